"""One compiled block, used by all recursions: unrolled, they would take many times as long to compile.

It is compiled for one batch size and one number of threads, with and without gradient. The compiler caches
its results on disk, so that what a child process compiled is loaded in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from macbook_optimization.errors import CompilationError

if TYPE_CHECKING:
    from trm.backends.pytorch.model import TinyRecursiveModel

# One C++ function for the whole block: it releases the interpreter lock, so that workers run in parallel.
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"cpp_wrapper": True}


def compile_block(model: TinyRecursiveModel, precision: str, batch_size: int, threads: int) -> None:
    """Compile with the number of threads that the block will run with; the result depends on it."""
    block = model.L_level
    angles = model.angles(model.num_positions)
    shape = model.start(batch_size).shape[1:]
    example = torch.zeros(*shape, dtype=model.dtype_for(precision), device=model.initial_latents.device)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled = block.compiled or torch.compile(block.through_layers, dynamic=False, options=OPTIONS)
        with torch.no_grad():
            compiled(example, angles)
        y_LBD = compiled(example.requires_grad_(), angles)
        torch.autograd.grad(y_LBD.sum(), [example, *block.parameters()])
    except (RuntimeError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CompilationError(f"The block cannot be compiled here: {reason}") from error
    finally:
        torch.set_num_threads(threads_before)
    block.compiled = compiled
    block.compiled_size = batch_size
    block.compiled_threads = threads
