"""Snapshot of the code version that submits a job."""

from __future__ import annotations

import subprocess
from pathlib import Path

from trainer import __version__


def code_version(root: Path) -> str:
    """The commit, and whether there are uncommitted changes; without git, the package version."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return f"version {__version__}"
    return f"commit {commit.strip()}{' with uncommitted changes' if _git(root, 'status', '--porcelain') else ''}"


def uncommitted_changes(root: Path) -> tuple[str, list[str]]:
    """The uncommitted changes as a patch, and the names of untracked files."""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    return _git(root, "diff", "--binary", "HEAD") or "", untracked.splitlines()


def write_code_version(root: Path, folder: Path) -> None:
    """Writes `code.txt`, and `code.diff` if there are changes."""
    patch, untracked = uncommitted_changes(root)
    lines = [code_version(root), *(f"untracked: {name}" for name in untracked)]
    (folder / "code.txt").write_text("\n".join(lines) + "\n")
    if patch:
        (folder / "code.diff").write_text(patch)


def _git(root: Path, *args: str) -> str | None:
    """The output of git; None without git or if `root` is not a repository."""
    if not (root / ".git").exists():
        return None
    try:
        completed = subprocess.run(
            ["git", "-C", str(root), *args],
            capture_output=True,
            text=True,
            # A patch may hold bytes of any encoding.
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        return None
    return completed.stdout if completed.returncode == 0 else None
