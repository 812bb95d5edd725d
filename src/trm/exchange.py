"""Exchange weights with the reference implementation, and between runs."""

from __future__ import annotations

from pathlib import Path

from macbook_optimization.checkpoint_files import find_damage, open_checkpoint
from macbook_optimization.checkpoint_management import Warn, python_warning
from macbook_optimization.errors import CheckpointError
from macbook_optimization.output_files import OutputFile
from trm.backends.base import Program, SingleProcess, Weights, load_backend
from trm.backends.bounds import check_training, smallest_program
from trm.backends.failures import check_shapes
from trm.config import RunConfig, recursion_of
from trm.plan import Execution
from trm.runs.directory import Run, check_path, new_run, open_run
from trm.runs.events import Imported
from trm.runs.saved_state import SavedSpec, SavedState, check_compatible
from trm.slots import Slots
from trm.tasks.base import DataSpec
from trm.tasks.dataset import complete_spec, open_split
from trm.tasks.registry import load_task

_HEAD = ("lm_head.", "q_head.")  # replaced by a new head
_TOKENS = ("embed_tokens.", "puzzle_emb.")  # depend on the task: replaced where they do not fit


def import_weights(
    source: Path, config: RunConfig, path: Path, *, new_head: bool = False, warn: Warn = python_warning
) -> list[str]:
    """Create a run at step 0 with the weights of a run or of a file of the reference implementation.

    Returns the names of the weights that are newly initialised. `warn` receives why the weights of a run are
    not its best ones.
    """
    target = check_path(path)
    if (target / "recipe.yaml").exists():
        raise CheckpointError(f"{path} already holds a run", hint="Choose a new --run directory.")
    open_run(target, config)  # refuses a directory of other files, before anything that takes time
    spec = _spec(config)
    program = Program.of(config, spec)
    check_training(smallest_program(config, spec))
    theirs = weights_of_run(source, warn)[1] if source.is_dir() else _weights_of_file(source, config)
    execution = Execution()  # the weights are exchanged through PyTorch
    learner = load_backend(execution).learner(program, execution, SingleProcess(program.num_slots))
    groups = learner.state()
    weights = _with_new_head(theirs, groups["weights"]) if new_head else dict(theirs)
    learner.load_state({**groups, "weights": weights, **({"ema": weights} if "ema" in groups else {})})
    state = {
        "recipe": config.what_is_learned(),
        "spec": SavedSpec.of(spec),
        "data": None,  # nothing has been learned from a dataset that we know
        "slots": Slots.new(program.num_slots).to_lists(),
    }
    metadata = SavedState.model_validate(state).model_dump(mode="json")
    with new_run(target, config) as run:
        run.checkpoints().save(0, learner.state(), metadata)
        run.record(Imported(str(source)))
    return sorted(name for name in weights if weights[name] is not theirs.get(name))


def _weights_of_file(file: Path, config: RunConfig) -> Weights:
    from trm.backends.pytorch.reference_weights import from_reference_file

    return from_reference_file(file, recursion_of(config.model, "The reference implementation"))


def weights_of_run(path: Path, warn: Warn) -> tuple[RunConfig, Weights]:
    """Return the recipe and the best weights of a run, or the weights of one checkpoint in it."""
    if (path / "manifest.json").is_file():
        run = Run(path.resolve().parents[1])
        if (problem := find_damage(path)) is not None:
            raise CheckpointError(f"{path}: {problem}", hint="`trm checkpoint verify` lists the intact ones.")
        checkpoint = open_checkpoint(path)
    else:
        run = Run(path)
        checkpoint = run.checkpoints().best_or_newest(warn)
    config = run.config
    check_compatible(checkpoint, config)
    return config, checkpoint.load("ema" if config.training.ema else "weights")


def _with_new_head(theirs: Weights, ours: Weights) -> Weights:
    """Take their weights, except for heads, and for embeddings that do not fit. Anything else that does not
    fit is an error."""
    check_shapes(_trunk(ours), _trunk(theirs), "The weights below the head do")
    taken = {}
    for name, tensor in ours.items():
        fits = name in theirs and theirs[name].shape == tensor.shape
        replaced = name.startswith(_HEAD) or (name.startswith(_TOKENS) and not fits)
        taken[name] = tensor if replaced else theirs.get(name, tensor)
    return taken


def _trunk(tensors: Weights) -> Weights:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith((*_HEAD, *_TOKENS))}


def export_reference(
    path: Path, file: OutputFile, *, averaged: bool = True, compiled: bool = True, warn: Warn = python_warning
) -> int:
    """Write the best weights of a run for the reference implementation; return their step."""
    from trm.backends.pytorch.reference_weights import to_reference, write_reference_file

    run = Run(path)
    config = run.config
    model = recursion_of(config.model, "The reference implementation")
    if model.mixer in ("neighbourhood", "candidates"):
        raise CheckpointError(
            f"The reference implementation has no layers like those of model.mixer={model.mixer}"
        )
    checkpoint = run.checkpoints().best_or_newest(warn)
    weights = checkpoint.load("ema" if averaged and config.training.ema else "weights")
    write_reference_file(to_reference(weights, model, compiled), file)
    return checkpoint.step


def _spec(config: RunConfig) -> DataSpec:
    task = load_task(config.task)
    if config.data.build is not None and not config.data.path.exists():
        return task.complete(task.spec(config.data.build))
    return complete_spec(task, open_split(config.data.path, "train"))
