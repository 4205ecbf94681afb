"""Steps of training for the GPU benchmark: Longhaul's own `Config` and `Trainer`, a row of numbers for each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_rows import Bench, K
from models.batch import Batch
from parallelisms.collectives import to_local
from trainer.config import checks
from trainer.config.job_config import Config
from trainer.config.parse import load
from trainer.data.copy_task import CopyDataset
from trainer.data.sequences import FULL_SEQUENCE, BlendedDataset, SequenceShard
from trainer.distributed import process_group
from trainer.hardware.device import peak_flops
from trainer.hardware.host import GIB
from trainer.memory.auto import fit_memory_options
from trainer.memory.estimator import MemoryEstimate, phase_estimates
from trainer.memory.rank import RankMemory
from trainer.trainer import StepMetrics, Trainer

B1 = "--model.family llama3.2 --model.size 1b"
MODELS = {
    "1b": B1,
    "1b-128": f"{B1} --model.num_heads 16 --model.num_kv_heads 4 --model.head_dim 128",
    "8b": "--model.family llama3 --model.size 8b",
    "parity": "--model.vocab_size 4096 --model.dim 512 --model.num_kv_heads 4 --model.head_dim 64 --model.ffn_dim 1408",
}
TINY = (
    "--model.vocab_size 264 --model.dim 64 --model.num_layers 2 --model.num_heads 8 --model.num_kv_heads 4 --model.head_dim 8 "
    "--model.ffn_dim 96 --memory.loss_chunk_mib 1"
)
COMMON = (
    "--config debug --job.name gpu --data.corpus copy --training.global_batch_size 1 --training.dtype bfloat16 "
    "--memory.recompute keep_attention --checkpoint.enabled false --metrics.tensorboard false "
    "--checkpoint.initial_load_path drawn-on-the-device"  # So the trainer leaves the weights to `draw_weights`.
)
LINEAR = 650e12
"""FLOP/s of matrix products that predictions assume."""
ASSUMED = (360e12, 320e12)
"""FLOP/s of attention, forward and backward, where none was measured."""
SHORT = 4 * K
"""Tokens of documents in warm-ups that would else take long."""


class Packed(BlendedDataset):
    """Random tokens, the second half of a row the first again; row n is packed with documents of `documents[n]` tokens.

    Its last length is that of all rows after it.
    """

    def __init__(self, config: Config, documents: Sequence[int]) -> None:
        training = config.training
        vocabulary, length = config.model.build().vocab_size, training.seq_len
        rows = training.steps * training.global_batch_size
        copied: Any = {"vocab_size": vocabulary, "period": length // 2, "num_sequences": rows, "seed": training.seed}
        super().__init__([CopyDataset(**copied, seq_len=length)], seq_len=length)
        self._documents = documents

    def read(self, indices: Sequence[int | None], shard: SequenceShard = FULL_SEQUENCE) -> Batch:
        batch, (number,) = super().read(indices, shard), indices
        length = min(self.seq_len, self._documents[min(number or 0, len(self._documents) - 1)])
        whole, rest = divmod(self.seq_len, length)
        pairs = whole * (length * (length + 1) // 2) + rest * (rest + 1) // 2
        starts = [*range(0, self.seq_len, length), self.seq_len]
        return replace(
            batch,
            positions=batch.positions % length,
            document_ids=batch.positions // length,
            boundaries=torch.tensor([starts], dtype=torch.int32),
            num_pairs=pairs,
            num_computed_pairs=pairs,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes; None where there is no such device."""

    peak: int | None
    reserved: int | None
    pinned: int | None
    rss: float


def begin_memory(bench: Bench) -> None:
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
        getattr(torch.cuda, "reset_peak_host_memory_stats", bool)()


def memory(bench: Bench) -> Memory:
    resident = float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if not bench.cuda:
        return Memory(None, None, None, resident)
    stats: dict[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()
    pinned = stats.get("allocated_bytes.peak")
    return Memory(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), pinned, resident)


def configured(bench: Bench, model: str, tokens: int, *levers: str) -> Config:
    """The configuration of a step, on the kernel that is chosen for it."""
    tiny = TINY if bench.rehearse else ""
    argv = " ".join((COMMON, MODELS[model], tiny, *levers)).split()
    argv += ["--training.seq_len", str(bench.size(tokens)), *bench.given]
    config = load(argv)
    if "--training.attention" not in argv:
        config = load([*argv, "--training.attention", bench.kernel(config)])
    checks.require_valid(config, 1)
    room = torch.cuda.get_device_properties(bench.device).total_memory if bench.cuda else bench.host
    return fit_memory_options(config, 1, ranks_per_node=1, device_bytes=float(room), host_bytes=bench.host)


def seconds_of(bench: Bench, config: Config, pairs: float) -> float:
    """Predicted: products at the assumed rate, attention at the measured one."""
    model, levers = config.model.build(), config.memory
    forward, backward = bench.rates.get((config.training.attention, model.head_dim), ASSUMED)
    again = {"recompute": levers.recompute, "blocks_per_checkpoint": levers.blocks_per_checkpoint}
    products = model.hardware_flops(tokens=config.training.seq_len, pairs=0, **again)  # type: ignore[arg-type]
    attended = model.num_layers * model.num_heads * model.head_dim * pairs
    passes = 1 + (levers.recompute == "full")
    slower = 1 if bench.cuda else 1e4
    return slower * (products / LINEAR + attended * (4 * passes / forward + 10 / backward))


def ledger_of(config: Config) -> tuple[MemoryEstimate, float]:
    """The fullest moment of the device, and the most bytes that the host holds at any."""
    moments = list(phase_estimates(RankMemory(config, 1, 0)))
    return max(moments, key=lambda moment: moment.device_bytes), max(moment.host_bytes for moment in moments)


def state_bytes(estimate: MemoryEstimate) -> float:
    """Parameters, gradients and optimizer state on the device."""
    return sum(item.device_bytes for item in estimate.items[:3])


def residual_multiple(peak: float, estimate: MemoryEstimate, rank: RankMemory) -> float:
    """k, where the peak is the state plus k times the residual stream on one rank."""
    return (peak - state_bytes(estimate)) / rank.block.residual_bytes


def rounds_for(each: float, short: float, room: float) -> tuple[int, int, bool]:
    """(warm-ups, rounds, whether warm-ups attend to short documents only) that take about `room` seconds."""
    for warmups, rounds, is_short in ((3, 5, False), (1, 5, False), (1, 3, False), (1, 3, True), (1, 2, True)):
        if warmups * (short if is_short else each) + rounds * each <= room:
            return warmups, rounds, is_short
    return 1, 1, True


def train(
    bench: Bench,
    model: str,
    tokens: int,
    *levers: str,
    room: float = 25,
    document: int | None = None,
    rounds: tuple[int, int, bool] | None = None,
    ballast: int = 0,
    note: str = "",
) -> float | None:
    """Report a row of training steps; returns their median seconds, or None."""
    what = f"{model} {bench.size(tokens)} {' '.join(levers)}"
    config = bench.guard(what, lambda: configured(bench, model, tokens, *levers))
    if config is None:
        return None
    length = config.training.seq_len
    each, short = (seconds_of(bench, config, length * min(length, n) / 2) for n in (document or length, SHORT))
    tried_out = (1, 1, False) if bench.rehearse else None
    warmups, count, is_short = rounds or tried_out or rounds_for(each, short, room)
    config = with_steps(config, warmups + count)
    held = ledger_of(config)[1]
    if held > 0.75 * bench.host:
        bench.report.row(what=what, result=f"skipped: {held / GIB:.0f} GiB of host memory")
        return None
    documents = [SHORT if is_short else document or length] * warmups + [document or length]
    job = partial(run_steps, bench, config, warmups, documents, ballast)
    needs = 1.05 * (warmups * (short if is_short else each) + count * each) + bench.cuda * (
        60 if config.training.compile else 5
    )
    if 120 < needs < bench.left():
        bench.report.row(what=what, result=f"begun, about {needs:.0f} s")
    said = ", ".join(part for part in (note, "warmed up on short documents" if is_short else "") if part)

    def measured() -> float:
        return training_row(bench, model, config, *job(), predicted=each, note=said)

    return bench.attempt(what, measured, needs=needs)


def with_steps(config: Config, steps: int) -> Config:
    return config.model_copy(update={"training": config.training.model_copy(update={"steps": steps})})


def with_length(config: Config, tokens: int) -> Config:
    return config.model_copy(update={"training": config.training.model_copy(update={"seq_len": tokens})})


def run_steps(
    bench: Bench, config: Config, warmups: int, documents: list[int], ballast: int = 0
) -> tuple[list[StepMetrics], str, Memory]:
    """Metrics of the steps after warm-up, the kernel that ran, and peak memory."""
    with process_group(config.distributed) as world:
        found: list[StepMetrics] = []
        weight = torch.empty(ballast, dtype=torch.uint8, device=world.device)
        trainer = Trainer(config, world, Packed(config, documents), kernel=bench.trusted_kernel(config))
        draw_weights(trainer, world.device)
        begin_memory(bench)
        for number, result in enumerate(trainer.train_steps()):
            found.append(result.read())
            if number + 1 == warmups:
                begin_memory(bench)
        del weight
        return found[warmups:], trainer.parallel_model.kernel, memory(bench)


def draw_weights(trainer: Trainer, device: torch.device) -> None:
    """Initial weights, drawn on the device: a tenth of the time that the host takes. Bitwise the same in every run."""
    (model,) = trainer.stage_modules.values()
    for name, tensor in trainer.state_dict().items():
        if name.startswith("model."):
            weight, (mean, std) = to_local(tensor), model.init_mean_std(name.removeprefix("model."))
            seed = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
            generator = torch.Generator(device).manual_seed(seed)
            weight.copy_(torch.empty_like(weight, device=device).normal_(mean, std, generator=generator))


def training_row(
    bench: Bench,
    name: str,
    config: Config,
    found: list[StepMetrics],
    kernel: str,
    used: Memory,
    *,
    predicted: float,
    note: str,
) -> float:
    model, levers, length = config.model.build(), config.memory, config.training.seq_len
    times = [each.step_seconds for each in found]
    seconds, work = median(times), {"tokens": found[-1].tokens, "pairs": found[-1].attended_pairs}
    again = model.hardware_flops(**work, recompute=levers.recompute, blocks_per_checkpoint=levers.blocks_per_checkpoint)
    peak, expected, rank = peak_flops(bench.device), ledger_of(config)[0], RankMemory(config, 1, 0)
    bench.report.row(
        model=f"{name}, {model.num_layers} layers",
        heads=f"{model.num_heads}:{model.num_kv_heads} x {model.head_dim}",
        seq_len=length,
        attended=work["pairs"] / max(1.0, work["tokens"]),
        policy=policy(config),
        optimizer=levers.optimizer_placement,
        kernel=kernel,
        s_step=seconds,
        n=len(times),
        spread=(max(times) - min(times)) / seconds,
        tok_s=work["tokens"] / seconds,
        mfu=model.flops(**work) / seconds / peak if peak else None,
        hfu=again / seconds / peak if peak else None,
        peak_gib=gib(used.peak),
        reserved_gib=gib(used.reserved),
        rss_gib=gib(used.rss),
        pinned_gib=gib(used.pinned),
        predicted_s=predicted,
        predicted_gib=gib(expected.device_bytes),
        k=None if used.peak is None else residual_multiple(used.peak, expected, rank),
        predicted_k=residual_multiple(expected.device_bytes, expected, rank),
        loss=found[-1].loss,
        note=note,
    )
    return seconds


def gib(size: float | None) -> float | None:
    return None if size is None else size / GIB


def policy(config: Config) -> str:
    levers = config.memory
    said = {
        levers.recompute: True,
        f"{levers.offload} on the host": levers.offload != "none",
        f"one input of {levers.blocks_per_checkpoint}": levers.blocks_per_checkpoint > 1,
        f"{levers.head_groups} head groups": levers.head_groups > 1,
        f"tiles of {levers.mlp_tile_mib} MiB": levers.mlp_tile_mib is not None,
        "compiled": config.training.compile,
    }
    return ", ".join(part for part, holds in said.items() if holds)
