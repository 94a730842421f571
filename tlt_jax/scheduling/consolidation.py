"""Whether the rows of one slice move to another, so that a slice becomes free. Pure.

Rows only go to a slice that has rows, so every move leaves one slice fewer with rows, and none comes back.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tlt_jax.scheduling.batching import length_bucket
from tlt_jax.strategies import Strategy

TOLERANCE = 0.05  # by which a measured round may be slower: a table of single measurements is no finer
SLOTS_TO_COPY = 4  # slots of the target for each slot that is copied to it: beside a full cache there is room for a quarter of it


class Holding(NamedTuple):
    """What a slice holds."""

    rows: int  # that decode
    sizes: tuple[int, ...]  # numbers of rows that it has programs for, rising; the last one is all its slots
    costs: Mapping[tuple[int, Strategy], float]  # measured seconds of one round, by number of rows and strategy


class Move(NamedTuple):
    """All rows of the slice `source` go to the slice `target`, by number."""

    source: int
    target: int


def next_move(slices: Sequence[Holding], queued: int) -> Move | None:
    """The move of fewest rows to the fullest slice that makes no row slower; None while requests wait, or where there is none."""
    numbers = [number for number, held in enumerate(slices) if held.rows]
    moves = [Move(source, target) for source in numbers for target in numbers if source != target]
    moves.sort(key=lambda move: (slices[move.source].rows, -slices[move.target].rows, move))
    return None if queued else next((move for move in moves if costs_nothing(slices[move.source], slices[move.target])), None)


def costs_nothing(source: Holding, target: Holding) -> bool:
    """Whether a round of the rows of both on the target takes no longer than one of either's rows alone, with each strategy that either has.

    Everything is read from the target's table: the slices are alike, and two measurements of the same rounds differ. What was not measured is not known.
    """
    sizes, together = target.sizes, source.rows + target.rows
    if not source.rows or not target.rows or together > sizes[-1]:
        return False
    copied, held, after = (length_bucket(rows, sizes) for rows in (source.rows, target.rows, together))
    if SLOTS_TO_COPY * copied > sizes[-1] or length_bucket(source.rows, source.sizes) != copied:
        return False
    now = [(size, strategy) for size, strategy in target.costs if size in (copied, held)]
    measured = {size for size, _ in now} == {copied, held}
    return measured and all(target.costs.get((after, key[1]), math.inf) <= (1 + TOLERANCE) * target.costs[key] for key in now)
