"""The `data.build` options that all grid tasks share."""

from __future__ import annotations

from pathlib import Path
from typing import Self, TypeVar

from pydantic import Field, model_validator

from trm.config import Count, CountOrZero, Section

DEFAULT_NUM_TRAIN = 2000


class GridOptions(Section):
    """`data.build` of a recipe. Derive a class from it to add options."""

    size: Count = 9
    """Rows and columns of the grid."""
    train: Count | None = None
    """Training examples. The default is 2,000; from a file, all rows that are not used for testing."""
    test: Count = 256
    """Test examples."""
    seed: CountOrZero = 0
    """Seed for generation, and for the order of the rows of a file."""
    file: Path | None = Field(None, alias="from")
    """File to read examples from, instead of generating them; `-` is standard input."""
    max_input_mb: Count = 1024
    """Most MiB of text to read from the file, counted after it is unpacked."""
    source: str | None = None
    """Value of the file's `source` column that selects the training rows. The default is all rows."""
    test_source: str | None = None
    """Value of the `source` column that selects the test rows. The default is rows not used for training."""

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if self.file is None and (self.source or self.test_source):
            raise ValueError("source and test_source select rows of a file, so they need `from`")
        return self

    @property
    def num_train(self) -> int:
        """Training examples to generate."""
        return self.train or DEFAULT_NUM_TRAIN


OptionsT = TypeVar("OptionsT", bound=GridOptions)
