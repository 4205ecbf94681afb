"""Evaluates a causal language model of transformers on long text, its sequences sharded over the
ranks.

    torchrun --nproc-per-node 4 -m longhaul_attention perplexity MODEL book.txt --tokens 131072
    torchrun --nproc-per-node 4 -m longhaul_attention needle MODEL book.txt --tokens 32768,131072

MODEL is a folder or a name that transformers knows. Without torchrun, one process. Every rank
holds all weights.
"""

from __future__ import annotations

import json
import math
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from longhaul_attention import ContextParallel, register_transformers
from longhaul_attention.evaluation import beginning, finds, hide_number, token_scores
from parallelisms.mesh.context_plan import CP_METHODS


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    with ranks(options.device) as device:
        try:
            text_T, model, tokenizer, cp = load(options, device)
            results = (perplexity if options.command == "perplexity" else needle)(
                options, model, tokenizer, cp, text_T
            )
        except (OSError, ValueError) as error:
            say(f"error: {error}", file=sys.stderr)
            return 2
        if options.json is not None and distributed.get_rank() == 0:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        "longhaul_attention", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "perplexity": "loss and perplexity of text, cut into sequences",
        "needle": "whether a number hidden in text is found, by depth and length",
    }
    for name, description in helps.items():
        command = commands.add_parser(name, help=description, description=description)
        add = command.add_argument
        add("model", metavar="MODEL", help="folder or name of a causal language model")
        add(
            "text",
            metavar="FILE",
            type=Path,
            nargs="+",
            help="text files, read one after the other",
        )
        add(
            "--tokens",
            metavar="N,...",
            type=lengths,
            default=[8192],
            help="tokens of a sequence (default: 8192)",
        )
        add(
            "--method",
            choices=["auto", *CP_METHODS[:-1]],
            default="auto",
            help="context parallelism (default: auto)",
        )
        add("--dtype", default="auto", help="of the weights (default: that of the checkpoint)")
        add(
            "--device",
            choices=["cpu", "cuda"],
            default="cuda" if torch.cuda.is_available() else "cpu",
        )
        add("--json", metavar="FILE", type=Path, help="also write the results to FILE")
        if name == "perplexity":
            add(
                "--sequences",
                metavar="N",
                type=int,
                default=8,
                help="at most per length (default: 8)",
            )
        else:
            add("--depths", metavar="N", type=int, default=5, help="evenly spaced (default: 5)")
            add(
                "--trials",
                metavar="N",
                type=int,
                default=2,
                help="numbers per depth and length (default: 2)",
            )
    return parser


def lengths(text: str) -> list[int]:
    """An argparse type: tokens such as 32768 or 32K, separated by commas."""
    sizes = {"K": 1 << 10, "M": 1 << 20}
    return [
        int(part.strip().upper().rstrip("KM")) * sizes.get(part.strip()[-1:].upper(), 1)
        for part in text.split(",")
    ]


@contextmanager
def ranks(device_type: str) -> Iterator[torch.device]:
    """Process groups of torchrun's ranks, or of this process; yields its device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    # gloo as well, because ranks exchange values over the host.
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    # Without torchrun a store in memory: one process needs no port.
    options: dict[str, Any] = (
        {}
        if "RANK" in os.environ
        else {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    )
    distributed.init_process_group(backend, timeout=timedelta(minutes=30), **options)
    device = (
        torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
    )
    if device_type == "cuda":
        torch.cuda.set_device(device)
    try:
        yield device
        # Otherwise a rank that is done would close connections that others still use.
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def load(options: Namespace, device: torch.device) -> tuple[Tensor, Any, Any, ContextParallel]:
    """Text as tokens, model, tokenizer and ranks.

    Raises OSError for files, and ValueError for what is too short.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "\n".join(path.read_text("utf-8") for path in options.text)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text_T = torch.tensor(
        tokenizer.encode(text, add_special_tokens=False, verbose=False), dtype=torch.int64
    )
    if min(options.tokens) < 2 or len(text_T) < min(options.tokens) - 1:
        raise ValueError(
            f"--tokens {min(options.tokens)} needs at least 2, and as much text: there are {len(text_T)} tokens"
        )
    name = register_transformers()
    loaded = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=options.dtype, attn_implementation=name
    )
    config = loaded.config.get_text_config()
    cp = ContextParallel(
        init_device_mesh(device.type, (distributed.get_world_size(),)),
        method=options.method,
        heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None),
        packs_documents=False,
    )
    say(f"{options.model}: {cp.plan.summary()}, {len(text_T):,} tokens of text")
    return text_T, loaded.eval().to(device), tokenizer, cp


def perplexity(
    options: Namespace, model: Any, tokenizer: Any, cp: ContextParallel, text_T: Tensor
) -> list[dict[str, float]]:
    """The mean loss per length: sequences of text, one after the other, each behind the token that
    begins a text.
    """
    first = beginning(tokenizer)
    device = next(model.parameters()).device
    results = list[dict[str, float]]()
    for length in options.tokens:
        losses = []
        for part_T in text_T.split(length - len(first))[: options.sequences]:
            if len(part_T) == length - len(first):
                scores = token_scores(model, cp, torch.cat((first, part_T))[None].to(device))
                losses.append(float(scores.losses.double().mean()))
                say(f"{length:,} tokens, sequence {len(losses)}: loss {losses[-1]:.4f}")
        if not losses:
            raise ValueError(f"--tokens {length} is more than the {len(text_T)} tokens of text")
        loss = fmean(losses)
        results.append(
            {
                "tokens": length,
                "sequences": len(losses),
                "loss": loss,
                "perplexity": math.exp(loss),
            }
        )
        say(
            f"{length:,} tokens: loss {loss:.4f}, perplexity {math.exp(loss):.3f}, {len(losses)} sequences"
        )
    return results


def needle(
    options: Namespace, model: Any, tokenizer: Any, cp: ContextParallel, text_T: Tensor
) -> list[dict[str, float]]:
    """Trials that found their number, and its log-probability, per length and depth."""
    results = list[dict[str, float]]()
    for length in options.tokens:
        for number in range(options.depths):
            depth = number / max(1, options.depths - 1)
            trials = [
                finds(model, cp, hide_number(tokenizer, text_T, length, depth, trial))
                for trial in range(options.trials)
            ]
            found, log_probability = (fmean(values) for values in zip(*trials, strict=True))
            results.append(
                {
                    "tokens": length,
                    "depth": depth,
                    "found": found,
                    "log_probability": log_probability,
                }
            )
            say(
                f"{length:,} tokens, depth {depth:.0%}: {found:.0%} found (log-probability {log_probability:.2f})"
            )
    return results


def say(line: str, file: Any = None) -> None:
    """Prints on the first rank."""
    if distributed.get_rank() == 0:
        print(line, file=file, flush=True)


if __name__ == "__main__":
    sys.exit(main())
