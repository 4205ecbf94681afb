"""Manifests: every changed byte is damage, an I/O error is not."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.artifacts import content, forge, train_state
from trainer.config.parse import load
from trainer.errors import ResumeError, RunFailedError
from trainer.storage import manifest
from trainer.storage.artifact import DamageError, NewerFormatError, write_artifact
from trainer.storage.durable_io import format_bytes
from trainer.storage.manifest import Manifest, read, read_validated


def commit(folder: Path, *, step: int = 6, tensors: bytes = bytes(range(256)) * 40) -> Path:
    """A checkpoint of a state and two arbitrary files."""
    folder.mkdir(parents=True)
    write_artifact(folder / "state.json", train_state(load([]), step=step))
    for name, data in ((".metadata", b"m"), ("__0_0.distcp", tensors)):
        (folder / name).write_bytes(data)
    files = {path.name: manifest.hash_file(path) for path in folder.iterdir()}
    versions = {"torch": "2"}
    mesh = {"tp": 2}
    about = Manifest(
        step=step,
        attempt="a",
        world_size=2,
        mesh=mesh,
        versions=versions,
        saved="now",
        files=files,
    )
    manifest.write(folder, about)
    return folder


def test_manifest_round_trip(tmp_path: Path) -> None:
    problem = read_validated(commit(tmp_path / "step-6"))
    size = 10241 + (tmp_path / "step-6" / "state.json").stat().st_size
    assert (problem.step, problem.world_size, problem.mesh, problem.bytes) == (
        6,
        2,
        {"tp": 2},
        size,
    )
    assert manifest.find_damage(tmp_path / "step-6", problem, problem.files) == []


def test_every_flipped_bit_of_a_manifest_is_detected(tmp_path: Path) -> None:
    folder = commit(tmp_path / "step-6")
    path = folder / manifest.MANIFEST_FILE
    content = path.read_bytes()
    for offset in range(len(content)):
        path.write_bytes(
            content[:offset] + bytes([content[offset] ^ (1 << offset % 8)]) + content[offset + 1 :]
        )
        with pytest.raises(DamageError):
            read(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"sha256": ' + b"1" * 5000 + b"}",
        b"\xff\xfe",
    ],
    ids=["empty", "nothing", "list", "null", "deep", "long", "not text"],
)
def test_other_content_is_not_a_manifest(tmp_path: Path, content: bytes) -> None:
    folder = commit(tmp_path / "step-6")
    (folder / manifest.MANIFEST_FILE).write_bytes(content)
    with pytest.raises(
        DamageError,
        match=r"manifest.json is damaged: it (is not a checkpoint manifest|does not match)",
    ):
        read_validated(folder)


FORGED: dict[str, tuple[dict[str, object], str]] = {
    "a path": ({"files": {"../state.json": (1, "")}}, '"../state.json" is not a checkpoint file'),
    "a root": ({"files": {"/etc/passwd": (1, "")}}, '"/etc/passwd" is not'),
    "itself": ({"files": {"manifest.json": (1, "")}}, '"manifest.json" is not'),
    "no size": (
        {"files": {"state.json": ("1", "")}},
        "files.state.json.0: Input should be a valid integer",
    ),
    "no state": ({"files": {".metadata": (1, "")}}, "state.json must be listed"),
    "another step": ({"step": 7}, "is for step 7"),
    "no step": ({"step": "6"}, "step: Input should be a valid integer"),
    "a word more": ({"steps": 6}, "steps: Extra inputs"),
}


@pytest.mark.parametrize(("changed", "message"), FORGED.values(), ids=list(FORGED))
def test_a_forged_manifest_with_a_valid_checksum_is_refused(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    folder = commit(tmp_path / "step-6")
    forge(folder / manifest.MANIFEST_FILE, lambda values: values.update(changed))
    with pytest.raises(DamageError, match=message):
        read_validated(folder)


def test_a_later_format_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(Manifest, "version", classmethod(lambda _: 2))
        folder = commit(tmp_path / "step-6")
    with pytest.raises(
        ResumeError,
        match=r'has version 2 of "checkpoint manifest"; longhaul .* reads versions 1 to 1',
    ):
        read_validated(folder)
    assert issubclass(NewerFormatError, ResumeError)


@pytest.mark.parametrize("part", ["step", "trainer"])
def test_manifest_and_state_are_of_one_step(tmp_path: Path, part: str) -> None:
    folder = commit(tmp_path / "step-6")
    forge(
        folder / "state.json",
        lambda state: (state if part == "step" else state["trainer"]).update(step=50),
    )
    about = read(folder)
    files = about.files | {"state.json": manifest.hash_file(folder / "state.json")}
    manifest.write(folder, about.model_copy(update={"files": files}))
    with pytest.raises(DamageError, match=r"state.json is for step 50, manifest.json for step 6"):
        read_validated(folder)


# ---- files


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def zero_page(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(4096) + content[8192:])


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (flip, ": checksum mismatch \\(10,240 bytes\\)"),
    "a page": (zero_page, ": checksum mismatch \\(10,240 bytes\\)"),
    "cut": (lambda path: os.truncate(path, 100), " has 100 bytes instead of 10,240"),
    "empty": (lambda path: os.truncate(path, 0), " has 0 bytes instead of 10,240"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), " has 10,241 bytes"),
    "gone": (Path.unlink, " is missing"),
    "a link": (link, " is not a regular file"),
}


@pytest.mark.parametrize(("do", "message"), DAMAGES.values(), ids=list(DAMAGES))
def test_damage_is_reported_with_the_file_name(
    tmp_path: Path, do: Callable[[Path], object], message: str
) -> None:
    folder = commit(tmp_path / "step-6")
    do(folder / "__0_0.distcp")
    about = read_validated(folder)
    (problem,) = manifest.find_damage(folder, about, about.files)
    assert re.match(f"__0_0.distcp{message}", problem)
    by_size = manifest.find_damage(folder, about, about.files, check_hashes=False)
    assert by_size == ([] if "checksum" in message else [problem])


# ---- I/O errors


def failing(function: Callable[..., object], times: int, number: int) -> Callable[..., object]:
    """A function that raises `OSError` on its first calls."""
    failures_left = [times]

    def call(*arguments: object) -> object:
        failures_left[0] -= 1
        if failures_left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return function(*arguments)

    return call


@pytest.mark.parametrize(
    ("number", "times", "succeeds"),
    [
        (errno.EIO, 3, True),
        (errno.ESTALE, 3, True),
        (errno.EIO, 4, False),
        (errno.EACCES, 1, False),
    ],
)
def test_transient_io_errors_are_retried_and_are_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, times: int, *, succeeds: bool
) -> None:
    folder = commit(tmp_path / "step-6")
    monkeypatch.setattr(manifest, "RETRY_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(manifest, "hash_file", failing(manifest.hash_file, times, number))
    if succeeds:
        assert read_validated(folder).step == 6
    else:
        with pytest.raises(
            RunFailedError, match=rf"state.json cannot be read .*{os.strerror(number)}"
        ):
            read_validated(folder)


def test_format_bytes_uses_binary_units() -> None:
    assert [*map(format_bytes, (0, 1023, 1024, 1536, 5 * 2**30, 2**40))] == [
        *("0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "1.0 TiB")
    ]


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    path = commit(tmp_path / "step-6") / manifest.MANIFEST_FILE
    assert json.loads(path.read_text())["kind"] == "checkpoint manifest"
    assert [*map(type, content(path)["files"]["state.json"])] == [int, str]
