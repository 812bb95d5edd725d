"""A backend whose library is not installed says how to install it."""

import importlib
import sys

import pytest

from macbook_optimization.errors import LaptopError
from trm.backends.base import is_installed, load_backend
from trm.plan import Execution


def test_a_directory_that_shares_the_name_of_a_library_does_not_install_it(monkeypatch, tmp_path):
    """`mlx` is a namespace, and other packages put files there."""
    (tmp_path / "mlx" / "data").mkdir(parents=True)
    (tmp_path / "torch-1.0.dist-info").mkdir()
    (tmp_path / "torch-1.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.0\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert (is_installed("mlx"), is_installed("pytorch"), is_installed("other")) == (False, True, False)


def test_without_mlx_the_error_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("trm.backends.mlx")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("mlx", "mlx.core"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(LaptopError, match="The Python package mlx") as error:
        load_backend(Execution(backend="mlx"))
    assert "-e '.[mlx]'" in error.value.hint
