"""One compiled level, used by all recursions: unrolled, they would take many times as long to compile.

Compiled for one batch size, one thread count, with and without gradient. The compiler keeps its results on
the disk, so what a child has compiled is loaded in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from macbook_optimization.errors import CompilationError
from trm.backends.pytorch.model import TinyRecursiveModel

# One C++ function for the whole level: it lets go of the interpreter, so that lanes run side by side.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"cpp_wrapper": True}


def compile_level(model: TinyRecursiveModel, batch_size: int, threads: int) -> None:
    """Here and now, in the threads' number that it will run with, which is part of what is compiled."""
    level = model.L_level
    example = torch.zeros(*model.start(batch_size).shape[1:], dtype=model.dtype)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled = level.compiled or torch.compile(level.through_layers, dynamic=False, options=OPTIONS)
        with torch.no_grad():
            compiled(example, model.angles)
        y_LBD = compiled(example.requires_grad_(), model.angles)
        torch.autograd.grad(y_LBD.sum(), [example, *level.parameters()])
    except (RuntimeError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CompilationError(f"The level cannot be compiled here: {reason}") from error
    finally:
        torch.set_num_threads(threads_before)
    level.compiled, level.compiled_size, level.compiled_threads = compiled, batch_size, threads
