"""A recipe that is too large for this machine: what it needs, and which smaller ones would fit.

A smaller recipe learns something else, so it is never used silently: an error lists the alternatives, and
`--fit` takes the best one and prints each change.
"""

from __future__ import annotations

from dataclasses import replace

from macbook_optimization.errors import MemoryBudgetError
from trm.backends.bounds import smallest_program, training_problem
from trm.planning.planner import Planner
from trm.planning.smaller import smaller_recipes


def too_large(planner: Planner) -> MemoryBudgetError:
    try:
        estimates = planner.estimates()
    except MemoryBudgetError as error:
        return error
    needed = estimates.least
    alternatives = "; ".join(" ".join(changes) for changes, _ in estimates.smaller[:3])
    smaller = (
        f" Changes that should fit: {alternatives}." if alternatives else " No smaller model fits either."
    )
    fit = ", or use --fit to train a smaller model" if alternatives else ""
    amount = f"more than {needed.limit_mib} MiB" if needed.fits else f"about {needed.mib} MiB"
    return MemoryBudgetError(
        f"This recipe needs {amount} even with one example at a time; {needed.limit_mib} MiB is allowed "
        f"({needed.reason}).{smaller}",
        hint=f"Raise limits.memory_limit_mb or close other programs{fit}.",
    )


def fitted(planner: Planner) -> Planner:
    """Return a planner for the recipe itself if it fits, otherwise for the best smaller one that does."""
    absurd = training_problem(smallest_program(planner.config, planner.data))
    if absurd is None and planner.choose() is not None:
        return planner
    if absurd is not None and not _has_smaller(planner):
        raise absurd
    candidates = planner.estimates().smaller
    for number, (changes, smaller) in enumerate(candidates, start=1):
        described = f"smaller recipe {number} of {len(candidates)}: {' '.join(changes)}"
        candidate = replace(planner, config=smaller, subject=described)
        if candidate.choose() is not None:
            planner.display.message("The recipe does not fit; --fit changes it:\n  " + "\n  ".join(changes))
            return candidate
    raise too_large(planner)


def _has_smaller(planner: Planner) -> bool:
    programs = (smallest_program(config, planner.data) for _, config in smaller_recipes(planner.config))
    return any(training_problem(program) is None for program in programs)
