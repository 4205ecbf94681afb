"""Compare published measurements with the planner's predictions for equivalent configurations.

    python -m benchmarks.published

Nothing is timed; each row is a plan of its own, which takes a second or two until its trace is
known. Tables enter whole: every line of a source is predicted, or listed with the
reason why not. Its group is that which it was put in before it was predicted, whatever its error.
CONSTANTS names the constants that were chosen by published lines, which then prove nothing; three
stand beside the values at which torchtitan's lines would be predicted exactly. Where others compute
linear layers in 8 bits, the rate of products is raised by one factor. Memory is that of other
programs, which hold logits whole and keep more of a block; it is put there to be seen, not to be
compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from benchmarks.doc_tables import markdown
from benchmarks.published_nvidia import megatron_bridge, megatron_core, nemo
from benchmarks.published_row import (
    A100,
    H100,
    HELD_OUT,
    NARROW_PRODUCTS,
    OTHER,
    USED,
    Group,
    K,
    LeftOut,
    M,
    PublishedTable,
    Row,
    Values,
    configured,
    in_eight_bits,
    of_peak,
    on_grand_teton,
    short_length,
)
from trainer.config.job_config import Config
from trainer.hardware.device_specs import MATMUL_SHARE
from trainer.hardware.host import GIB
from trainer.plan.step_time import ASYNC_TP_OVERLAP

CONSTANTS = (
    (
        "sustained share of the matmul rate",
        f"{MATMUL_SHARE:.2f}",
        "UPipe's table, ALST and TRL; later torchtitan: 8B with compile",
    ),
    (
        "the same on A100",
        f"{A100.matmul_share:.2f}",
        "matmul-bound measurements on A100 that are not recorded here",
    ),
    (
        "speed-up of products in 8 bits",
        f"{NARROW_PRODUCTS:g}",
        "torchtitan: 8B with compile, with and without FP8",
    ),
    ("overlap of async TP", f"{ASYNC_TP_OVERLAP:g}", "torchtitan: 70B, with and without async TP"),
)
"""Those chosen by published measurements: name, value, and the lines that they were chosen by."""

LONG: Values = {
    "recompute": "full",
    "offload": "inputs",
    "mlp_tile_mib": 1024,
    "loss_chunk_mib": 1024,
}


def upipe() -> Iterator[Row]:
    """The table of the UPipe paper: 8B on eight H100, FlashAttention 3, everything computed again,
    inputs on the host.
    """
    published: dict[str, dict[int, float]] = {
        "Ulysses, offload": {128 * K: 2320, 512 * K: 879, M: 475.3, 2 * M: 246, 3 * M: 162},
        "zigzag ring (USP)": {128 * K: 2065, 512 * K: 841, M: 458.5, 2 * M: 238, 3 * M: 160},
        "UPipe": {
            128 * K: 2281,
            512 * K: 867,
            M: 472.5,
            2 * M: 246,
            3 * M: 166,
            4 * M: 126,
            5 * M: 98.3,
        },
        "PyTorch CP": {128 * K: 1374, 512 * K: 474, M: 250},
    }
    methods = {"zigzag ring (USP)": "ring", "PyTorch CP": "allgather"}
    for system, rates in published.items():
        for tokens, rate in rates.items():
            is_torch = system == "PyTorch CP"
            memory = LONG | ({"head_groups": 4} if system == "UPipe" else {})
            config = configured(
                "8b",
                tokens,
                training={"attention": "flash" if is_torch else "fa3"},
                parallelism={"cp": 8, "cp_method": methods.get(system, "ulysses")},
                memory=memory,
            )
            why = (
                "its step has one to three more seconds outside attention and matmul"
                if tokens == 128 * K
                else ""
            )
            yield Row(
                system,
                f"8B, {short_length(tokens)}, 8 x H100",
                config,
                H100,
                rate,
                None,
                why,
                USED,
            )


def trl() -> Iterator[Row]:
    """Its guide to long contexts."""
    for family, size, seconds, held in (
        ("qwen3", "8b", 380, 56.2e9),
        ("qwen3_moe", "30b-a3b", 483, 46.0e9),
    ):
        config = configured(
            size,
            M,
            family=family,
            training={"attention": "cudnn"},
            parallelism={"cp": 8, "cp_method": "allgather"},
            memory=LONG,
        )
        why = "its weights and optimizer state are bfloat16"
        yield Row(
            "TRL",
            f"{family} {size}, 1M, 8 x H100",
            config,
            H100,
            M / 8 / seconds,
            held / GIB,
            why,
            USED,
        )


def alst() -> Iterator[Row]:
    """Its longest sequences, whose rates follow from shares of the peak."""
    for tokens, ranks, percent in (
        (500_000, 1, 21.9),
        (1_100_000, 8, 22.4),
        (3_700_000, 8, 21.4),
        (15_000_000, 32, 21.0),
    ):
        method = {"cp": ranks, "cp_method": "ulysses"} if ranks > 1 else {}
        memory = LONG | {"optimizer_placement": "host"}
        config = configured(
            "8b", tokens, training={"attention": "flash"}, parallelism=method, memory=memory
        )
        setting = f"8B, {short_length(tokens)}, {ranks} x H100"
        rate = of_peak(config, H100, percent)
        yield Row("ALST", setting, config, H100, rate, None, "", USED)


def easy_context() -> Iterator[Row]:
    """Its README: Llama2-7B on eight A100, tokens/s of all."""
    for tokens, cp, rate in (
        (64 * K, 1, 10240),
        (64 * K, 8, 7816),
        (128 * K, 8, 4266),
        (512 * K, 8, 2133),
        (700 * K, 8, 1603),
    ):
        config = configured(
            "7b",
            tokens,
            family="llama2",
            rows=8 // cp,
            training={"attention": "flash"},
            parallelism={"cp": 8, "cp_method": "ring"} if cp > 1 else {"dp_shard": 8},
            memory=LONG | {"optimizer_placement": "host"},
        )
        is_short = tokens <= 128 * K
        why, group = (
            ("the batch of a step is not published", OTHER) if is_short else ("", HELD_OUT)
        )
        setting = f"Llama2-7B, {short_length(tokens)}{'' if cp > 1 else ' without cp'}, 8 x A100"
        yield Row("EasyContext", setting, config, A100, rate / 8, None, why, group)


def torchtitan() -> Iterator[Row]:
    """Its tables of December 2024, in their order."""
    bench = on_grand_teton()
    narrow = in_eight_bits(on_grand_teton())
    selective = "it recomputes every other matmul"
    for ranks, device, compiled, rate, gib in (
        (8, bench, False, 5762, 82.4),
        (8, bench, True, 6667, 77.0),
        (8, narrow, True, 8532, 76.8),
        (128, bench, False, 5605, 67.0),
        (128, bench, True, 6514, 62.0),
        (128, narrow, True, 8380, 61.8),
    ):
        config = configured(
            "8b",
            8 * K,
            rows=2 * ranks,
            training={"compile": compiled, "micro_batch_size": 2, "attention": "flash"},
            parallelism={"dp_shard": ranks},
        )
        name = (
            "torchtitan"
            + (", compile" if compiled else "")
            + (", FP8" if device is narrow else "")
        )
        group = USED if (ranks, compiled) == (8, True) else OTHER
        yield Row(name, f"8B, 8K, {ranks} x H100", config, device, rate, gib, selective, group)
    for cp, rate, gib in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5)):
        config = configured(
            "8b",
            32 * K * cp,
            rows=8 // cp,
            training={"attention": "flash"},
            parallelism={
                "dp_shard": 8 // cp,
                "cp": cp,
                **({"cp_method": "allgather"} if cp > 1 else {}),
            },
            memory={"recompute": "full", "loss_chunk_mib": 1 << 14},
        )
        why = (
            "it repeats the FP8 casts in recomputation"
            if cp == 1
            else "its first context parallelism"
        )
        yield Row(
            "torchtitan, FP8",
            f"8B, {short_length(32 * K * cp)}, 8 x H100",
            config,
            narrow,
            rate,
            gib,
            why,
            OTHER,
        )
    for hidden, rate, gib in ((False, 829, 71.9), (True, 876, 67.6)):
        mesh: Values = {"dp_shard": 32, "tp": 8, "async_tp": hidden}
        config = configured(
            "70b",
            8 * K,
            rows=512,
            training={"micro_batch_size": 16, "attention": "flash"},
            parallelism=mesh,
            memory={"recompute": "full"},
        )
        name = f"torchtitan, FP8{', async TP' if hidden else ''}"
        why = "its tp all-gathers send 8 bits"
        yield Row(name, "70B, 8K, 256 x H100", config, narrow, rate, gib, why, USED)
    for schedule, rate, gib in (("1F1B", 100, 82.5), ("Interleaved1F1B", 128, 72.7)):
        config = _largest(8 * K, 256, 4, {"dp_shard": 8, "pp_schedule": schedule})
        yield Row(
            f"torchtitan, FP8, {schedule}",
            "405B, 8K, 512 x H100",
            config,
            narrow,
            rate,
            gib,
            "",
            OTHER,
        )
    for cp, rate, gib in ((1, 76, 75.3), (2, 47, 75.9), (4, 31, 77.1), (8, 16, 84.9)):
        mesh = {"dp_shard": 8 // cp, "cp": cp, **({"cp_method": "allgather"} if cp > 1 else {})}
        config = _largest(32 * K * cp, 64 // cp, 1, mesh)
        why = "" if cp == 1 else "its first context parallelism"
        yield Row(
            "torchtitan, FP8, 1F1B",
            f"405B, {short_length(32 * K * cp)}, 512 x H100",
            config,
            narrow,
            rate,
            gib,
            why,
            OTHER,
        )


def _largest(tokens: int, rows: int, micro_batch: int, mesh: Values) -> Config:
    """Eight micro-batches, which is what a pipeline of eight ranks had without being told
    otherwise.
    """
    return configured(
        "405b",
        tokens,
        family="llama3.1",
        rows=rows,
        training={"micro_batch_size": micro_batch, "attention": "flash"},
        parallelism={"tp": 8, "pp": 8, "async_tp": True, **mesh},
        memory={"recompute": "full"},
    )


def tables() -> Iterator[PublishedTable]:
    fpdt = LeftOut(
        6, "FPDT", "it computes chunks of a sequence one after the other from host memory"
    )
    yield PublishedTable("UPipe's paper, Llama3-8B on eight H100", [*upipe()], [fpdt])
    yield PublishedTable("TRL's guide to long contexts", [*trl()], [], is_whole=False)
    yield PublishedTable("ALST's longest sequences", [*alst()], [], is_whole=False)
    yield PublishedTable("EasyContext's README, Llama2-7B on eight A100", [*easy_context()], [])
    yield from nemo()
    yield megatron_core()
    yield megatron_bridge()
    yield PublishedTable("torchtitan, December 2024, six tables", [*torchtitan()], [])


def rows() -> list[Row]:
    return [row for table in tables() for row in table.rows]


def sources(found: Sequence[PublishedTable]) -> list[str]:
    """The constants, and how much of each source is predicted."""
    return [
        *markdown(
            ["constant chosen by published rows", "value", "rows"], [[*each] for each in CONSTANTS]
        ),
        "",
        *markdown(
            ["source", "rows", "predicted", "left out"], [_coverage(table) for table in found]
        ),
    ]


def exact_values(found: Sequence[Row]) -> list[tuple[str, float, float]]:
    """Constants beside the values at which torchtitan's speed with them, or their gain, would be
    predicted exactly.
    """
    by_name = {(row.system, row.setting): row for row in found}
    small, large = "8B, 8K, 8 x H100", "70B, 8K, 256 x H100"
    compiled = by_name["torchtitan, compile", small]
    in_narrow = by_name["torchtitan, compile, FP8", small]
    exposed = by_name["torchtitan, FP8", large]
    hidden = by_name["torchtitan, FP8, async TP", large]
    at_best_rate = replace(compiled, device=replace(compiled.device, matmul_share=1.0))
    seconds = compiled.seconds
    share = _interpolated(
        {1 / MATMUL_SHARE: seconds, 1.0: at_best_rate.seconds}, seconds * (1 + compiled.error)
    )
    slowness = _interpolated(
        {1.0: seconds, 1 / NARROW_PRODUCTS: in_narrow.seconds},
        seconds * compiled.rate / in_narrow.rate,
    )
    overlap = _interpolated(
        {0.0: exposed.seconds, ASYNC_TP_OVERLAP: hidden.seconds},
        exposed.seconds * exposed.rate / hidden.rate,
    )
    return [
        ("sustained share of the matmul rate", MATMUL_SHARE, 1 / share),
        ("speed-up of products in 8 bits", NARROW_PRODUCTS, 1 / slowness),
        ("overlap of async TP", ASYNC_TP_OVERLAP, overlap),
    ]


def _interpolated(seconds: Mapping[float, float], target: float) -> float:
    """Where a line through two points reaches the target."""
    (first, first_seconds), (second, second_seconds) = seconds.items()
    slope = (second_seconds - first_seconds) / (second - first)
    return first + (target - first_seconds) / slope


def report(found: Sequence[PublishedTable]) -> list[str]:
    heading = [
        "system",
        "setting",
        "tokens/s/GPU",
        "predicted",
        "error",
        "MFU %",
        "GiB",
        "predicted",
        "error",
        "rows",
        "what differs",
    ]
    lines = [row for table in found for row in table.rows]
    rows = markdown(heading, [_cells(row) for row in lines])
    exact = markdown(
        ["constant", "value", "exact for torchtitan's rows"],
        [[name, f"{value:g}", f"{best:.2f}"] for name, value, best in exact_values(lines)],
    )
    return [*sources(found), "", *exact, "", *summary(lines), "", *rows]


def _coverage(table: PublishedTable) -> list[str]:
    """How many lines a source has, how many are predicted, and why others are not."""
    left_out = sum(each.lines for each in table.left_out)
    reasons = "; ".join(f"{each.lines} ({each.what}): {each.why}" for each in table.left_out)
    predicted = len(table.rows)
    if not table.is_whole:
        return [
            table.source,
            f"{predicted} known here",
            str(predicted),
            "what the source has beyond is not known here",
        ]
    return [table.source, str(predicted + left_out), str(predicted), reasons]


def summary(found: Sequence[Row]) -> list[str]:
    """Errors of tokens/s by group and by what bounds the step; the bias is the mean with its
    sign.
    """
    kinds = [
        (group, bound)
        for group in get_args(Group)
        for bound in ("attention", "matmul", "communication")
    ]
    lines = []
    for group, bound in kinds:
        if errors := [row.error for row in found if (row.group, row.bound) == (group, bound)]:
            mean = sum(map(abs, errors)) / len(errors)
            bias = sum(errors) / len(errors)
            worst = max(errors, key=abs)
            lines.append(
                [group, bound, str(len(errors)), f"{mean:.0%}", f"{worst:+.0%}", f"{bias:+.0%}"]
            )
    return markdown(["rows", "bound by", "number", "mean error", "worst", "bias"], lines)


def _cells(row: Row) -> list[str]:
    plan = row.plan
    gib = "" if row.gib is None else f"{row.gib:.1f}"
    return [
        row.system,
        row.setting,
        f"{row.rate:#.3g}".rstrip("."),
        f"{plan.tokens_per_second_per_device:#.3g}".rstrip("."),
        f"{100 * row.error:+.0f} %",
        f"{100 * plan.mfu:.1f}",
        gib,
        f"{plan.peak_memory.device_bytes / GIB:.1f}",
        ""
        if row.gib is None
        else f"{100 * (plan.peak_memory.device_bytes / GIB / row.gib - 1):+.0f} %",
        row.group,
        row.why,
    ]


if __name__ == "__main__":
    sys.stdout.write("\n".join(report([*tables()])) + "\n")
