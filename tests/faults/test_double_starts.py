"""Two trainers in one run directory would corrupt each other's checkpoints: exactly one of them runs."""

import os
import statistics
import time

import pytest
from processes import kill, kill_all, start, trainer_of, wait_for

from macbook_optimization.errors import RunError
from trm.runs.directory import Run, only_trainer


@pytest.mark.slow
def test_exactly_one_of_two_trainers_started_together_runs(tmp_path, tally, full):
    tally, seconds = tally("two started together"), []
    for _ in range(50 if full else 4):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        began = time.monotonic()
        both = [start(tmp_path, "plan.threads=1"), start(tmp_path, "plan.threads=1")]
        wait_for(lambda both=both: any(process.poll() is not None for process in both))
        seconds.append(time.monotonic() - began)
        losers = [process for process in both if process.poll() is not None]
        winner = next(process for process in both if process not in losers)
        runs = trainer_of(winner).is_running()
        text = log.read_text()
        explained = text.count("is being trained by another process") == 1 and "hint: Wait for it" in text
        survived = len(losers) == 1 and losers[0].returncode == 1 and runs and explained
        assert tally.add(survived), text
        kill_all(winner)  # which must not leave a stale lock for the next two
    median = statistics.median(seconds)
    assert not full or median < 1
    tally.remark(f"the other one exited {median:.2f} s after its start, {max(seconds):.2f} s at most")


@pytest.mark.slow
def test_a_trainer_whose_parent_was_killed_holds_the_lock_until_it_has_saved(tmp_path):
    process = start(tmp_path)
    trainer = trainer_of(process)
    wait_for(lambda: Run(tmp_path / "run").checkpoints().newest_step())
    trainer.suspend()
    kill(process)
    process.wait()
    with pytest.raises(RunError, match=r"by another process$"), only_trainer(tmp_path / "run"):
        pass
    trainer.resume()
    trainer.wait(30)
    with only_trainer(tmp_path / "run") as lock:
        assert lock > 0
    assert Run(tmp_path / "run").rows("events.jsonl")[-1]["reason"] == "interrupted"


def test_the_lock_is_released_with_its_holder(tmp_path):
    in_use = pytest.raises(RunError, match=f"by another process, PID {os.getpid()}")
    with only_trainer(tmp_path / "run"), in_use, only_trainer(tmp_path / "run"):
        pass
    with only_trainer(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_below_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RunError, match="Cannot create the run directory"),
        only_trainer(tmp_path / "file" / "run"),
    ):
        pass
