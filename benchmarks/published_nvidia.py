"""NVIDIA's published tables: long sequences of NeMo, and Megatron Bridge and Megatron Core at 4K
and 8K.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published_row import (
    B200,
    H100,
    HELD_OUT,
    OTHER,
    Group,
    K,
    LeftOut,
    PublishedTable,
    Row,
    Values,
    configured,
    in_eight_bits,
    short_length,
)
from trainer.config.job_config import Config
from trainer.hardware.device_specs import load_device

DEVICES = {
    "GB300": load_device("gb300"),
    "GB200": load_device("gb200"),
    "B200": B200,
    "H100": H100,
}
ESTIMATED = "rates of Blackwell are largely estimated"
SMALL_EXPERTS = "128 small experts: by its guide, the host cannot keep up"

# NeMo's tables: (thousand tokens, sequences a step, tp, pp, cp, dp, TFLOP/s of a GPU).
LLAMA3_ON_B200 = (
    (8, 512, 1, 1, 1, 2, 1671),
    (16, 256, 1, 1, 1, 4, 1717),
    (32, 128, 1, 1, 2, 4, 1624),
    (64, 64, 1, 1, 4, 4, 1600),
    (128, 32, 2, 1, 4, 4, 1588),
    (256, 16, 4, 1, 4, 4, 1590),
    (512, 8, 4, 1, 8, 4, 1619),
    (1024, 4, 4, 1, 16, 4, 1608),
)
LLAMA2_ON_H100 = (
    (4, 1024, 1, 1, 1, 4, 768),
    (8, 512, 1, 2, 1, 4, 730),
    (16, 256, 2, 1, 1, 8, 660),
    (32, 128, 2, 1, 2, 8, 610),
    (64, 64, 4, 1, 2, 8, 574),
    (128, 32, 4, 1, 4, 8, 555),
    (256, 16, 4, 1, 8, 8, 549),
    (512, 8, 8, 1, 16, 4, 549),
    (1024, 4, 8, 1, 32, 4, 536),
)

# Megatron Bridge's tables, line by line: (device, bits, family, size, GPUs, sequences a step,
# micro-batch, thousand tokens, tp, pp, cp, vp, ep, tokens/s of a GPU). Of two recipes for 8 bits,
# the first.
BRIDGE = (
    ("GB300", 8, "llama3", "8b", 8, 128, 2, 8, 1, 1, 1, 1, 1, 37556),
    ("GB300", 8, "llama3", "70b", 64, 256, 2, 8, 1, 1, 1, 1, 1, 4520),
    ("GB300", 8, "llama3.1", "405b", 256, 1536, 1, 8, 2, 8, 2, 4, 1, 999),
    ("GB300", 16, "gpt_oss", "120b", 64, 1280, 2, 8, 1, 1, 1, 1, 64, 18347),
    ("GB300", 8, "qwen3_moe", "30b-a3b", 8, 512, 4, 4, 1, 1, 1, 1, 8, 28934),
    ("GB300", 16, "qwen3_moe", "235b-a22b", 256, 8192, 2, 4, 1, 4, 1, 12, 16, 6131),
    ("GB200", 8, "llama3", "8b", 8, 128, 2, 8, 1, 1, 1, 1, 1, 31508),
    ("GB200", 8, "llama3", "70b", 64, 256, 2, 8, 1, 1, 1, 1, 1, 4312),
    ("GB200", 8, "llama3.1", "405b", 256, 1536, 1, 8, 4, 16, 1, 4, 1, 813),
    ("GB200", 16, "gpt_oss", "120b", 64, 1280, 1, 8, 1, 1, 1, 1, 64, 15876),
    ("GB200", 8, "qwen3_moe", "30b-a3b", 8, 512, 4, 4, 1, 1, 1, 1, 8, 23766),
    ("GB200", 16, "qwen3_moe", "235b-a22b", 256, 8192, 1, 4, 1, 8, 1, 3, 32, 4916),
    ("B200", 8, "llama3", "8b", 8, 128, 2, 8, 1, 1, 1, 1, 1, 30624),
    ("B200", 8, "llama3.1", "405b", 128, 64, 1, 8, 4, 8, 2, 8, 1, 661),
    ("B200", 16, "gpt_oss", "120b", 64, 512, 4, 4, 1, 1, 1, 1, 8, 8213),
    ("B200", 8, "qwen3_moe", "30b-a3b", 8, 512, 1, 4, 1, 1, 1, 1, 8, 9299),
    ("B200", 8, "qwen3_moe", "235b-a22b", 64, 1024, 1, 4, 1, 8, 1, 2, 8, 3269),
    ("H100", 8, "llama3", "8b", 8, 128, 1, 8, 1, 1, 1, 1, 1, 14451),
    ("H100", 8, "llama3", "70b", 64, 128, 1, 8, 4, 8, 1, 5, 1, 1602),
    ("H100", 8, "llama3.1", "405b", 1024, 512, 1, 8, 8, 8, 2, 8, 1, 292),
    ("H100", 16, "gpt_oss", "120b", 64, 512, 4, 4, 1, 4, 1, 1, 8, 5630),
    ("H100", 8, "qwen3_moe", "30b-a3b", 16, 512, 2, 4, 1, 2, 1, 24, 8, 5275),
)


def nemo() -> Iterator[PublishedTable]:
    """Long sequences, linear layers in 8 bits; the source counts the FLOPs of attention without
    its mask.
    """
    without_cp = "the same without context parallelism"
    for source, family, size, name, lines, why, unknown in (
        ("NeMo 25.04, Llama3-8B on B200", "llama3", "8b", "B200", LLAMA3_ON_B200, ESTIMATED, 5),
        (
            "NeMo 24.03, Llama2-7B on H100",
            "llama2",
            "7b",
            "H100",
            LLAMA2_ON_H100,
            "March 2024: older kernel",
            6,
        ),
    ):
        rows = []
        for thousands, sequences, tp, pp, cp, dp, tflops in lines:
            mesh = {
                "tp": tp,
                "cp": cp,
                "dp_shard": dp,
                "pp": pp,
                **({"cp_method": "ring"} if cp > 1 else {}),
            }
            config = without_recomputation(family, size, thousands * K, sequences, mesh)
            setting = (
                f"{family} {size}, {short_length(thousands * K)}, {tp * pp * cp * dp} x {name}"
            )
            device = in_eight_bits(DEVICES[name])
            rows.append(
                Row(
                    "NeMo, FP8",
                    setting,
                    config,
                    device,
                    of_unmasked(config, tflops * 1e12),
                    None,
                    why,
                    OTHER,
                )
            )
        yield PublishedTable(
            source, rows, [LeftOut(unknown, without_cp, "the mapping is not published")]
        )


def of_unmasked(config: Config, flops: float) -> float:
    """Tokens/s of a device, from its model FLOP/s with attention of every token to every other."""
    return flops / config.model.build().flops(tokens=1, pairs=config.training.seq_len)


def without_recomputation(
    family: str, size: str, tokens: int, sequences: int, mesh: Values, *, micro_batch: int = 1
) -> Config:
    return configured(
        size,
        tokens,
        family=family,
        rows=sequences,
        training={"attention": "cudnn", "micro_batch_size": micro_batch},
        parallelism=mesh,
        memory={"recompute": "none"},
    )


def megatron_bridge() -> PublishedTable:
    """Its page of container 25.11. Tokens are spread over experts by force."""
    rows = []
    for (
        name,
        bits,
        family,
        size,
        gpus,
        sequences,
        micro_batch,
        thousands,
        tp,
        pp,
        cp,
        vp,
        ep,
        rate,
    ) in BRIDGE:
        mesh: Values = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp_shard": gpus // (tp * pp * cp)}
        if cp > 1:
            mesh["cp_method"] = "ring"
        if vp > 1:
            mesh |= {"pp_schedule": "Interleaved1F1B", "pp_stages_per_rank": vp}
        config = without_recomputation(
            family, size, thousands * K, sequences, mesh, micro_batch=micro_batch
        )
        device = in_eight_bits(DEVICES[name]) if bits == 8 else DEVICES[name]
        system = "Megatron Bridge, FP8" if bits == 8 else "Megatron Bridge"
        setting = f"{family} {size}, {thousands}K, {gpus} x {name}"
        why = _difference(name, size)
        group = _group(name, bits)
        rows.append(Row(system, setting, config, device, float(rate), None, why, group))
    left_out = [
        LeftOut(5, "DeepSeek-V3", "Longhaul has no multi-head latent attention"),
        LeftOut(1, "Qwen3-235B on 256 H100", "the line lacks the batch"),
    ]
    return PublishedTable("Megatron Bridge 25.11, GB300, GB200, B200 and H100", rows, left_out)


def _difference(device_name: str, size: str) -> str:
    if size == "30b-a3b":
        return SMALL_EXPERTS
    return "" if device_name == "H100" else ESTIMATED


def _group(device_name: str, bits: int) -> Group:
    """Only bfloat16 on H100 is an equivalent configuration at known rates."""
    is_equivalent = device_name == "H100" and bits == 16
    return HELD_OUT if is_equivalent else OTHER


def megatron_core() -> PublishedTable:
    """A single figure: 468 TFLOP/s of a GPU for Mixtral 8x7B."""
    mesh: Values = {"pp": 4, "pp_schedule": "Interleaved1F1B", "dp_shard": 16, "ep": 8}
    config = without_recomputation("mixtral", "8x7b", 4 * K, 256, mesh)
    model = config.model.build()
    rate = 468e12 / model.flops(tokens=1, pairs=model.mean_pairs(4 * K) / (4 * K))
    why = "mapping of its release 0.8"
    device = DEVICES["H100"]
    row = Row(
        "Megatron Core 0.9",
        "mixtral 8x7b, 4K, 64 x H100",
        config,
        device,
        rate,
        None,
        why,
        HELD_OUT,
    )
    return PublishedTable("Megatron Core 0.9, its figure of Mixtral", [row], [])
