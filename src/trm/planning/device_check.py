"""Compare a few steps of the recipe on another device or backend with PyTorch on the CPU.

Accelerators are sometimes wrong without an error: an operator writes nothing into a part of a tensor, or is
less exact than it should be. So a child process computes the same steps on both, each from a common state,
and compares losses, gradients and what every update changed. The bounds are loose for rounding and tight for
mistakes; no GPU of a Mac has been available to set them on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.children import Send
from macbook_optimization.json_types import JsonMapping, JsonObject
from trm.arrays import Float32Array
from trm.backends.base import StepResult, StepSettings, load_backend
from trm.config import RunConfig
from trm.plan import Execution
from trm.planning.probe import Stepper
from trm.schedule import typical_cycles

NUM_STEPS = 3
NUM_SLOTS = 4  # of a step, in two micro-batches
MAX_LOSS_DIFFERENCE = 1e-4  # relative
MIN_COSINE = 0.9999  # between gradients
MAX_NORM_DIFFERENCE = 1e-3  # relative, of gradients
MAX_UPDATE_DIFFERENCE = 0.1  # relative: a gradient that is nearly zero may have either sign
MAX_UNWRITTEN = 1e-3  # share of the weights that changed on the CPU: a change may round to none
FEW_UNWRITTEN = 2
MAX_ANSWER_DIFFERENCE = 1e-2  # of probabilities and logits, after the steps
NEGLIGIBLE = 1e-6  # norm of a gradient, relative to that of all: it consists of rounding

Named: TypeAlias = dict[str, Float32Array]  # "group/tensor" -> content


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs first from the CPU."""

    tensor: str | None  # None: no single tensor
    problem: str


def list_devices(backend: str, send: Send) -> list[str]:
    """List the devices of a backend. Runs in a child, because it imports the backend."""
    return list(load_backend(Execution(backend=backend)).devices())


def compare(config: JsonMapping, execution: JsonMapping, send: Send) -> JsonObject | None:
    """Return the first difference between an execution and the CPU, or None. Runs in a child."""
    recipe = with_few_slots(RunConfig.model_validate(config))
    there = Execution(**execution)
    here = replace(there, backend="pytorch", device="cpu")
    pair = [_Trial(recipe, each) for each in (here, there)]
    found = next(_differences(*pair), None)
    return None if found is None else asdict(found)


def with_few_slots(config: RunConfig) -> RunConfig:
    slots = min(NUM_SLOTS, config.training.effective_batch_size)
    training = config.training.model_copy(update={"effective_batch_size": slots})
    return config.model_copy(update={"training": training})


class _Trial:
    """The recipe on one device."""

    def __init__(self, config: RunConfig, execution: Execution) -> None:
        self.config = config
        self.stepper = Stepper(config, execution)
        self.stepper.begin()
        self.state = self.read_state()

    def read_state(self) -> Named:
        groups = self.stepper.learner.state()
        return {
            f"{group}/{name}": as_array(tensor)
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
        }

    def take(self, step: int) -> StepResult:
        """Take a step at the full learning rate: warm-up would round many changes to none."""
        training = self.config.training
        cycles = typical_cycles(self.config.model, training)
        settings = StepSettings(step, cycles, training.learning_rate, training.puzzle_emb_lr)
        batch = self.stepper.batch
        if step > 1 and training.supervision == "deep":  # which carries latents
            batch = replace(batch, fresh=np.zeros_like(batch.fresh))
        size = max(1, len(batch) // 2)
        return self.stepper.learner.step(batch, settings, lambda done: size)

    def follow(self, other: _Trial) -> None:
        """Continue from the state of another trial: from step to step, rounding would grow."""
        groups = other.stepper.learner.state()
        self.stepper.learner.load_state({name: dict(tensors) for name, tensors in groups.items()})
        self.state = self.read_state()

    def answers(self) -> NDArray[Any]:
        """Return what an evaluation computes."""
        count = min(NUM_SLOTS, len(self.stepper.test))
        batch = self.stepper.test.batch(np.arange(count)).trimmed()
        if self.config.model.kind == "decoder":
            return self.stepper.learner.language_model().token_losses(batch)
        predictor = self.stepper.learner.predictor()
        predictor.begin(batch)
        predictor.advance(np.arange(count), batch.inputs)
        found = predictor.advance(np.arange(count), batch.inputs, probabilities=True)
        assert found.probabilities is not None
        return np.concatenate((found.halt_logits, found.probabilities.ravel()))


def as_array(tensor: Any) -> Float32Array:
    """Return a copy of a tensor of any backend in float32."""
    if hasattr(tensor, "detach"):  # of PyTorch
        tensor = tensor.detach().cpu().float().numpy()
    return np.array(tensor, dtype=np.float32)


def _differences(here: _Trial, there: _Trial) -> Iterator[Difference]:
    for name, values in here.state.items():
        other = there.state.get(name)
        if (
            other is None
            or other.shape != values.shape
            or not np.allclose(other, values, rtol=1e-5, atol=1e-6)
        ):
            yield Difference(name, "it is not the same before the first step")
    for step in range(1, NUM_STEPS + 1):
        there.follow(here)
        results = here.take(step), there.take(step)
        before = here.state, there.state
        here.state, there.state = here.read_state(), there.read_state()
        where = f"in step {step}"
        found = chain(_of_states(before, (here.state, there.state)), _of_results(*results))
        yield from (replace(each, problem=f"{each.problem} {where}") for each in found)
    yield from _of_answers(here.answers(), there.answers())


def _of_results(here: StepResult, there: StepResult) -> Iterator[Difference]:
    for name, bound, ours, theirs in (
        ("loss", MAX_LOSS_DIFFERENCE, here.loss, there.loss),
        ("gradient norm", MAX_NORM_DIFFERENCE, here.grad_norm, there.grad_norm),
    ):
        if not abs(theirs - ours) <= bound * abs(ours):
            yield Difference(None, f"the {name} is {theirs:.6g} instead of {ours:.6g}")


def _of_states(before: tuple[Named, Named], after: tuple[Named, Named]) -> Iterator[Difference]:
    """Yield what differs in one step. Gradients come first, as whatever follows depends on them."""
    here, there = after
    total = np.sqrt(sum(_norm(each) ** 2 for name, each in here.items() if _is_gradient(name)))
    for name in sorted(here, key=lambda name: (not _is_gradient(name), not name.startswith("optimizer/"))):
        ours, theirs = here[name], there[name]
        if np.isfinite(ours).all() and not np.isfinite(theirs).all():
            yield Difference(name, "it is not finite")
        elif name.startswith("optimizer/"):
            least = NEGLIGIBLE * total if _is_gradient(name) else 0.0
            yield from _of_moments(name, ours, theirs, least)
        else:
            changes = ours - before[0][name], theirs - before[1][name]
            yield from _of_changes(name, *changes)


def _is_gradient(name: str) -> bool:
    """Whether a moment is the running mean of a gradient: of the first one, after the first step."""
    return name.endswith(".exp_avg")


def _of_moments(name: str, ours: Float32Array, theirs: Float32Array, least: float) -> Iterator[Difference]:
    what = "the gradient" if _is_gradient(name) else "the squared gradient"
    norms = _norm(ours), _norm(theirs)
    if norms[0] <= least:
        if norms[1] > 10 * least:
            yield Difference(name, f"{what} has the norm {norms[1]:.4g} instead of {norms[0]:.4g}")
        return
    cosine = float(np.vdot(ours, theirs)) / max(norms[0] * norms[1], 1e-38)
    if not cosine > MIN_COSINE:
        yield Difference(name, f"the cosine of {what} is {cosine:.6f}, at least {MIN_COSINE} is required,")
    if not abs(norms[1] - norms[0]) <= MAX_NORM_DIFFERENCE * norms[0]:
        yield Difference(name, f"{what} has the norm {norms[1]:.4g} instead of {norms[0]:.4g}")


def _of_changes(name: str, ours: Float32Array, theirs: Float32Array) -> Iterator[Difference]:
    """Find weights that an update did not write, and updates of another size."""
    changed = ours != 0
    count = int(changed.sum())
    unwritten = int((changed & (theirs == 0)).sum())
    if not name.startswith("weights/"):  # averages and latents are compared through what they lead to
        if count and unwritten == count:
            yield Difference(name, "it did not change")
        return
    if count and (unwritten == count or unwritten > MAX_UNWRITTEN * count + FEW_UNWRITTEN):
        yield Difference(name, f"{unwritten} of {count} numbers did not change")
    elif _norm(theirs - ours) > MAX_UPDATE_DIFFERENCE * _norm(ours):
        yield Difference(name, "the update is another one")


def _of_answers(ours: NDArray[Any], theirs: NDArray[Any]) -> Iterator[Difference]:
    if not np.allclose(theirs, ours, rtol=MAX_ANSWER_DIFFERENCE, atol=MAX_ANSWER_DIFFERENCE):
        yield Difference(None, "an evaluation gives other probabilities")


def _norm(values: Float32Array) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))
