"""The runs, each through the whole product on the rank pool, with one thread per rank.

They differ in numerics; `tests/system/test_parity.py` compares meshes. The runs of
`benchmarks/compare_commits.py` take seconds to minutes each, for two checkouts whose keys may
differ, so they are not shared. The corpus is a function of integers, so neither Python's version,
nor its hash seed, nor the number of cores matters.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.system.runs import WORDS, forked, lines, metrics, train_rank

Trajectory = dict[str, list[float]]
"""Values of each step by quantity; validation losses, one per validation, as `validation SET
LENGTH`.
"""
Options = tuple[str, ...]

BASE = """\
[model]
num_layers = 3
dim = 32
num_heads = 4
num_kv_heads = 2
head_dim = 8
ffn_dim = 48

[data]
packing_version = 1
corpus = "{root}/corpus.jsonl"
cache_dir = "{root}/prepared"

[optimizer]
lr = 1e-2

[metrics]
log_interval = 1
tensorboard = false
"""
ONE_STAGE = """
[training]
seq_len = 48
global_batch_size = 4
steps = 5

[checkpoint]
enabled = false
"""
VALIDATION = """
[validation]
interval = 2

[validation.sets.packed]
seq_len = 40
rows = 5

[validation.sets.context]
seq_len = [16, 48]
rows = 4
tail = 9
"""
RECIPE = """
[checkpoint]
interval = 100

[[stage]]
name = "short"
seq_len = 32
steps = 3
batch_tokens = 128
warmup = 0.4

[[stage]]
name = "long"
seq_len = 64
steps = 3
batch_tokens = 192
lr = 5e-3
rope = { theta = 2e6 }
mix = [{ source = "corpus", weight = 0.6 }, { source = "corpus", max_len = 24, weight = 0.4 }]
"""


def train_with_aot_eager(argv: list[str]) -> int:
    """Generating kernels would take a C++ compiler and a minute."""
    # Dynamo hides its own warnings only where they are no errors.
    warnings.simplefilter("default")
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        return train_rank(argv)


@dataclass(frozen=True)
class Run:
    options: Options = ()
    dtype: str = "float64"
    ranks: int = 1
    sections: str = ONE_STAGE
    launches: int = 1
    """One per stage of a recipe."""
    is_slow: bool = False
    train: Callable[[list[str]], int] = train_rank

    @property
    def arguments(self) -> Options:
        return f"training.dtype={self.dtype}", *self.options


def rope(kind: str, *options: str) -> Options:
    return f"model.rope.kind={kind}", *(f"model.rope.{option}" for option in options)


HALF_DIM = range(4)
LONGROPE = rope(
    "longrope",
    "factor=4",
    "original_length=16",
    f"short_factors={','.join(str(1 + i / 8) for i in HALF_DIM)}",
    f"long_factors={','.join(str(1 + i / 2) for i in HALF_DIM)}",
)
FEW_STEPS = ("model.num_layers=2", "training.steps=3")
ONE_MICRO_BATCH = ("training.micro_batch_size=4",)
# Otherwise rounding grows from step to step.
GENTLE = ("optimizer.lr=1e-3",)
RUNS = {
    "llama3": Run(("schedule.warmup_steps=2",)),
    "qwen3, linear schedule": Run(
        ("model.family=qwen3", "schedule.kind=linear", "schedule.min_lr_factor=0.2")
    ),
    "linear rope, concat": Run(
        (*rope("linear", "factor=4"), "data.packing=concat", "schedule.kind=constant")
    ),
    "llama3 rope, single": Run(
        (*rope("llama3", "factor=8", "original_length=32"), "data.packing=single")
    ),
    "yarn and nope, wsd schedule": Run(
        (
            *rope("yarn", "factor=4", "original_length=16"),
            "model.nope_every=3",
            "schedule.kind=wsd",
            "schedule.warmup_steps=1",
            "schedule.decay_steps=3",
        )
    ),
    "longrope, no mask": Run((*LONGROPE, "data.packing=concat", "data.mask=none")),
    "longrope, short": Run((*LONGROPE, "training.seq_len=16", "data.mask=none")),
    "float32 rope": Run(("model.rope.precision=float32",)),
    "copy": Run(("data.corpus=copy", "model.vocab_size=64", "data.copy_period=12")),
    "validation": Run(
        ("data.holdout=0.3", "training.micro_batch_size=2"), sections=ONE_STAGE + VALIDATION
    ),
    "recipe": Run(sections=RECIPE, launches=2),
    "mixed packing": Run(("data.packing_version=2",)),
    "mixed packing, dealt to dp_shard 2": Run(
        (
            "data.packing_version=2",
            "parallelism.dp_shard=2",
            "training.global_batch_size=8",
            *FEW_STEPS,
        ),
        ranks=2,
    ),
    "empty micro-batch": Run(("parallelism.dp_shard=2", "training.global_batch_size=3"), ranks=2),
    "tiles and head groups": Run(
        (
            "training.seq_len=256",
            "training.global_batch_size=2",
            "training.micro_batch_size=2",
            "training.steps=3",
            "model.ffn_dim=256",
            "memory.recompute=keep_attention",
            "memory.mlp_tile_mib=1",
            "memory.loss_chunk_mib=1",
            "memory.head_groups=2",
            "memory.blocks_per_checkpoint=2",
        )
    ),
    "float32, optimizer on the host": Run(("memory.optimizer_placement=host",), dtype="float32"),
    "float32, bfloat16 moments": Run(("memory.optimizer_dtype=bfloat16",), dtype="float32"),
    "float32, dp_shard 2 x pp 2": Run(
        ("parallelism.dp_shard=2", "parallelism.pp=2", *FEW_STEPS), "float32", ranks=4
    ),
    "bfloat16": Run(GENTLE, "bfloat16"),
    "bfloat16, cp 2 ring x tp 2": Run(
        (
            "parallelism.cp=2",
            "parallelism.cp_method=ring",
            "parallelism.tp=2",
            *ONE_MICRO_BATCH,
            *FEW_STEPS,
            *GENTLE,
        ),
        "bfloat16",
        ranks=4,
    ),
    "float32, compiled": Run(
        ("training.compile=true", "memory.recompute=none"),
        "float32",
        is_slow=True,
        train=train_with_aot_eager,
    ),
}


def write_corpus(root: Path) -> None:
    """60 documents of 1 to 40 words, drawn by a linear congruential generator."""
    state = 1

    def draw(count: int) -> int:
        nonlocal state
        state = (1_103_515_245 * state + 12_345) % 2**31
        return state // 2**16 % count

    documents = (" ".join(WORDS[draw(len(WORDS))] for _ in range(1 + draw(40))) for _ in range(60))
    (root / "corpus.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in documents)
    )


def trajectory(name: str, root: Path) -> Trajectory:
    """Trains in a new folder of `root`, which holds the corpus."""
    run = RUNS[name]
    folder = root / name.replace(" ", "-")
    config = folder.with_suffix(".toml")
    config.write_text(BASE.format(root=root) + run.sections)
    options = [f"--{option}" for option in run.arguments]
    for _ in range(run.launches):
        done = forked(config, folder, *options, processes=run.ranks, train=run.train)
        assert done.statuses == [0] * run.ranks, done.said
    steps = zip(*metrics(folder, *STEP_KEYS), strict=True)
    found = {key: [*values] for key, values in zip(STEP_KEYS, steps, strict=True)}
    for event in lines(folder / "events.jsonl"):
        if event["event"] == "validation":
            for length, loss in (event["by_context"] or {"": event["loss"]}).items():
                found.setdefault(f"validation {event['set']} {length}".rstrip(), []).append(loss)
    return found


STEP_KEYS = ("tokens", "lr", "loss", "grad_norm")
