"""The supervisor: what it decides after a death, and real trainers that are killed, starved and stopped."""

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from processes import trainer_of, wait_for
from safetensors.torch import load_file
from tiny import FOUR, MIXER, TINY, TRM, Recorder, plan_of, run_config, sudoku_dataset

from macbook_optimization.children import ChildDied
from macbook_optimization.errors import RunError
from macbook_optimization.hardware_detection import GIB, available_memory
from macbook_optimization.memory_management import MemoryModel
from trm.plan import Execution, Plan
from trm.runs.directory import EVENTS, METRICS, Run
from trm.runs.events import Advised
from trm.training.loop import Limits
from trm.training.preparation import prepare
from trm.training.start import OUT_OF_MEMORY
from trm.training.supervisor import (
    MAX_KEPT_PLANS,
    GiveUp,
    History,
    ProbeFirst,
    Restart,
    _remaining,
    next_plan,
    smaller_plan,
    supervise,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


# Decisions

PLAN = Plan.of(Execution(), 6, num_slots=6)
SMALLEST = Plan.of(Execution(gradient_checkpointing="all"), 1, num_slots=6)
PROVISIONAL = replace(PLAN, provisional=True)


def died(number=None, code=1, bug=False):
    return ChildDied(-number if number else code, bug, "")


KILLED = died(signal.SIGKILL)
NO_ROOM = died(code=OUT_OF_MEMORY)


def test_a_killed_trainer_resumes_with_ever_smaller_micro_batches():
    plan = PLAN
    seen = []
    for _ in range(6):
        how = plan.execution.gradient_checkpointing
        seen.append((plan.micro_batch_size, plan.accumulation_steps, how))
        plan = smaller_plan(KILLED, plan, num_slots=6)
    assert seen == [(6, 1, "none"), (3, 2, "none"), (1, 6, "none"), *[(1, 6, "all")] * 3]


def test_a_smaller_plan_gives_its_reason_and_predicts_its_memory():
    smaller = smaller_plan(KILLED, replace(PLAN, memory=MemoryModel(100, 10)), num_slots=6)
    assert smaller.reasons["micro_batch_size"] == "the trainer was killed by SIGKILL"
    assert smaller.predicted_peak_bytes == 130


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV])
def test_other_fatal_signals_are_treated_like_an_oom_kill(number):
    assert smaller_plan(died(number), PLAN, 6).micro_batch_size == 3


def test_a_missing_instruction_falls_back_to_float32():
    plan = PLAN.with_execution(precision="bfloat16")
    assert smaller_plan(died(signal.SIGILL), plan, 6).execution.precision == "float32"
    with pytest.raises(RunError, match="lacks an instruction"):
        smaller_plan(died(signal.SIGILL), PLAN, 6)


def test_an_import_that_ran_out_of_memory_is_not_a_bug():
    death = ChildDied(1, True, "ImportError('libx.so: failed to map segment from shared object')")
    assert smaller_plan(death, PLAN, 6).micro_batch_size == 3


def test_a_bug_is_not_retried():
    with pytest.raises(RunError, match="unexpected error, shown above"):
        smaller_plan(died(bug=True), PLAN, 6)


@pytest.mark.parametrize("death", [died(code=130), died(signal.SIGINT), died(signal.SIGTERM)])
def test_a_trainer_that_was_asked_to_stop_is_not_started_again(death):
    with pytest.raises(KeyboardInterrupt):
        smaller_plan(death, PLAN, 6)


@pytest.mark.parametrize(
    ("death", "plan", "history", "keep_plan", "decision"),
    [
        # A kill and a failed allocation both lower the plan.
        (KILLED, PLAN, History(3), False, Restart(smaller_plan(KILLED, PLAN, 6), History(3))),
        (NO_ROOM, PLAN, History(3), False, Restart(smaller_plan(NO_ROOM, PLAN, 6), History(3))),
        # A missing instruction changes the precision, and nothing else.
        (
            died(signal.SIGILL),
            PLAN.with_execution(precision="bfloat16"),
            History(),
            False,
            Restart(
                PLAN.with_execution({"precision": "the trainer was killed by SIGILL"}, precision="float32"),
                History(),
            ),
        ),
        # A provisional plan says nothing about memory, so a probe measures it, whatever the death was.
        (KILLED, PROVISIONAL, History(), False, ProbeFirst(History())),
        (NO_ROOM, PROVISIONAL, History(), False, ProbeFirst(History())),
        (KILLED, replace(SMALLEST, provisional=True), History(), False, ProbeFirst(History())),
        # Deterministic training keeps its plan after a kill that was not for memory, some times.
        (KILLED, PLAN, History(5), True, Restart(PLAN, History(5, kept_plans=1))),
        (KILLED, PROVISIONAL, History(5), True, Restart(PROVISIONAL, History(5, kept_plans=1))),
        (
            KILLED,
            PLAN,
            History(5, kept_plans=MAX_KEPT_PLANS - 1),
            True,
            Restart(PLAN, History(5, kept_plans=MAX_KEPT_PLANS)),
        ),
        (
            KILLED,
            PLAN,
            History(5, kept_plans=MAX_KEPT_PLANS),
            True,
            Restart(smaller_plan(KILLED, PLAN, 6), History(5, kept_plans=MAX_KEPT_PLANS)),
        ),
        # The smallest plan gets three attempts without progress; a failed allocation would only repeat.
        (KILLED, SMALLEST, History(7), False, Restart(SMALLEST, History(7, at_smallest_plan=1))),
        (KILLED, SMALLEST, History(7, 1), False, Restart(SMALLEST, History(7, at_smallest_plan=2))),
        (KILLED, SMALLEST, History(7, 2), False, GiveUp(deaths=3)),
        (NO_ROOM, SMALLEST, History(7), False, GiveUp(deaths=1)),
    ],
)
def test_what_follows_a_death(death, plan, history, keep_plan, decision):
    assert next_plan(death, plan, history, num_slots=6, keep_plan=keep_plan) == decision


def test_a_checkpoint_between_two_deaths_resets_the_history():
    history = History(step=7, at_smallest_plan=2, kept_plans=4)
    assert history.at(7) is history
    assert history.at(8) == History(8)
    assert History().at(None) == History()
    assert next_plan(KILLED, SMALLEST, history.at(8), 6, keep_plan=False) == Restart(SMALLEST, History(8, 1))


@pytest.mark.parametrize("plan", [PLAN, PROVISIONAL, SMALLEST])
def test_no_decision_hides_a_bug_or_ignores_a_stop_request(plan):
    with pytest.raises(RunError, match="unexpected error"):
        next_plan(died(bug=True), plan, History(), 6, keep_plan=False)
    with pytest.raises(KeyboardInterrupt):
        next_plan(died(signal.SIGTERM), plan, History(), 6, keep_plan=False)


def test_a_time_limit_covers_all_restarts_together():
    assert _remaining(Limits(max_seconds=60, max_step=5), seconds=45) == Limits(max_seconds=15, max_step=5)
    assert _remaining(Limits(max_seconds=60), seconds=100).max_seconds == 0
    assert _remaining(Limits(), seconds=100) == Limits()


@pytest.mark.slow
def test_a_trainer_without_memory_for_one_example_exits_with_its_own_code(tmp_path, dataset, monkeypatch):
    from trm.backends.pytorch.model import TinyRecursiveModel
    from trm.training.start import train_in_child

    def starved(self, inputs, *more):
        raise MemoryError

    monkeypatch.setattr(TinyRecursiveModel, "forward", starved)
    config = run_config(dataset)
    recipe = config.model_dump(mode="json")
    start = {"limits": {}, "quiet": True}
    with pytest.raises(SystemExit) as ended:
        train_in_child(recipe, str(tmp_path / "run"), plan_of(config).to_json(), start, {}, print)
    assert ended.value.code == OUT_OF_MEMORY


# Real trainers


def start(cwd, name, *overrides):
    command = [
        TRM, "train", "sudoku-6x6", *FOUR, *TINY, "plan.micro_batch_size=16", *overrides, "--run", name,
    ]  # fmt: skip
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_a_row(run_directory):
    wait_for(lambda: Run(run_directory).rows(METRICS))


@pytest.mark.slow
def test_a_trainer_killed_with_sigkill_resumes_by_itself_and_learns_the_same(tmp_path):
    """At a low learning rate: the two runs differ by rounding, which a high one would amplify."""
    long = (
        "training.max_steps=60", "training.learning_rate=1e-4", "training.lr_min_ratio=1",
        "model.hidden_size=64",
        "checkpoints.every_steps=5", "checkpoints.keep=100", "evaluation.every_steps=60",
    )  # fmt: skip
    whole = start(tmp_path, "whole", *long)
    assert whole.wait(timeout=120) == 0, whole.stderr.read()
    killed = start(tmp_path, "killed", *long)
    deadline = time.monotonic() + 60
    trainer = trainer_of(killed)
    while not (tmp_path / "killed" / "checkpoints" / "step-00000010").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    trainer.kill()
    _, errors = killed.communicate(timeout=120)
    assert killed.returncode == 0, errors
    assert "was killed by SIGKILL. Resuming from the newest checkpoint with 2 x 8 examples" in errors
    events = Run(tmp_path / "killed").rows(EVENTS)
    assert [row["event"] for row in events] == [
        "plan", "data", "restarted", "resumed", "plan", "data", "stopped",
    ]  # fmt: skip
    assert events[4]["micro_batch_size"] == 8
    first, second = (Run(tmp_path / name).checkpoints().newest_intact() for name in ("whole", "killed"))
    assert first.step == second.step == 60
    one, other = first.load("weights"), second.load("weights")
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-5, msg=name)
    early = load_file(tmp_path / "killed" / "checkpoints" / "step-00000005" / "weights.safetensors")
    moved = other["lm_head.weight"] - early["lm_head.weight"]
    assert float(moved.abs().max()) > 1e-3, "so little was learned that this test shows nothing"


@pytest.mark.slow
def test_after_three_kills_at_the_smallest_plan_the_supervisor_gives_up(tmp_path):
    parent = start(tmp_path, "run", "training.max_steps=100000", "plan.micro_batch_size=1",
                   "plan.gradient_checkpointing=all")  # fmt: skip
    for _ in range(3):
        trainer = trainer_of(parent)
        trainer.kill()
        trainer.wait(10)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert "was killed by SIGKILL, 3 times with the smallest possible plan" in errors
    assert "needs about" in errors
    assert errors.count("error: ") == 1


@pytest.mark.slow
def test_kills_with_progress_between_them_do_not_end_the_run(tmp_path):
    parent = start(tmp_path, "run", "training.max_steps=100000", "plan.micro_batch_size=1",
                   "plan.gradient_checkpointing=all", "checkpoints.every_steps=2")  # fmt: skip
    checkpoints = Run(tmp_path / "run").checkpoints()
    for _ in range(4):
        trainer, before = trainer_of(parent), checkpoints.newest_step() or 0
        wait_for(lambda before=before: (checkpoints.newest_step() or 0) > before)
        trainer.kill()
        trainer.wait()
    trainer_of(parent)
    assert parent.poll() is None
    parent.send_signal(signal.SIGTERM)
    _, errors = parent.communicate(timeout=60)
    assert errors.count("Resuming from the newest checkpoint") == 4


@pytest.mark.slow
def test_a_data_file_that_is_truncated_during_training_is_named(tmp_path):
    """Reading a mapped file beyond its end kills the process."""
    parent = start(tmp_path, "run", "training.max_steps=100000", "data.loading.enable_caching=false")
    trainer_of(parent)
    wait_for_a_row(tmp_path / "run")
    os.truncate(tmp_path / "set" / "train" / "all__inputs.npy", 0)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert "all__inputs.npy is truncated" in errors
    assert errors.count("error: ") == 1


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_trainer_behind(tmp_path):
    parent = start(tmp_path, "run", "training.max_steps=100000")
    trainer = trainer_of(parent)
    wait_for_a_row(tmp_path / "run")
    parent.kill()
    parent.communicate()
    psutil.wait_procs([trainer], timeout=20)
    assert not trainer.is_running()
    assert Run(tmp_path / "run").rows(EVENTS)[-1]["reason"] == "interrupted"


@pytest.mark.slow
def test_pausing_and_continuing_reaches_the_trainer(tmp_path):
    parent = start(tmp_path, "run", "training.max_steps=100000")
    trainer = trainer_of(parent)
    wait_for_a_row(tmp_path / "run")
    parent.send_signal(signal.SIGTSTP)
    for process in (trainer, psutil.Process(parent.pid)):  # as a shell waits before it continues a job
        wait_for(lambda process=process: process.status() == psutil.STATUS_STOPPED)
    os.kill(parent.pid, signal.SIGCONT)
    wait_for(lambda: trainer.status() != psutil.STATUS_STOPPED)
    parent.send_signal(signal.SIGTERM)
    output, errors = parent.communicate(timeout=60)
    assert parent.returncode == 130, errors
    assert "Stopped after step" in output


# Takes memory piece by piece until its standard input is closed, and at most as much as it is given.
HOG = """
import mmap, select, sys
blocks, step = [], 2**28
while not select.select([sys.stdin], [], [], 0)[0]:
    if len(blocks) * step < int(sys.argv[1]):
        blocks.append(mmap.mmap(-1, step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        blocks[-1][::4096] = b"x" * (step // 4096)
    else:
        sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.alone
def test_micro_batches_are_smaller_while_another_program_takes_much_of_the_memory(tmp_path):
    """It really takes memory until the run reacts: about 15 % of what is available, and 70 % at most."""
    in_use = psutil.virtual_memory().percent
    parent = start(
        tmp_path, "run", "training.max_steps=1000000", "evaluation.every_steps=1000000",
        f"limits.memory_pressure_threshold={in_use + 0.15 * (100 - in_use)}",  # not to fill all of it
    )  # fmt: skip
    trainer_of(parent)
    wait_for_a_row(tmp_path / "run")
    size = min(int(0.7 * available_memory()), 24 * GIB)
    hog = subprocess.Popen([sys.executable, "-c", HOG, str(size)], stdin=subprocess.PIPE)

    def events():
        return [row["event"] for row in Run(tmp_path / "run").rows(EVENTS)]

    try:
        wait_for(lambda: "batch shrunk" in events(), seconds=150)
    finally:
        hog.communicate()
    wait_for(lambda: "batch grown" in events(), seconds=90)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 130, errors
    happened = [name for name in events() if name != Advised.name]  # other programs may be busy, too
    assert happened == ["plan", "data", "data mapped", "batch shrunk", "batch grown", "stopped"]


BASE = """
import numpy, torch
torch.randn(64, 64) @ torch.randn(64, 64)
print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize")))
"""


TOO_WIDE = (
    TRM, "train", "sudoku-6x6", *FOUR, *MIXER, "model.hidden_size=640", "training.supervision=deep",
    "training.effective_batch_size=4", "training.max_steps=2", "evaluation.target_accuracy=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory):
    """A directory with a run that had all the memory it wanted; its probe serves the limited runs, too."""
    directory = tmp_path_factory.mktemp("address-space")
    command = [*TOO_WIDE, "limits.memory_limit_mb=8000", "--run", "unlimited"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
@pytest.mark.parametrize("more_mb", [100, 300])
def test_under_an_address_space_limit_a_run_finishes_or_says_what_it_needs(unlimited, more_mb):
    base = int(subprocess.check_output([sys.executable, "-c", BASE]))
    limit = base + more_mb * 2**20
    name = f"limited-{more_mb}"

    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [*TOO_WIDE, "--run", name], cwd=unlimited, capture_output=True, text=True, preexec_fn=limited
    )
    assert "Traceback" not in done.stderr
    if done.returncode == 0:
        one, other = (
            Run(unlimited / each).checkpoints().newest_intact().load("weights")
            for each in ("unlimited", name)
        )
        for tensor_name, tensor in one.items():
            torch.testing.assert_close(other[tensor_name], tensor, rtol=1e-3, atol=1e-4, msg=tensor_name)
    else:
        assert done.returncode == 1
        assert "This recipe needs about" in done.stderr


@pytest.mark.slow
def test_a_supervised_run_stops_when_its_time_is_up_and_describes_its_machine(tmp_path, dataset):
    config = run_config(dataset, plan={"threads": 1, "micro_batch_size": 6}, training__max_steps=10**6)
    job = prepare(config, tmp_path / "run", Recorder())
    started = time.monotonic()
    assert supervise(job, Limits(max_seconds=0.5)).reason == "limit"
    assert time.monotonic() - started < 60
    assert Path(tmp_path / "run" / "hardware.json").is_file()
