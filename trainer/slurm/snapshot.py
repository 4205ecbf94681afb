"""Which code a job was submitted with."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path


def code_version(root: Path) -> str:
    """The commit that is checked out and whether files differ from it; where there is none, the version."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        return f"version {project['version']}"
    return f"commit {commit.strip()}{' and changes' if _git(root, 'status', '--porcelain') else ''}"


def uncommitted_changes(root: Path) -> tuple[str, list[str]]:
    """What differs from the commit, as a patch, and the names of files that git does not know."""
    untracked = _git(root, "ls-files", "--others", "--exclude-standard") or ""
    return _git(root, "diff", "--binary", "HEAD") or "", untracked.splitlines()


def write_code_version(root: Path, folder: Path) -> None:
    """Writes `code.txt`, and `code.diff` if there are changes."""
    patch, untracked = uncommitted_changes(root)
    lines = [code_version(root), *(f"not under git: {name}" for name in untracked)]
    (folder / "code.txt").write_text("\n".join(lines) + "\n")
    if patch:
        (folder / "code.diff").write_text(patch)


def _git(root: Path, *args: str) -> str | None:
    """What git says; None where it is missing, or where the code is no repository of its own."""
    if not (root / ".git").exists():
        return None
    try:
        completed = subprocess.run(
            ["git", "-C", str(root), *args], capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        return None
    return completed.stdout if completed.returncode == 0 else None
