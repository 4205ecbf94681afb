"""The host's side of training on CUDA, over a runtime that computes nothing: what a step asks of
device and driver.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_host import steps

ROW = re.compile(
    r"^\| `(.*?)` \| ([\d.]+) \| ([\d.]+) \| [+-][\d.]+% \| ([\d.]+) \|$", re.MULTILINE
)
RECORDED = {
    row[1]: tuple(map(float, row.groups()[1:])) for row in ROW.finditer(steps.PAGE.read_text())
}
"""Traced and requested MiB, and launches per block, by variant."""


def run(code: str, stand_in: dict[str, str]) -> str:
    """What a process on the stand-in prints."""
    command = [sys.executable, "-c", code]
    environment = os.environ | stand_in
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=120, check=True
    ).stdout


def test_every_variant_is_recorded() -> None:
    assert RECORDED.keys() == set(steps.VARIANTS)


QUICK = {steps.VARIANTS[0], steps.TWO_SEQUENCES, steps.NO_GROUPS, steps.RING, steps.DETERMINISTIC}


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=[pytest.mark.slow] * (variant not in QUICK))
        for variant in steps.VARIANTS
    ],
)
def test_traces_equal_what_the_allocator_was_asked_for(variant: str) -> None:
    recorded_trace, requested_mib, _ = RECORDED[variant]
    traced = steps.traced_bytes(variant) / 2**20
    assert traced == pytest.approx(recorded_trace, abs=0.06)
    assert (variant in steps.INEXACT) == (traced != pytest.approx(requested_mib, rel=steps.LIMIT))


@pytest.mark.cuda_host
@pytest.mark.parametrize("variant", steps.VARIANTS)
def test_a_step_never_waits_and_asks_for_what_is_recorded(
    variant: str, stand_in: dict[str, str]
) -> None:
    """Torch's host code raises where a tensor is on the wrong device, or where the host waits for
    the device.
    """
    found = steps.measure_in_process(variant, stand_in)
    _, requested_mib, launches = RECORDED[variant]
    # FSDP waits once for each gradient that it copies to a host optimizer.
    gradients = 3 + 9 * steps.BLOCKS
    assert found.waits_per_step == (gradients if variant == steps.ON_HOST else 0)
    assert found.launches_per_block == launches
    assert found.requested_bytes / 2**20 == pytest.approx(requested_mib, abs=0.06)


SHARED = """
import sys
from pathlib import Path
from torch import distributed
from tests.cuda_host import steps
from trainer.step.process_group import init_single_host
rank, store, variant = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
config = steps.configured(variant)
world = init_single_host(config.distributed, rank=rank, size=steps.num_ranks(config), store=store, device_type="cuda")
trainer = steps.new_trainer(config, world)
reading = trainer.loader.steps(0)
for _ in range(2):
    trainer.step += 1
    trainer.train_step(next(reading), 1e-3)
reading.close()
print(world.device, distributed.get_backend())
distributed.destroy_process_group()
"""


@pytest.mark.cuda_host
@pytest.mark.parametrize(
    "mesh",
    [
        "--parallelism.dp_shard 2 --training.global_batch_size 2",
        "--parallelism.tp 2",
        f"{steps.RING}",
        "--parallelism.cp 2 --parallelism.cp_method ulysses",
        "--parallelism.pp 2 --training.global_batch_size 4",
    ],
)
def test_ranks_that_share_a_device_exchange_its_tensors_through_the_host(
    mesh: str, tmp_path: Path, stand_in: dict[str, str]
) -> None:
    """Gloo raises where it is given a tensor of the device."""
    given = [str(tmp_path / "store"), f"{mesh} --training.seq_len 2048"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARED, str(rank), *given],
            env=os.environ | stand_in,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [rank.communicate(timeout=120) for rank in ranks]
    assert [printed for printed, _ in ended] == ["cuda:0 host_staged\n"] * 2, ended[0][1]


REHEARSAL = """
import json, sys, warnings
from pathlib import Path
import torch
from tests.cuda_host.cudnn import replace_cudnn_attention
library = replace_cudnn_attention()
from benchmarks.gpu import measure
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_jobs import all_jobs
warnings.filterwarnings("ignore")
rows = []
bench = Bench(torch.device("cuda", 0), rows.append, Path(sys.argv[1]), rehearse=True)
failed = {job.name: measure(job, bench) for job in all_jobs() if job.kind not in ("run", "tests", "mesh", "kernels") and not job.library}
print(json.dumps({"failed": {name: row["result"] for name, row in failed.items() if row}, "rows": rows}))
"""
OF_NUMBERS = re.compile("^(errors of|parity|windows|rate of|2.32 numbers|calibrate)")
"""Jobs that fail where nothing is computed: they check numbers, or start a process, which checks
its kernel.
"""


@pytest.mark.cuda_host
def test_every_job_of_the_gpu_script_is_rehearsed(
    tmp_path: Path, stand_in: dict[str, str]
) -> None:
    """What is wrong becomes rows that say so; every step of training is measured.

    Not rehearsed: what starts processes, and the profiler, which a runtime without a device ends.
    """
    command = [sys.executable, "-c", REHEARSAL, str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | stand_in, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {
        name: why for name, why in found["failed"].items() if not OF_NUMBERS.search(name)
    } == {}
    assert len([row for row in found["rows"] if "s_step" in row]) >= 20


MISTAKES = {
    "x[0] = 3": "synchronizing",
    "x.sum().item()": "synchronizing",
    "x + torch.ones(2)": "at least two devices",
    "torch.empty(1 << 40, device='cuda')": "out of memory",
    "attend(torch.ones(1, 4, 1, 8, device='cuda', dtype=torch.half))": "AssertionError",
    "attend(torch.ones(1, 4, 5, 8, device='cuda'))": "AssertionError",
    "attend(torch.ones(1, 4, 5, 8, device='cuda', dtype=torch.half))": "nothing",
}


@pytest.mark.cuda_host
def test_the_stand_in_finds_mistakes(stand_in: dict[str, str]) -> None:
    code = f"""
import torch
from tests.cuda_host.cudnn import replace_cudnn_attention
replace_cudnn_attention()
attend = lambda x: torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)
x = torch.ones(2, device="cuda")
torch.cuda.set_sync_debug_mode("error")
for statement in {[*MISTAKES]}:
    try:
        exec(statement)
        print("nothing")
    except Exception as error:
        print(repr(error))
"""
    found = run(code, stand_in).splitlines()
    assert [
        (word, line)
        for word, line in zip(MISTAKES.values(), found, strict=True)
        if word not in line
    ] == []


@pytest.mark.cuda_host
def test_the_check_of_kernels_believes_no_device_that_computes_nothing(
    stand_in: dict[str, str],
) -> None:
    code = """
import torch
from models.kernel_check import Heads, SHORT_LENGTHS, verify_kernel
for kernel, dtype in {"flash": torch.bfloat16, "efficient": torch.float32, "plain": torch.float64}.items():
    for heads in Heads(8, 2, 128), Heads(8, 2, 64), Heads(2, 2, 128):
        try:
            verify_kernel(kernel, torch.device("cuda"), dtype, heads=heads, lengths=SHORT_LENGTHS)
            print(kernel, heads, "passed")
        except ValueError as error:
            print("relative error" in str(error))
"""
    assert run(code, stand_in).splitlines() == ["True"] * 9


WAITS = {
    "torch.cuda.synchronize()": True,
    "torch.cuda.current_stream().synchronize()": True,
    "event.synchronize()": True,
    "x.cpu()": True,
    "torch.empty(4).copy_(x, non_blocking=True)": True,
    "torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)": False,
    "torch.ones(4, pin_memory=True).to(x.device, non_blocking=True)": False,
    "x * x + x": False,
}


@pytest.mark.cuda_host
def test_waits_are_counted(stand_in: dict[str, str]) -> None:
    code = f"""
import torch
from tests.cuda_host.steps import Runtime
x, event, runtime = torch.ones(4, device="cuda"), torch.cuda.Event(), Runtime()
event.record()
for statement in {[*WAITS]}:
    before = runtime.counts()
    exec(statement)
    print(runtime.counts()[1] > before[1])
"""
    assert run(code, stand_in).splitlines() == [str(waits) for waits in WAITS.values()]
