"""A node that lies is found before a run trains on it."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import kernel_check
from trainer.hardware import node_checks
from trainer.hardware.node_checks import CHECKS, CheckFailedError, Node

NODE = Node(Path(), product_size=64)


def preflight(*options: str, **environment: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "trainer.preflight", *options]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        timeout=60,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_a_good_node_passes_every_check(tmp_path: Path) -> None:
    code, said = preflight("--path", str(tmp_path), "--json", str(tmp_path / "found"))
    host = socket.gethostname()
    assert code == 0, said
    assert [line.split(": ")[1] for line in said[:-1]] == [*CHECKS]
    assert said[-1] == f"{host}: good"
    found = json.loads((tmp_path / "found" / f"{host}.json").read_text())
    assert (found["host"], found["good"], len(found["checks"])) == (host, True, len(CHECKS))
    assert [*tmp_path.iterdir()] == [tmp_path / "found"], "no file is left"


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts its own devices")
def test_a_node_that_lacks_devices_exits_with_3() -> None:
    code, said = preflight("--devices", "8")
    assert code == 3
    assert f"{socket.gethostname()}: devices: failed, 0 of 8 GPUs are visible" in said[0]
    assert said[-1].endswith(": BAD")


@pytest.mark.parametrize(
    "options", [("--path", "nowhere"), ("--devices", "-1"), ("--unknown",), ("--seconds", "x")]
)
def test_wrong_arguments_exit_with_2(options: tuple[str, ...]) -> None:
    code, said = preflight(*options)
    assert (code, len(said)) == (2, 1)
    assert said[0].startswith("error: ")


STALLING = """
import time
from pathlib import Path
from trainer.hardware import check_node, node_checks
def stall(node):
    time.sleep(60)
node_checks.CHECKS["devices"] = stall
"""
DYING = STALLING.replace("time.sleep(60)", "import os; os.abort()")


@pytest.mark.parametrize(
    ("code", "options", "said"),
    [
        (STALLING, ("--seconds", "6"), "devices: hung, did not end within 6 s"),
        (DYING, (), "devices: failed, its process ended with -6"),
    ],
    ids=["hangs", "dies"],
)
def test_a_check_that_hangs_or_dies_is_named(
    tmp_path: Path, code: str, options: tuple[str, ...], said: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nif 'trainer.hardware.check_node' in sys.orig_argv:\n{indented(code)}"
    )
    began = time.monotonic()
    status, lines = preflight(
        *options,
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(Path.cwd()))]),
    )
    assert status == 3
    assert any(said in line for line in lines), lines
    assert time.monotonic() - began < 40


def indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.strip().splitlines())


# ---- each check on a node that lies


def wrong_product(self: Tensor, other: Tensor) -> Tensor:
    """A bit of one number flips."""
    found = torch.matmul(self, other)
    if found.dtype == torch.bfloat16:
        found[0, 0] += 1
    return found


class Unstable:
    """The second product differs from the first."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        found = torch.matmul(one, other)
        if found.dtype == torch.bfloat16:
            self.calls += 1
            found[3, 3] += self.calls > 1
        return found


@pytest.mark.parametrize(
    ("multiply", "said"),
    [
        (wrong_product, "computes a wrong product"),
        (Unstable(), "computes another product the second time"),
    ],
    ids=["wrong", "unstable"],
)
def test_a_wrong_product_is_found(
    monkeypatch: pytest.MonkeyPatch, multiply: Callable[..., Tensor], said: str
) -> None:
    monkeypatch.setattr(Tensor, "__matmul__", lambda one, other: multiply(one, other))
    with pytest.raises(CheckFailedError, match=said):
        node_checks.product(NODE)


def test_wrong_attention_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward_backward = vars(kernel_check)["forward_backward"]

    def wrong(*args: Any) -> Any:
        out, *others = forward_backward(*args)
        return out * 1.01, *others

    monkeypatch.setattr(kernel_check, "forward_backward", wrong)
    with pytest.raises(CheckFailedError, match="cpu: "):
        node_checks.attention(NODE)


def test_a_clock_that_is_apart_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 100)
    with pytest.raises(CheckFailedError, match=r"are 100 s apart"):
        node_checks.clock(Node(tmp_path))


def test_a_disk_that_returns_other_bytes_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def flip(descriptor: int) -> None:
        os.pwrite(descriptor, b"x", 5)

    monkeypatch.setattr(node_checks, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(os, "urandom", bytes)
    monkeypatch.setattr(os, "fsync", flip)
    with pytest.raises(CheckFailedError, match=r"returns other bytes than were written to it"):
        node_checks.disk(Node(tmp_path))


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.ENOSPC, "is full"), (errno.EIO, "cannot be written: Input/output error")],
)
def test_a_disk_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, said: str
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(node_checks, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckFailedError, match=f"{tmp_path} {said}"):
        node_checks.disk(Node(tmp_path))


def test_a_slow_device_is_named_beside_the_median() -> None:
    seconds = {torch.device("cuda", index): 1.0 for index in range(8)}
    assert node_checks._rates(seconds, "ms", 1e3) == "1e+03 ms"
    with pytest.raises(CheckFailedError, match=r"cuda:5 is slow: 2e\+03 ms, the median 1e\+03"):
        node_checks._rates(seconds | {torch.device("cuda", 5): 2.0}, "ms", 1e3)
