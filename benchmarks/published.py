"""Compare published measurements with the planner's predictions for equivalent configurations.

    python -m benchmarks.published

Nothing is timed. Kernel rates are those of `trainer/hardware/specs`; nothing is fitted to a row. Where others compute linear
layers in 8 bits, the rate of products is raised by one factor for all of their rows, taken from a row of torchtitan's first
table, which is then no evidence. Every row of a published table is in the group that the table was put in before it was
predicted, whatever its error. Memory is that of other programs, which hold logits whole and keep more of a block; it is put there to be seen, not to be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, get_args

from benchmarks.doc_tables import markdown
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.hardware.device_specs import MEMORY_SHARE, DeviceSpec, load_device
from trainer.hardware.host import GIB
from trainer.plan.plan import TrainingPlan, plan_stage

Values = dict[str, Any]
Group = Literal["used to set a constant", "held out", "another system"]
USED, HELD_OUT, OTHER = get_args(Group)
"""Rows that set a constant, rows of an equivalent configuration, and rows of programs that do something else."""
K, M = 1 << 10, 1 << 20
H100, A100, B200 = (load_device(name) for name in ("h100-80gb", "a100-80gb", "b200"))
NARROW_PRODUCTS = 1.5
"""How much faster linear layers in 8 bits are, with their casts: it makes of 6,667 tokens/s, torchtitan's 8B at 8K, the 8,532
that it reaches with them."""
COOL = 0.85
"""Of the rates of H100 at 700 W, at 500 W: estimated from what clocks lose."""


@dataclass(frozen=True)
class Row:
    """A published measurement. `rate` is tokens/s of a device, or what follows from a published share of the peak."""

    system: str
    setting: str
    config: Config
    device: DeviceSpec
    rate: float
    gib: float | None = None
    why: str = ""
    """What is different in it, as far as known."""
    group: Group = HELD_OUT

    @cached_property
    def plan(self) -> TrainingPlan:
        return plan_stage(self.config, prod(self.config.parallelism.degrees(1).values()), self.device)

    @property
    def error(self) -> float:
        """Of what is predicted, over what was published."""
        return self.plan.tokens_per_second_per_device / self.rate - 1

    @property
    def bound(self) -> str:
        """What takes most of the predicted step."""
        seconds = dict.fromkeys(("attention", "matmul", "communication"), 0.0)
        for name, part in self.plan.step_time.busiest.breakdown().items():
            if name in ("attention", "matmul"):
                seconds[name] += part
            elif name in ("recompute", "loss head"):
                seconds["matmul"] += part
            elif name.startswith("exposed") or name == "contention":
                seconds["communication"] += part
        return max(seconds, key=lambda name: seconds[name])


def configured(
    size: str,
    tokens: int,
    *,
    family: str = "llama3",
    rows: int = 1,
    training: Values | None = None,
    parallelism: Values | None = None,
    memory: Values | None = None,
) -> Config:
    """A configuration, of which every degree is stated that is not 1. Raises ValueError if it breaks a rule."""
    batch: Values = {"seq_len": tokens, "global_batch_size": rows, "compile": True}
    config = Config.model_validate(
        {
            "model": {"family": family, "size": size},
            "training": batch | (training or {}),
            "parallelism": {"dp_shard": 1} | (parallelism or {}),
            "memory": memory or {},
        }
    )
    if problems := checks.layout_problems(config, prod(config.parallelism.degrees(1).values())):
        raise ValueError("; ".join(problems))
    return config


def in_eight_bits(device: DeviceSpec) -> DeviceSpec:
    return replace(device, matmul_flops=device.matmul_flops * NARROW_PRODUCTS)


def on_grand_teton() -> DeviceSpec:
    """torchtitan's: H100 of 96 GB and 2.4 TB/s, held at 500 W."""
    attention = {
        kernel: {width: (forward * COOL, backward * COOL) for width, (forward, backward) in widths.items()}
        for kernel, widths in H100.attention_flops.items()
    }
    return replace(
        H100,
        memory=95 * GIB,
        hbm_bandwidth=MEMORY_SHARE * 2.4e12,
        matmul_flops=H100.matmul_flops * COOL,
        attention_flops=attention,
    )


def of_peak(config: Config, device: DeviceSpec, percent: float) -> float:
    """Tokens/s of a device, from the share of its peak that model FLOPs have."""
    tokens = config.training.seq_len
    flops = config.model.build().flops(tokens=1, pairs=config.model.build().mean_pairs(tokens) / tokens)
    return percent / 100 * device.peak_flops / flops


LONG: Values = {"recompute": "full", "offload": "inputs", "mlp_tile_mib": 1024, "loss_chunk_mib": 1024}


def upipe() -> Iterator[Row]:
    """The table of the UPipe paper: 8B on eight H100, FlashAttention 3, everything computed again, inputs on the host."""
    published: dict[str, dict[int, float]] = {
        "Ulysses, offload": {128 * K: 2320, 512 * K: 879, M: 475.3, 2 * M: 246, 3 * M: 162},
        "zigzag ring (USP)": {128 * K: 2065, 512 * K: 841, M: 458.5, 2 * M: 238, 3 * M: 160},
        "UPipe": {128 * K: 2281, 512 * K: 867, M: 472.5, 2 * M: 246, 3 * M: 166, 4 * M: 126, 5 * M: 98.3},
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
            why = "its step has one to three more seconds outside attention and matmul" if tokens == 128 * K else ""
            yield Row(system, f"8B, {_short(tokens)}, 8 x H100", config, H100, rate, None, why)


def others() -> Iterator[Row]:
    """Single rows of single systems."""
    for family, size, seconds, held in (("qwen3", "8b", 380, 56.2e9), ("qwen3_moe", "30b-a3b", 483, 46.0e9)):
        trl = configured(
            size,
            M,
            family=family,
            training={"attention": "cudnn"},
            parallelism={"cp": 8, "cp_method": "allgather"},
            memory=LONG,
        )
        note = "its weights and optimizer state are bfloat16"
        yield Row("TRL", f"{family} {size}, 1M, 8 x H100", trl, H100, M / 8 / seconds, held / GIB, note, OTHER)
    for tokens, ranks, percent in (
        (500_000, 1, 21.9),
        (1_100_000, 8, 22.4),
        (3_700_000, 8, 21.4),
        (15_000_000, 32, 21.0),
    ):
        method = {"cp": ranks, "cp_method": "ulysses"} if ranks > 1 else {}
        memory = LONG | {"optimizer_placement": "host"}
        alst = configured("8b", tokens, training={"attention": "flash"}, parallelism=method, memory=memory)
        yield Row("ALST", f"8B, {_short(tokens)}, {ranks} x H100", alst, H100, of_peak(alst, H100, percent))
    for tokens, percent in ((512 * K, 38.6), (700 * K, 37.9)):
        easy = configured(
            "7b",
            tokens,
            family="llama2",
            training={"attention": "flash"},
            parallelism={"cp": 8, "cp_method": "ring"},
            memory=LONG | {"optimizer_placement": "host"},
        )
        yield Row("EasyContext", f"Llama2-7B, {_short(tokens)}, 8 x A100", easy, A100, of_peak(easy, A100, percent))


def nemo() -> Iterator[Row]:
    """NVIDIA's tables of long sequences, linear layers in 8 bits: (tokens, tp, cp, dp, rows, share of the bfloat16 peak)."""
    for tokens, tp, cp, dp, rows, percent in (
        (128, 2, 4, 4, 32, 41.6),
        (512, 4, 8, 4, 8, 37.8),
        (1024, 4, 16, 4, 4, 36.7),
    ):
        config = _nemo("8b", "llama3", tokens * K, rows, {"tp": tp, "cp": cp, "dp_shard": dp})
        setting = f"8B, {_short(tokens * K)}, {tp * cp * dp} x B200"
        why = "B200 rates are largely estimated"
        yield Row("NeMo, FP8", setting, config, in_eight_bits(B200), of_peak(config, B200, percent), None, why, OTHER)
    for tokens, tp, cp, dp, percent in ((128, 4, 4, 8, 32.6), (512, 8, 16, 4, 29.0), (1024, 8, 32, 4, 27.7)):
        config = _nemo("7b", "llama2", tokens * K, dp, {"tp": tp, "cp": cp, "dp_shard": dp})
        setting = f"Llama2-7B, {_short(tokens * K)}, {tp * cp * dp} x H100"
        why = "March 2024: older kernel; batch and recomputation not published"
        yield Row("NeMo, FP8", setting, config, in_eight_bits(H100), of_peak(config, H100, percent), None, why, OTHER)


def _nemo(size: str, family: str, tokens: int, rows: int, mesh: dict[str, int]) -> Config:
    return configured(
        size,
        tokens,
        family=family,
        rows=rows,
        training={"attention": "cudnn"},
        parallelism={**mesh, "cp_method": "ring"},
        memory={"recompute": "none"},
    )


def mixtures() -> Iterator[Row]:
    """NVIDIA's mixtures of experts of 4,096 tokens, tokens spread over experts by force: Megatron Core's figure of Mixtral with
    its mapping, and tables of Megatron Bridge (container 25.11). Qwen3-235B is left out: its line lacks the batch. torchtitan
    publishes no table of mixtures.
    """
    host = "128 small experts: by its guide, the host cannot keep up"
    for system, family, size, device, rate, rows, micro_batch, mesh, why in (
        ("Megatron Core 0.9", "mixtral", "8x7b", H100, 468e12, 256, 1, (4, 8, 16), "mapping of its release 0.8"),
        ("Megatron Bridge", "gpt_oss", "120b", H100, 5630.0, 512, 4, (4, 1, 16), ""),
        ("Megatron Bridge", "gpt_oss", "120b", B200, 8213.0, 512, 4, (1, 1, 64), "B200 rates are largely estimated"),
        ("Megatron Bridge, FP8", "qwen3_moe", "30b-a3b", H100, 5275.0, 512, 2, (2, 24, 8), host),
        ("Megatron Bridge, FP8", "qwen3_moe", "30b-a3b", B200, 9299.0, 512, 1, (1, 1, 8), host),
    ):
        stages, chunks, sharded = mesh
        pipeline: Values = (
            {"pp": stages, "pp_schedule": "Interleaved1F1B" if chunks > 1 else "1F1B"} if stages > 1 else {}
        )
        config = configured(
            size,
            4 * K,
            family=family,
            rows=rows,
            training={"micro_batch_size": micro_batch, "attention": "cudnn"},
            parallelism={"dp_shard": sharded, "ep": 8, **pipeline},
            memory={"recompute": "none"},
        )
        if rate > 1e12:
            rate /= config.model.build().flops(tokens=1, pairs=config.model.build().mean_pairs(4 * K) / (4 * K))
        narrow = in_eight_bits(device) if "FP8" in system else device
        group = HELD_OUT if narrow is H100 else OTHER
        setting = f"{family} {size}, 4K, {stages * sharded} x {'H100' if device is H100 else 'B200'}"
        yield Row(system, setting, config, narrow, rate, None, why, group)


def torchtitan() -> Iterator[Row]:
    """Its tables of December 2024, in their order."""
    bench, narrow = on_grand_teton(), in_eight_bits(on_grand_teton())
    selective = "it recomputes every other matmul"
    for ranks, device, compiled, rate, gib in (
        (8, bench, False, 5762, 82.4),
        (8, bench, True, 6667, 77.0),
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
        name = "torchtitan" + (", compile" if compiled else "") + (", FP8" if device is narrow else "")
        group = USED if (ranks, device, compiled) == (8, bench, True) else OTHER
        yield Row(name, f"8B, 8K, {ranks} x H100", config, device, rate, gib, selective, group)
    for cp, rate, gib in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5)):
        config = configured(
            "8b",
            32 * K * cp,
            rows=8 // cp,
            training={"attention": "flash"},
            parallelism={"dp_shard": 8 // cp, "cp": cp, **({"cp_method": "allgather"} if cp > 1 else {})},
            memory={"recompute": "full", "loss_chunk_mib": 1 << 14},
        )
        why = "it repeats the FP8 casts in recomputation" if cp == 1 else "its first context parallelism"
        yield Row("torchtitan, FP8", f"8B, {_short(32 * K * cp)}, 8 x H100", config, narrow, rate, gib, why, OTHER)
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
        why = "the overlap of async TP is taken from its own figure" if hidden else ""
        group = USED if hidden else OTHER
        yield Row(name, "70B, 8K, 256 x H100", config, narrow, rate, gib, why, group)
    for schedule, rate, gib in (("1F1B", 100, 82.5), ("Interleaved1F1B", 128, 72.7)):
        config = _largest(8 * K, 256, 4, {"dp_shard": 8, "pp_schedule": schedule})
        yield Row(f"torchtitan, FP8, {schedule}", "405B, 8K, 512 x H100", config, narrow, rate, gib, "", OTHER)
    for cp, rate, gib in ((1, 76, 75.3), (2, 47, 75.9), (4, 31, 77.1), (8, 16, 84.9)):
        mesh = {"dp_shard": 8 // cp, "cp": cp, **({"cp_method": "allgather"} if cp > 1 else {})}
        config = _largest(32 * K * cp, 64 // cp, 1, mesh)
        why = "" if cp == 1 else "its first context parallelism"
        yield Row(
            "torchtitan, FP8, 1F1B", f"405B, {_short(32 * K * cp)}, 512 x H100", config, narrow, rate, gib, why, OTHER
        )


def _largest(tokens: int, rows: int, micro_batch: int, mesh: Values) -> Config:
    """Eight micro-batches, which is what a pipeline of eight ranks had without being told otherwise."""
    return configured(
        "405b",
        tokens,
        family="llama3.1",
        rows=rows,
        training={"micro_batch_size": micro_batch, "attention": "flash"},
        parallelism={"tp": 8, "pp": 8, "async_tp": True, **mesh},
        memory={"recompute": "full"},
    )


def rows() -> list[Row]:
    return [*upipe(), *others(), *nemo(), *mixtures(), *torchtitan()]


def report(found: Sequence[Row]) -> list[str]:
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
        "what differs",
    ]
    return [*summary(found), "", *markdown(heading, [_cells(row) for row in found])]


def summary(found: Sequence[Row]) -> list[str]:
    """Errors of tokens/s by group and by what bounds the step; the bias is the mean with its sign."""
    kinds = [(group, bound) for group in get_args(Group) for bound in ("attention", "matmul", "communication")]
    lines = []
    for group, bound in kinds:
        if errors := [row.error for row in found if (row.group, row.bound) == (group, bound)]:
            mean, bias = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
            worst = max(errors, key=abs)
            lines.append([group, bound, str(len(errors)), f"{mean:.0%}", f"{worst:+.0%}", f"{bias:+.0%}"])
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
        "" if row.gib is None else f"{100 * (plan.peak_memory.device_bytes / GIB / row.gib - 1):+.0f} %",
        row.why,
    ]


def _short(tokens: int) -> str:
    if tokens % K:
        return f"{tokens / 1e6:g}M"
    return f"{tokens // K}K" if tokens < M else f"{tokens / M:g}M"


if __name__ == "__main__":
    sys.stdout.write("\n".join(report(rows())) + "\n")
