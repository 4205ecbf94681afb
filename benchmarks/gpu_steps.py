"""Steps of training for the GPU benchmark: Longhaul's own `Config` and `Trainer`, a row of numbers
for each.

Models are built from a `Config` and trained by the `Trainer`; only initial weights are drawn on
the device, which takes a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_bench import Bench, K
from models.batch import Batch
from models.score_pairs import causal_pairs, mean_pairs
from parallelisms.mesh.collectives import to_local
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.data.copy_task import CopyDataset
from trainer.data.sequences import FULL_SEQUENCE, BlendedDataset, SequenceShard
from trainer.hardware.host import GIB, node_memory_bytes
from trainer.step.build import compiles, require_right_gradients
from trainer.step.planner import ask_planner
from trainer.step.process_group import process_group
from trainer.step.trainer import StepMetrics, Trainer

LLAMA_1B = "--model.family llama3.2 --model.size 1b"
MODELS = {
    # Llama 3.2 1B with half of its heads, each twice as wide: 1.24B parameters, 16 layers of 2048.
    "1.24B": f"{LLAMA_1B} --model.num_heads 16 --model.num_kv_heads 4 --model.head_dim 128",
    "Qwen3-30B-A3B, 4 layers": "--model.family qwen3_moe --model.size 30b-a3b --model.num_layers 4",
    "gpt-oss-20b, 4 layers": "--model.family gpt_oss --model.size 20b --model.num_layers 4",
    "Gemma 3 1B": "--model.family gemma3 --model.size 1b",
    "parity": "--model.vocab_size 4096 --model.dim 512 --model.num_kv_heads 4 --model.head_dim 64 --model.ffn_dim 1408",
}
TINY = (
    "--model.vocab_size 264 --model.dim 64 --model.num_layers 2 --model.num_heads 8 --model.num_kv_heads 4 --model.head_dim 8 "
    "--model.ffn_dim 96 --memory.loss_chunk_mib 1"
)
"""A model of any family in a rehearsal."""
COMMON = (
    "--config debug --job.name gpu --data.corpus copy --training.global_batch_size 1 --training.dtype bfloat16 "
    "--training.compile auto "
    "--memory.recompute keep_attention --checkpoint.enabled false --metrics.tensorboard false "
    # So the trainer leaves the weights to `draw_weights`.
    "--checkpoint.initial_load_path drawn-on-the-device"
)
LISTED_KERNELS = 40
"""Of a profiled step, the longest."""
SHORT = 4 * K
"""Tokens of documents in warm-ups that would otherwise take long."""


@dataclass(frozen=True)
class Rounds:
    warmups: int = 3
    steps: int = 5
    short: bool = False
    """Warm-ups attend to documents of `SHORT` tokens only."""


@dataclass(frozen=True)
class StepCase:
    """What is trained, and how: all that a row needs to be predicted by the planner."""

    model: str
    tokens: int
    options: str = ""
    document: int | None = None
    """Tokens of each packed document; None: one document per sequence."""

    @property
    def name(self) -> str:
        packed = f", documents of {self.document // K}K" if self.document else ""
        return f"{self.model}, {self.tokens // K}K{packed}{self.options and ', ' + self.options}"

    def with_option(self, option: str) -> StepCase:
        return replace(self, options=f"{self.options} {option}".strip())

    def config(self, *, tiny: bool = False) -> Config:
        """The configuration of one device. Raises ConfigError if it is refused."""
        words = (
            COMMON,
            MODELS[self.model],
            TINY if tiny else "",
            self.options,
            f"--training.seq_len {self.tokens}",
        )
        config = load(" ".join(words).split())
        checks.require_valid(config, 1)
        return config


class Packed(BlendedDataset):
    """Random tokens, the second half of a row the first again; row n is packed with documents of
    `documents[n]` tokens.

    Its last length is that of all rows after it.
    """

    def __init__(self, config: Config, documents: Sequence[int]) -> None:
        training = config.training
        model = config.model.build()
        length = training.seq_len
        rows = training.steps * training.global_batch_size
        copied: Any = {
            "vocab_size": model.vocab_size,
            "period": length // 2,
            "num_sequences": rows,
            "seed": training.seed,
        }
        super().__init__(
            [CopyDataset(**copied, seq_len=length)], seq_len=length, windows=model.layers_by_window
        )
        self._documents = documents

    def read(self, indices: Sequence[int | None], shard: SequenceShard = FULL_SEQUENCE) -> Batch:
        batch, (number,) = super().read(indices, shard), indices
        length = min(self.seq_len, self._documents[min(number or 0, len(self._documents) - 1)])
        starts = [*range(0, self.seq_len, length), self.seq_len]
        lengths = torch.tensor(starts).diff()
        pairs = mean_pairs(self._windows, lambda window: int(causal_pairs(lengths, window).sum()))
        return replace(
            batch,
            positions=batch.positions % length,
            document_ids=batch.positions // length,
            boundaries=torch.tensor([starts], dtype=torch.int32),
            num_pairs=pairs,
            num_computed_pairs=pairs,
        )


def with_steps(config: Config, steps: int) -> Config:
    return config.model_copy(
        update={"training": config.training.model_copy(update={"steps": steps})}
    )


def as_started(bench: Bench, config: Config) -> Config:
    """With the memory options that a start on this device chooses.

    Raises RankFailedError if it would not compile blocks.
    """
    if not bench.cuda:
        return config
    if compiles(config, bench.device):
        training = config.training.model_copy(update={"compile": True})
        require_right_gradients(config.model_copy(update={"training": training}))
    with TemporaryDirectory() as folder:
        answer = ask_planner(
            config,
            1,
            prediction_path=Path(folder) / "prediction.json",
            ranks_per_node=1,
            device_bytes=torch.cuda.get_device_properties(bench.device).total_memory,
            host_bytes=node_memory_bytes(),
            on_cpu=False,
        )
    return config.model_copy(update={"memory": config.memory.model_copy(update=answer["memory"])})


def step(bench: Bench, case: StepCase, rounds: Rounds = Rounds()) -> float:
    """Reports a row of training steps; returns their median seconds."""
    case = replace(case, tokens=bench.size(case.tokens))
    rounds = replace(rounds, warmups=1, steps=1) if bench.rehearse else rounds
    config = as_started(
        bench, with_steps(case.config(tiny=bench.rehearse), rounds.warmups + rounds.steps)
    )
    model = config.model.build()
    length = case.tokens
    measured = bench.size(case.document) if case.document else length
    documents = [SHORT if rounds.short else measured] * rounds.warmups + [measured]
    found, kernel, memory = run_steps(bench, config, rounds.warmups, documents)
    times = [each.step_seconds for each in found]
    seconds = median(times)
    work = {"tokens": found[-1].tokens, "pairs": found[-1].attended_pairs}
    again = {
        "recompute": config.memory.recompute,
        "blocks_per_checkpoint": config.memory.blocks_per_checkpoint,
    }
    peak = bench.peak_flops
    bench.row(
        model=case.model,
        tokens=length,
        document=case.document,
        options=case.options,
        recompute=config.memory.recompute,
        compile=compiles(config, bench.device),
        loss_chunk_mib=config.memory.loss_chunk_mib,
        head="tied" if model.tie_embeddings else "untied",
        kernel=kernel,
        s_step=seconds,
        n=len(times),
        spread=(max(times) - min(times)) / seconds,
        mfu=model.flops(**work) / seconds / peak if peak else None,
        hfu=model.hardware_flops(**work, **again) / seconds / peak if peak else None,  # type: ignore[arg-type]
        **memory,
        loss=found[-1].loss,
        short_warmups=rounds.short,
    )
    return seconds


def compile_step(bench: Bench, case: StepCase) -> None:
    """One step, which fills the cache of generated code."""
    case = replace(case, tokens=bench.size(case.tokens))
    config = as_started(bench, with_steps(case.config(tiny=bench.rehearse), 1))
    (found,), _, _ = run_steps(bench, config, 0, [SHORT])
    bench.row(what="first step", result=f"{found.step_seconds:.1f} s")


def pair(bench: Bench, case: StepCase, off: str, on: str, rounds: Rounds = Rounds(2, 3)) -> None:
    """Steps without and with an option, one after the other in one process."""
    first = step(bench, case.with_option(off), rounds)
    bench.clear()
    second = step(bench, case.with_option(on), rounds)
    bench.row(what=f"step with {on} over {off or 'without'}", result=f"{second / first:.3f}")


@contextmanager
def drawn_trainer(bench: Bench, config: Config, documents: Sequence[int]) -> Iterator[Trainer]:
    """With initial weights; row n is packed with documents of `documents[n]` tokens."""
    with process_group(config.distributed) as world:
        trainer = Trainer(
            config, world, Packed(config, documents), kernel=bench.trusted_kernel(config)
        )
        draw_weights(trainer, world.device)
        yield trainer


def kernel_times(bench: Bench, case: StepCase, warmups: int = 3) -> None:
    """Reports the kernels of one step after warm-up: time of each, and launches; and how long the
    device was busy.
    """
    case = replace(case, tokens=bench.size(case.tokens))
    config = as_started(bench, with_steps(case.config(tiny=bench.rehearse), warmups + 1))
    with drawn_trainer(bench, config, [case.tokens]) as trainer:
        steps = trainer.train_steps()
        seconds = [next(steps).read().step_seconds for _ in range(warmups)][-1]
        activities = [ProfilerActivity.CUDA] if bench.cuda else [ProfilerActivity.CPU]
        with profile(activities=activities) as profiler:
            next(steps).read()
    kernels = [
        each
        for each in profiler.key_averages()
        if each.device_type == DeviceType.CUDA and not each.is_user_annotation
    ]
    busy = sum(each.self_device_time_total for each in kernels)
    launches = sum(each.count for each in kernels)
    result = f"{busy / 1e3:.1f} ms of kernels in {launches} launches; {1e3 * seconds:.1f} ms without the profiler"
    bench.row(what=f"one step of {case.name}", result=result)
    for each in sorted(kernels, key=lambda each: -each.self_device_time_total)[:LISTED_KERNELS]:
        bench.row(
            what=f"kernel of {case.name}",
            ms=each.self_device_time_total / 1e3,
            launches=each.count,
            result=each.key[:160],
        )


def run_steps(
    bench: Bench, config: Config, warmups: int, documents: Sequence[int]
) -> tuple[list[StepMetrics], str, dict[str, float | None]]:
    """Metrics of the steps after warm-up, the kernel that ran, and peak memory in GiB; None where
    there is no device.
    """
    with drawn_trainer(bench, config, documents) as trainer:
        bench.begin_memory()
        found: list[StepMetrics] = []
        for result in trainer.train_steps():
            found.append(result.read())
            if len(found) == warmups:
                bench.begin_memory()
        return found[warmups:], trainer.parallel_model.kernel, peak_memory(bench)


def peak_memory(bench: Bench) -> dict[str, float | None]:
    if not bench.cuda:
        return dict.fromkeys(("peak_gib", "reserved_gib", "pinned_gib"))
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "pinned_gib": torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / GIB,
    }


def draw_weights(trainer: Trainer, device: torch.device) -> None:
    """Initial weights, drawn on the device. Bitwise the same in every run."""
    (model,) = trainer.stage_modules.values()
    for name, tensor in trainer.state_dict().items():
        if name.startswith("model."):
            weight, (mean, std) = (
                to_local(tensor),
                model.init_mean_std(name.removeprefix("model.")),
            )
            seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
            generator = torch.Generator(device).manual_seed(seed)
            weight.copy_(
                torch.empty_like(weight, device=device).normal_(mean, std, generator=generator)
            )
