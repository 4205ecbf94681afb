"""Initial weights at a URL, which a launch downloads before anything looks at them. Imports no
torch.
"""

from __future__ import annotations

from trainer.checkpoint.initial_weights import initial_url
from trainer.config.training_stages import Recipe
from trainer.storage.object_store import reporting
from trainer.storage.remote_checkpoints import RemoteCheckpoints
from trainer.storage.remote_models import fetch_model
from trainer.storage.run_dir import RunDir


def fetch_initial_weights(config: Recipe) -> None:
    """Downloads initial weights at a URL to `data.cache_dir`, if they are not there. Raises as
    `fetch_model`.

    A run that has checkpoints resumes from them.
    """
    initial = config.checkpoint.initial_load_path
    url = None if initial is None else initial_url(initial)
    if url is not None and not has_checkpoints(config):
        fetch_model(url, config.data.cache_dir, key="checkpoint.initial_load_path")


def has_checkpoints(config: Recipe) -> bool:
    """Whether a launch resumes, from a local checkpoint or from a copy."""
    remote = config.checkpoint.remote
    if not config.checkpoint.enabled:
        return False
    if RunDir(config.output_dir).committed_checkpoints():
        return True
    if remote is None:
        return False
    with reporting("checkpoint.remote", remote):
        return bool(RemoteCheckpoints(remote).steps())
