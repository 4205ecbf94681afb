"""What is damage, what is not, and that no byte of a manifest can change unseen."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import DamageError, Manifest, read, read_validated
from trainer.errors import ResumeError, RunFailedError


def commit(folder: Path, **changed: object) -> Path:
    """A checkpoint of three files, none of which torch would know."""
    folder.mkdir(parents=True)
    for name, content in (("state.json", b"{}"), (".metadata", b"m"), ("__0_0.distcp", bytes(range(256)) * 40)):
        (folder / name).write_bytes(content)
    files = {path.name: manifest.hash_file(path) for path in folder.iterdir()}
    facts = {"step": 6, "attempt": "a", "world_size": 2, "mesh": {"tp": 2}, "versions": {"torch": "2"}, "saved": "now"}
    manifest.write(folder, Manifest(**(facts | {"files": files} | changed)))  # type: ignore[arg-type]
    return folder


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    found = read_validated(commit(tmp_path / "step-6"))
    assert (found.step, found.world_size, found.mesh, found.bytes) == (6, 2, {"tp": 2}, 10243)
    assert manifest.find_damage(tmp_path / "step-6", found, found.files) == []


def test_no_bit_of_a_manifest_changes_unseen(tmp_path: Path) -> None:
    folder = commit(tmp_path / "step-6")
    path = folder / manifest.MANIFEST_FILE
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
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
def test_what_is_no_manifest_is_damage(tmp_path: Path, content: bytes) -> None:
    folder = commit(tmp_path / "step-6")
    (folder / manifest.MANIFEST_FILE).write_bytes(content)
    with pytest.raises(DamageError, match=r"manifest.json (is no manifest|does not have its own hash)"):
        read_validated(folder)


FORGED: dict[str, tuple[dict[str, object], str]] = {
    "a path": ({"files": {"../state.json": (1, "")}}, 'names "../state.json", which is no file of a checkpoint'),
    "a root": ({"files": {"/etc/passwd": (1, "")}}, 'names "/etc/passwd"'),
    "itself": ({"files": {"manifest.json": (1, "")}}, 'names "manifest.json"'),
    "no size": ({"files": {"state.json": ("1", "")}}, "does not tell size and hash of state.json"),
    "no state": ({"files": {".metadata": (1, "")}}, "names no state.json"),
    "another step": ({"step": 7}, "is of update 7"),
    "no step": ({"step": "6"}, "must hold step"),
}


@pytest.mark.parametrize(("changed", "told"), FORGED.values(), ids=list(FORGED))
def test_a_manifest_with_its_own_hash_may_still_say_nothing_of_use(
    tmp_path: Path, changed: dict[str, object], told: str
) -> None:
    with pytest.raises(DamageError, match=told):
        read_validated(commit(tmp_path / "step-6", **changed))


def test_a_newer_format_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(manifest, "FORMAT_VERSION", 2)
        folder = commit(tmp_path / "step-6")
    with pytest.raises(ResumeError, match="of format 2, and this version reads 1"):
        read_validated(folder)


# ---- files


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def zero_a_page(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(4096) + content[8192:])


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (flip, "has other content than was written"),
    "a page": (zero_a_page, "has other content than was written"),
    "cut": (lambda path: os.truncate(path, 100), "has 100 bytes and not 10,240"),
    "empty": (lambda path: os.truncate(path, 0), "has 0 bytes and not 10,240"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 10,241 bytes"),
    "gone": (Path.unlink, "is missing"),
    "a link": (link, "is not a regular file"),
}


@pytest.mark.parametrize(("do", "told"), DAMAGES.values(), ids=list(DAMAGES))
def test_damage_is_told_with_its_file(tmp_path: Path, do: Callable[[Path], object], told: str) -> None:
    folder = commit(tmp_path / "step-6")
    do(folder / "__0_0.distcp")
    about = read_validated(folder)
    (found,) = manifest.find_damage(folder, about, about.files)
    assert found.startswith(f"__0_0.distcp {told}")
    by_size = manifest.find_damage(folder, about, about.files, check_hashes=False)
    assert by_size == ([] if "other content" in told else [found])


# ---- what may pass


def failing(function: Callable[..., object], times: int, number: int) -> Callable[..., object]:
    """The function, which fails the first times it is called."""
    left = [times]

    def call(*arguments: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return function(*arguments)

    return call


@pytest.mark.parametrize(
    ("number", "times", "passes"),
    [(errno.EIO, 3, True), (errno.ESTALE, 3, True), (errno.EIO, 4, False), (errno.EACCES, 1, False)],
)
def test_a_file_that_cannot_be_read_now_is_asked_for_again_and_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, times: int, *, passes: bool
) -> None:
    folder = commit(tmp_path / "step-6")
    monkeypatch.setattr(manifest, "RETRY_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(manifest, "hash_of", failing(manifest.hash_file, times, number))
    if passes:
        assert read_validated(folder).step == 6
    else:
        with pytest.raises(RunFailedError, match=rf"state.json cannot be read .*{os.strerror(number)}"):
            read_validated(folder)


def test_sizes_are_told_for_people() -> None:
    assert [*map(manifest.format_bytes, (0, 1023, 1024, 1536, 5 * 2**30, 2**40))] == [
        *("0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 GiB", "1.0 TiB")
    ]


def test_the_manifest_is_json_that_others_can_read(tmp_path: Path) -> None:
    body = json.loads((commit(tmp_path / "step-6") / manifest.MANIFEST_FILE).read_text())
    assert body["format"] == 1
    assert [*map(type, body["files"]["state.json"])] == [int, str]
