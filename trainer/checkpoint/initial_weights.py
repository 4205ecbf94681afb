"""Initial weights of a run: another run's checkpoint or a Hugging Face model. Imports torch only to read tensors.

Loads weights only: optimizer, data position and step start from zero. A checkpoint of the run itself takes precedence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from models.config import ModelConfig
from models.hf import LM_HEAD, HuggingFaceError, SafetensorsReader, TensorSpec, tensor_specs
from trainer.checkpoint import manifest
from trainer.checkpoint.manifest import DamageError
from trainer.checkpoint.run_dir import ResumeError, RunDir

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("trainer")
HF_PREFIX = "hf:"


def is_hugging_face(initial: str) -> bool:
    return initial.startswith(HF_PREFIX)


def resolve_initial_path(initial: str) -> Path:
    """The Hugging Face folder or the checkpoint that `checkpoint.initial_load_path` names. Raises `ResumeError`."""
    if is_hugging_face(initial):
        return Path(initial.removeprefix(HF_PREFIX)).expanduser()
    return find_checkpoint(Path(initial).expanduser())


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the newest one of the run folder at `path`. Raises `ResumeError`."""
    if (path / manifest.MANIFEST_FILE).is_file() or (path / manifest.STATE_FILE).is_file():
        try:
            manifest.read_validated(path)
        except DamageError as error:
            raise ResumeError(f"{path} cannot be read: {error}") from None
        return path
    newest = RunDir(path).latest_valid_checkpoint()
    if newest is None:
        raise ResumeError(f"{path} is neither a checkpoint nor a run folder with a checkpoint")
    return newest


def load_hf_weights(folder: Path, model: ModelConfig, parameters: Mapping[str, Tensor]) -> None:
    """Fills this rank's parameters, reading only its shards from safetensors. Raises `HuggingFaceError`."""
    import torch

    from parallelisms.collectives import to_local
    from parallelisms.init_weights import local_ranges

    weights, hf_entries = SafetensorsReader(folder), tensor_specs(model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            values = weights.read(hf_entries[name], local_ranges(parameter))
            to_local(parameter).copy_(values)
            if model.tie_embeddings and name == "embed.weight" and weights.has_tensor(LM_HEAD):
                head = weights.read(TensorSpec(LM_HEAD, hf_entries[name].shape), local_ranges(parameter))
                if not torch.equal(head, values):
                    raise HuggingFaceError(
                        [f"{LM_HEAD} differs from model.embed_tokens.weight, but tie_word_embeddings is true"]
                    )
