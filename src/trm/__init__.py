"""Train a Tiny Recursive Model on the laptop you own.

`trm.train` and `trm.load` are the Python interface (see `trm.api`); `trm.load_mail` opens a mail model. They
are imported when they are first used, so that `import trm` takes milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trm.api import Answer, Model, Outcome, load, train
    from trm.mail.loading import load_mail

__all__ = ["Answer", "Model", "Outcome", "load", "load_mail", "train"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'trm' has no attribute {name!r}")
    module = "trm.mail.loading" if name == "load_mail" else "trm.api"
    value: object = getattr(importlib.import_module(module), name)
    return value
