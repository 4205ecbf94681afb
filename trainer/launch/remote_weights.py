"""Initial weights at a URL, which a launch downloads before anything looks at them. Imports no
torch.
"""

from __future__ import annotations

from trainer.checkpoint.initial_weights import initial_url
from trainer.config.overrides import with_overrides
from trainer.config.training_stages import Recipe
from trainer.storage.object_store import reporting
from trainer.storage.remote_checkpoints import RemoteCheckpoints
from trainer.storage.remote_models import fetch_model
from trainer.storage.run_dir import RunDir


def with_local_weights(config: Recipe) -> Recipe:
    """The configuration with the local copy of initial weights at a URL.

    A run that has checkpoints resumes from them, and keeps the URL. Raises as `fetch_model`.
    """
    initial = config.checkpoint.initial_load_path
    url = None if initial is None else initial_url(initial)
    if initial is None or url is None or has_checkpoints(config):
        return config
    folder = fetch_model(url, config.data.cache_dir, key="checkpoint.initial_load_path")
    local = f"{initial.removesuffix(url)}{folder.absolute()}"
    return with_overrides(config, {"checkpoint.initial_load_path": local})


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
