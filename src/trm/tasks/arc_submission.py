"""The file that `trm eval --submission` writes, outside of `grids`, whose import loads NumPy and pydantic."""

from __future__ import annotations

from typing import Any

from macbook_optimization.output_files import FileKind, json_like


def _is_submission(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    tests = [test for task in value.values() for test in (task if isinstance(task, list) else [None])]
    return bool(tests) and all(isinstance(test, dict) and "attempt_1" in test for test in tests)


SUBMISSION = FileKind("an ARC submission", json_like(_is_submission))
