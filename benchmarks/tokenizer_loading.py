"""What loading a tokenizer.json of 262,144 tokens costs, in the process that prepares and in each
worker.

    python -m benchmarks.tokenizer_loading [--tokens 262144] [--rounds 3]

The file has the parts of Gemma's: a BPE of characters with bytes for unknown ones, every merge
that two tokens make, and added tokens. CPU-seconds and the growth of peak memory, each in a
process of its own, the best of the rounds: the library alone; the process that prepares, without
and with what only long texts need (where they may be cut, tiktoken's ranks); and a worker, which
unpickles all of it.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks.data import machine, say

SUBJECTS = ("library", "parent", "parent, for long texts", "worker")


def write_tokenizer(folder: Path, num_tokens: int) -> None:
    draw = Random(0)
    characters = [chr(code) for code in (*range(33, 127), *range(0x4E00, 0x4E00 + 5000), 0x2581)]
    pieces = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *characters,
    ]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    words = [*characters]
    while len(vocab) < num_tokens:
        word = draw.choice(words) + draw.choice(words[:2000])
        if len(word) <= 16 and word not in vocab:
            vocab[word] = len(vocab)
            words.append(word)
    splits = ((word[:at], word[at:]) for word in words for at in range(1, len(word)))
    merges = [[left, right] for left, right in splits if left in vocab and right in vocab]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": pieces[number], "special": True, **flags} for number in range(4)
    ]
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "model": {**model, "vocab": vocab, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')


def measure(subject: str, folder: Path) -> None:
    """Writes the CPU-seconds and MiB of one subject, in this process."""
    from tokenizers import Tokenizer

    from trainer.data.huggingface_tokenizer import load_huggingface_tokenizer

    pickled = folder / "pickled"
    if subject == "worker" and not pickled.exists():
        pickled.write_bytes(pickle.dumps(load_huggingface_tokenizer(folder)))
        return
    content = (pickled if subject == "worker" else folder / "tokenizer.json").read_bytes()
    load: dict[str, Callable[[], object]] = {
        "library": lambda: Tokenizer.from_buffer(content),
        "parent": lambda: load_huggingface_tokenizer(folder),
        "parent, for long texts": lambda: load_huggingface_tokenizer(folder)._tiktoken,
        "worker": lambda: pickle.loads(content),
    }
    before = peak_mebibytes()
    began = time.process_time()
    load[subject]()
    seconds = time.process_time() - began
    sys.stdout.write(f"{seconds} {peak_mebibytes() - before}\n")


def peak_mebibytes() -> float:
    """Of this process; what getrusage says is also that of the process that started it."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1 << 18)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--measure", nargs=2, metavar=("SUBJECT", "FOLDER"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.measure:
        measure(options.measure[0], Path(options.measure[1]))
        return
    say(f"{machine()}; {options.tokens:,} tokens, {options.rounds} rounds\n")
    say("| loaded | CPU-s | of the library's | MiB |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder, options.tokens)
        measure("worker", folder)
        base = 0.0
        for subject in SUBJECTS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.tokenizer_loading",
                "--measure",
                subject,
                name,
            ]
            runs = [
                subprocess.run(command, check=True, capture_output=True, text=True)
                for _ in range(options.rounds)
            ]
            seconds, mebibytes = min(tuple(map(float, run.stdout.split())) for run in runs)
            base = base or seconds
            say(f"| {subject} | {seconds:.2f} | {seconds / base:.2f} | {mebibytes:.0f} |")


if __name__ == "__main__":
    main()
