"""Why a step is not traced. Imports no torch."""


class UntraceableError(ValueError):
    """The step of a valid configuration has no trace yet."""
