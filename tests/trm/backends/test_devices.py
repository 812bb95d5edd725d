"""Backend and device are named explicitly, and one module moves arrays to the device."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import SPEC, make_batch, model_config, training_config

import trm
from macbook_optimization.errors import ConfigError
from trm.backends.base import Program, SingleProcess, load_backend
from trm.backends.pytorch.device import to_array, to_tensor
from trm.plan import Execution

SOURCES = Path(trm.__file__).parents[1]
FROM_ARRAYS = {"from_numpy", "as_tensor", "asarray"}  # functions of torch that take an array
FACTORIES = {
    "arange", "empty", "empty_strided", "eye", "frombuffer", "full", "linspace", "normal", "ones", "rand",
    "randint", "randn", "randperm", "tensor", "zeros",
}  # fmt: skip
# Where tensors of the CPU are meant: models are built there and then moved, and files and messages are there.
ON_THE_CPU = {
    ("device.py", "warm_up"),
    ("model.py", "__init__"),
    ("model.py", "rotary_angles"),
    ("reference_weights.py", "_read_tensor"),
    *(("world.py", name) for name in ("_maximum", "_received", "broadcast", "gather")),
}


def test_an_unknown_backend_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match=r"There is no backend 'pytroch'.*pytorch") as refused:
        load_backend(Execution(backend="pytroch"))
    assert refused.value.hint == "Set plan.backend to one of: pytorch, mlx"


@pytest.mark.parametrize("device", ["mps", "cuda", "cpu:7", ""])
def test_an_unknown_device_is_refused_with_those_that_exist(device):
    with pytest.raises(ConfigError, match=f"pytorch has no device {device!r}") as refused:
        load_backend(Execution(device=device))
    assert refused.value.hint.startswith("Set plan.device to one of: cpu")


def test_a_backend_makes_learners_and_predictors_on_the_named_device():
    execution = Execution(device="cpu")
    backend = load_backend(execution)
    program = Program(model_config(), training_config(), SPEC)
    learner = backend.learner(program, execution, SingleProcess(program.num_slots))
    assert learner.device == torch.device("cpu")
    assert {tensor.device for tensors in learner.state().values() for tensor in tensors.values()} == {
        torch.device("cpu")
    }
    predictor = backend.predictor(program, execution, learner.state()["ema"])
    assert predictor.device == torch.device("cpu")
    outputs = []
    for each in (predictor, learner.predictor()):
        batch = make_batch()
        each.begin(batch)
        outputs.append(each.advance(np.arange(len(batch)), batch.inputs))
    np.testing.assert_array_equal(outputs[0].tokens, outputs[1].tokens)
    np.testing.assert_array_equal(outputs[0].halt_logits, outputs[1].halt_logits)


def test_a_run_on_the_cpu_does_not_start_the_driver_of_a_gpu(monkeypatch):
    def start():
        raise AssertionError("the driver was started")

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", start)
    execution = Execution(device="cpu")
    backend = load_backend(execution)
    assert (backend.held_bytes(execution), backend.release_memory(execution)) == (0, 0)
    assert backend.peak_bytes(execution) > 2**20
    with pytest.raises(AssertionError, match="was started"):
        backend.held_bytes(Execution(device="mps"))


def test_arrays_and_tensors_share_memory_on_the_cpu():
    array = np.arange(6).reshape(2, 3)
    tensor = to_tensor(array, torch.device("cpu"))
    tensor[0, 0] = 7
    assert array[0, 0] == 7
    assert np.shares_memory(to_array(tensor), array)


def calls_of_torch(source: str) -> set[str]:
    """Return the names in `torch.name`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    }


@pytest.mark.slow
def test_only_the_device_module_makes_tensors_of_arrays():
    """A tensor that another module makes would stay on the CPU."""
    files = {
        str(file.relative_to(SOURCES)): file.read_text(encoding="utf-8")
        for package in ("trm", "macbook_optimization")
        for file in (SOURCES / package).rglob("*.py")
    }
    found = {
        name for name, text in files.items() if "from_numpy" in text or calls_of_torch(text) & FROM_ARRAYS
    }
    assert found == {"trm/backends/pytorch/device.py"}


def makes_without_a_device(node: ast.AST) -> bool:
    """Whether this is a call of torch that has no device, and no generator that has one."""
    if not isinstance(node, ast.Call):
        return False
    names = {f"torch.{name}" for name in FACTORIES}
    given = {keyword.arg for keyword in node.keywords}
    return ast.unparse(node.func) in names and not given & {"device", "generator"}


def made_without_a_device(source: str) -> set[str]:
    """Return the functions in which a tensor is made without a device."""
    return {
        function.name
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef) and any(map(makes_without_a_device, ast.walk(function)))
    }


def test_no_tensor_of_a_step_is_made_without_a_device():
    """It would be on the CPU, and a step elsewhere would fail or wait for it."""
    found = {
        (file.name, name)
        for file in (SOURCES / "trm/backends/pytorch").glob("*.py")
        for name in made_without_a_device(file.read_text(encoding="utf-8"))
    }
    assert found == ON_THE_CPU


def test_a_tensor_without_a_device_is_found():
    source = "def step(n):\n    a = torch.arange(n)\ndef other(d):\n    return torch.zeros(1, device=d).sum()"
    assert made_without_a_device(source) == {"step"}
