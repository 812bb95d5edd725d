"""The contents of a checkpoint beside its tensors, and the check that it belongs to a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from macbook_optimization.checkpoint_files import Checkpoint
from macbook_optimization.errors import CheckpointError
from macbook_optimization.json_types import JsonObject
from trm.config import Count, CountOrZero, PositiveOrZero, RunConfig
from trm.runs.directory import refuse_if_different
from trm.tasks.base import DataSpec


class SavedSpec(BaseModel):
    """The spec of the dataset, without what its task adds. Earlier versions used the names on the right."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)
    max_len: int = Field(ge=1, validation_alias=AliasChoices("max_len", "seq_len"))
    vocab_size: int = Field(ge=1)
    num_outputs: int = Field(ge=1, validation_alias=AliasChoices("num_outputs", "output_vocab_size"))
    num_puzzle_identifiers: int = Field(1, ge=1)
    class_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: DataSpec) -> SavedSpec:
        return cls.model_validate({name: getattr(spec, name) for name in cls.model_fields})


class SavedPlateau(BaseModel):
    """The evaluations since the primary metric improved; unused without `training.plateau`."""

    model_config = ConfigDict(frozen=True)
    best: Annotated[float, Field(allow_inf_nan=False)] | None = None
    waited: CountOrZero = 0
    scale: Annotated[float, Field(gt=0, le=1)] = 1.0


class SavedEarlyStopping(BaseModel):
    """The evaluations since the primary metric improved; unused without `training.early_stopping`."""

    model_config = ConfigDict(frozen=True)
    best: Annotated[float, Field(allow_inf_nan=False)] | None = None
    waited: CountOrZero = 0


class SavedState(BaseModel):
    """The facts that decide the weights are compared when a run is resumed; `plan` and `versions` may
    change, and changes are recorded."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)
    recipe: JsonObject
    spec: SavedSpec = Field(validation_alias=AliasChoices("spec", "shape"))
    data: dict[str, str] | None  # digests; None in a run that only imported its weights
    slots: dict[str, list[Annotated[int, Field(ge=-1, lt=2**62)]]]
    curriculum: dict[Literal["stage", "exact", "seen"], CountOrZero] = {}
    plateau: SavedPlateau = SavedPlateau()
    early_stopping: SavedEarlyStopping = SavedEarlyStopping()
    seconds: PositiveOrZero = 0.0  # of training, over all starts
    evaluated: CountOrZero = 0  # the last step whose weights were evaluated
    best: JsonObject | None = None  # the best evaluation so far, including this one
    skipped_in_a_row: CountOrZero = 0
    learning_rate_scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    rolled_back_from: CountOrZero | None = None
    max_length: Count | None = None  # to which rows are cut; None without `training.adaptive_min_length`
    plan: JsonObject | None = None
    versions: dict[str, str] = {}

    def data_spec(self) -> DataSpec:
        return DataSpec(**self.spec.model_dump())


def read_state(checkpoint: Checkpoint) -> SavedState:
    try:
        return SavedState.model_validate(checkpoint.metadata)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        raise CheckpointError(f"{checkpoint.path}/state.json is not valid: {problems}") from error


def check_compatible(
    checkpoint: Checkpoint,
    config: RunConfig,
    spec: DataSpec | None = None,
    data: Mapping[str, str] | None = None,
) -> SavedState:
    """Return the saved state if it belongs to this recipe and data; otherwise list every difference.

    A recipe edited by hand, changed data, or a checkpoint copied from another run would load as something
    else.
    """
    state = read_state(checkpoint)
    ours = config.what_is_learned(checkpoint.step)
    theirs = RunConfig.learned_with_defaults(state.recipe, checkpoint.step)
    if spec is not None:
        ours["spec"] = SavedSpec.of(spec).model_dump()
        theirs["spec"] = state.spec.model_dump()
    if data is not None and state.data is not None:
        ours["fingerprint"] = {name: value[:12] for name, value in data.items()}
        theirs["fingerprint"] = {name: value[:12] for name, value in state.data.items()}
    refuse_if_different(ours, theirs, checkpoint.path)
    return state
