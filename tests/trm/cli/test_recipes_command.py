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
    }
    assert all(len(recipe["description"]) < 130 for recipe in found.values())
    lines = trm("recipes").splitlines()
    assert [line.split()[0] for line in lines] == sorted(found)


def test_a_recipe_is_shown_as_it_is_in_its_file():
    assert trm("recipes", "show", "maze-hard") == (ROOT / "recipes" / "maze-hard.yaml").read_text()


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


def test_an_installed_package_has_its_own_recipes(tmp_path):
    """A wheel has them inside the package, and there is no checkout around it."""
    for package in ("trm", "macbook_optimization"):
        shutil.copytree(ROOT / "src" / package, tmp_path / "site" / package)
    shutil.copytree(ROOT / "recipes", tmp_path / "site" / "trm" / "recipes")
    (tmp_path / "site" / "trm" / "recipes" / "maze-hard.yaml").rename(
        tmp_path / "site" / "trm" / "recipes" / "only-there.yaml"
    )
    code = "from trm.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "recipes", "copy", "only-there", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == {"recipe": "only-there", "file": "only-there.yaml"}
    assert (tmp_path / "only-there.yaml").read_text() == (ROOT / "recipes" / "maze-hard.yaml").read_text()
