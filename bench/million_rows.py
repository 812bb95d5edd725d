"""Time and memory of a report on a run of a million training rows: `python bench/million_rows.py [ROWS]`.

The rows are copies of one with other steps, losses and times; nothing is trained. The limits are 10 s and
300 MB (`make test` does not run this).
"""

import json
import math
import sys
import tempfile
import time
from pathlib import Path

from macbook_optimization.memory_readings import peak_bytes
from macbook_optimization.units import MIB
from trm.reports.report import write_report
from trm.reports.tensorboard import write_event_files
from trm.runs.directory import EVENTS, METRICS, Run
from trm.runs.rows import EvalRow, TrainRow

EVALUATE_EVERY = 1000
BEGAN = 1.7e9


def write_rows(path: Path, num_rows: int) -> None:
    row = TrainRow(
        step=1,
        seconds=1.0,
        loss=1.2345678901234567,
        grad_norm=0.1234567890123456,
        samples_per_second=123.4567890123456,
        learning_rate=1.2345678901234e-4,
        micro_batch_size=32,
        train_token_accuracy=0.9123456789012345,
        train_exact_accuracy=0.5123456789012345,
        rss_bytes=987654321,
        cpu_percent=198.7,
        spent={"forward": 0.312345, "backward": 0.512345, "optimizer": 0.051234, "data": 0.012345},
    ).to_json()
    with open(path, "w", encoding="utf-8") as file:
        for step in range(1, num_rows + 1):
            row.update(step=step, seconds=float(step), time=BEGAN + step, loss=1 / math.sqrt(step))
            file.write(json.dumps(row) + "\n")
            if step % EVALUATE_EVERY == 0:
                scores = {"exact_accuracy": step / num_rows}
                evaluation = EvalRow(step, float(step), 256, scores, {}, 4.0, [0.5] * 16, 1.0).to_json()
                file.write(json.dumps(evaluation) + "\n")


def main() -> None:
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as directory:
        run = Run(Path(directory))
        write_rows(run.path / METRICS, num_rows)
        event = {"time": BEGAN, "event": "resumed", "step": 5, "changes": []}
        (run.path / EVENTS).write_text(json.dumps(event) + "\n")
        megabytes = (run.path / METRICS).stat().st_size / 1e6
        sys.stdout.write(f"{num_rows:,} rows, {megabytes:.0f} MB\n")
        for name, write in (("report", write_report), ("event files", write_event_files)):
            began = time.perf_counter()
            used = time.process_time()
            write(run)
            wall = time.perf_counter() - began
            cpu = time.process_time() - used
            peak = peak_bytes() / MIB
            sys.stdout.write(f"{name}: {wall:.1f} s, {cpu:.1f} s of CPU, peak {peak:.0f} MiB so far\n")


if __name__ == "__main__":
    main()
