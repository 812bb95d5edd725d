"""The supervisor: real trainers, really killed, starved and interrupted."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from processes import trainer_of, wait_for
from safetensors.torch import load_file
from tiny import FOUR, MIXER, TINY, TRM, Recorder, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.children import ChildDied
from macbook_optimization.errors import ConfigError, DataError, MemoryBudgetError, RunError
from macbook_optimization.hardware_detection import GIB, available_memory
from trm.runs import Run, list_runs, set_aside
from trm.training.loop import NO_MEMORY, Limits
from trm.training.supervisor import _remaining, plan_after, prepare, supervise


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


# What is decided


def died(number=None, code=1, bug=False):
    return ChildDied(-number if number else code, bug, "")


def test_a_killed_trainer_goes_on_with_ever_smaller_cuts(dataset):
    plan = plan_of(run_config(dataset))
    seen = []
    for _ in range(6):
        seen.append((plan.micro_batch_size, plan.accumulation_steps, plan.gradient_checkpointing))
        plan = plan_after(died(signal.SIGKILL), plan, num_slots=6)
    assert seen == [(6, 1, "none"), (3, 2, "none"), (1, 6, "none"), *[(1, 6, "all")] * 3]


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGBUS, signal.SIGSEGV])
def test_other_deaths_are_answered_like_one_for_memory(dataset, number):
    assert plan_after(died(number), plan_of(run_config(dataset)), 6).micro_batch_size == 3


def test_a_missing_instruction_means_float32(dataset):
    plan = plan_of(run_config(dataset, plan={"precision": "bfloat16"}))
    assert plan_after(died(signal.SIGILL), plan, 6).precision == "float32"
    with pytest.raises(RunError, match="lacks an instruction"):
        plan_after(died(signal.SIGILL), plan_of(run_config(dataset)), 6)


def test_an_import_that_got_no_memory_is_no_bug(dataset):
    death = ChildDied(1, True, "ImportError('libx.so: failed to map segment from shared object')")
    assert plan_after(death, plan_of(run_config(dataset)), 6).micro_batch_size == 3


def test_a_bug_is_not_tried_again(dataset):
    with pytest.raises(RunError, match="unexpected error, shown above"):
        plan_after(died(bug=True), plan_of(run_config(dataset)), 6)


@pytest.mark.parametrize("death", [died(code=130), died(signal.SIGINT), died(signal.SIGTERM)])
def test_a_trainer_that_was_asked_to_stop_is_not_started_again(dataset, death):
    with pytest.raises(KeyboardInterrupt):
        plan_after(death, plan_of(run_config(dataset)), 6)


# What is prepared


def test_a_missing_dataset_is_built_if_the_recipe_says_how(tmp_path):
    build = {"size": 4, "difficulty": "easy", "train": 40, "test": 12}
    by_hand = {"threads": 1, "micro_batch_size": 6}
    config = run_config(tmp_path, data={"path": str(tmp_path / "set"), "build": build}, plan=by_hand)
    assert prepare(config, tmp_path / "run", Recorder()).plan.micro_batch_size == 6
    assert (tmp_path / "set" / "train").is_dir()
    with pytest.raises(DataError, match="There is no dataset"):
        prepare(run_config(tmp_path / "nowhere"), tmp_path / "other", Recorder())
    misspelt = run_config(tmp_path, data={"path": str(tmp_path / "third"), "build": {"sise": 4}})
    with pytest.raises(ConfigError, match="unknown key sise; did you mean size"):
        prepare(misspelt, tmp_path / "other", Recorder())


def test_a_fresh_start_sets_the_old_run_aside(tmp_path, dataset):
    run(run_config(dataset), tmp_path / "run", max_step=1)
    letters = tmp_path / "letters"
    letters.mkdir()
    assert set_aside(letters) is None, "an empty directory is in nobody's way"
    (letters / "letter.txt").write_text("dear")
    with pytest.raises(RunError, match="is not a run, so it stays"):
        set_aside(letters)
    other = run_config(dataset, seed=1, plan={"threads": 1, "micro_batch_size": 6})
    prepare(other, tmp_path / "run", Recorder(), fresh=True)
    assert [summary.path for summary in list_runs(tmp_path)] == [str(tmp_path / "run.1")]


def test_impossible_plan_settings_are_corrected_with_a_warning(tmp_path, dataset):
    display = Recorder()
    config = run_config(dataset, plan={"threads": 10_000, "micro_batch_size": 999})
    plan = prepare(config, tmp_path / "run", display).plan
    assert (plan.micro_batch_size, plan.threads) == (6, psutil.cpu_count(logical=False))
    warnings = [text for text in display.messages if text.startswith("warning: ")]
    assert len(warnings) == 2
    assert "plan.threads is" in warnings[0]
    assert "instead of 10000" in warnings[0]


def test_deterministic_training_goes_on_with_the_plan_that_it_has(tmp_path, dataset):
    changes = {"training__deterministic": True, "training__effective_batch_size": 8}
    first = run_config(dataset, plan={"threads": 1, "micro_batch_size": 4}, **changes)
    run(first, tmp_path / "run", max_step=1)
    torch.use_deterministic_algorithms(False)
    as_measured = run_config(dataset, plan={}, **changes)
    assert prepare(as_measured, tmp_path / "run", Recorder()).plan.micro_batch_size == 4
    by_hand = run_config(dataset, plan={"threads": 1, "micro_batch_size": 2}, **changes)
    assert prepare(by_hand, tmp_path / "run", Recorder()).plan.micro_batch_size == 2


def test_a_recipe_without_a_model_gets_the_size_for_this_machine(tmp_path, dataset):
    config = run_config(dataset, plan={"threads": 1, "micro_batch_size": 2})
    tree = config.model_dump(mode="json", exclude={"model"})
    display = Recorder()
    job = prepare(type(config).model_validate(tree), tmp_path / "run", display)
    assert job.config.model.hidden_size in (256, 384, 512)
    assert any("names no model" in text for text in display.messages)
    run(config, tmp_path / "other", max_step=1)
    again = prepare(type(config).model_validate(tree), tmp_path / "other", Recorder())
    assert again.config.model == config.model, "a run keeps the model that it has"


# What is measured


@pytest.mark.slow
def test_a_plan_is_measured_explained_and_remembered(tmp_path, dataset, monkeypatch):
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("trm.training.measuring.BUSY_PERCENT", 101)
    display = Recorder()
    config = run_config(dataset, plan={"memory_limit_mb": 4000})
    job = prepare(config, tmp_path / "run", display)
    assert job.plan.predicted_peak_bytes < job.plan.budget_bytes
    assert {"micro_batch_size", "threads", "memory", "precision"} <= set(job.plan.reasons)
    assert any("Measuring" in text for text in display.messages)
    again = Recorder()
    assert prepare(config, tmp_path / "run", again).plan.memory == job.plan.memory
    assert not any("Measuring" in text for text in again.messages)


@pytest.mark.slow
def test_a_model_that_cannot_fit_is_refused_with_choices_and_fitted_on_request(tmp_path, dataset):
    too_large = {"hidden_size": 1024, "mlp_t": True, "pos_encodings": "none", "L_cycles": 1, "H_cycles": 1}
    config = run_config(dataset, model=too_large, plan={"memory_limit_mb": 500, "threads": 1})
    with pytest.raises(
        MemoryBudgetError, match=r"needs about \d+ MiB.*Recipes that should fit: model.hidden"
    ):
        prepare(config, tmp_path / "run", Recorder())
    display = Recorder()
    job = prepare(config, tmp_path / "run", display, fit=True)
    assert 128 <= job.config.model.hidden_size < 1024
    assert job.plan.predicted_peak_bytes < 500 * 2**20
    assert any("--fit changes it:\n  model.hidden_size=" in text for text in display.messages)


@pytest.mark.parametrize(
    ("loading", "said"), [({}, []), ({"force_streaming_mode": True}, ["Data: streaming."])]
)
def test_a_set_that_is_not_held_in_memory_is_explained(tmp_path, dataset, loading, said):
    data = {"path": str(dataset), "loading": loading}
    by_hand = {"threads": 1, "micro_batch_size": 2}
    display = Recorder()
    prepare(run_config(dataset, data=data, plan=by_hand), tmp_path / "run", display)
    assert [text[:16] for text in display.messages if text.startswith("Data")] == said


# What happens to real trainers


def start(cwd, name, *overrides):
    command = [
        TRM,
        "train",
        "sudoku-6x6",
        *FOUR,
        *TINY,
        "plan.micro_batch_size=16",
        *overrides,
        "--run",
        name,
    ]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(run_directory, step, deadline, of="metrics.jsonl"):
    while time.monotonic() < deadline:
        if any(row.get("step", 0) >= step for row in Run(run_directory).rows(of)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


@pytest.mark.slow
def test_a_trainer_killed_with_sigkill_goes_on_by_itself_and_learns_the_same(tmp_path):
    """At a low rate: what is left between the two runs is rounding, which a high one would blow up."""
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
    assert "was killed by SIGKILL. Going on from the newest checkpoint with 2 x 8 examples" in errors
    events = Run(tmp_path / "killed").rows("events.jsonl")
    assert [row["event"] for row in events] == ["plan", "restarted", "resumed", "plan", "stopped"]
    assert events[3]["micro_batch_size"] == 8
    first, second = (Run(tmp_path / name).checkpoints().newest_good() for name in ("whole", "killed"))
    assert first.step == second.step == 60
    one, other = first.load("weights"), second.load("weights")
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-5, msg=name)
    early = load_file(tmp_path / "killed" / "checkpoints" / "step-00000005" / "weights.safetensors")
    moved = other["lm_head.weight"] - early["lm_head.weight"]
    assert float(moved.abs().max()) > 1e-3, "so little was learned that this test shows nothing"


@pytest.mark.slow
def test_three_kills_at_the_smallest_plan_are_enough(tmp_path):
    parent = start(tmp_path, "run", "training.max_steps=100000", "plan.micro_batch_size=1",
                   "plan.gradient_checkpointing=all")  # fmt: skip
    for _ in range(3):
        trainer = trainer_of(parent)
        trainer.kill()
        trainer.wait(10)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert "was killed by SIGKILL, 3 times with the smallest plan there is" in errors
    assert "needs about" in errors
    assert errors.count("error: ") == 1


@pytest.mark.slow
def test_kills_with_progress_between_them_are_no_reason_to_give_up(tmp_path):
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
    assert errors.count("Going on from the newest checkpoint") == 4


@pytest.mark.slow
def test_data_that_are_cut_short_while_they_are_read_are_named(tmp_path):
    """Reading a map beyond the end of its file kills the process."""
    parent = start(tmp_path, "run", "training.max_steps=100000", "data.loading.enable_caching=false")
    trainer_of(parent)
    wait_for(lambda: Run(tmp_path / "run").rows())
    os.truncate(tmp_path / "set" / "train" / "all__inputs.npy", 0)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert "all__inputs.npy is truncated" in errors
    assert errors.count("error: ") == 1


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_trainer_behind(tmp_path):
    parent = start(tmp_path, "run", "training.max_steps=100000")
    deadline = time.monotonic() + 60
    trainer = trainer_of(parent)
    wait_for_step(tmp_path / "run", 1, deadline)
    parent.kill()
    parent.communicate()
    psutil.wait_procs([trainer], timeout=20)
    assert not trainer.is_running()
    assert Run(tmp_path / "run").rows("events.jsonl")[-1]["reason"] == "interrupted"


@pytest.mark.slow
def test_pausing_and_going_on_reaches_the_trainer(tmp_path):
    parent = start(tmp_path, "run", "training.max_steps=100000")
    deadline = time.monotonic() + 60
    trainer = trainer_of(parent)
    wait_for_step(tmp_path / "run", 1, deadline)
    parent.send_signal(signal.SIGTSTP)
    while trainer.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.02)
    assert trainer.status() == psutil.STATUS_STOPPED
    os.kill(parent.pid, signal.SIGCONT)
    while trainer.status() == psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.02)
    parent.send_signal(signal.SIGTERM)
    output, errors = parent.communicate(timeout=60)
    assert parent.returncode == 130, errors
    assert "Stopped after step" in output


HOG = """
import sys, time
block = bytearray(int(sys.argv[1]))
block[::4096] = b"x" * len(block[::4096])
print("full", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_program_that_takes_most_of_the_memory_is_given_way_to_until_it_ends(tmp_path):
    """It really takes 70 % of what is free, and no more than 24 GiB of it."""
    parent = start(tmp_path, "run", "training.max_steps=1000000", "evaluation.every_steps=1000000")
    deadline = time.monotonic() + 150
    trainer_of(parent)
    wait_for_step(tmp_path / "run", 1, deadline)
    time.sleep(2)
    size = min(int(0.7 * available_memory()), 24 * GIB)
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def events():
        return [row["event"] for row in Run(tmp_path / "run").rows("events.jsonl")]

    try:
        assert hog.stdout.readline() == "full\n"
        while "batch shrunk" not in events() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "batch shrunk" in events()
    finally:
        hog.communicate()
    while "batch grown" not in events() and time.monotonic() < deadline:
        time.sleep(0.1)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 130, errors
    assert events() == ["plan", "data mapped", "batch shrunk", "batch grown", "stopped"]


BASE = """
import numpy, torch
torch.randn(64, 64) @ torch.randn(64, 64)
print(next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmSize")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
@pytest.mark.parametrize("more_mb", [100, 300])
def test_under_a_limit_a_run_finishes_or_says_what_it_needs(tmp_path, more_mb):
    base = int(subprocess.check_output([sys.executable, "-c", BASE]))
    limit = base + more_mb * 2**20
    command = [
        TRM, "train", "sudoku-6x6", *FOUR, *MIXER, "model.hidden_size=640",
        "training.supervision=deep", "training.effective_batch_size=4", "training.max_steps=2",
        "evaluation.target_accuracy=null",
    ]  # fmt: skip

    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    measured = [*command, "plan.memory_limit_mb=8000"]  # by a probe that has room, for both
    free = subprocess.run([*measured, "--run", "free"], cwd=tmp_path, capture_output=True, text=True)
    assert free.returncode == 0, free.stderr
    done = subprocess.run(
        [*command, "--run", "limited"], cwd=tmp_path, capture_output=True, text=True, preexec_fn=limited
    )
    assert "Traceback" not in done.stderr
    if done.returncode == 0:
        one, other = (
            Run(tmp_path / name).checkpoints().newest_good().load("weights") for name in ("free", "limited")
        )
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    else:
        assert done.returncode == 1
        assert "This recipe needs about" in done.stderr


def test_a_step_that_gets_no_memory_is_done_again_with_smaller_cuts(tmp_path, dataset, monkeypatch):
    """An allocator that gives nothing to more than two examples at a time."""
    from trm.backends.pytorch import step

    real = step.TinyRecursiveModel.forward

    def starved(self, inputs, *more):
        if len(inputs) > 2 and torch.is_grad_enabled():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return real(self, inputs, *more)

    run(run_config(dataset), tmp_path / "free")
    monkeypatch.setattr(step.TinyRecursiveModel, "forward", starved)
    run(run_config(dataset), tmp_path / "starved")
    events = [row for row in Run(tmp_path / "starved").rows("events.jsonl") if row["event"] == "batch shrunk"]
    assert [(row["before"], row["after"]) for row in events] == [(6, 3), (3, 1)]
    assert Run(tmp_path / "starved").checkpoints().newest_good().step == 20


def test_a_step_that_gets_no_memory_at_all_ends_the_trainer_not_the_run(tmp_path, dataset, monkeypatch):
    from trm.backends.pytorch import step
    from trm.training.loop import train_in_child

    def starved(self, inputs, *more):
        raise MemoryError

    monkeypatch.setattr(step.TinyRecursiveModel, "forward", starved)
    config = run_config(dataset)
    with pytest.raises(SystemExit) as ended:
        train_in_child(
            config.model_dump(mode="json"), str(tmp_path / "run"), plan_of(config).to_json(), {}, {}, print
        )
    assert ended.value.code == NO_MEMORY


def test_a_time_limit_holds_over_restarts():
    assert _remaining(Limits(max_seconds=60, max_step=5), seconds=45) == Limits(max_seconds=15, max_step=5)
    assert _remaining(Limits(max_seconds=60), seconds=100).max_seconds == 0
    assert _remaining(Limits(), seconds=100) == Limits()


@pytest.mark.slow
def test_a_supervised_run_stops_when_its_time_is_up_and_describes_its_machine(tmp_path, dataset):
    config = run_config(dataset, plan={"threads": 1, "micro_batch_size": 6}, training__max_steps=10**6)
    job = prepare(config, tmp_path / "run", Recorder())
    started = time.monotonic()
    assert supervise(job, Limits(max_seconds=0.5)).reason == "limit"
    assert time.monotonic() - started < 60
    assert Path(tmp_path / "run" / "hardware.json").is_file()
