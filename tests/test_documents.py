"""The documents match the product: every command and every code block in them is run.

README.md and each page below docs/ that has code blocks are run from top to bottom in an empty directory.
Blocks are found by their language, so the pages may be rearranged freely:

- `console` lines after `$ `, and all lines of `bash`, `sh` and `shell` blocks, are commands. Those with a
  placeholder in capitals, such as RUN or FILE, cannot be run: only their options are checked. One that ends
  with `&` runs in the background, from its first line of output to the end of the page.
- A `python` or `yaml` block is written to the file that the paragraph before it names in backticks. A
  `python` block without such a name is run as a script.
- `text` blocks are output or sketches and are not run. docs/lab/ has notes on long experiments: only the
  options in its commands are checked.
"""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import click
import command_reference
import forked
import key_reference
import pytest

from trm.cli import cli
from trm.tasks.grids.sudoku import TASK
from trm.tasks.grids.sudoku_puzzles import generate

ROOT = Path(__file__).parents[1]
TRM = Path(sys.executable).with_name("trm")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("bash", "sh", "shell")
# Commands that set up the environment of these tests, or run these tests.
NOT_RUN = ("make test", "make install", "make check", "make docs", "git clone", "cd ", "source ", "pip ")
PLACEHOLDER = re.compile(r"(^|[\s=:/])[A-Z][A-Z_]+([\s:/]|$)")
# What each command of `make demo` and of `make demo-mail` must print.
DEMOS = {
    "demo": ("Reached the target", "step 1"),
    "demo-mail": ("420 messages", "together", "travel  ", "rather than", "%? -"),
}
LIMITS = ("--max-steps", "--max-minutes", "--more-steps")


@dataclass(frozen=True)
class Block:
    language: str
    content: str
    paragraph: str  # the one before it

    @property
    def commands(self) -> list[str]:
        lines = self.content.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line[2:] for line in lines if line.startswith("$ ")]
        if self.language in SHELL:
            return [line for line in lines if line.strip() and not line.startswith("#")]
        return []

    @property
    def file(self) -> str | None:
        ending = {"python": "py", "yaml": "yaml"}.get(self.language)
        names = re.findall(rf"`([\w.-]+\.{ending})`", self.paragraph)
        return names[-1] if names else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [
        Block(match[1], match[2], text[: match.start()].rstrip().rpartition("\n\n")[2]) for match in found
    ]


def is_run(page: Path) -> bool:
    runs = ("console", "python", *SHELL)
    return "lab" not in page.parts and any(block.language in runs for block in blocks_of(page))


def commands_of(page: Path) -> list[str]:
    return [command for block in blocks_of(page) for command in block.commands]


PAGES_TO_RUN = [page for page in PAGES if is_run(page)]
# `trm doctor` takes seconds, reads no files of the directory and is on several pages: one of them runs it.
DOCTORS_PAGE = next(page for page in PAGES_TO_RUN if "trm doctor" in commands_of(page))


def option(words: list[str], name: str) -> str | None:
    """Return the value of an option in a command."""
    return words[words.index(name) + 1] if name in words else None


def execute(words: list[str], cwd: Path) -> str:
    if words[0] == str(TRM):
        done = forked.run(words[1:], cwd, timeout=600)
    else:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
    return done.stdout


def check_doctor() -> None:
    text = execute([str(TRM), "doctor"], cwd=ROOT)
    titles = {line for line in text.splitlines() if line and not line.startswith(" ")}
    assert {"This machine", "Measured", "Plan for sudoku-6x6", "Recommendations"} <= titles
    assert "None" not in text


@dataclass
class Reader:
    """Follows a page: runs its commands in one directory and checks what each of them promises."""

    directory: Path
    page: Path
    accuracy: dict[str, float] = field(default_factory=dict)  # of runs that were trained to their target
    last_step: dict[str, str] = field(default_factory=dict)  # of runs that were trained to a step
    background: list[subprocess.Popen[str]] = field(default_factory=list)

    def follow(self) -> None:
        try:
            self.follow_blocks()
            for process in self.background:
                process.terminate()
                assert process.wait(60) == 0, process.args
        finally:
            for process in self.background:
                process.kill()
                process.communicate()

    def follow_blocks(self) -> None:
        for block in blocks_of(self.page):
            if block.file is not None:
                (self.directory / block.file).write_text(block.content)
            elif block.language == "python":
                done = forked.run_script(block.content, self.directory, timeout=600)
                assert done.returncode == 0, done.stderr
            for command in block.commands:
                self.run(command)

    def run(self, command: str) -> None:
        if command.startswith("make demo"):
            self.demo(command)
        elif not command.startswith(NOT_RUN) and not PLACEHOLDER.search(command):
            words = shlex.split(command)
            assert words[0] == "trm", f"a document has a command that no test runs: {command}"
            if words == ["trm", "doctor"]:
                if self.page == DOCTORS_PAGE:
                    check_doctor()
            elif words[-1] == "&":
                self.start([str(TRM), *words[1:-1]])
            else:
                self.trm(words[1:])

    def demo(self, command: str) -> None:
        """Run what `make demo` would run, in the environment of the tests."""
        words = ["make", "-n", f"BIN={TRM.parent}", *command.split()[1:]]
        recipe = subprocess.check_output(words, cwd=ROOT, text=True)
        lines = [line.lstrip("@") for line in recipe.splitlines() if f"{TRM} " in line]
        for line, expected in zip(lines, DEMOS[command.split()[1]], strict=True):
            is_alone = line.startswith(f"{TRM} ")
            text = self.trm(shlex.split(line)[1:]) if is_alone else self.execute(["sh", "-c", line])
            assert expected in text, text

    def trm(self, words: list[str]) -> str:
        self.provide_puzzles(words)
        text = self.execute([str(TRM), *words])
        check = getattr(self, f"check_{'_'.join(words[:2])}", getattr(self, f"check_{words[0]}", None))
        if check is not None:
            check(words, text)
        return text

    def execute(self, words: list[str]) -> str:
        return execute(words, self.directory)

    def start(self, words: list[str]) -> None:
        process = subprocess.Popen(words, cwd=self.directory, stdout=subprocess.PIPE, text=True)
        self.background.append(process)
        assert process.stdout is not None
        assert process.stdout.readline(), f"{shlex.join(words)} ended before it was ready"

    def provide_puzzles(self, words: list[str]) -> None:
        """Write the file that a user would have, where a command reads puzzles from one."""
        name = option(words, "--from")
        if name is not None and words[:3] == ["data", "build", "sudoku"]:
            size = int(option(words, "--size") or 9)
            questions, _ = generate(size, {4: 8, 6: 16, 9: 40}[size], 50, seed=5)
            lines = [TASK.text(grid.reshape(-1).astype(int) + 1) for grid in questions]
            (self.directory / name).write_text("\n".join(lines))

    def check_train(self, words: list[str], text: str) -> None:
        run = option(words, "--run") or f"runs/{Path(words[1]).stem}"
        if any(limit in words for limit in LIMITS):
            self.last_step[run] = option(words, "--max-steps") or ""
            return
        assert "Reached the target" in text, text
        found = re.search(r"Best: [\w@ ]+ (\d+\.\d)% on \d+ unseen examples", text)
        self.accuracy[run] = float(found[1])
        assert self.accuracy[run] >= 95

    def check_predict(self, words: list[str], text: str) -> None:
        if self.accuracy.get(words[1], 0) >= 99:
            assert TASK.verified in text
        for name, start in (("--png", b"\x89PNG"), ("--gif", b"GIF8")):
            if (file := option(words, name)) is not None:
                assert (self.directory / file).read_bytes().startswith(start)

    def check_eval(self, words: list[str], text: str) -> None:
        assert "exact by depth:" in text or "perplexity" in text

    def check_data_info(self, words: list[str], text: str) -> None:
        assert "0 test questions are also in the training split" in text

    def check_checkpoint_verify(self, words: list[str], text: str) -> None:
        if step := self.last_step.get(words[2]):
            assert f"`trm train` would resume after step {step}." in text

    def check_checkpoint_import(self, words: list[str], text: str) -> None:
        assert ("lm_head.weight" in text) == ("--new-head" in words)

    def check_report(self, words: list[str], text: str) -> None:
        page = self.directory / (option(words, "--out") or f"{words[1]}/report.html")
        assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
        if "--tensorboard" in words:
            assert list((self.directory / words[1] / "tensorboard").glob("events.out.tfevents.*"))

    def check_runs(self, words: list[str], text: str) -> None:
        if "--compare" in words:
            assert "samples per second" in text
            return
        listed = json.loads(self.execute([str(TRM), *words, "--json"]))
        accuracies = {run["path"]: run["accuracy"] for run in listed}
        for path, accuracy in self.accuracy.items():
            assert 100 * accuracies[path] == pytest.approx(accuracy, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_TO_RUN, ids=lambda page: page.name)
def test_every_command_and_code_block_of_a_page_works(page, tmp_path):
    Reader(tmp_path, page).follow()


def test_the_documents_show_every_important_command():
    """This also notices pages whose blocks are not found any more."""
    found = {command for page in PAGES_TO_RUN for command in commands_of(page)}
    shown = {command for command in found if not PLACEHOLDER.search(command)}
    for important in (
        "make demo", "make test", "trm train", "trm eval", "trm predict", "trm runs", "trm doctor",
        "make demo-mail", "trm tune", "trm runs --compare",
        "trm data build sudoku", "trm data build maze", "trm data info", "trm checkpoint verify",
        "trm checkpoint import", "trm checkpoint export", "trm email train", "trm email classify",
        "trm email explain", "trm email learn", "trm email sort", "trm email serve", "trm email eval",
        "trm data build email", "trm data build text", "trm report",
    ):  # fmt: skip
        assert any(command.startswith(important) for command in shown), important
    assert any(
        Path(command.split()[2]).suffix == ".yaml" for command in shown if command.startswith("trm train")
    )
    assert any("--png" in command for command in shown)
    assert any("--gif" in command for command in shown)
    assert any("--new-head" in command for command in shown)
    files = [block.file for page in PAGES_TO_RUN for block in blocks_of(page) if block.file]
    assert {Path(name).suffix for name in files} == {".py", ".yaml"}


def mentioned_commands(page: Path) -> list[str]:
    """Return the commands in code blocks and in backticks."""
    inline = re.findall(r"`(trm [^`]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    return [command for command in (*commands_of(page), *inline) if command.startswith("trm ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_that_a_page_mentions_exists(page):
    for text in mentioned_commands(page):
        words = text.split()[1:]
        command: click.Command = cli
        while isinstance(command, click.Group) and words and words[0].islower() and words[0][0] != "-":
            assert words[0] in command.commands, f"{page.name}: {text}"
            command = command.commands[words.pop(0)]
        shown = [each for each in command.params if not getattr(each, "hidden", False)]
        known = {"--help", "--version"}.union(*((*each.opts, *each.secondary_opts) for each in shown))
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= known, f"{page.name}: {text}"


@pytest.mark.parametrize(
    ("name", "generator"),
    [("commands", command_reference), ("keys", key_reference)],
    ids=["commands", "keys"],
)
def test_a_generated_reference_is_up_to_date(name, generator):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert text == generator.reference(), "run `make docs`"


def test_every_key_and_every_section_has_a_description():
    found = dict(key_reference.keys())
    assert len(found) > 90
    assert {
        "seed",
        "training.curriculum.share",
        "data.loading.chunk_size_mb",
        "limits.memory_limit_mb",
    } <= set(found)
    for key, schema in found.items():
        assert schema.get("description", "").endswith((".", ").")), key
    for prefix, schema in key_reference.sections():
        assert schema["description"].endswith("."), prefix


def test_every_option_of_a_command_has_help():
    def all_commands(command):
        yield command
        for inner in getattr(command, "commands", {}).values():
            yield from all_commands(inner)

    for command in all_commands(cli):
        assert command.help, command.name
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.help, f"{command.name} {parameter.opts}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


def test_every_link_inside_the_project_leads_somewhere():
    for document in (*PAGES, ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert "://" in target or (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_text_after_a_table_is_not_a_row_of_it(page):
    assert re.findall(r"^\|.*\n(?!\|)\S.*", page.read_text(encoding="utf-8"), re.MULTILINE) == []


def test_every_recipe_is_in_a_table():
    rows = [
        line
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert any(f"`{path.stem}`" in row.split("|")[1] for row in rows), path.stem
