"""Why a step is not traced. Imports no torch."""

from trainer.errors import ConfigError


class UntraceableError(ConfigError):
    """The step of a valid configuration has no trace yet."""
