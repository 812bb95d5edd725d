"""Bits that flip, files that are cut, pages that are lost: never silent, and the one before it wins."""

import random
import shutil

import pytest
from faults.saves import holds, manager_with

FILES = [
    "weights.safetensors", "ema.safetensors", "optimizer.safetensors", "latents.safetensors", "state.json",
    "manifest.json",
]  # fmt: skip
PAGE = 4096


def flipped(content, fate):
    changed = bytearray(content)
    changed[fate.randrange(len(content))] ^= 1 << fate.randrange(8)
    return bytes(changed)


def truncated(content, fate):
    return content[: fate.randrange(len(content))]


def zeroed(content, fate):
    start = fate.randrange(0, len(content), PAGE)
    page = content[start : start + PAGE]
    return content[:start] + bytes(len(page)) + content[start + PAGE :]


@pytest.mark.parametrize("name", FILES)
def test_no_damage_is_silent_and_the_newest_good_checkpoint_is_found(tmp_path, tally, full, name):
    manager = manager_with(tmp_path, 1, 2)
    file = manager.path(2) / name
    content = file.read_bytes()
    damages = [
        (flipped, 1000, "bits flipped"),
        (truncated, 100, "files truncated"),
        (zeroed, 100, "pages zeroed"),
    ]
    for damage, count, what in damages:
        fate = random.Random(f"{name} {what}")
        for _ in range(count if full else count // 20):
            file.write_bytes(damage(content, fate))
            assert tally(what).add(falls_back(manager)), what
    file.unlink()
    assert tally("files deleted").add(falls_back(manager))
    shutil.copyfile(manager.path(1) / name, file)
    assert tally("files swapped with another step's").add(falls_back(manager))
    file.write_bytes(content)
    assert manager.newest_good().step == 2


def falls_back(manager):
    found = manager.newest_good()
    return found is not None and found.step == 1 and holds(found)


def test_a_whole_directory_of_another_step_is_noticed(tmp_path):
    manager = manager_with(tmp_path, 1, 2)
    shutil.rmtree(manager.path(2))
    shutil.copytree(manager.path(1), manager.path(2))
    assert manager.newest_good().step == 1
    assert "another step" in next(manager.examine()).damage
