"""The host's side of training on CUDA, over a runtime that computes nothing: what a step asks of device and driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.cuda_host import steps
from trainer.memory.estimator import estimate_memory

ROW = re.compile(r"^\| `(.*?)` \| ([\d.]+) \| ([\d.]+) \| [+-][\d.]+% \| ([\d.]+) \|$", re.MULTILINE)
RECORDED = {row[1]: tuple(map(float, row.groups()[1:])) for row in ROW.finditer(steps.PAGE.read_text())}
"""Estimated and requested MiB, and launches per block, by variant."""


def run(code: str, stand_in: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | stand_in
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def test_every_variant_is_recorded() -> None:
    assert RECORDED.keys() == set(steps.VARIANTS)


@pytest.mark.parametrize("variant", steps.VARIANTS)
def test_estimates_equal_what_the_allocator_was_asked_for(variant: str) -> None:
    config, (recorded_estimate, requested_mib, _) = steps.configured(variant), RECORDED[variant]
    estimate = estimate_memory(config, steps.num_ranks(config)).device_bytes / 2**20
    assert estimate == pytest.approx(recorded_estimate, abs=0.06)
    assert (variant in steps.INEXACT) == (estimate != pytest.approx(requested_mib, rel=steps.LIMIT))


@pytest.mark.cuda_host
@pytest.mark.parametrize("variant", steps.VARIANTS)
def test_a_step_never_waits_and_asks_for_what_is_recorded(variant: str, stand_in: dict[str, str]) -> None:
    """Torch's host code raises where a tensor is on the wrong device, or where the host waits for the device."""
    found = steps.measure_in_process(variant, stand_in)
    _, requested_mib, launches = RECORDED[variant]
    # FSDP waits once for each gradient that it copies to a host optimizer.
    gradients = 3 + 9 * steps.BLOCKS
    assert found.waits_per_step == (gradients if variant == steps.ON_HOST else 0)
    assert found.launches_per_block == launches
    assert found.requested_bytes / 2**20 == pytest.approx(requested_mib, abs=0.06)


@pytest.mark.cuda_host
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x = torch.ones(2, device='cuda'); torch.cuda.set_sync_debug_mode('error'); x[0] = 3", "synchronizing"),
        ("x = torch.ones(2, device='cuda'); torch.cuda.set_sync_debug_mode('error'); x.sum().item()", "synchronizing"),
        ("torch.ones(2, device='cuda') + torch.ones(2)", "at least two devices"),
        ("torch.empty(1 << 40, device='cuda')", "out of memory"),
        ("attend(torch.ones(1, 4, 1, 8, device='cuda', dtype=torch.half))", "AssertionError"),
        ("attend(torch.ones(1, 4, 5, 8, device='cuda'))", "AssertionError"),
    ],
)
def test_the_stand_in_finds_mistakes(code: str, error: str, stand_in: dict[str, str]) -> None:
    begin = """
import torch
from tests.cuda_host.cudnn import replace_cudnn_attention
replace_cudnn_attention()
attend = lambda x: torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)
"""
    assert run(f"{begin}attend(torch.ones(1, 4, 5, 8, device='cuda', dtype=torch.half))", stand_in).returncode == 0
    assert error in run(begin + code, stand_in).stderr


@pytest.mark.cuda_host
@pytest.mark.parametrize(
    ("statement", "waits"),
    [
        ("torch.cuda.synchronize()", True),
        ("torch.cuda.current_stream().synchronize()", True),
        ("event.synchronize()", True),
        ("x.cpu()", True),
        ("torch.empty(4).copy_(x, non_blocking=True)", True),
        ("torch.empty(4, pin_memory=True).copy_(x, non_blocking=True)", False),
        ("torch.ones(4, pin_memory=True).to(x.device, non_blocking=True)", False),
        ("x * x + x", False),
    ],
)
def test_waits_are_counted(statement: str, waits: bool, stand_in: dict[str, str]) -> None:  # noqa: FBT001
    code = f"""
import torch
from tests.cuda_host.steps import Runtime
x, event, runtime = torch.ones(4, device="cuda"), torch.cuda.Event(), Runtime()
event.record()
before = runtime.counts()
{statement}
print(runtime.counts()[1] > before[1])
"""
    done = run(code, stand_in)
    assert (done.stdout.strip(), done.returncode) == (str(waits), 0), done.stderr
