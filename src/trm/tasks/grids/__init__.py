"""Puzzles on grids: Sudoku, mazes, ARC, and the base class for a grid task of your own."""

from trm.tasks.grids.examples import Grids, Pairs
from trm.tasks.grids.options import GridOptions
from trm.tasks.grids.task import GridTask, parse_cells

__all__ = ["GridOptions", "GridTask", "Grids", "Pairs", "parse_cells"]
