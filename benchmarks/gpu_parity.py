"""Whether training is right on this device, for the GPU benchmark: its tests, options that must
change nothing, windows, meshes of ranks that share it.
"""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor

from benchmarks.gpu_bench import ROOT, Bench, K
from benchmarks.gpu_kernels import distances
from benchmarks.gpu_steps import StepCase, draw_weights
from parallelisms.mesh.collectives import to_local
from tests.build_datasets import build_train_dataset
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.selfcheck.processes import RankPool
from trainer.selfcheck.random_check import check_case
from trainer.selfcheck.random_configs import parse_case
from trainer.selfcheck.shrink import write_sample_documents
from trainer.step.process_group import process_group
from trainer.step.trainer import Trainer

GPU_TESTS = ("tests/models",)
FARTHEST = 0.05
"""Of a tensor's norm: kernels in bfloat16 give gradients 0.02 apart, a wrong one gives any."""
KEPT = "--memory.recompute keep_attention"
MESHES = {
    "FSDP": "parallelism.dp_shard=2 training.global_batch_size=2",
    "HSDP": "parallelism.dp_replicate=2 parallelism.dp_shard=2 training.global_batch_size=4",
    "tensor parallelism": "parallelism.tp=2",
    "context parallelism, ring": "parallelism.cp=2 parallelism.cp_method=ring",
    "context parallelism, all-gather": "parallelism.cp=2 parallelism.cp_method=allgather",
    "context parallelism, Ulysses": "parallelism.cp=2 parallelism.cp_method=ulysses",
    "context parallelism, hybrid": "parallelism.cp=4 parallelism.cp_method=hybrid parallelism.cp_ulysses=2",
    "pipeline": "parallelism.pp=2 training.global_batch_size=2",
    "experts": "parallelism.dp_shard=2 parallelism.ep=2 model.feed_forward=softmax training.global_batch_size=2",
}
"""Cases of the self-check, whose ranks share a GPU where there is one."""
Seen = tuple[float, float, dict[str, Tensor]]
"""Loss, gradient norm and gradients of a first step."""
# What is compared, with what, and how it is configured.
VARIANTS = {
    "float32": ("", "--training.dtype float32 --memory.recompute none"),
    "none": ("float32", "--memory.recompute none"),
    "none, once more": ("none", "--memory.recompute none"),
    "keep_attention": ("none", KEPT),
    "full": ("none", "--memory.recompute full"),
    "inputs on the host": ("keep_attention", f"{KEPT} --memory.offload inputs"),
    "all on the host": ("keep_attention", f"{KEPT} --memory.offload inputs_and_attention"),
    "one input of 2": ("keep_attention", f"{KEPT} --memory.blocks_per_checkpoint 2"),
    "2 head groups": ("keep_attention", f"{KEPT} --memory.head_groups 2"),
    "4 head groups": ("keep_attention", f"{KEPT} --memory.head_groups 4"),
    "tiles": ("keep_attention", f"{KEPT} --memory.mlp_tile_mib 1"),
    "states on the host": ("keep_attention", f"{KEPT} --memory.optimizer_placement host"),
    "compiled": ("keep_attention", f"{KEPT} --training.compile true"),
    "cudnn": ("keep_attention", f"{KEPT} --training.attention cudnn"),
    "efficient": ("keep_attention", f"{KEPT} --training.attention efficient"),
}
OF_CUDA = ("cudnn", "efficient")


def gpu_tests(bench: Bench) -> None:
    """The project's tests that need a CUDA device. Raises RuntimeError if one fails."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        *GPU_TESTS,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode:
        raise RuntimeError(" / ".join([*lines[-1:], *failed]) or done.stderr[-160:])
    bench.row(what="gpu tests", result=lines[-1])


def parity(bench: Bench) -> None:
    """Loss, norm and gradients of the first step of each variant, compared with another's.

    Raises ValueError.
    """
    seen: dict[str, Seen] = {}
    wrong = []
    torch.use_deterministic_algorithms(True, warn_only=True)  # noqa: FBT003
    try:
        for name, (other, options) in VARIANTS.items():
            if name in OF_CUDA and not bench.cuda:
                continue
            case = StepCase("parity", bench.size(4 * K), f"--training.compile false {options}")
            seen[name] = first_step(bench, case.config(tiny=bench.rehearse))
            loss, norm, gradients = seen[name]
            far = distance(gradients, seen[other][2]) if other else 0.0
            result = f"{far:.1e} of a tensor's norm" if far else "bitwise equal"
            bench.row(
                variant=name,
                loss=f"{loss:.7f}",
                norm=f"{norm:.6f}",
                beside=other or None,
                gradients=result,
            )
            wrong += [f"{name}: {result}"] * (not far < FARTHEST)
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003
    if wrong:
        raise ValueError("; ".join(wrong))


def first_step(bench: Bench, config: Config) -> Seen:
    with process_group(config.distributed) as world:
        trainer = Trainer(
            config, world, build_train_dataset(config), kernel=bench.trusted_kernel(config)
        )
        draw_weights(trainer, world.device)
        reading = trainer.loader.steps(0)
        vector = trainer.accumulate_gradients(next(reading))
        reading.close()
        named = trainer.optimizer.parameters_by_name.items()
        grads = {
            name: to_local(x.grad).to(bench.device, copy=True)
            for name, x in named
            if x.grad is not None
        }
        parts = trainer.accumulator.layout.split(trainer.optimizer_step(vector, 1e-3))
        return float(parts["loss"] / parts["targets"]), float(parts["grad_norm"]), grads


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest over tensors; 0 only if all are equal bit for bit, NaN if a number is not
    finite.
    """
    if ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    ):
        return 0.0
    return float(torch.tensor([*distances(ours, theirs).values()]).max())


def windows(bench: Bench) -> None:
    """Three steps of a model with windows and sinks, by kernels with and without windows of their
    own, and in float32.

    Raises ValueError if losses of the first step differ by more than 0.01.
    """
    seen = {}
    for kernel, dtype in (
        ("efficient", "float32"),
        ("efficient", "bfloat16"),
        ("flash", "bfloat16"),
    ):
        words = (
            f"--config debug_window --data.corpus copy --training.steps 3 --training.seq_len {bench.size(4 * K)} "
            f"--training.global_batch_size 1 --training.dtype {dtype} --training.attention {kernel} "
            f"--model.head_dim 64 --job.output_dir {bench.folder}/windows --checkpoint.enabled false --metrics.tensorboard false"
        )
        config = load(words.split())
        with process_group(config.distributed) as world:
            trainer = Trainer(
                config, world, build_train_dataset(config), kernel=bench.trusted_kernel(config)
            )
            losses = [result.read().loss for result in trainer.train_steps()]
        seen[kernel, dtype] = losses[0]
        result = ", ".join(f"{loss:.6f}" for loss in losses)
        bench.row(what=f"losses with windows and sinks, {kernel}, {dtype}", result=result)
    if not max(seen.values()) - min(seen.values()) < 0.01:
        raise ValueError("losses with windows and sinks differ between kernels")


def meshes(bench: Bench) -> None:
    """Two steps in float64 on each mesh beside one process.

    Raises ValueError with the meshes that differ.
    """
    write_sample_documents(bench.folder)
    wrong = []
    with RankPool(device_type=bench.device.type) as pool:
        for name, case in MESHES.items():
            found = check_case(parse_case(case), pool, bench.folder)
            result = found.problem or f"{max(found.errors.values()):.1e} from one process"
            bench.row(what=f"ranks on one GPU: {name}", result=result)
            wrong += [f"{name}: {found.problem}"] * bool(found.problem)
    if wrong:
        raise ValueError("; ".join(wrong))
