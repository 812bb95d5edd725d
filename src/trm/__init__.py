"""Train a Tiny Recursive Model on the laptop you own.

`trm.train` and `trm.load` are the Python interface (see `trm.api`). They are imported when they are first
used, so that `import trm` takes milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trm.api import Answer, Model, Outcome, load, train

__all__ = ["Answer", "Model", "Outcome", "load", "train"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'trm' has no attribute {name!r}")
    value: object = getattr(importlib.import_module("trm.api"), name)
    return value
