"""The recipe: everything that decides what is learned, and the plan settings beside it.

A recipe is YAML. Unknown keys are refused with a suggestion, and every problem in a file is reported at
once. Names are those that TRM configurations already use. The `plan`, `evaluation` and `checkpoints`
sections say how a recipe is carried out and watched; they may change between two starts of one run.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from macbook_optimization.errors import ConfigError
from macbook_optimization.training_config_adapter import Checkpointing


def _not_a_switch(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic would read `true` as 1
        raise ValueError("Input should be a number, not true or false")
    return value


Count = Annotated[int, BeforeValidator(_not_a_switch), Field(ge=1, lt=2**31)]
CountOrZero = Annotated[int, BeforeValidator(_not_a_switch), Field(ge=0, lt=2**63)]
Positive = Annotated[float, BeforeValidator(_not_a_switch), Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, BeforeValidator(_not_a_switch), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_not_a_switch), Field(ge=0, le=1, allow_inf_nan=False)]
Rate = Annotated[float, BeforeValidator(_not_a_switch), Field(gt=0, lt=1, allow_inf_nan=False)]
BelowOne = Annotated[float, BeforeValidator(_not_a_switch), Field(ge=0, lt=1, allow_inf_nan=False)]


_MAX_RECIPE_LENGTH, _MAX_BRACKETS = 100_000, 1000


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


S = TypeVar("S", bound=Section)


class ModelConfig(Section):
    """The network. The paper's letters: x question, y answer (z_H), z latent (z_L);
    n = `L_cycles`, T = `H_cycles`, N_sup = `halt_max_steps`."""

    variant: Literal["trm", "singlez", "transformer"] = "trm"
    hidden_size: Annotated[Count, Field(le=2**16)] = 512
    num_heads: Count = 8
    L_layers: Count = 2
    H_layers: Count = 8  # only the transformer baseline, whose single level the public code calls H
    H_cycles: Count = 3
    L_cycles: Count = 6
    expansion: Annotated[Positive, Field(le=64)] = 4.0
    mlp_t: bool = False  # mix positions by a network over all of them, instead of attention
    neighbourhood: Literal[3, 5, 7] | None = None  # ... or by what so large a square around a cell holds
    # ... or, for Sudoku, by what rows, columns, boxes and cells hold; then every digit of every cell has a
    # latent of its own.
    candidates: bool = False
    pos_encodings: Literal["rope", "learned", "none"] = "rope"
    puzzle_emb_ndim: CountOrZero = 0
    puzzle_emb_len: CountOrZero = 16  # 0: as many positions as puzzle_emb_ndim needs
    rms_norm_eps: Rate = 1e-5
    rope_theta: Annotated[Positive, Field(le=1e12)] = 10000.0
    width_multiple: Count = 256  # the public code rounds inner widths up to this; 32 suits small models
    halt_max_steps: Count = 16
    halt_exploration_prob: Fraction = 0.1
    forward_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def prefix_len(self) -> int:
        """Positions that the puzzle embedding takes before the first token."""
        if self.puzzle_emb_ndim == 0:
            return 0
        return self.puzzle_emb_len or -(-self.puzzle_emb_ndim // self.hidden_size)

    @property
    def attention(self) -> bool:
        return not (self.mlp_t or self.neighbourhood or self.candidates)

    @property
    def cycles_per_step(self) -> int:
        return 1 if self.variant == "transformer" else self.H_cycles

    def inner_width(self, width: int) -> int:
        """Of the gated network over `width` channels or positions."""
        return math.ceil(round(self.expansion * width * 2 / 3) / self.width_multiple) * self.width_multiple

    @property
    def num_layers(self) -> int:
        return self.H_layers if self.variant == "transformer" else self.L_layers

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = []
        head_size, rest = divmod(self.hidden_size, self.num_heads)
        if self.attention and rest:
            found.append(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        if self.attention and self.pos_encodings == "rope" and head_size % 2:
            found.append(f"rotary positions need an even head size; hidden_size / num_heads is {head_size}")
        if not self.attention and self.pos_encodings == "rope":
            found.append(
                "rotary positions act inside attention; without it (mlp_t, neighbourhood, candidates) use "
                "pos_encodings none or learned"
            )
        if self.mlp_t + bool(self.neighbourhood) + self.candidates > 1:
            found.append("positions are mixed by one of mlp_t, neighbourhood and candidates")
        if (self.neighbourhood or self.candidates) and self.puzzle_emb_ndim:
            found.append(
                "neighbourhood and candidates reach cells only; puzzle_emb_ndim would put positions before "
                "them"
            )
        if self.candidates and self.inner_width(self.hidden_size) < 5:
            found.append("candidates need a fifth of the inner width for each kind of house; it is below 5")
        if self.prefix_len * self.hidden_size < self.puzzle_emb_ndim:
            found.append(f"puzzle_emb_ndim {self.puzzle_emb_ndim} does not fit puzzle_emb_len positions")
        if found:
            raise ValueError("; ".join(found))
        return self


class CurriculumConfig(Section):
    """Easy examples first: of the training half the easiest `share`, and `widen` times as many each time that
    `threshold` of the examples of `every_steps` steps were answered exactly, up to all of them."""

    share: Annotated[Fraction, Field(gt=0)] = 0.2
    threshold: Fraction = 0.5
    widen: Annotated[Positive, Field(gt=1, le=1000)] = 1.5
    every_steps: Count = 50


class TrainingConfig(Section):
    supervision: Literal["deep", "terminal"] = "deep"
    effective_batch_size: Count = 768
    max_steps: Count = 10_000
    optimizer: Literal["adam_atan2", "adamw", "muon"] = "adam_atan2"
    learning_rate: Rate = 1e-4
    lr_min_ratio: Fraction = 1.0
    warmup_steps: CountOrZero = 2000
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    weight_decay: Annotated[PositiveOrZero, Field(le=1000)] = 0.1
    puzzle_emb_lr: BelowOne = 1e-2
    puzzle_emb_weight_decay: Annotated[PositiveOrZero, Field(le=1000)] = 0.1
    max_grad_norm: Annotated[Positive, Field(le=1e6)] | None = None
    loss: Literal["stablemax_cross_entropy", "softmax_cross_entropy"] = "stablemax_cross_entropy"
    halt_loss_weight: Annotated[PositiveOrZero, Field(le=1000)] = 0.5
    ema: bool = True
    ema_rate: Fraction = 0.999
    # Terminal supervision only: from this step on, the depth is drawn from 1 up to this value.
    depths: dict[CountOrZero, Count] = {0: 1}
    noise: Annotated[PositiveOrZero, Field(le=100)] = 0.0  # in the first thoughts about every example
    # From this step on, in this share of the examples, up to half of the answer is given away.
    hints: dict[CountOrZero, Fraction] = {0: 0.0}
    curriculum: CurriculumConfig | None = None
    deterministic: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("depths", "hints"):
            if 0 not in getattr(self, name):
                raise ValueError(f"{name} must say what holds from step 0 on")
        return self


class EvaluationConfig(Section):
    every_steps: Count = 1000
    depth: Count = 16  # supervision steps at test time (single recursions under terminal supervision)
    settle: Count | None = None  # stop a puzzle whose answer has not changed for this many steps
    halt: bool = False  # stop a puzzle whose answer the halting head believes in
    tries: Count = 1  # if the halting head does not believe in the first; then it chooses
    noise: Annotated[PositiveOrZero, Field(le=100)] = 0.0  # in the first thoughts of all tries but one
    guesses: CountOrZero = 0  # in all tries but one, beliefs that are taken for given
    examples: Count | None = None  # only the first so many test examples
    target_accuracy: Fraction | None = None  # training is done when exact accuracy reaches this

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tries > 1 and not (self.noise or self.guesses):
            raise ValueError("tries are all the same without noise or guesses")
        if self.guesses and self.tries == 1:
            raise ValueError("guesses are for all tries but the first, so tries must be 2 or more")
        if self.guesses and not self.guess_moments:
            raise ValueError(f"guesses need a depth of more than {2 * self.standing + 1} steps")
        return self

    @property
    def standing(self) -> int:
        """Steps for which an answer must not change that was found by guesses."""
        return self.settle or 2

    @property
    def guess_moments(self) -> range:
        """After these steps; so that an answer can stand after the last, and again without the guesses."""
        last = self.depth - (2 * self.standing + 1)
        every = max(1, last // max(1, self.guesses))
        return range(every, min(last, self.guesses * every) + 1, every)


class CheckpointsConfig(Section):
    every_steps: Count | None = None
    every_seconds: Annotated[Positive, Field(le=1e8)] = 60.0  # or longer, where saving takes long
    keep: Count = 3
    keep_every_hours: Annotated[Positive, Field(le=1e6)] | None = None  # and one of every so many, for good


class LoadingConfig(Section):
    """How a dataset is read: in memory, mapped, or row by row (`DatasetSettings` says what decides)."""

    streaming_threshold_mb: Annotated[PositiveOrZero, Field(le=1e9)] = 200.0
    cache_threshold_mb: Annotated[PositiveOrZero, Field(le=1e9)] = 100.0
    chunk_size_mb: Annotated[Positive, Field(le=1e9)] = 50.0
    enable_caching: bool = True
    auto_fallback_streaming: bool = True
    force_streaming_mode: bool = False


class DataConfig(Section):
    path: Path
    loading: LoadingConfig = LoadingConfig()
    augment: bool = True
    build: dict[str, Any] | None = None  # the task's own options, used when nothing lies at `path`


def _switch_or_layers(value: Any) -> Any:
    return {True: "all", False: "none"}[value] if isinstance(value, bool) else value


class PlanSettings(Section):
    """What a user may fix by hand about how this machine carries the recipe out. None is measured."""

    micro_batch_size: Count | None = None
    threads: Count | None = None
    lanes: Count | None = None  # pieces of a micro-batch that are computed side by side
    precision: Literal["float32", "bfloat16", "auto"] | None = None  # auto: the fastest; None: the recipe's
    gradient_checkpointing: Annotated[Checkpointing, BeforeValidator(_switch_or_layers)] | None = None
    allocator: Literal["system", "compact"] | None = None
    compile: bool | None = None  # None: tried beside a long run, and used if it is faster
    memory_limit_mb: Annotated[Positive, Field(le=2**30)] | None = None
    memory_fraction: Annotated[Positive, Field(le=1)] = 0.8  # of what is available, without a limit
    dynamic_batch_sizing: bool = True
    memory_pressure_threshold: Annotated[Positive, Field(le=100)] = 90.0  # percent of all memory in use
    garbage_collection_frequency: Count | None = None  # steps; None: only when the batch shrinks
    low_battery_percent: Annotated[PositiveOrZero, Field(le=100)] = 10.0  # save when it falls below
    enable_thermal_monitoring: bool = True
    thermal_throttle_threshold: Annotated[Positive, Field(le=150)] | None = None  # None: the sensors' own
    cooling_delay_seconds: Annotated[PositiveOrZero, Field(le=3600)] = 3.0


TASKS = ("sudoku", "maze", "arc")


def _known_task(name: str) -> str:
    if name not in TASKS and not name.endswith(".py"):
        known = ", ".join(map(repr, TASKS))
        raise ValueError(f"there is no task {name!r}; there are {known}, and Python files that define one")
    return name


class RunConfig(Section):
    task: Annotated[str, AfterValidator(_known_task)]  # one of TASKS, or a Python file that defines one
    seed: CountOrZero = 0
    data: DataConfig
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    plan: PlanSettings = PlanSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model.candidates and self.task in TASKS and self.task != "sudoku":
            raise ValueError("model.candidates is for Sudoku")
        return self

    def what_is_learned(self) -> dict[str, Any]:
        """The part that a resumed run must share. Data are compared by content, not by path."""
        learned = self.model_dump(mode="json", include={"task", "seed", "model", "training"})
        learned["data"] = {"augment": self.data.augment}
        del learned["training"]["deterministic"]
        if self.training.lr_min_ratio == 1:  # nothing then depends on where training ends
            del learned["training"]["max_steps"]
        return learned

    @classmethod
    def with_defaults(cls, learned: Mapping[str, Any]) -> dict[str, Any]:
        """What an older version saved, with the keys that did not exist then."""
        try:
            whole = {**learned, "data": {"path": ".", **learned["data"]}}
            return cls.model_validate(whole).what_is_learned()
        except (ValidationError, KeyError, TypeError):  # of a newer version: compared as it is
            return dict(learned)

    def model_in(self, precision: str) -> ModelConfig:
        return self.model.model_copy(update={"forward_dtype": precision})

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def shipped_recipes() -> dict[str, Path]:
    package = Path(__file__).parent
    directory = next(
        (d for d in (package / "recipes", package.parents[1] / "recipes") if d.is_dir()), package / "recipes"
    )
    return {path.stem: path for path in sorted(directory.glob("*.yaml"))}


def find_recipe(recipe: str) -> Path:
    """A recipe is a file, or the name of a shipped one."""
    shipped = shipped_recipes()
    if recipe in shipped:
        return shipped[recipe]
    path = Path(recipe)
    if path.is_file():
        return path
    raise ConfigError(
        f"There is no recipe {recipe!r}{_did_you_mean(recipe, shipped)}",
        hint=f"Give a YAML file or one of: {', '.join(shipped)}",
    )


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    path = find_recipe(str(recipe))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return config_from_text(text, str(path), overrides)


def config_from_text(text: str, origin: str, overrides: Sequence[str] = ()) -> RunConfig:
    tree = _parse_yaml(text, origin)
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin} holds no recipe: a mapping with task, data, model and training")
    for override in overrides:
        _apply_override(tree, override)
    return parse_section(RunConfig, tree, origin)


def parse_section(section: type[S], tree: Mapping[str, Any], origin: str) -> S:
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        problems = [_describe(problem, section) for problem in error.errors()]
    if len(problems) == 1:
        raise ConfigError(f"{origin}: {problems[0]}")
    raise ConfigError(f"{origin} has {len(problems)} problems:\n  " + "\n  ".join(problems))


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key: here, there` for every leaf that differs."""
    found = []
    for key in sorted({*ours, *theirs}):
        here, there = ours.get(key), theirs.get(key)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            found += differences(here, there, f"{prefix}{key}.")
        elif here != there:
            found.append(f"{prefix}{key} is {here} here and {there} in the run")
    return found


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"{override!r} is not an override", hint="Write key=value, for example model.hidden_size=256"
        )
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    node[leaf] = _parse_yaml(text, f"the value of {override!r}")


def _parse_yaml(text: str, origin: str) -> Any:
    """The parser takes quadratic time for text that nests, which no recipe does; `safe_load` makes plain
    values only, whatever tags the text has."""
    if len(text) > _MAX_RECIPE_LENGTH or text.count("[") + text.count("{") > _MAX_BRACKETS:
        raise ConfigError(f"{origin} is too large or too deep for a recipe")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{origin} is not readable as YAML: {' '.join(str(error).split())}") from error


def _describe(problem: Any, section: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *parents, key = problem["loc"]
        known = _fields_at(section, parents)
        # A key that was put into the wrong section is the next most likely slip.
        elsewhere = [f"{name}.{key}" for name in section.model_fields if key in _fields_at(section, [name])]
        suggestion = f"; did you mean {elsewhere[0]}?" if elsewhere else _did_you_mean(str(key), known)
        return f"unknown key {where}{suggestion}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    if "it should" in message:
        return f"{where} is {problem['input']!r}: {message}"
    return f"{where}: {message}".removeprefix(": ")  # of several keys together


def _fields_at(section: type[BaseModel], parents: Sequence[Any]) -> list[str]:
    for parent in parents:
        annotation = section.model_fields[parent].annotation if parent in section.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return list(section.model_fields)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
