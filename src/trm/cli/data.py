"""`trm data`: build datasets, describe them, and verify them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import click

from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import counted
from trm.cli.common import PATH, Command, json_option, show, showing, with_options


@click.group()
def data() -> None:
    """Build datasets, describe them, and verify them."""


@data.group()
def build() -> None:
    """Build a dataset for a task, in the layout of the reference implementation."""


output_options = (
    click.option("--out", type=PATH, required=True, help="Directory of the new dataset."),
    click.option("--jobs", type=click.IntRange(1, 256), help="Number of processes [default: one per core]."),
    json_option,
)


def grid_options(command: Command) -> Command:
    """Add the options of tasks whose puzzles are generated, or read from a file with one puzzle per row."""
    options = (
        click.option(
            "--train", type=int, help="Training puzzles [default: 2000, or all others of the file]."
        ),
        click.option(
            "--test", type=int, default=256, show_default=True, help="Test puzzles, none of them in training."
        ),
        click.option(
            "--seed", type=int, default=0, show_default=True,
            help="Seed of the generator, or of the order of the file's rows.",
        ),
        click.option(
            "--from", "file", type=PATH,
            help="File to read puzzles from: CSV, or text with one per line (also .gz, .xz); - is standard "
            "input [default: generate them].",
        ),
        click.option(
            "--max-input-mb", type=click.IntRange(min=1), default=1024, show_default=True,
            help="Most MiB of text to read from that file, counted after it is unpacked.",
        ),
        click.option("--source", help="Training rows of the file: those with this `source` [default: all]."),
        click.option(
            "--test-source",
            help="Test rows of the file: those with this `source` [default: rows not used for training].",
        ),
        *output_options,
    )  # fmt: skip
    return with_options(command, options)


@build.command("sudoku")
@click.option(
    "--size", type=click.Choice(["4", "6", "9"]), default="9", show_default=True, help="Rows and columns."
)
@click.option(
    "--difficulty", type=click.Choice(["easy", "medium", "hard"]), default="hard", show_default=True,
    help="Named number of blanks per generated puzzle.",
)  # fmt: skip
@click.option("--blanks", type=int, help="Blanks per generated puzzle [default: set by --difficulty].")
@click.option("--train-blanks", type=int, help="Blanks per training puzzle [default: as for test puzzles].")
@grid_options
def build_sudoku(
    size: str, file: Path | None, out: Path, jobs: int | None, as_json: bool, **options: object
) -> None:
    """Build Sudoku puzzles with one solution; no test puzzle is a symmetric copy of a training puzzle."""
    facts = _build("sudoku", _grid_options(options, file, int(size)), out, jobs)
    _show_grids(facts, int(size), as_json)


@build.command("maze")
@click.option("--size", type=int, default=10, show_default=True, help="Rows and columns, at most 40.")
@click.option(
    "--min-path", type=int, default=13, show_default=True,
    help="Least number of cells on the shortest path, start and goal included. Maze-Hard has --size 30 "
    "and --min-path 110.",
)  # fmt: skip
@click.option("--train-min-path", type=int, help="The same for training mazes [default: --min-path].")
@grid_options
def build_maze(
    size: int, file: Path | None, out: Path, jobs: int | None, as_json: bool, **options: object
) -> None:
    """Build mazes of random walls with a long path from S to G.

    No test maze is a rotated or reflected training maze.
    """
    facts = _build("maze", _grid_options(options, file, size), out, jobs)
    _show_grids(facts, size, as_json)


@build.command("arc")
@click.option(
    "--train", type=PATH, multiple=True,
    help="JSON file or directory of tasks to train on; may be given several times.",
)  # fmt: skip
@click.option(
    "--test", type=PATH, multiple=True, required=True,
    help="JSON file or directory of test tasks; only their demonstrations are trained on.",
)  # fmt: skip
@click.option(
    "--augmentations", type=int, default=100, show_default=True,
    help="Most copies per task with colours renamed and grids rotated or reflected.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the augmentations.")
@click.option(
    "--overlap", type=click.Choice(["refuse", "drop", "allow"]), default="refuse", show_default=True,
    help="Treatment of training tasks that are also test tasks; drop removes them from training.",
)  # fmt: skip
@click.option(
    "--max-input-mb", type=click.IntRange(min=1), default=256, show_default=True,
    help="Most MiB to read from all files together.",
)  # fmt: skip
@partial(with_options, options=output_options)
def build_arc(
    train: tuple[Path, ...],
    test: tuple[Path, ...],
    out: Path,
    jobs: int | None,
    as_json: bool,
    **options: object,
) -> None:
    """Build a dataset from the JSON files of ARC-AGI and ConceptARC."""
    options["train"] = [str(path) for path in train]
    options["test"] = [str(path) for path in test]
    facts = _build("arc", options, out, jobs)
    show(
        facts,
        as_json,
        f"{out}: {facts['train']:,} training and {counted(facts['test'], 'test example')}",
    )


def mail_options(command: Command) -> Command:
    """Add the options of tasks over the tokens of mail."""
    options = (
        click.option(
            "--from", "sources", type=click.Path(), multiple=True, required=True, metavar="MAIL",
            help="An mbox, a Maildir, a directory whose folders are the categories, or a table; may be "
            "repeated.",
        ),
        click.option(
            "--split", type=click.Choice(["random", "time", "thread"]), default="random", show_default=True,
            help="Choice of the test set: at random, the newest messages, or whole conversations.",
        ),
        click.option("--length", type=int, default=256, show_default=True, help="Most tokens per message."),
        click.option(
            "--vocab-size", type=int, help="Tokens in the vocabulary [default: 8000, or that of --tokenizer]."
        ),
        click.option(
            "--tokenizer", type=PATH,
            help="Dataset of mail whose vocabulary is used [default: one is made of this mail].",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of the split."),
        *output_options,
    )  # fmt: skip
    return with_options(command, options)


@build.command("email")
@click.option("--mapping", type=PATH, help="YAML file that says which folders and labels are which category.")
@click.option("--test-share", type=float, default=0.15, show_default=True, help="Share of the test set.")
@mail_options
def build_email(mapping: Path | None, out: Path, jobs: int | None, as_json: bool, **options: object) -> None:
    """Build a dataset of tokens from mail, for the recursive path.

    A report says what the mail is like. If the import is interrupted, the same command continues it.
    """
    settings = {**_mail_options(options), "mapping": None if mapping is None else str(mapping)}
    _show_mail(_build("email", settings, out, jobs), as_json)


@build.command("email-masked")
@click.option("--test-share", type=float, default=0.05, show_default=True, help="Share of the test set.")
@mail_options
def build_masked_email(out: Path, jobs: int | None, as_json: bool, **options: object) -> None:
    """Build a dataset from mail without categories, to pre-train a model that predicts masked tokens."""
    _show_mail(_build("email-masked", _mail_options(options), out, jobs), as_json)


@build.command("text")
@click.argument("files", nargs=-1, type=click.Path(), metavar="FILE...")
@click.option(
    "--from", "sources", type=click.Path(), multiple=True, help="The same as FILE; may be repeated."
)
@click.option(
    "--tokenizer", type=click.Choice(["char", "bytes", "bpe"]), default="bpe", show_default=True,
    help="Tokens: characters, bytes, or pieces of words, which are trained on the text.",
)  # fmt: skip
@click.option("--vocab-size", type=int, help="Most tokens of bpe [default: 8192].")
@click.option("--context", type=int, default=256, show_default=True, help="Tokens per window.")
@click.option(
    "--test-share", type=float, default=0.1, show_default=True,
    help="Share of every file, at its end, that is the test split.",
)  # fmt: skip
@click.option(
    "--max-input-mb", type=click.IntRange(min=1), default=4096, show_default=True,
    help="Most MiB to read from one file.",
)  # fmt: skip
@partial(with_options, options=output_options)
def build_text(
    files: tuple[str, ...],
    sources: tuple[str, ...],
    out: Path,
    jobs: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Build a dataset of tokens from text FILEs in UTF-8, for a language model."""
    if not files and not sources:
        raise click.UsageError("Give at least one text FILE.")
    given = {name: value for name, value in options.items() if value is not None}
    facts = _build("text", {**given, "from": [*files, *sources]}, out, jobs)
    counts = f"{facts['train']:,} training and {counted(int(facts['test']), 'test window')}"
    show(facts, as_json, f"{out}: {counts} of {counted(options['context'], 'token')}")


def _mail_options(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options of `data.build`: those that were given, and the size of a new vocabulary."""
    given: dict[str, object] = {name: value for name, value in options.items() if value is not None}
    given["from"] = list(cast(tuple[str, ...], given.pop("sources")))
    if "tokenizer" in given:
        given["tokenizer"] = str(given["tokenizer"])
    else:
        given.setdefault("vocab_size", 8000)
    return given


def _show_mail(facts: JsonObject, as_json: bool) -> None:
    counts = f"{facts['train']:,} training and {counted(int(facts['test']), 'test message')}"
    show(facts, as_json, f"{facts['path']}: {counts}")


def _grid_options(options: Mapping[str, object], file: Path | None, size: int) -> dict[str, object]:
    """Return the options of `data.build`: those that were given."""
    given: dict[str, object] = {name: value for name, value in options.items() if value is not None}
    given["size"] = size
    if file is not None:
        given["from"] = str(file)
    return given


def _show_grids(facts: JsonObject, size: int, as_json: bool) -> None:
    counts = f"{facts['train']:,} training and {counted(facts['test'], 'test puzzle')}"
    show(facts, as_json, f"{facts['path']}: {counts}, {size}x{size}")


def _build(task: str, options: Mapping[str, object], out: Path, jobs: int | None) -> JsonObject:
    with showing("Building the dataset") as display:
        from macbook_optimization.performance_reporting import available_cores
        from trm.tasks.dataset import SPLITS, open_split
        from trm.tasks.registry import build_dataset, load_task

        facts = build_dataset(load_task(task), options, out, display, jobs or available_cores())
    return {"path": str(out), **{name: len(open_split(out, name)) for name in SPLITS}, **facts}


@data.command()
@click.argument("dataset", type=PATH)
@json_option
def info(dataset: Path, as_json: bool) -> None:
    """Describe DATASET: its sizes, repeated questions, and how this machine would read it."""
    with showing("Reading the dataset") as display:
        from trm.tasks.inspection import format_facts, inspect_dataset

        facts = inspect_dataset(dataset, display.update)
    show(asdict(facts), as_json, format_facts(facts))


@data.command()
@click.argument("dataset", type=PATH)
@json_option
def verify(dataset: Path, as_json: bool) -> None:
    """Verify that the arrays of DATASET are intact, fit together, and match their checksums."""
    from macbook_optimization.dataset_files import BUILD_FILE
    from trm.tasks.dataset import SPLITS, open_split

    names = [name for name in SPLITS if (dataset / name).is_dir()] or ["train"]  # an error if there is none
    counts = {name: len(open_split(dataset, name)) for name in names}
    has_checksums = (dataset / BUILD_FILE).is_file()
    facts = {"path": str(dataset), "checksums": has_checksums, **counts}
    how = "checksums match" if has_checksums else "no checksums, because it was not built here"
    examples = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    show(facts, as_json, f"{dataset} is intact: {examples} ({how})")
