"""Train and predict from Python: `trm.train` and `trm.load`. The command line uses the same functions.

Training runs in a child process, as it does for `trm train`, so a script survives a trainer that runs out of
memory. What a user can fix is raised as a `LaptopError` (`macbook_optimization.errors`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, overload

from macbook_optimization.errors import ConfigError, DataError, RunError
from trm.backends.base import LanguageModel
from trm.config import InferenceConfig, RunConfig, find_recipe, load_config, parse_section
from trm.config.kinds import check_several_machines
from trm.display import Display, Silent
from trm.inference.predict import (
    Answer,
    TrainedModel,
    answer_of,
    interactive,
    load_search,
    open_model,
    predict,
    until_converged,
)
from trm.inference.sampling import SamplingSettings, load_language_model, sample
from trm.inference.search import Search
from trm.runs.directory import Run, is_run, only_trainer
from trm.tasks.base import Generative, Question, Tokenizer
from trm.tasks.documents.text import encode_prompt
from trm.tasks.documents.text_tokens import decoded
from trm.training.loop import Limits, Outcome

if TYPE_CHECKING:
    from trm.training.hosting import Hosting
    from trm.training.preparation import Job

__all__ = ["Answer", "Model", "Outcome", "Start", "load", "train", "train_recipe"]

Puzzle = str | bytes
Puzzles = list[str] | list[bytes] | tuple[Puzzle, ...]
DEFAULTS = SamplingSettings()


@dataclass(frozen=True, slots=True)
class Start:
    """Options of the start of a run. `more_steps` trains a finished run longer; `quiet` shows no progress."""

    fresh: bool = False
    fit: bool = False
    quiet: bool = False
    more_steps: int | None = None
    max_minutes: float | None = None
    max_steps: int | None = None
    listen: str | None = None  # ADDR or ADDR:PORT, at which other machines may join
    allow_public: bool = False  # listen even at a public address

    def limits(self) -> Limits:
        for name in ("more_steps", "max_minutes", "max_steps"):
            value = getattr(self, name)
            is_count = name == "max_minutes" or (isinstance(value, int) and not isinstance(value, bool))
            if value is not None and not (is_count and value > 0):
                what = "above 0" if name == "max_minutes" else "an integer above 0"
                raise ConfigError(f"{name} is {value}; it must be {what}", hint="Leave it out for no limit.")
        return Limits(None if self.max_minutes is None else 60 * self.max_minutes, self.max_steps)


def train(  # noqa: PLR0913 - the documented signature
    recipe: str | Path,
    changes: Mapping[str, object] | None = None,
    *,
    run: str | Path | None = None,
    fresh: bool = False,
    fit: bool = False,
    more_steps: int | None = None,
    max_minutes: float | None = None,
    max_steps: int | None = None,
    quiet: bool = False,
) -> Outcome:
    """Train a recipe, a YAML file or the name of a shipped one; an earlier run is resumed.

    `recipe` may also be the directory of a run, which is resumed with its own recipe. `changes` maps recipe
    keys to values, for example `{"model.hidden_size": 64}`. `run` is the run directory, runs/RECIPE by
    default. The other options have the meaning that they have for `trm train`; `quiet` shows no progress.
    """
    overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in (changes or {}).items()]
    start = Start(
        fresh=fresh,
        fit=fit,
        quiet=quiet,
        more_steps=more_steps,
        max_minutes=max_minutes,
        max_steps=max_steps,
    )
    return train_recipe(recipe, overrides, None if run is None else Path(run), start)


def train_recipe(recipe: str | Path, overrides: Sequence[str], run: Path | None, start: Start) -> Outcome:
    """Train a recipe with overrides as they are written on the command line."""
    if threading.current_thread() is not threading.main_thread():
        raise RunError(
            "Training was started in a thread, where Ctrl-C cannot be passed on to the trainer",
            hint="Call trm.train in the main thread, or run `trm train` as a process.",
        )
    config = load_config(recipe, overrides)
    limits = start.limits()
    path = run or default_run(recipe)
    if start.more_steps is not None:
        _check_extension(recipe, path, start)
    with only_trainer(path) as lock:  # before anything that takes time
        from macbook_optimization.progress_monitoring import ProgressDisplay
        from trm.reports.monitor import train_monitored
        from trm.training.extension import extend
        from trm.training.preparation import outcome_if_finished, prepare

        with nullcontext(Silent()) if start.quiet else ProgressDisplay() as display:
            display.status("Starting")
            if start.more_steps is not None:
                keep_target = any(each.startswith("evaluation.target_") for each in overrides)
                config = extend(Run(path), config, start.more_steps, display, keep_target=keep_target)
            if not start.fresh and (outcome := outcome_if_finished(config, path, fit=start.fit)) is not None:
                display.message(f"{path} has finished already; nothing is left to train.")
                return outcome
            with _hosting(start, config) as hosting:
                job = prepare(config, path, display, fresh=start.fresh, fit=start.fit)
                if hosting is not None:
                    _announce(hosting, job, display)
                return train_monitored(replace(job, quiet=start.quiet, hosting=hosting), limits, lock)


def _announce(hosting: Hosting, job: Job, display: Display) -> None:
    """Show how other machines join, once the backend is known and can exchange what the recipe says."""
    from trm.training.hosting import token_of

    check_several_machines(job.config.training, job.config.plan)
    hosting.token = token_of(job.run)
    display.message(f"On another machine: trm join {hosting.place}")


@contextmanager
def _hosting(start: Start, config: RunConfig) -> Iterator[Hosting | None]:
    if start.listen is None:
        yield None
        return
    from trm.training.hosting import listening

    check_several_machines(config.training, config.plan)  # not only when the first one joins
    seconds = config.plan.peer_timeout_seconds
    with listening(start.listen, seconds, allow_public=start.allow_public) as hosting:
        yield hosting


def default_run(recipe: str | Path) -> Path:
    """Return the run directory that a recipe trains in; a run that is named itself is its own."""
    named = Path(recipe)
    return named if _is_recipe_of(named, recipe) else Path("runs") / named.stem


def _is_recipe_of(run: Path, recipe: str | Path) -> bool:
    return find_recipe(str(recipe)) == run / "recipe.yaml"


def _check_extension(recipe: str | Path, path: Path, start: Start) -> None:
    """Raise `ConfigError` unless `recipe` is the run itself: another recipe would replace its settings."""
    if _is_recipe_of(path, recipe) and not start.fresh:
        return
    if start.fresh:
        raise ConfigError("A fresh start cannot continue a run for more steps", hint="Leave out one of both.")
    command = f"trm train {path} --more-steps {start.more_steps}"
    raise ConfigError(
        "More steps need the name of a finished run, and no other run directory",
        hint=f"For example: {command}" if is_run(path) else "`trm runs` lists the runs.",
    )


def load(run: str | Path, **inference: object) -> Model:
    """Load the best checkpoint of a run. Keywords are keys of the recipe's `inference` section.

    Without `depth`, an answer takes as many steps as it needs to converge. A model that writes text has no
    such keys; it needs its dataset, whose vocabulary it was trained with.
    """
    trained = open_model(Path(run))
    if isinstance(trained.task, Generative):
        return Model(trained, writer=_load_writer(trained, trained.task, inference))
    recipe = trained.config.inference
    depth = inference.get("depth")
    steps = until_converged(recipe, depth if isinstance(depth, int) else None)
    settings = parse_section(InferenceConfig, {**recipe.model_dump(), **steps, **inference}, "trm.load")
    interactive(trained)  # an error, if the task has no questions that can be typed
    return Model(trained, load_search(trained, settings))


def _load_writer(trained: TrainedModel, task: Generative, inference: Mapping[str, object]) -> Writer:
    if inference:
        raise ConfigError(
            f"{next(iter(inference))} is for models that answer puzzles; this one writes text",
            hint="Give temperature, top_p, max_tokens and seed to generate() or stream().",
        )
    tokenizer = task.tokenizer(trained.config.data.path)
    return Writer(load_language_model(trained), tokenizer)


class Writer(NamedTuple):
    """A model that continues a text."""

    model: LanguageModel
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class Model:
    """A trained model in memory: `predict` answers puzzles, `generate` and `stream` continue a text."""

    trained: TrainedModel
    search: Search | None = None
    writer: Writer | None = None

    @overload
    def predict(self, puzzles: Puzzle) -> Answer: ...

    @overload
    def predict(self, puzzles: Puzzles) -> list[Answer]: ...

    def predict(self, puzzles: Puzzle | Puzzles) -> Answer | list[Answer]:
        """Answer one puzzle, or several together, each written as for `trm predict`."""
        if isinstance(puzzles, str | bytes):
            return self._answers([self._read(puzzles)])[0]
        return self._answers([self._read(puzzle, i) for i, puzzle in enumerate(puzzles, start=1)])

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = DEFAULTS.max_tokens,
        temperature: float = DEFAULTS.temperature,
        top_p: float = DEFAULTS.top_p,
        seed: int = DEFAULTS.seed,
    ) -> str:
        """Return the text that follows a prompt. The options are those of `trm predict`."""
        return "".join(self._written(prompt, SamplingSettings(max_tokens, temperature, top_p, seed)))

    def stream(
        self,
        prompt: str,
        *,
        max_tokens: int = DEFAULTS.max_tokens,
        temperature: float = DEFAULTS.temperature,
        top_p: float = DEFAULTS.top_p,
        seed: int = DEFAULTS.seed,
    ) -> Iterator[str]:
        """Return the same text in pieces, each as soon as it is written. One text at a time."""
        return self._written(prompt, SamplingSettings(max_tokens, temperature, top_p, seed))

    def _written(self, prompt: str, settings: SamplingSettings) -> Iterator[str]:
        if self.writer is None:
            raise DataError(
                f"The model of {self.trained.task.name} answers questions and writes no text",
                hint="Use predict().",
            )
        tokens = encode_prompt(self.writer.tokenizer, prompt)
        return decoded(self.writer.tokenizer, sample(self.writer.model, tokens, settings))

    def _answers(self, questions: Sequence[Question]) -> list[Answer]:
        task = interactive(self.trained)
        assert self.search is not None  # as `load` gives one to every task with questions
        return [answer_of(task, each) for each in predict(self.trained, self.search, questions)]

    def _read(self, puzzle: Puzzle, number: int | None = None) -> Question:
        source = puzzle.encode() if isinstance(puzzle, str) else puzzle
        try:
            return interactive(self.trained).read(source, self.trained.data)
        except DataError as error:
            if number is None:
                raise
            raise DataError(f"Puzzle {number}: {error}", hint=error.hint) from error
