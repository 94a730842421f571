"""The strategy selector against a table of measured speeds: what its choices cost, without a machine whose clock is noisy. Pure."""

import random
from collections.abc import Mapping
from typing import NamedTuple

from tlt_jax.scheduling.strategy_selector import Observation, Outcome, SelectorSettings, SelectorState, choose, record
from tlt_jax.strategies import OFF, Strategy

Table = Mapping[int, Mapping[Strategy, float]]  # tokens per second of one row, by active rows and strategy; plain decoding included


class Conditions(NamedTuple):
    """How a table is replayed."""

    dispatches: int = 4000
    seconds: float = 0.1  # of a dispatch
    noise: float = 0.1  # standard deviation of the logarithm of a measured time
    seed: int = 1


USUAL = Conditions()


class Replayed(NamedTuple):
    """Seconds that a replay took, and that the best fixed arm of each number of rows, or plain decoding, takes for the same tokens; arms by rows."""

    state: SelectorState
    spent: float
    best: float
    plain: float
    chosen: dict[int, list[Strategy]]


def replay(settings: SelectorSettings, table: Table, conditions: Conditions = USUAL, state: SelectorState | None = None) -> Replayed:
    """Equally many dispatches of each number of rows, in the order of the table, from `state` or from nothing."""
    state, generator = state or SelectorState(), random.Random(conditions.seed)
    spent = best = plain = 0.0
    chosen = {rows: [] for rows in table}
    for turn in range(conditions.dispatches):
        rows = list(table)[turn * len(table) // conditions.dispatches]
        seen = Observation(rows, 100, frozenset(table[rows]) - {OFF})
        state, arm = choose(settings, state, seen)
        tokens = table[rows][arm] * conditions.seconds
        measured = conditions.seconds * generator.lognormvariate(0, conditions.noise)
        state = record(settings, state, seen, Outcome(arm, tokens, measured, False))
        spent, best, plain = spent + conditions.seconds, best + tokens / max(table[rows].values()), plain + tokens / table[rows][OFF]
        chosen[rows].append(arm)
    return Replayed(state, spent, best, plain, chosen)
