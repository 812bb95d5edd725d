"""Ranks that compute with MLX learn what one process learns, and none of them outlives another for long."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from rank_processes import TIMEOUT_SECONDS, run_ranks, start_ranks
from ranks import thread_worlds
from test_gloo import DATA, DECODER, NUM_SLOTS, TEXT, take_step
from tiny import VARIANTS, model_config, training_config

from macbook_optimization.errors import ConfigError
from trm.backends.base import Program, load_backend
from trm.backends.world import Address, SingleProcess
from trm.plan import Execution
from trm.training.machines import LOST_PEER_CODES

pytest.importorskip("mlx.core")
pytestmark = pytest.mark.mlx

NUM_STEPS = 20
PEER_TIMEOUT_SECONDS = 4.0
ON_MLX = Execution(backend="mlx")


def learner_of(world, kind, how=ON_MLX):
    terminal = {"supervision": "terminal", "effective_batch_size": NUM_SLOTS, "max_grad_norm": 0.5}
    data = DATA
    if kind == "decoder":
        model, data = DECODER, TEXT
        training = training_config(**terminal, optimizer="adamw", loss="softmax_cross_entropy")
    else:
        model = model_config(**VARIANTS["mixer, puzzle prefix"], halt_max_steps=4)
        supervision = "deep" if kind == "deep" else "terminal"
        training = training_config(**{**terminal, "supervision": supervision}, noise=0.1)
    return load_backend(how).learner(Program(model, training, data), how, world)


def losses_of(world, kind):
    learner = learner_of(world, kind)
    return [take_step(learner, step).loss for step in range(1, NUM_STEPS + 1)], learner.digest()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recursion", "decoder"])
def test_two_processes_have_the_losses_of_one(kind):
    expected, _ = losses_of(SingleProcess(NUM_SLOTS), kind)
    (losses, digest), (others_losses, others_digest) = run_ranks(losses_of, (32, 16), kind, backend="mlx")
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    assert (losses, digest) == (others_losses, others_digest)


@pytest.mark.parametrize("message", ["bfloat16", "topk"])
def test_a_message_that_is_not_float32_is_refused_where_it_would_be_exchanged(message):
    training = training_config(gradient_message=message, effective_batch_size=NUM_SLOTS)
    program = Program(model_config(**VARIANTS["mixer"]), training, DATA)
    load_backend(ON_MLX).learner(program, ON_MLX, SingleProcess(NUM_SLOTS))
    (world, *_) = thread_worlds((32, 16))
    with pytest.raises(ConfigError, match="in float32 only"):
        load_backend(ON_MLX).learner(program, ON_MLX, world)


def differences_from_common_states(world):
    """Compare steps of these ranks with those of one process, each from the state of that process."""
    learner = learner_of(world, "deep")
    single = learner_of(SingleProcess(NUM_SLOTS), "deep") if world.writes else None
    differences = []
    for step in (1, 2, 3):
        learner.load_state(single.state() if single else {})
        found = take_step(learner, step)
        latents = learner.state()["latents"]["latents"]
        if single is not None:
            expected = take_step(single, step)
            differences.append(abs(found.loss - expected.loss))
            differences.append(float(np.abs(found.halt_margins - expected.halt_margins).max()))
            differences.append(float(abs(latents - single.latents).max()))
    return max(differences, default=0.0)


@pytest.mark.slow
def test_three_processes_make_the_steps_of_one_with_deep_supervision():
    found = run_ranks(differences_from_common_states, (24, 16, 8), backend="mlx")
    assert max(found) < 1e-5


def latents_change(world, precisions):
    """Return by how much saving and loading changes the latents of a rank with a precision of its own."""
    to_array = load_backend(ON_MLX).to_array
    learner = learner_of(world, "deep", replace(ON_MLX, precision=precisions[world.rank]))
    take_step(learner, 1)
    before = to_array(learner.latents)
    state = learner.state()
    learner.load_state(state if world.writes else {})
    assert str(learner.latents.dtype).endswith(precisions[world.rank])
    return float(np.abs(to_array(learner.latents) - before).max() / np.abs(before).max())


@pytest.mark.slow
@pytest.mark.parametrize("precisions", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_processes_of_different_precision_exchange_their_latents(precisions):
    host, guest = run_ranks(latents_change, (32, 16), precisions, backend="mlx")
    assert host == 0
    assert guest <= (2.0**-8 if precisions[0] == "bfloat16" else 0)  # the checkpoint is that of the host


def use_every_method(world):
    strange = np.array([-0.0, np.nan, np.inf, 1e-45], dtype=np.float32)  # whose bits a sum would change
    own = np.full((2, world.shares[world.rank], 3), float(world.rank), dtype=np.float32)
    whole = world.gather(own, 1)
    copied = strange if world.writes else np.zeros(4, dtype=np.float32)
    world.copy_from_writer(copied)
    back = np.zeros_like(own)
    world.scatter(whole, back, 1)
    precise = np.array([[1 / 3, world.rank], [1e-300, 2.0**60]])
    world.sum(precise.reshape(-1))
    return {
        "agreed": world.agree([2**40 + world.rank, -world.rank]),
        "told": world.broadcast({"rank": world.rank, "text": "ä"}),
        "gathered": None if whole is None else whole[0, :, 0].tolist(),
        "copied": copied.tobytes() == strange.tobytes(),
        "scattered": np.array_equal(own, back),
        "summed": precise.tolist(),
    }


@pytest.mark.slow
def test_every_bit_arrives_and_sums_are_in_the_precision_of_the_array():
    host, *guests = run_ranks(use_every_method, (2, 3, 1), backend="mlx")
    common = {
        "agreed": [2**40 + 2, 0],
        "told": {"rank": 0, "text": "ä"},
        "copied": True,
        "scattered": True,
        "summed": [[1.0, 3.0], [3e-300, 3 * 2.0**60]],
    }
    assert host == {**common, "gathered": [0.0, 0.0, 1.0, 1.0, 1.0, 2.0]}
    assert guests == [{**common, "gathered": None}] * 2


def sum_forever(world, directory):
    while True:
        world.sum(np.ones(1000, dtype=np.float32))
        (directory / str(world.rank)).touch()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_dead_or_frozen_process_ends_the_other_within_the_deadline(lost, fault, tmp_path):
    how = {"timeout_seconds": PEER_TIMEOUT_SECONDS, "backend": "mlx"}
    processes, _ = start_ranks(sum_forever, (1, 1), tmp_path, **how)
    try:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert processes[1 - lost].exitcode is None
        os.kill(processes[lost].pid, fault)
        started = time.monotonic()
        processes[1 - lost].join(3 * PEER_TIMEOUT_SECONDS)  # with time to spare on a busy machine
        assert processes[1 - lost].exitcode not in (None, 0)
        if fault == signal.SIGSTOP:  # a closed connection is noticed sooner
            assert time.monotonic() - started > PEER_TIMEOUT_SECONDS / 2
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_neighbour_that_never_connects_ends_the_process():
    """In a process of its own, as it is killed by the alarm that supervisors take for a lost machine."""
    code = (
        "from trm.backends.mlx import world\n"
        "from trm.backends.world import Place\n"
        "class Store(dict):\n"
        "    def set(self, key, value):\n"
        "        self[key] = value.encode()\n"
        "store = Store({'ring/1': b'127.0.0.1:9'})\n"
        "world.FORMING_SECONDS = 0.5\n"
        "world.ring_world(store, Place(0, (1, 1), 0, '127.0.0.1'))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_SECONDS, check=False)
    assert ended.returncode in LOST_PEER_CODES


def test_ipv6_is_refused_as_the_ring_does_not_have_it():
    with pytest.raises(ConfigError, match="by IPv4 only"):
        load_backend(ON_MLX).host_meeting(Address("::1", 0), 0, "host", 5.0, {})
