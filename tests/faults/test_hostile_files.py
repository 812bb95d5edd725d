"""Forged files are refused in less than two seconds, and nothing in them is executed."""

import hashlib
import json
import os
import pickle
import time
import zipfile

import forked
import numpy as np
import pytest
from faults.saves import manager_with
from tiny import FOUR, TINY, run_config, sudoku_dataset

from macbook_optimization.checkpoint_files import signed

RAN = "ran"  # the file that executed code would create
SECONDS = 1.2  # without the start of the interpreter and the imports, which take up to 0.8 s


class Malicious:
    def __reduce__(self):
        return os.system, (f"touch {RAN}",)


@pytest.fixture
def directory(tmp_path):
    sudoku_dataset(tmp_path / "set")
    return tmp_path


def refused(directory, *arguments):
    """Return the error of a command, which must come soon and without executing anything."""
    best = float("inf")
    for _ in range(3):  # the fastest of three: a busy machine is slow now and then
        started = time.monotonic()
        answer = forked.run(arguments, directory)
        best = min(best, time.monotonic() - started)
        assert answer.returncode in (1, 2), answer.stdout + answer.stderr
        assert not (directory / RAN).exists()
        if best < SECONDS:
            break
    assert best < SECONDS
    assert "Traceback" not in answer.stderr
    return answer.stdout + answer.stderr


def checkpoint_in(directory):
    run = directory / "run"
    manager = manager_with(run, 1)
    (run / "recipe.yaml").write_text(run_config(directory / "set").to_yaml())
    return manager


def replace(manager, name, content):
    """Replace a file together with its entry in the manifest, which an attacker can write as well."""
    (manager.path(1) / name).write_bytes(content)
    manifest = json.loads((manager.path(1) / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.pop("sha256")
    (manager.path(1) / "manifest.json").write_text(signed(manifest))


PICKLES = {
    "a plain pickle": lambda path: path.write_bytes(pickle.dumps(Malicious())),
    "a pickle in a zip": lambda path: _zip(path, pickle.dumps({"w": Malicious()})),
    "a pickle behind a name that is allowed": lambda path: _zip(
        path, b"ctorch._utils\n_rebuild_tensor_v2\n" + pickle.dumps(Malicious())[2:]
    ),
    "a pickle that takes all memory": lambda path: _zip(path, _doubling()),
    "a pickle that nests": lambda path: _zip(path, b"\x80\x02" + b"(" * 1_000_000 + b"t" * 1_000_000 + b"."),
    "a compressed bomb": lambda path: _zip(path, bytes(200_000_000), zipfile.ZIP_DEFLATED),
}


def _zip(path, content, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", content)


def _doubling():
    """Nest tuples so that each has twice the size of the one before."""
    return b"(I0\ntp0\n" + b"".join(f"(g{n}\ng{n}\ntp{n + 1}\n".encode() for n in range(60)) + b"."


@pytest.mark.slow
@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_is_refused(directory, tally, kind):
    PICKLES[kind](directory / "weights.pt")
    text = refused(directory, "checkpoint", "import", "weights.pt", "sudoku-6x6", *FOUR, "--run", "run")
    assert tally("hostile pickles").add("error: weights.pt is not a checkpoint" in text), text
    assert not (directory / "run").exists()


@pytest.mark.slow
def test_an_array_of_objects_is_refused(directory, tally):
    array = np.empty(3, dtype=object)
    array[:] = [Malicious()] * 3
    np.save(directory / "set" / "train" / "all__inputs.npy", array, allow_pickle=True)
    text = refused(directory, "train", "sudoku-6x6", *FOUR, *TINY)
    assert tally("hostile arrays").add("all__inputs.npy" in text), text


HEADERS = {
    "huge": "{'descr': '<i8', 'fortran_order': False, 'shape': (4611686018427387904,)}",
    "negative": "{'descr': '<i8', 'fortran_order': False, 'shape': (-1,)}",
    "code": f"__import__('os').system('touch {RAN}')",
    "deep": "(" * 5000,
    "not a dictionary": "{[]: 1}",
    "long": "{'descr': '<i8', 'fortran_order': False, 'shape': (" + "9" * 400 + ",)}",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADERS)
def test_an_array_with_a_forged_header_is_refused(directory, tally, kind):
    header = HEADERS[kind].encode() + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (directory / "set" / "train" / "all__inputs.npy").write_bytes(content)
    text = refused(directory, "train", "sudoku-6x6", *FOUR, *TINY)
    assert tally("hostile arrays").add("all__inputs.npy" in text), text


RECIPES = {
    "call": f"task: !!python/object/apply:os.system ['touch {RAN}']\n",
    "object": "task: !!python/object/new:subprocess.Popen [[touch, ran]]\n",
    "module": "task: !!python/module:antigravity\n",
    "bomb": "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40)),
    "deep": "[" * 20_000,
    "deep blocks": "- " * 20_000,
    "long": "a: b\n" * 10_000_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_with_objects_or_of_excessive_size_is_refused(directory, tally, kind):
    (directory / "recipe.yaml").write_text(RECIPES[kind])
    text = refused(directory, "train", "recipe.yaml")
    assert tally("hostile recipes").add("error: recipe.yaml" in text), text[:500]


def _safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _entry(start, end, shape=(2,)):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}


FILES = {
    "a header of 100 MB": lambda: _safetensors(b"{" + b" " * 100_000_001),
    "a header of many names": lambda: _safetensors({f"n{n}": _entry(0, 0, (0,)) for n in range(200_000)}),
    "a header longer than the file": lambda: (2**62).to_bytes(8, "little") + b"{}",
    "entries that overlap": lambda: _safetensors({"a": _entry(0, 8), "b": _entry(4, 12)}, bytes(12)),
    "entries beyond the end": lambda: _safetensors({"a": _entry(0, 8), "b": _entry(8, 800)}, bytes(16)),
    "a shape that overflows": lambda: _safetensors({"a": _entry(0, 8, (2**62, 2**62, 16))}, bytes(8)),
    "a shape that is not its size": lambda: _safetensors({"a": _entry(0, 8, (200,))}, bytes(8)),
    "a negative offset": lambda: _safetensors({"a": _entry(-8, 0)}, bytes(8)),
    "not JSON": lambda: _safetensors(b"\xff" * 64),
    "deep JSON": lambda: _safetensors(b"[" * 100_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_forged_tensors_with_a_correct_sha256_are_refused(directory, tally, kind):
    replace(checkpoint_in(directory), "weights.safetensors", FILES[kind]())
    text = refused(directory, "checkpoint", "verify", "run")
    explained = "weights.safetensors is malformed" in text and "No checkpoint is intact" in text
    assert "no usable checkpoint" in refused(directory, "eval", "run")
    assert tally("hostile safetensors").add(explained), text


def _device(file):
    file.symlink_to("/dev/zero")


PLACES = {"a pipe": os.mkfifo, "a device": _device, "a directory": os.mkdir}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("kind", PLACES)
def test_a_pipe_a_device_or_a_directory_is_refused(directory, tally, kind, name):
    """Reading it might never end."""
    manager = checkpoint_in(directory)
    (manager.path(1) / name).unlink()
    PLACES[kind](manager.path(1) / name)
    text = refused(directory, "checkpoint", "verify", "run")
    assert tally("pipes and devices").add(f"{name} is not a file" in text), text


@pytest.mark.slow
def test_a_large_state_is_refused_before_it_is_parsed(directory, tally):
    replace(checkpoint_in(directory), "state.json", b"[" + b"{}," * 30_000_000 + b"{}]")
    assert tally("hostile manifests").add("is too large" in refused(directory, "checkpoint", "verify", "run"))


@pytest.mark.slow
def test_paths_that_lead_out_of_a_dataset_are_not_followed(directory, tally):
    build = json.loads((directory / "set" / "build.json").read_text())
    build["sha256"]["train/../../../../../../../dev/zero"] = "0" * 64
    build["sha256"]["train/all__labels.npy"] = "0" * 64
    (directory / "set" / "build.json").write_text(json.dumps(build))
    text = refused(directory, "train", "sudoku-6x6", *FOUR, *TINY)
    assert tally("hostile arrays").add("all__labels.npy is not what was built" in text), text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../set/build.json", "/etc/hostname", "a.safetensors/../x.json", "x.pt"])
def test_a_manifest_that_leads_out_of_its_directory_is_refused(directory, tally, name):
    manager = checkpoint_in(directory)
    manifest = json.loads((manager.path(1) / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    manifest.pop("sha256")
    (manager.path(1) / "manifest.json").write_text(signed(manifest))
    assert tally("hostile manifests").add("is damaged" in refused(directory, "checkpoint", "verify", "run"))
