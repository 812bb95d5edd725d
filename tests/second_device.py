"""A second torch device, made up for tests: its tensors hold tensors of the CPU, and compute there.

It refuses float64 and tensors of different devices, as the GPU of a Mac does. `SECOND_DEVICE_BROKEN` names an
operator that is wrong. A process that has the device cannot be forked, as other tests do: torch starts a
thread for it. So the device belongs to processes of its own; `announce` makes those that are started find it,
as they find one that an installed package adds to torch.
"""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "second"
BROKEN = "SECOND_DEVICE_BROKEN"
_MOVES = ("aten::_to_copy", "aten::copy_")
_library = []


class SecondTensor(Tensor):
    @staticmethod
    def __new__(cls, held):
        if held.dtype == torch.float64:
            raise TypeError(f"the device {NAME} has no float64")
        shape = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        tensor = Tensor._make_wrapper_subclass(cls, held.size(), device=torch.device(NAME, 0), **shape)
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operator, types, arguments=(), options=None):
        return compute(operator, *arguments, **(options or {}))

    def __repr__(self):
        return f"{NAME}({self.held!r})"


def compute(operator, *arguments, **options):
    """Compute an operator with what its tensors hold."""
    name = operator._schema.name
    given = [each for each in tree_leaves((arguments, options)) if isinstance(each, Tensor)]
    elsewhere = [each for each in given if not isinstance(each, SecondTensor) and each.ndim]
    if elsewhere and name not in _MOVES:
        raise RuntimeError(f"{name} has tensors on {NAME} and on {elsewhere[0].device}")
    target = options.get("device")
    leaves = name == "aten::_to_copy" and target is not None and torch.device(target).type != NAME
    if target is not None:
        options["device"] = "cpu"
    inner = tree_map_only(SecondTensor, lambda each: each.held, (arguments, options))
    found = broken(name, operator, *inner[0], **inner[1])
    if leaves or (name == "aten::copy_" and not isinstance(arguments[0], SecondTensor)):
        return found
    same = {id(each.held): each for each in given if isinstance(each, SecondTensor)}
    return tree_map_only(
        Tensor, lambda each: same[id(each)] if id(each) in same else SecondTensor(each), found
    )


def broken(name, operator, *arguments, **options):
    """Compute an operator, wrongly if that is wanted."""
    wanted = os.environ.get(BROKEN, "")
    if not wanted or name != f"aten::{wanted}":
        return operator(*arguments, **options)
    if wanted == "addcmul_":  # writes nothing
        return arguments[0]
    if wanted == "copy_":  # leaves out all but the first part of a tensor with gaps
        target, source = arguments[:2]
        whole = target.is_contiguous()
        (target if whole else target[:1]).copy_(source if whole else source.expand_as(target)[:1])
        return target
    if wanted == "_safe_softmax":
        return operator(*arguments, **options) + 1e-2
    raise NotImplementedError(f"The operator '{name}' is not currently implemented for the device {NAME}")


class _Module:
    """`torch.second`."""

    def is_available(self):
        return True

    def is_initialized(self):
        return True

    def _is_in_bad_fork(self):
        return False

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def manual_seed_all(self, seed):
        pass

    def get_amp_supported_dtype(self):
        return []

    def synchronize(self):
        pass

    def empty_cache(self):
        pass


def register() -> None:
    """Add the device to torch, once per process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    if not _library:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        _library.append(torch.library.Library("_", "IMPL"))
        _library[0].fallback(compute, "PrivateUse1")


needed = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason=f"torch {torch.__version__} has no device that Python makes up",
)


def announce(monkeypatch, directory: Path, broken: str = "") -> None:
    """Let processes that are started from now on have the device."""
    package = directory / "second_device-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: second-device\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nsecond = second_device:register\n")
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), here]))
    monkeypatch.syspath_prepend(str(directory))  # importlib.metadata finds it here, too
    monkeypatch.setenv(BROKEN, broken)
