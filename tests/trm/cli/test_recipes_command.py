"""`trm recipes`: what ships with the package can be listed, read and copied to be edited."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from macbook_optimization.errors import ConfigError, DataError
from trm.cli import cli
from trm.config import load_config

ROOT = Path(__file__).parents[3]


def trm(*arguments):
    return CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False).output


def test_every_recipe_is_listed_with_its_task_and_the_first_sentence_of_its_file():
    found = {recipe["name"]: recipe for recipe in json.loads(trm("recipes", "--json"))}
    assert found.keys() == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert found["sudoku-6x6"] == {
        "name": "sudoku-6x6",
        "task": "sudoku",
        "description": "The demo: 6x6 Sudoku with 22 of 36 cells blank, learned in seconds on two cores.",
        "problem": None,
    }
    assert all(len(recipe["description"]) < 130 for recipe in found.values())
    lines = trm("recipes").splitlines()
    assert [line.split()[0] for line in lines] == sorted(found)


def test_a_recipe_is_shown_as_it_is_in_its_file():
    assert trm("recipes", "show", "maze-hard") == (ROOT / "recipes" / "maze-hard.yaml").read_text()


def test_a_recipe_is_shown_as_json_with_its_text():
    found = json.loads(trm("recipes", "show", "sudoku-6x6", "--json"))
    assert (found["name"], found["task"], found["problem"]) == ("sudoku-6x6", "sudoku", None)
    assert found["yaml"] == (ROOT / "recipes" / "sudoku-6x6.yaml").read_text()


@pytest.mark.parametrize("command", ["show", "copy"])
def test_an_unknown_name_gets_a_suggestion(command):
    with pytest.raises(ConfigError, match="'soduku-6x6'; did you mean sudoku-6x6"):
        trm("recipes", command, "soduku-6x6")


def test_a_copy_can_be_trained_and_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "trm train sudoku-6x6.yaml" in trm("recipes", "copy", "sudoku-6x6")
    assert load_config("sudoku-6x6.yaml") == load_config("sudoku-6x6")
    (tmp_path / "sudoku-6x6.yaml").write_text("edited")
    with pytest.raises(DataError, match=r"sudoku-6x6.yaml cannot be written: it already exists"):
        trm("recipes", "copy", "sudoku-6x6")
    assert (tmp_path / "sudoku-6x6.yaml").read_text() == "edited"
    trm("recipes", "copy", "sudoku-9x9", "sudoku-6x6.yaml", "--force")
    assert load_config("sudoku-6x6.yaml") == load_config("sudoku-9x9")


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["plain", "forced"])
def test_only_regular_files_are_replaced(tmp_path, force):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, reason in (("pipe", "it is a pipe"), ("dangling", "leads nowhere"), (".", "it is a directory")):
        with pytest.raises(DataError, match=reason):
            trm("recipes", "copy", "sudoku-6x6", tmp_path / name, *force)
    with pytest.raises(DataError, match="there is no directory"):
        trm("recipes", "copy", "sudoku-6x6", tmp_path / "nowhere" / "file", *force)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "pipe"]


@pytest.fixture
def installed(tmp_path):
    """An installed package, as a function that runs its commands in `tmp_path`, and its recipes.

    A wheel has the recipes inside the package, and there is no checkout around it.
    """
    for package in ("trm", "macbook_optimization"):
        shutil.copytree(ROOT / "src" / package, tmp_path / "site" / package)
    directory = shutil.copytree(ROOT / "recipes", tmp_path / "site" / "trm" / "recipes")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-c", "from trm.cli import main; main()", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run, directory


BROKEN = {
    "duplicate": (
        "# Mine.\ntask: sudoku\nseed: 1\nseed: 2\n",
        "the key seed is given twice, in lines 3 and 4",
    ),
    "unclosed": ("task: [sudoku\n", "is not valid YAML"),
    "tagged": ("task: !!python/name:os.system\n", "is not valid YAML"),
    "list": ("- task\n", "is not a recipe: it names no task"),
    "nameless": ("task: 5\n", "is not a recipe: it names no task"),
    "empty": ("", "is not a recipe: it names no task"),
    "binary": (b"\xff\xfe\x00", "Cannot read"),
    "pipe": (None, "not a regular file"),
}


@pytest.mark.slow
def test_a_recipe_that_cannot_be_read_is_reported_and_the_others_are_listed(installed):
    trm, directory = installed
    for name, (content, _) in BROKEN.items():
        file = directory / f"{name}.yaml"
        if content is None:
            os.mkfifo(file)
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = trm("recipes")
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert lines.keys() == {path.stem for path in directory.iterdir()}
    for name, (_, problem) in BROKEN.items():
        assert lines[name].split()[1] == "?"
        assert f"{name}.yaml" in lines[name]
        assert problem in lines[name]
    found = {recipe["name"]: recipe for recipe in json.loads(trm("recipes", "--json").stdout)}
    assert found["duplicate"]["task"] is None
    assert BROKEN["duplicate"][1] in found["duplicate"]["problem"]
    assert found["sudoku-6x6"]["problem"] is None


@pytest.mark.slow
def test_a_broken_recipe_is_shown_and_copied_with_a_warning_and_not_trained(installed, tmp_path):
    trm, directory = installed
    text, problem = BROKEN["duplicate"]
    (directory / "mine.yaml").write_text(text)
    shown = trm("recipes", "show", "mine")
    assert (shown.returncode, shown.stdout) == (0, text)
    assert shown.stderr.startswith("warning: ")
    assert problem in shown.stderr
    copied = trm("recipes", "copy", "mine")
    assert copied.returncode == 0
    assert problem in copied.stderr
    assert (tmp_path / "mine.yaml").read_text() == text
    for recipe in ("mine", "mine.yaml"):
        refused = trm("train", recipe)
        assert refused.returncode == 2
        assert refused.stderr.count("error: ") == 1
        assert problem in refused.stderr


@pytest.mark.parametrize("command", ["show", "copy"])
def test_a_recipe_that_is_not_text_is_one_error_line(installed, tmp_path, command):
    trm, directory = installed
    (directory / "mine.yaml").write_bytes(BROKEN["binary"][0])
    refused = trm("recipes", command, "mine")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: Cannot read ")
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "mine.yaml").exists()


def test_an_installed_package_has_its_own_recipes(installed, tmp_path):
    trm, directory = installed
    (directory / "maze-hard.yaml").rename(directory / "only-there.yaml")
    done = trm("recipes", "copy", "only-there", "--json")
    assert json.loads(done.stdout) == {"recipe": "only-there", "file": "only-there.yaml"}
    assert (tmp_path / "only-there.yaml").read_text() == (ROOT / "recipes" / "maze-hard.yaml").read_text()
