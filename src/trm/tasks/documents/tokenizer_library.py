"""The package `tokenizers`, imported where a vocabulary of word pieces is trained or used."""

from __future__ import annotations

from typing import Any

from macbook_optimization.errors import LaptopError


def tokenizer_library() -> Any:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ModuleNotFoundError as error:
        raise LaptopError(
            f"The Python package {error.name} is missing; vocabularies of word pieces need it.",
            hint="Install it: python -m pip install tokenizers",
        ) from error
    return tokenizers
