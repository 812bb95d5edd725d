"""Errors that a user can fix.

Each of these reaches the user as one `error:` line and a `hint:`. Every other exception is a bug and keeps
its traceback. `cli.main` is the only place that catches `LaptopError`.

    LaptopError
      ConfigError        CheckpointError      CompilationError
      DataError          MemoryBudgetError    NonFiniteError
      RunError           AllocationFailed
"""


class LaptopError(Exception):
    """Base class. `exit_code` is the exit status of the command line."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(LaptopError):
    """A recipe, an override or an argument has an invalid value."""

    exit_code = 2


class DataError(LaptopError):
    """A dataset or an input file is missing, damaged or inconsistent."""


class CheckpointError(LaptopError):
    """A checkpoint is missing, damaged, incompatible, or cannot be written."""


class RunError(LaptopError):
    """A run directory cannot be used as requested."""


class MemoryBudgetError(LaptopError):
    """The model or the plan does not fit into this machine's memory."""


class CompilationError(LaptopError):
    """The model could not be compiled. Training works without compilation, only slower."""


class NonFiniteError(LaptopError):
    """A loss, a gradient or a weight is NaN or Inf. Raised before anything is saved.

    `torn` is true when some weights had been updated before a gradient was found that is not finite;
    otherwise nothing has been updated.
    """

    def __init__(self, message: str, hint: str | None = None, *, torn: bool = False) -> None:
        super().__init__(message, hint)
        self.torn = torn


class AllocationFailed(LaptopError):  # noqa: N818 - a state of the machine; a smaller micro-batch may fit
    """The system refused to allocate memory.

    `torn` is true when this happened in the middle of an optimizer update: some weights are updated and
    others are not, so the step cannot simply be repeated.
    """

    def __init__(
        self,
        message: str = "The system is out of memory.",
        hint: str | None = "Close other programs.",
        *,
        torn: bool = False,
    ) -> None:
        super().__init__(message, hint)
        self.torn = torn
