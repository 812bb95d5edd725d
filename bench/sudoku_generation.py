"""Measure how fast Sudoku puzzles are generated: `python bench/sudoku_generation.py [COUNT]`.

Each result is the median of three seeds on one core, with the spread.
"""

import statistics
import sys
import time

from trm.tasks.grids.sudoku_puzzles import BLANKS, generate

NUM_SEEDS = 3


def main(count: int) -> None:
    for size, levels in BLANKS.items():
        for difficulty, blanks in levels.items():
            seconds = []
            for seed in range(NUM_SEEDS):
                started = time.perf_counter()
                generate(size, blanks, count, seed)
                seconds.append(time.perf_counter() - started)
            median = statistics.median(seconds)
            sys.stdout.write(
                f"{size}x{size} {difficulty:6} {blanks} blanks: {count} in {median:.2f} s "
                f"({min(seconds):.2f} to {max(seconds):.2f}), {count / median:.0f} puzzles/s\n"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
