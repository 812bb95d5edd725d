"""Exports for other programs hold the values of the run, and nothing leaves the machine.

Both packages are optional: without them, these tests are skipped, except for the message that says so.
"""

import importlib.util
import json
import os
import socket
import struct

import pytest
from recorded import recorded_run

from macbook_optimization.errors import LaptopError
from trm.reports.exporters import export_to_trackio, export_to_wandb


def is_installed(name):
    return importlib.util.find_spec(name) is not None


needs_wandb = pytest.mark.skipif(not is_installed("wandb"), reason="wandb is not installed")
needs_trackio = pytest.mark.skipif(not is_installed("trackio"), reason="trackio is not installed")


@pytest.fixture
def no_network(monkeypatch):
    def refuse(self, address):
        assert self.family == socket.AF_UNIX, f"a connection to {address}"
        return connect(self, address)

    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def run(tmp_path):
    return recorded_run(tmp_path / "run", num_steps=20)


@pytest.mark.parametrize(("export", "package"), [(export_to_wandb, "wandb"), (export_to_trackio, "trackio")])
def test_a_missing_package_is_named(run, export, package):
    if is_installed(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(LaptopError, match=f"{package} is missing") as error:
        export(run)
    assert f"pip install {package}" in error.value.hint


def messages_of(content):
    """Read W&B's file: blocks of 32 KiB of records, as in LevelDB's log format, after a header of 7 bytes."""
    place = 7
    message = b""
    while place < len(content):
        if 0 < (rest := -place % 32768) < 7:  # too short for the head of a record
            place += rest
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        message += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield message
            message = b""


@needs_wandb
@pytest.mark.slow
@pytest.mark.usefixtures("no_network")
def test_an_offline_run_of_wandb_holds_the_rows(run, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "online")
    for _ in range(2):
        directory = export_to_wandb(run)
    assert os.environ["WANDB_MODE"] == "online"
    assert directory.parent == run.path / "wandb"
    (file,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    losses = {}
    for message in messages_of(file.read_bytes()):
        history = Record.FromString(message).history
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
        if "train/loss" in items:
            losses[items["step"]] = items["train/loss"]
    assert losses == {row["step"]: row["loss"] for row in run.rows() if row["kind"] == "train"}


@needs_trackio
@pytest.mark.slow
@pytest.mark.usefixtures("no_network")
def test_the_database_of_trackio_holds_the_rows(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/elsewhere")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    name = export_to_trackio(run)
    assert os.environ["TRACKIO_SPACE_ID"] == "somebody/elsewhere"
    logs = SQLiteStorage.get_logs("macbook-trm", name)
    losses = {log["step"]: log["train/loss"] for log in logs if "train/loss" in log}
    assert losses == {row["step"]: row["loss"] for row in run.rows() if row["kind"] == "train"}
