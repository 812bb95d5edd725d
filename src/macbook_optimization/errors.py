"""Errors that a user can fix.

Everything raised here reaches the user as one `error:` line and a `hint:`; every other exception is a bug
and keeps its traceback. `cli.main` is the only place that catches `LaptopError`.
"""


class LaptopError(Exception):
    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(LaptopError):
    """A recipe or an override that says something we cannot do."""

    exit_code = 2


class DataError(LaptopError):
    """A dataset, a puzzle or a file of puzzles that is not what it should be."""


class CheckpointError(LaptopError):
    """A checkpoint that is missing, damaged or made for something else."""


class RunError(LaptopError):
    """A run directory that cannot be used as asked."""


class MemoryBudgetError(LaptopError):
    """Something that does not fit into this machine's memory."""


class CompilationError(LaptopError):
    """The compiler failed; everything works without it, only slower."""


class NonFiniteError(LaptopError):
    """A loss, a gradient or a weight is not a number; raised before anything is updated or saved."""


class AllocationFailed(LaptopError):  # noqa: N818 - a state of the machine, which a smaller cut may answer
    """The machine gave no more memory. `torn`: in the middle of an update, so the weights are mixed."""

    def __init__(
        self,
        message: str = "The machine gave no more memory.",
        hint: str | None = "Close other programs.",
        *,
        torn: bool = False,
    ) -> None:
        super().__init__(message, hint)
        self.torn = torn
