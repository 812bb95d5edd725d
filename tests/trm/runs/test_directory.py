"""The directory of a run: links, files in its place, and runs that are complete or absent."""

import errno
import os

import pytest
from tiny import run_config

from macbook_optimization.errors import RunError
from trm.runs.directory import Run, begin, check_path, new_run, only_trainer, open_run, set_aside
from trm.runs.listing import list_runs


@pytest.fixture
def config(tmp_path):
    return run_config(tmp_path / "nowhere")


@pytest.fixture
def linked(tmp_path, config):
    """A link to a run on another disk."""
    begin(Run(tmp_path / "disk" / "mine"), config)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to("../disk/mine")
    return tmp_path / "runs" / "link"


def test_a_run_behind_a_link_is_set_aside_again_and_again(linked, config):
    for number in (1, 2, 3):
        aside = set_aside(linked)
        assert aside == linked.parents[1] / "disk" / f"mine.{number}"
        assert (aside / "recipe.yaml").is_file()
        assert os.readlink(linked) == "../disk/mine"
        assert list(linked.iterdir()) == []
        with only_trainer(linked):
            begin(open_run(linked, config), config)
        assert (linked.parents[1] / "disk" / "mine" / "recipe.yaml").is_file()


def test_a_dangling_or_looping_link_is_refused_with_a_hint_that_fits(tmp_path, config):
    (tmp_path / "dangling").symlink_to("unplugged/mine")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    for name in ("dangling", "loop"):
        for use in (check_path, set_aside, lambda path: open_run(path, config), lambda path: enter(path)):
            with pytest.raises(RunError, match="is a symbolic link that leads nowhere") as refused:
                use(tmp_path / name)
            assert "remove the link" in refused.value.hint
    assert sorted(tmp_path.iterdir()) == before


def enter(path):
    with only_trainer(path):
        pass


def test_a_file_in_the_place_of_a_run_is_named(tmp_path, config):
    (tmp_path / "file").write_text("text")
    for use in (lambda path: open_run(path, config), enter, set_aside):
        with pytest.raises(RunError, match="is a file, not a run directory") as refused:
            use(tmp_path / "file")
        assert refused.value.hint == "Use another --run directory."
    with pytest.raises(RunError, match="Cannot create the run directory") as refused:
        enter(tmp_path / "file" / "run")
    assert "a file is in its place" in refused.value.hint


@pytest.mark.parametrize("there", ["nothing", "an empty directory", "what a killed start left"])
def test_a_new_run_is_complete_or_absent(tmp_path, config, there):
    path = tmp_path / "runs" / "new"
    if there != "nothing":
        path.mkdir(parents=True)
    if there == "what a killed start left":
        (path / ".recipe.yaml.partial").write_text("task: su")
    before = sorted(tmp_path.rglob("*"))

    def fail(error):
        with new_run(path, config) as run:
            run.write("plan.json", "{}")
            raise error

    for error in (RunError("refused"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises((RunError, KeyboardInterrupt)) as refused:
            fail(error)
        assert sorted(tmp_path.rglob("*")) == before
    assert refused.value.hint == "Free some disk space."
    with new_run(path, config) as run:
        run.write("plan.json", "{}")
    assert sorted(file.name for file in path.iterdir()) == ["plan.json", "recipe.yaml"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["new"]


def test_a_new_run_does_not_replace_one_that_appeared_meanwhile(tmp_path, config):
    def create():
        with new_run(tmp_path / "run", config):
            begin(Run(tmp_path / "run"), config)
            (tmp_path / "run" / "metrics.jsonl").write_text("{}")

    with pytest.raises(RunError, match="Directory not empty"):
        create()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}"


@pytest.mark.parametrize("name", ["recipe.yaml", "plan.json", "metrics.jsonl", "best"])
def test_a_pipe_in_a_run_does_not_block(tmp_path, config, name):
    run = Run(tmp_path / "run")
    begin(run, config)
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    (summary,) = list_runs(tmp_path)
    assert summary.state == "new"
    assert (summary.problem is None) == (name in ("plan.json", "best"))
    assert run.plan is None
    if name == "metrics.jsonl":
        with pytest.raises(RunError, match="it is a pipe"):
            run.append(name, {})


def test_a_plan_that_is_nested_too_deeply_is_like_none(tmp_path):
    (tmp_path / "plan.json").write_text("[" * 100_000)
    assert Run(tmp_path).plan is None
