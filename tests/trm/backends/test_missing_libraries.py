"""A backend whose library is not installed says how to install it."""

import sys

import pytest

from macbook_optimization.errors import LaptopError
from trm.backends.base import load_backend
from trm.plan import Execution


def test_without_mlx_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("trm.backends.mlx")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("mlx", "mlx.core"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(LaptopError, match="The Python package mlx") as error:
        load_backend(Execution(backend="mlx"))
    assert "-e '.[mlx]'" in error.value.hint
