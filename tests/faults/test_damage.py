"""Flipped bits, truncated files, lost pages: always noticed, and the checkpoint before is used."""

import random
import shutil

import pytest
from faults.saves import holds, manager_with

FILES = [
    "weights.safetensors", "ema.safetensors", "optimizer.safetensors", "latents.safetensors", "state.json",
    "manifest.json",
]  # fmt: skip
PAGE = 4096


def flipped(content, rng):
    changed = bytearray(content)
    changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncated(content, rng):
    return content[: rng.randrange(len(content))]


def zeroed(content, rng):
    start = rng.randrange(0, len(content), PAGE)
    page = content[start : start + PAGE]
    return content[:start] + bytes(len(page)) + content[start + PAGE :]


@pytest.mark.parametrize("name", FILES)
def test_every_damage_is_noticed_and_the_newest_intact_checkpoint_is_used(tmp_path, tally, full, name):
    manager = manager_with(tmp_path, 1, 2)
    file = manager.path(2) / name
    content = file.read_bytes()
    damages = [
        (flipped, 1000, "bits flipped"),
        (truncated, 100, "files truncated"),
        (zeroed, 100, "pages zeroed"),
    ]
    for damage, count, what in damages:
        rng = random.Random(f"{name} {what}")
        for _ in range(count if full else count // 20):
            file.write_bytes(damage(content, rng))
            assert tally(what).add(falls_back(manager)), what
    file.unlink()
    assert tally("files deleted").add(falls_back(manager))
    shutil.copyfile(manager.path(1) / name, file)
    assert tally("files swapped with another step's").add(falls_back(manager))
    file.write_bytes(content)
    assert manager.newest_intact().step == 2


def falls_back(manager):
    found = manager.newest_intact()
    return found is not None and found.step == 1 and holds(found)


def test_a_checkpoint_directory_with_the_content_of_another_step_is_noticed(tmp_path):
    manager = manager_with(tmp_path, 1, 2)
    shutil.rmtree(manager.path(2))
    shutil.copytree(manager.path(1), manager.path(2))
    assert manager.newest_intact().step == 1
    assert "another step" in next(manager.examine()).damage
