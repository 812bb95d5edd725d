"""What the documents say is what happens: every command in them is run."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_reference import reference

from trm.config import CheckpointsConfig, CurriculumConfig, LoadingConfig, PlanSettings
from trm.tasks.sudoku import TASK
from trm.tasks.sudoku_puzzles import generate

ROOT = Path(__file__).parents[1]
TRM = Path(sys.executable).with_name("trm")


def blocks_of(language: str, document: Path) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands_in(document: Path) -> list[str]:
    """The lines after `$ ` in console blocks."""
    return [
        line[2:]
        for block in blocks_of("console", document)
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


def run(command: str, cwd: Path) -> str:
    words = [str(TRM) if Path(word).name == "trm" else word for word in shlex.split(command)]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def test_the_command_reference_is_up_to_date():
    assert (ROOT / "docs" / "commands.md").read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


def test_every_link_inside_the_project_leads_somewhere():
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert "://" in target or (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_recipe_is_in_the_table():
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert f"| `{path.stem}` |" in text


@pytest.mark.slow
def test_the_commands_of_the_recipe_page_work(tmp_path):
    questions, _ = generate(6, 16, 50, seed=5)
    lines = [TASK.decode(grid.reshape(-1).astype(int) + 1) for grid in questions]
    (tmp_path / "puzzles.txt").write_text("\n".join(lines))
    found = commands_in(ROOT / "docs" / "recipes.md")
    assert len(found) == 6
    for command in found:
        run(command, tmp_path)


@pytest.mark.slow
def test_the_commands_and_the_files_of_the_task_page_work(tmp_path):
    page = ROOT / "docs" / "tasks.md"
    for language, file in (("python", "mirror.py"), ("yaml", "mirror.yaml")):
        (tmp_path / file).write_text(blocks_of(language, page)[0])
    found = commands_in(page)
    assert len(found) == 6
    answers = [run(command, tmp_path) for command in found]
    assert "0 test questions are also in the training half" in answers[1]
    assert (tmp_path / "maze.png").read_bytes()[1:4] == b"PNG"
    assert (tmp_path / "maze.gif").read_bytes()[:3] == b"GIF"
    assert re.search(r"Best: (99\.\d|100\.0)% of 100 unseen puzzles", answers[4])
    assert "solved: every rule holds" in answers[5]


@pytest.mark.slow
def test_the_commands_of_the_machine_page_work(tmp_path):
    found = commands_in(ROOT / "docs" / "machine.md")
    assert len(found) == 2
    for command in found:
        run(command, tmp_path)


@pytest.mark.slow
def test_the_commands_of_the_checkpoint_page_work(tmp_path):
    found = commands_in(ROOT / "docs" / "checkpoints.md")
    assert len(found) == 4
    answers = [run(command, tmp_path) for command in found]
    assert "`trm train` would go on after step 20." in answers[1]
    assert "lm_head.weight" in answers[2]


def test_every_setting_of_these_sections_is_explained():
    for page, section, model in (
        ("machine", "plan", PlanSettings),
        ("checkpoints", "checkpoints", CheckpointsConfig),
        ("tasks", "data.loading", LoadingConfig),
        ("tasks", "training.curriculum", CurriculumConfig),
    ):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for name in model.model_fields:
            assert f"| `{section}.{name}` |" in text


@pytest.mark.slow
def test_the_readme_works_from_the_demo_to_the_last_command(tmp_path):
    """`make demo` is replaced by what it would run, in the environment of the tests; `make test` is us."""
    for command in commands_in(ROOT / "README.md"):
        if command.startswith("make demo"):
            recipe = subprocess.check_output(["make", "-n", "demo"], cwd=ROOT, text=True)
            demo = [line.lstrip("@") for line in recipe.splitlines() if "/trm " in line]
            assert len(demo) == 2
            trained, shown = (run(line, tmp_path) for line in demo)
            assert re.search(r"Best: (9[5-9]\.\d|100\.0)% of 256 unseen puzzles", trained)
            assert "step 1" in shown
        elif command.startswith("trm "):
            run(command, tmp_path)
        else:
            assert command in ("make test",), f"the README has a command that no test runs: {command}"
    (finished,) = json.loads(run("trm runs --json", tmp_path))
    assert finished["exact_accuracy"] >= 0.95
