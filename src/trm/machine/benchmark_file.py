"""The file that `trm bench --out` writes. It is recognised without pydantic."""

from __future__ import annotations

from typing import Any

from macbook_optimization.output_files import FileKind, json_like


def _is_report(value: Any) -> bool:
    return isinstance(value, dict) and value.get("kind") == "trm bench"


BENCHMARK = FileKind("a report of trm bench", json_like(_is_report))
