"""Uses of a run's last checkpoint: an export to a Hugging Face folder, evaluations on its mesh,
and generation.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from models import hf, mxfp4
from models.decode import Decoder, sequence_batch
from models.hf_config import read_model
from models.hf_tensors import stored_tensors
from models.loss_head import LossHead
from models.transformer import Transformer
from parallelisms.init_weights import local_ranges
from parallelisms.mesh.collectives import to_local
from trainer.checkpoint.export_weights import export_weights
from trainer.checkpoint.initial_weights import find_checkpoint
from trainer.checkpoint.load import MODEL_PREFIX, load_tensors
from trainer.checkpoint.rank_sync import run_on_rank_zero
from trainer.config.training_stages import Recipe
from trainer.errors import RunFailedError
from trainer.evaluation import needle, perplexity
from trainer.evaluation.load_checkpoint import ResolvedCheckpoint, load_weights
from trainer.generate import load_model, sample_token
from trainer.hf import export
from trainer.run.validation import evaluate_set
from trainer.selfcheck.launches import EXPORT, Launch
from trainer.step.build import ParallelModel
from trainer.step.trainer import Trainer
from trainer.storage.run_dir import RunDir

NextLogits = Callable[[Sequence[int]], Tensor]
"""Computes the logits [V] of the token after a sequence of tokens."""
MAX_SHARD_GIB = 1e-4
"""Maximum size of exported files: small, so that even a small model has several."""
NEEDLE_LENGTHS = (70, 101)
PROMPT_TOKENS = 23
NEW_TOKENS = 12
PROMPT_CHUNK = 9
QUANTIZED = ("gate_proj", "up_proj", "down_proj")
"""The weights of experts that gpt-oss publishes as MXFP4."""


def finish(launch: Launch, trainer: Trainer) -> dict[str, float]:
    """Uses the last checkpoint as the launch says; returns what must equal one process.

    Collective.
    """
    if launch.finish == "none":
        return {}
    checkpoint = find_checkpoint(launch.config.output_dir)
    if launch.finish in ("export", "export MXFP4"):
        export_and_compare(trainer, checkpoint, launch.config.output_dir / EXPORT)
        # The first run's weights were rounded to MXFP4 values, so the quantized folder holds the
        # same ones.
        if launch.finish == "export MXFP4":
            quantize(launch.config.output_dir / EXPORT)
        return {}
    run_dir = RunDir(launch.config.output_dir)
    run_config = cast(Recipe, launch.config)
    resolved = ResolvedCheckpoint(run_dir, checkpoint, trainer.step, trainer.config, run_config)
    if launch.finish == "generate":
        return generate(resolved, trainer.parallel_model, with_cache=not launch.is_reference)
    return evaluate(resolved, trainer)


# ---- export


def export_and_compare(trainer: Trainer, checkpoint: Path, output: Path) -> None:
    """Exports on rank 0, to both formats; every rank reads its weights back.

    Raises `RunFailedError` if one is not bitwise the same.
    """
    weights_only = output.with_name("weights")

    def write() -> None:
        options = {"dtype": "float64", "max_shard_gib": MAX_SHARD_GIB, "tokenizer": None}
        export(Namespace(source=checkpoint, output=output, **options))
        export_weights(checkpoint, weights_only)

    run_on_rank_zero(write, None)
    reader = hf.SafetensorsReader(output)
    weights = weights_of(trainer)
    specs = reader.specs(trainer.config.model.build())
    read = {
        # NaN, so that a value that is not read differs from every weight.
        f"{MODEL_PREFIX}{name}": torch.full_like(tensor, torch.nan)
        for name, tensor in weights.items()
    }
    load_tensors(weights_only, read, trainer.mesh.pp_group, prefix=MODEL_PREFIX)
    for name, tensor in weights.items():
        if not torch.equal(to_local(read[f"{MODEL_PREFIX}{name}"]), to_local(tensor)):
            raise RunFailedError(f"{weights_only}: {name} is not bitwise the same")
        if name in specs and not torch.equal(
            reader.read(specs[name], local_ranges(tensor)), to_local(tensor).cpu()
        ):
            raise RunFailedError(f"{output}: {specs[name].name} is not bitwise {name}")


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    state = trainer.state_dict().items()
    return {
        name.removeprefix(MODEL_PREFIX): each.detach()
        for name, each in state
        if name.startswith(MODEL_PREFIX)
    }


def round_experts(trainer: Trainer) -> None:
    """Replaces the weights of experts by those that random MXFP4 codes stand for.

    In one process.
    """
    for name, tensor in weights_of(trainer).items():
        if name.endswith(QUANTIZED) and ".experts." in name:
            to_local(tensor).copy_(values_of(*codes_of(name, tensor.shape)))


def codes_of(name: str, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Random codes [experts, outputs, inputs] from 0 to 15, and an exponent of two for each 32
    inputs.
    """
    # Seeded by name, so that rounding the weights and writing the folder draw the same codes.
    generator = torch.Generator().manual_seed(sum(name.encode()))
    codes = torch.randint(0, 16, shape, generator=generator)
    exponents = torch.randint(
        -7, -3, (*shape[:2], shape[2] // mxfp4.BLOCK_SIZE), generator=generator
    )
    return codes, exponents


def values_of(codes: Tensor, exponents: Tensor) -> Tensor:
    """Values of MXFP4 codes by definition.

    A code has a sign, two bits of exponent and one of mantissa; a block has a power of two as its
    scale.
    """
    sign = 1.0 - 2.0 * (codes >> 3)
    exponent = codes >> 1 & 3
    mantissa = codes & 1
    # E2M1 with bias 1: 2^(exponent - 1) * (1 + mantissa / 2), or mantissa / 2 below. Written from
    # the definition, as a check of `models/mxfp4.py`.
    normal = (2.0 + mantissa) * 2.0 ** (exponent - 2)
    subnormal = mantissa * 0.5
    scales = (2.0**exponents).repeat_interleave(mxfp4.BLOCK_SIZE, dim=2)
    return sign * torch.where(exponent > 0, normal, subnormal).double() * scales


def quantize(folder: Path) -> None:
    """Stores the experts of a folder of gpt-oss as they are published."""
    from safetensors.torch import load_file, save_file

    stored = stored_tensors(read_model(folder)).items()
    quantized = {name: each for name, each in stored if name.endswith(("_up_proj", "down_proj"))}
    tensors = {
        name: each
        for path in folder.glob("*.safetensors")
        for name, each in load_file(path).items()
    }
    for path in (*folder.glob("*.safetensors"), folder / hf.INDEX_FILE):
        path.unlink(missing_ok=True)
    for name, each in quantized.items():
        del tensors[name]
        parts = [codes_of(ours, torch.Size(spec.shape)) for ours, spec, _ in each.parts]
        # Gate and up take turns.
        codes, exponents = (
            torch.stack(turns, dim=2).flatten(1, 2) for turns in zip(*parts, strict=True)
        )
        # Two 4-bit codes share a byte, the first one in the low half.
        halves = codes.unflatten(2, (-1, mxfp4.BLOCK_SIZE // 2, 2))
        low, high = halves.unbind(-1)
        tensors[f"{name}{mxfp4.BLOCKS}"] = (low + 16 * high).to(torch.uint8)
        tensors[f"{name}{mxfp4.SCALES}"] = (exponents + mxfp4.EXPONENT_BIAS).to(torch.uint8)
    save_file(tensors, folder / hf.SINGLE_FILE)


# ---- evaluation


def evaluate(resolved: ResolvedCheckpoint, trainer: Trainer) -> dict[str, float]:
    """Losses of the run's validation sets or of its corpus, and of hidden numbers. Collective."""
    config = resolved.config
    parallel_model = ParallelModel(config, trainer.world)
    load_weights(resolved.checkpoint, parallel_model)
    values = dict[str, float]()
    for each in perplexity.evaluation_sets(config, resolved.run_config):
        result = evaluate_set(
            each, parallel_model, step=resolved.step, max_tokens=config.training.seq_len
        )
        for length, found in result.metrics_by_length.items():
            scores = {"targets": found.targets, "loss": found.loss, "accuracy": found.accuracy}
            values |= {
                f"evaluated {each.name} {length} {key}": score for key, score in scores.items()
            }
    for dataset in needle.build_datasets(config, NEEDLE_LENGTHS, depths=2, trials=1):
        for cell in needle.evaluate_length(dataset, parallel_model):
            place = f"needle {cell.length} {cell.depth:g}"
            values |= {
                f"{place} found": cell.found,
                f"{place} log-probability": cell.log_probability,
            }
    return values


# ---- generation


def generate(
    resolved: ResolvedCheckpoint, parallel_model: ParallelModel, *, with_cache: bool
) -> dict[str, float]:
    """The likeliest tokens after a prompt, and their log-probability, in one process.

    Without a KV cache the model computes all tokens so far for each new one.
    """
    model = load_model(resolved, parallel_model.device)
    vocab_size = model.config.vocab_size
    tokens = [37 * index % vocab_size for index in range(PROMPT_TOKENS)]
    # The reference generates without a cache, the mesh's launch with one: both must choose the
    # same tokens.
    next_logits = (
        cached_logits(model, parallel_model.kernel) if with_cache else uncached_logits(model)
    )
    log_probability = 0.0
    for _ in range(NEW_TOKENS):
        logits_V = next_logits(tokens).cpu()
        tokens.append(
            sample_token(logits_V, temperature=0.0, top_k=1, generator=torch.Generator())
        )
        log_probability += float(logits_V.log_softmax(0)[tokens[-1]])
    generated = {
        f"generated {index}": float(token) for index, token in enumerate(tokens[PROMPT_TOKENS:])
    }
    return generated | {"generated log-probability": log_probability}


def cached_logits(model: Transformer, kernel: str) -> NextLogits:
    decoder = Decoder(
        model, capacity=PROMPT_TOKENS + NEW_TOKENS, chunk=PROMPT_CHUNK, kernel=kernel
    )
    return lambda tokens: decoder.next_token_logits(torch.tensor(tokens[decoder.length :]))


def uncached_logits(model: Transformer) -> NextLogits:
    # The model then returns hidden states.
    head = cast(LossHead, model.head)
    model.head = None

    @torch.no_grad()
    def next_logits(tokens: Sequence[int]) -> Tensor:
        tokens_BS = torch.tensor([tokens], device=head.proj.weight.device)
        hidden_BSE: Tensor = model(sequence_batch(tokens_BS, position=0))
        return head.logits(hidden_BSE[:, -1:])[0, 0]

    return next_logits
