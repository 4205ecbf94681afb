"""Sample reports with invented numbers: an 8B model at a million tokens on 32 devices."""

from __future__ import annotations

from trainer.plan.document import BarChart, LineChart, PlanReport, StackedBar, Table

K = 1 << 10

STATES = {"parameters": 0.93, "gradients": 0.93, "optimizer states": 1.87}
UNSHARDED = {"gathered weights": 0.41, "unreduced gradients": 1.22}
ACTIVATIONS = {"saved activations": 31.7, "transient activations": 15.9}

MEMORY = BarChart(
    title="Peak device memory of a rank",
    unit="GiB",
    bars=[
        StackedBar(
            label="in attention of block 31",
            segments={**STATES, **UNSHARDED, **ACTIVATIONS, "reserve": 4.0},
            limit=79.1,
        ),
        StackedBar(
            label="in the loss head",
            segments={**STATES, "saved activations": 31.7, "loss head": 6.4},
            limit=79.1,
        ),
        StackedBar(label="in the optimizer", segments={**STATES, "reserve": 4.0}, limit=79.1),
    ],
)
HOST = BarChart(
    title="Host memory of a node",
    unit="GiB",
    bars=[
        StackedBar(
            label="node of 8 ranks",
            segments={"saved activations": 1024.0, "async-checkpoint staging": 22.4},
            limit=2048.0,
        )
    ],
)
TIME = BarChart(
    title="Step time",
    unit="s",
    bars=[
        StackedBar(
            label="step",
            segments={
                "matrix products": 5.93,
                "attention": 78.4,
                "recomputation": 27.2,
                "exposed, fsdp": 0.31,
                "exposed, cp": 4.12,
                "offload": 1.06,
                "pipeline bubble": 0,
                "optimizer": 0.012,
            },
        )
    ],
)
SEARCH = Table(
    title="Meshes for 32 devices",
    columns=["mesh", "method", "recompute", "GiB", "s", "tokens/s", "MFU", "drawback"],
    rows=[
        ["cp 32", "hybrid 8 x 4", "keep_attention", "57.0", "96.2", "10,900", "39.1 %", ""],
        [
            "cp 32",
            "hybrid 8 x 4",
            "full",
            "52.9",
            "117.0",
            "8,962",
            "32.2 %",
            "recomputes attention",
        ],
        [
            "cp 16, tp 2",
            "ring",
            "keep_attention",
            "58.3",
            "104.7",
            "10,015",
            "36.0 %",
            "exposes 9.1 s of tp",
        ],
        [
            "cp 8, tp 4",
            "ulysses",
            "keep_attention",
            "61.0",
            "110.3",
            "9,507",
            "34.1 %",
            "exposes 14.6 s of tp",
        ],
        [
            "cp 8, pp 4",
            "ulysses",
            "keep_attention",
            "74.4",
            "131.9",
            "7,950",
            "28.5 %",
            "bubble of 27 %",
        ],
        [
            "cp 16, pp 2",
            "ring",
            "full",
            "70.8",
            "138.0",
            "7,598",
            "27.3 %",
            "bubble of 14 %, recomputes attention",
        ],
        [
            "dp_shard 2, cp 16",
            "ring",
            "keep_attention",
            "88.6",
            "-",
            "-",
            "-",
            "9.5 GiB over the limit",
        ],
        [
            "cp 32",
            "ring",
            "none",
            "1,203.4",
            "-",
            "-",
            "-",
            "1,124.3 GiB over the limit: saves everything",
        ],
    ],
    note="212 of 1,188 meshes fit; the best six, and two that do not",
    best=0,
)
TOKENS = LineChart(
    title="Memory against sequence length",
    x="tokens",
    y="GiB",
    log_x=True,
    log_y=True,
    lines={
        "keep_attention, offload": [(K * 2.0**n, 5.9 + 0.0497 * 2**n) for n in range(5, 13)],
        "full": [(K * 2.0**n, 5.9 + 0.0301 * 2**n) for n in range(5, 13)],
        "none": [(K * 2.0**n, 5.9 + 1.1747 * 2**n) for n in range(5, 11)],
    },
    limit=79.1,
)
MFU = LineChart(
    title="MFU against sequence length",
    x="tokens",
    y="MFU, %",
    log_x=True,
    log_y=False,
    lines={
        "keep_attention, offload": [
            (K * 2.0**n, mfu)
            for n, mfu in zip(
                range(5, 13), (24.1, 31.9, 36.8, 38.4, 38.9, 39.1, 39.4, 39.4), strict=True
            )
        ],
        "full": [
            (K * 2.0**n, mfu)
            for n, mfu in zip(
                range(5, 13), (21.2, 28.8, 32.0, 32.1, 32.2, 32.2, 32.3, 32.3), strict=True
            )
        ],
    },
)
TOML = """\
[parallelism]
cp = 32
cp_method = "hybrid"
cp_ulysses = 8

[memory]
recompute = "keep_attention"
offload = "inputs_and_attention"
"""
SAMPLE = PlanReport(
    title="llama3_8b_1m on 32 x h100-80gb",
    verdict="57.0 of 79.1 GiB on the fullest rank; attention takes most of the time.",
    fits=True,
    facts=[
        ("tokens per second", "10,900"),
        ("MFU", "39.1 %"),
        ("seconds per step", "117.0"),
        ("days for 10 B tokens", "10.6"),
        ("GPU-hours", "8,155"),
        ("disk per checkpoint", "89.7 GiB"),
    ],
    sections=[MEMORY, HOST, TIME, SEARCH, TOKENS, MFU],
    notes=[
        "Attention takes 67 % of a step.",
        'memory.recompute = "none" would save 27.2 s, but does not fit.',
        "Links within a node carry 450 GB/s, between nodes 50 GB/s each way; nothing was calibrated.",
    ],
    configurations=[TOML],
)


def stages(count: int, *, unit: str = "GiB") -> BarChart:
    """Memory of pipeline stages, of which the third is the fullest."""
    parts = [
        {"parameters": 11.0, "saved activations": 40.0 - 32 * stage / count, "reserve": 4.0}
        for stage in range(count)
    ]
    parts[0]["embedding"] = 1.5
    parts[-1]["loss head"] = 9.5
    parts[2]["saved activations"] += 31.0
    return BarChart(
        title=f"Memory of {count} stages",
        unit=unit,
        bars=[
            StackedBar(label=f"stage {n + 1} of {count}", segments=each, limit=79.1)
            for n, each in enumerate(parts)
        ],
    )
