"""Compare a few steps of the recipe on another device or backend with PyTorch on the CPU.

Accelerators are sometimes wrong without an error: an operator writes nothing into a part of a tensor, or is
less exact than it should be. So a child process computes the same steps on both, each from a common state,
and compares losses, gradients, latents and what every update changed. The bounds are loose for rounding and
tight for mistakes; no GPU of a Mac has been available to set them on. With bfloat16 they are wider, because
the CPU computes in float32 even then: not every CPU can do otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from macbook_optimization.children import Send
from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.memory_management import own_bytes
from trm.arrays import Float32Array
from trm.backends.base import StepResult, StepSettings, load_backend
from trm.config import RunConfig
from trm.plan import Execution
from trm.planning.probe import Stepper
from trm.schedule import typical_cycles

NUM_STEPS = 3
NUM_SLOTS = 4  # of a step, in two micro-batches
FEW_UNWRITTEN = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds for differences from the CPU by rounding. All but the cosine are relative."""

    start: float = 1e-5  # of everything before the first step
    loss: float = 1e-4
    cosine: float = 0.9999  # between gradients, at least
    norm: float = 1e-3  # of gradients
    update: float = 0.1  # a gradient that is nearly zero may have either sign
    unwritten: float = 1e-3  # share of the weights that changed on the CPU: a change may round to none
    latents: float = 1e-3  # norm of the difference; also of halting margins, which may be near zero
    answers: float = 1e-2  # of probabilities and logits, after the steps
    negligible: float = 1e-6  # norm of a gradient relative to that of all: it consists of rounding


FLOAT32 = Bounds()
BFLOAT16 = Bounds(
    start=0.01, loss=0.02, cosine=0.95, norm=0.1, update=1.0, unwritten=0.05, latents=0.3, answers=0.3,
    negligible=1e-3,
)  # fmt: skip

Named: TypeAlias = dict[str, Float32Array]  # "group/tensor" -> content


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference from the CPU."""

    tensor: str | None  # None: no single tensor
    problem: str


def list_devices(backend: str, send: Send) -> list[str]:
    """List the devices of a backend. Runs in a child, because it imports the backend."""
    return list(load_backend(Execution(backend=backend)).devices())


def compare(config: JsonMapping, execution: JsonMapping, send: Send) -> JsonObject | None:
    """Return the first difference between an execution and the CPU, or None. Runs in a child."""
    recipe = with_few_slots(RunConfig.model_validate(config))
    there = Execution(**execution)
    here = replace(there, backend="pytorch", device="cpu", precision="float32")
    bounds = bounds_of(recipe, there)
    found = next(_differences(_Trial(recipe, here), _Trial(recipe, there), bounds), None)
    return None if found is None else asdict(found)


def occupied(config: JsonMapping, execution: JsonMapping, send: Send) -> JsonObject:
    """Return what the system and a GPU's driver count after a step. Runs in a child."""
    how = Execution(**execution)
    trial = _Trial(with_few_slots(RunConfig.model_validate(config)), how)
    before = own_bytes(), trial.backend.held_bytes(how)
    trial.take(1)
    after = own_bytes(), trial.backend.held_bytes(how)
    return {"resident_bytes": [before[0], after[0]], "driver_bytes": [before[1], after[1]]}


def bounds_of(recipe: RunConfig, execution: Execution) -> Bounds:
    stored = (getattr(recipe.model, "weights_dtype", "float32"), recipe.training.moments_dtype)
    return BFLOAT16 if "bfloat16" in (execution.precision, *stored) else FLOAT32


def with_few_slots(config: RunConfig) -> RunConfig:
    slots = min(NUM_SLOTS, config.training.effective_batch_size)
    training = config.training.model_copy(update={"effective_batch_size": slots})
    return config.model_copy(update={"training": training})


class _Trial:
    """The recipe on one device."""

    def __init__(self, config: RunConfig, execution: Execution) -> None:
        self.config = config
        self.backend = load_backend(execution)
        self.stepper = Stepper(config, execution)
        self.stepper.begin()
        self.state = self.read_state()

    def read_state(self) -> Named:
        groups = self.stepper.learner.state()
        return {
            f"{group}/{name}": np.array(self.backend.to_array(tensor), dtype=np.float32)
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


def _differences(here: _Trial, there: _Trial, bounds: Bounds) -> Iterator[Difference]:
    for name, values in here.state.items():
        other = there.state.get(name)
        if (
            other is None
            or other.shape != values.shape
            or not np.allclose(other, values, rtol=bounds.start, atol=0.1 * bounds.start)
        ):
            yield Difference(name, "it is not the same before the first step")
    for step in range(1, NUM_STEPS + 1):
        there.follow(here)
        results = here.take(step), there.take(step)
        before = here.state, there.state
        here.state, there.state = here.read_state(), there.read_state()
        where = f"in step {step}"
        after = here.state, there.state
        found = chain(_of_states(before, after, bounds), _of_results(*results, bounds))
        yield from (replace(each, problem=f"{each.problem} {where}") for each in found)
    if bounds is BFLOAT16:  # whose updates differ too much for answers to agree after three of them
        there.follow(here)
    if not _agree(here.answers(), there.answers(), bounds):
        yield Difference(None, "an evaluation gives different probabilities")


def _agree(ours: NDArray[Any], theirs: NDArray[Any], bounds: Bounds) -> bool:
    if bounds is BFLOAT16:  # single probabilities of a small model may differ by a half
        return _norm(theirs - ours) <= bounds.answers * _norm(ours)
    return np.allclose(theirs, ours, rtol=bounds.answers, atol=bounds.answers)


def _of_results(here: StepResult, there: StepResult, bounds: Bounds) -> Iterator[Difference]:
    for name, bound, ours, theirs in (
        ("loss", bounds.loss, here.loss, there.loss),
        ("gradient norm", bounds.norm, here.grad_norm, there.grad_norm),
    ):
        if not abs(theirs - ours) <= bound * abs(ours):
            yield Difference(None, f"the {name} is {theirs:.6g} instead of {ours:.6g}")
    if not np.allclose(there.halt_margins, here.halt_margins, rtol=bounds.latents, atol=bounds.latents):
        yield Difference(None, "the halting margins of the slots are different")
    # In bfloat16, rounding decides between two tokens that are about as likely.
    if bounds is not BFLOAT16 and not np.array_equal(there.exact, here.exact):
        yield Difference(None, "different slots are answered exactly")


def _of_states(
    before: tuple[Named, Named], after: tuple[Named, Named], bounds: Bounds = FLOAT32
) -> Iterator[Difference]:
    """Yield what differs in one step. Gradients come first, as whatever follows depends on them."""
    here, there = after
    negligible = _negligible_gradients(here, bounds)
    for name in sorted(here, key=lambda name: (not _is_gradient(name), not name.startswith("optimizer/"))):
        ours, theirs = here[name], there[name]
        if np.isfinite(ours).all() and not np.isfinite(theirs).all():
            yield Difference(name, "it is not finite")
        elif name in negligible:
            if _norm(theirs) > 10 * negligible[name]:
                norms = f"{_norm(theirs):.4g} instead of {_norm(ours):.4g}"
                yield Difference(name, f"the gradient has the norm {norms}")
        elif name.startswith("optimizer/"):
            yield from _of_moments(name, ours, theirs, bounds)
        elif name.startswith("latents/"):
            yield from _of_latents(name, ours, theirs, bounds)
        elif f"optimizer/{name.removeprefix('weights/')}.exp_avg" not in negligible:
            # Where a gradient is divided by its size, one of rounding becomes a step in either direction.
            yield from _of_changes(name, ours - before[0][name], theirs - before[1][name], bounds)


def _is_gradient(name: str) -> bool:
    """Return whether a moment is the running mean of a gradient: of the first one, after the first step."""
    return name.endswith(".exp_avg")


def _negligible_gradients(here: Named, bounds: Bounds) -> dict[str, float]:
    """Return the gradients that consist of rounding, with the norm up to which they do."""
    norms = {name: _norm(values) for name, values in here.items() if _is_gradient(name)}
    least = bounds.negligible * math.hypot(*norms.values())
    return {name: least for name, norm in norms.items() if norm <= least}


def _of_moments(name: str, ours: Float32Array, theirs: Float32Array, bounds: Bounds) -> Iterator[Difference]:
    what, power = ("the gradient", 1) if _is_gradient(name) else ("the squared gradient", 2)
    norms = _norm(ours), _norm(theirs)
    cosine = float(np.vdot(ours, theirs)) / max(norms[0] * norms[1], 1e-38)
    if norms[0] and not cosine > bounds.cosine:
        yield Difference(name, f"the cosine of {what} is {cosine:.6f}, at least {bounds.cosine} is required,")
    if not abs(norms[1] - norms[0]) <= power * bounds.norm * norms[0]:
        yield Difference(name, f"{what} has the norm {norms[1]:.4g} instead of {norms[0]:.4g}")


def _of_latents(name: str, ours: Float32Array, theirs: Float32Array, bounds: Bounds) -> Iterator[Difference]:
    """Compare what the next step of training would begin with. That of the check begins with the latents of
    the CPU, so it would not show a difference."""
    share = _norm(theirs - ours) / max(_norm(ours), 1e-38)
    if not share <= bounds.latents:
        yield Difference(name, f"it differs by {share:.2g} of its norm, at most {bounds.latents} is allowed,")


def _of_changes(name: str, ours: Float32Array, theirs: Float32Array, bounds: Bounds) -> Iterator[Difference]:
    """Find weights that an update did not write, and updates of another size."""
    changed = ours != 0
    count = int(changed.sum())
    unwritten = int((changed & (theirs == 0)).sum())
    if not name.startswith("weights/"):  # averages are compared through the evaluation
        if count and unwritten == count:
            yield Difference(name, "it did not change")
        return
    if count and (unwritten == count or unwritten > bounds.unwritten * count + FEW_UNWRITTEN):
        yield Difference(name, f"{unwritten} of {count} numbers did not change")
    elif _norm(theirs - ours) > bounds.update * _norm(ours):
        yield Difference(name, f"the update differs by more than {bounds.update:.0%}")


def _norm(values: Float32Array) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))
