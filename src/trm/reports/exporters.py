"""A run for Weights & Biases and for trackio, written after the fact and to this machine only.

Both packages are optional. Neither is given a way to the network: W&B runs offline (`wandb sync` uploads a
run, if its owner wants that), and trackio writes its database in a local directory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

from macbook_optimization.durable_files import remove_directory
from macbook_optimization.errors import LaptopError, RunError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.json_types import JsonObject
from trm.reports.scalars import Recorded, read_recorded
from trm.runs.directory import Run

Variables = Mapping[str, str | None]
PROJECT = "macbook-trm"
_WANDB_ENVIRONMENT: Variables = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}
_TRACKIO_OPTIONS: JsonObject = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}


def export_to_wandb(run: Run) -> Path:
    """Write an offline run of W&B in `RUN/wandb`, in place of an earlier one, and return its directory."""
    with _environment(_WANDB_ENVIRONMENT):
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise _missing("wandb", error) from error
        recorded = _read(run)
        remove_directory(run.path / "wandb")
        settings = wandb.Settings(
            mode="offline",
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        logged = wandb.init(
            project=PROJECT,
            name=run.path.name,
            id=_identity(run, recorded),
            dir=os.fspath(run.path),
            config=_config(run),
            settings=settings,
        )
        for group, axis in (
            ("train", "step"),
            ("seconds", "step"),
            ("eval", "step"),
            ("resources", "second"),
        ):
            logged.define_metric(f"{group}/*", step_metric=axis)
        for point in recorded.rows:
            logged.log({"step": point.step, **point.scalars})
        for point in recorded.samples:
            logged.log({"second": point.step, **point.scalars})
        logged.finish()
        return Path(logged.dir).parent


def export_to_trackio(run: Run) -> str:
    """Add the rows of a run to the local database of trackio, and return the name of the run there.

    A run that was exported before is added once more: trackio keeps what it has.
    """
    with _environment(_uploads_of_trackio()):
        try:
            import trackio
        except ModuleNotFoundError as error:
            raise _missing("trackio", error) from error
        recorded = _read(run)
        with redirect_stdout(StringIO()):  # it prints advice
            logged = trackio.init(
                project=PROJECT, name=run.path.name, config=_config(run), **_TRACKIO_OPTIONS
            )
            for point in recorded.rows:
                trackio.log(dict(point.scalars), step=point.step)
            trackio.finish()
        return str(logged.name)


def _uploads_of_trackio() -> Variables:
    """Return the variables to remove: all but the one that names the local directory may lead elsewhere."""
    return {name: None for name in os.environ if name.startswith("TRACKIO_") and name != "TRACKIO_DIR"}


def _missing(package: str, error: ModuleNotFoundError) -> LaptopError:
    return LaptopError(
        f"The Python package {error.name} is missing; exporting to {package} needs it.",
        hint=f"Install it: python -m pip install {package}",
    )


def _read(run: Run) -> Recorded:
    try:
        return read_recorded(run)
    except OSError as error:
        raise RunError(f"Cannot read {run.path}: {reason_of(error)}", hint=hint_for(error)) from error


def _config(run: Run) -> JsonObject:
    """Return what was learned and how, as flat JSON values."""
    config: JsonObject = run.config.model_dump(mode="json")
    return config


def _identity(run: Run, recorded: Recorded) -> str:
    """Return the same ID at every export of a run, so that a second upload is the same run there."""
    began = recorded.rows[0].time if recorded.rows else 0.0
    return hashlib.sha256(f"{os.path.realpath(run.path)} {began}".encode()).hexdigest()[:16]


@contextmanager
def _environment(changes: Variables) -> Iterator[None]:
    """Set variables, or remove those that are None, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Variables) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
