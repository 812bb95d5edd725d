"""Reports of `trm bench` with chosen numbers."""

from datetime import UTC, datetime

from macbook_optimization.units import GIB
from trm.machine.benchmark_records import Repeat, Report, Results, Workload

STEADY = [10.0, 10.1, 10.2, 9.9, 9.8]
MODEL = {"hidden_size": 256, "num_heads": 8, "L_layers": 2, "H_cycles": 3, "L_cycles": 6, "expansion": 2.0}
MACHINE = {"brand": "Some CPU", "architecture": "arm64", "cores": 8, "quota": None, "memory_bytes": 8 * GIB}
VERSIONS = {"torch": "2.13.0", "numpy": "2.4.0", "python": "3.11.7"}


def make_report(rates, profiles=("8gb",), *, product_rate=1e11, threads=8, machine=None, versions=None):
    work = Workload(**MODEL, seq_len=256, micro_batch_size=2, timed_steps=1, threads=threads, workers=2)
    repeats = [
        Repeat(
            samples_per_second=[rate],
            resident_peak_bytes=5_500_000_000 + number,
            resident_mean_bytes=5_000_000_000,
            cpu_percent=95.5,
            product_rate=product_rate,
            start_seconds=4.0 + number,
            first_of_command=number == 0,
        )
        for number, rate in enumerate(rates)
    ]
    return Report(
        kind="trm bench",
        schema_version=2,
        date=datetime(2026, 1, 2, tzinfo=UTC),
        machine={**MACHINE, **(machine or {})},
        versions={**VERSIONS, **(versions or {})},
        busy_percent=1.0,
        profiles={name: Results(work=work, repeats=repeats) for name in profiles},
    )
