"""`trm data`: build datasets, look at them, and check that they are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from macbook_optimization.errors import DataError
from trm.cli.common import PATH, json_option, show

Command = Callable[..., None]


@click.group()
def data() -> None:
    """Build datasets, look at them, and check them."""


@data.group()
def build() -> None:
    """Build a dataset for a task, in the layout that public TRM code reads."""


building_options = (
    click.option("--out", type=PATH, required=True, help="Directory of the new dataset."),
    click.option(
        "--jobs", type=click.IntRange(1, 256), help="Processes that work on it [default: one a core]."
    ),
    json_option,
)


def with_options(command: Command, options: Iterable[Callable[[Command], Command]]) -> Command:
    for option in reversed(list(options)):
        command = option(command)
    return command


def grid_options(command: Command) -> Command:
    """Of every task whose puzzles are generated, or read from a file with one puzzle a row."""
    options = (
        click.option("--train", type=int, help="Training puzzles [default: 2000, or all the file has]."),
        click.option(
            "--test", type=int, default=256, show_default=True, help="Test puzzles, unseen in training."
        ),
        click.option("--seed", type=int, default=0, show_default=True),
        click.option(
            "--from", "file", type=PATH, help="Read puzzles from CSV or one-per-line text (.gz, .xz)."
        ),
        click.option("--source", help="Only the file's rows with this `source`."),
        click.option("--test-source", help="Take the test puzzles from the rows with this `source`."),
        *building_options,
    )
    return with_options(command, options)


@build.command("sudoku")
@click.option("--size", type=click.Choice(["4", "6", "9"]), default="9", show_default=True, help="Grid size.")
@click.option(
    "--difficulty", type=click.Choice(["easy", "medium", "hard"]), default="hard", show_default=True,
    help="Of generated puzzles; stands for a number of blanks.",
)  # fmt: skip
@click.option("--blanks", type=int, help="Exact number of blanks, instead of a named difficulty.")
@click.option("--train-blanks", type=int, help="Another number of blanks for training puzzles.")
@grid_options
def build_sudoku(size: str, **options: Any) -> None:
    """Sudoku puzzles with exactly one solution; no test puzzle is a symmetric copy of a training one."""
    _build_grids("sudoku", {"size": int(size), **options})


@build.command("maze")
@click.option("--size", type=int, default=10, show_default=True, help="Rows and columns, up to 40.")
@click.option(
    "--min-path", type=int, default=13, show_default=True,
    help="Cells of the shortest path at least, both ends counted. Maze-Hard has 30 and 110.",
)  # fmt: skip
@click.option("--train-min-path", type=int, help="Another least path for training mazes.")
@grid_options
def build_maze(**options: Any) -> None:
    """Mazes of random walls with a long way from S to G; no test maze is a turned training maze."""
    _build_grids("maze", options)


@build.command("arc")
@click.option(
    "--train", "train", type=PATH, multiple=True,
    help="Tasks to learn from as a whole: a JSON file or a directory of them; may be given several times.",
)  # fmt: skip
@click.option(
    "--test", "test", type=PATH, multiple=True, required=True,
    help="Tasks to be asked about; their demonstrations are learned from.",
)  # fmt: skip
@click.option(
    "--augmentations", type=int, default=100, show_default=True, help="Turned and recoloured copies a task."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--overlap", type=click.Choice(["refuse", "drop", "allow"]), default="refuse", show_default=True,
    help="Tasks that are in both: drop leaves them out of what is learned.",
)  # fmt: skip
@partial(with_options, options=building_options)
def build_arc(
    train: tuple[Path, ...],
    test: tuple[Path, ...],
    out: Path,
    jobs: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """ARC-AGI and ConceptARC tasks from their JSON files."""
    asked = {**options, "train": [str(path) for path in train], "test": [str(path) for path in test]}
    facts = _build("arc", asked, out, jobs)
    show(facts, as_json, f"{out}: {facts['train']:,} training and {facts['test']:,} test examples")


def _build_grids(task: str, options: dict[str, Any]) -> None:
    out, jobs, as_json, file = (options.pop(name) for name in ("out", "jobs", "as_json", "file"))
    asked = {key: value for key, value in options.items() if value is not None}
    facts = _build(task, asked | ({"from": str(file)} if file else {}), out, jobs)
    size = options["size"]
    text = f"{out}: {facts['train']} training and {facts['test']} test puzzles, {size}x{size}"
    show(facts, as_json, text)


def _build(task: str, options: Mapping[str, Any], out: Path, jobs: int | None) -> dict[str, Any]:
    from macbook_optimization.performance_reporting import available_cores
    from macbook_optimization.progress_monitoring import ProgressDisplay
    from trm.tasks import load_task
    from trm.tasks.base import open_split

    if out.exists():
        raise DataError(f"{out} is already there", hint="Choose another --out, or remove it first.")
    with ProgressDisplay() as display:
        load_task(task).build(options, out, display.update, jobs or available_cores())
    return {"path": str(out), **{name: len(open_split(out, name)) for name in ("train", "test")}}


@data.command()
@click.argument("dataset", type=PATH)
@json_option
def info(dataset: Path, as_json: bool) -> None:
    """Sizes, shapes, examples that occur twice or in both halves, and how this machine would read it."""
    from macbook_optimization.progress_monitoring import ProgressDisplay
    from trm.tasks.inspection import examine, page

    with ProgressDisplay() as display:
        found = examine(dataset, display.update)
    show(asdict(found), as_json, page(found))


@data.command()
@click.argument("dataset", type=PATH)
@json_option
def verify(dataset: Path, as_json: bool) -> None:
    """Check that a dataset is whole: its arrays fit each other and are what was built."""
    from macbook_optimization.dataset_files import BUILD
    from trm.tasks.base import open_split

    splits = {name: open_split(dataset, name) for name in ("train", "test") if (dataset / name).is_dir()}
    if not splits:
        open_split(dataset, "train")  # says what is missing
    checked = (dataset / BUILD).is_file()
    facts = {
        "path": str(dataset),
        "checksums": checked,
        **{name: len(split) for name, split in splits.items()},
    }
    how = "checksums of what was built" if checked else "no checksums, as it was not built here"
    counts = ", ".join(f"{len(split):,} {name}" for name, split in splits.items())
    show(facts, as_json, f"{dataset} is whole: {counts} ({how})")
