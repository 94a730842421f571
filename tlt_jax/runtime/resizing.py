"""Slots of a slice in another number: rows that move, and the programs of every number run once ahead of need."""

import itertools
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from tlt_jax.runtime.programs import SlicePrograms
from tlt_jax.sharding import movement
from tlt_jax.sharding.rules import replicated
from tlt_jax.strategies import OFF, Strategy


def moved(programs: SlicePrograms, state, kept: list[int], rows: int):
    """A state of `rows` slots whose first ones are the `kept` ones of the old state."""
    index, keep = np.zeros((rows,), np.int32), np.zeros((rows,), bool)
    index[: len(kept)], keep[: len(kept)] = kept, True
    whole = replicated(programs.mesh)
    return programs.gather(state, *movement.to_device((index, keep), (whole, whole)))


def departing(programs: SlicePrograms, state, kept: list[int], rows: int):
    """As `moved`, without what other rows of the slice wrote: what another slice takes in."""
    state = moved(programs, state, kept, rows)
    return state if state.draft is None else state.replace(draft=state.draft.replace(texts=None))


def compile_ahead(programs: SlicePrograms, state, plan: Mapping[int, tuple[Strategy, ...]], run: Callable, *, timed: bool,
                  join: Callable | None) -> dict[tuple[int, Strategy], float]:
    """Run every planned program once, since which numbers of rows a phase shrinks through depends on the answers: no later step compiles.

    `run(state, strategy)` is one dispatch, → (state, emitted); on empty rows it ends at once. `join(state, source, requests, slots)` takes in rows of another
    slice; None: none ever come. Returns the seconds of one round by (rows, strategy), empty unless `timed`.
    """
    larger, costs = [], {}
    for size in sorted(plan, reverse=True):
        smaller = [moved(programs, one, [], size) for one in larger] or [moved(programs, state, [], size)]
        empty = smaller[0]
        for strategy in (OFF, *plan[size]):
            empty, _ = run(empty, strategy)
            if timed:
                started, rehearsed = _rehearsal(empty), time.monotonic()
                empty, emitted = jax.block_until_ready(run(started, strategy))
                costs[size, strategy] = (time.monotonic() - rehearsed) / max(int(movement.to_host(emitted.rounds)), 1)
                empty = moved(programs, empty, [], size)
        larger.append(empty)
    if join is not None:
        for size, smaller in itertools.combinations_with_replacement(range(len(larger)), 2):
            source = larger[smaller]
            rows = source.active_B.shape[0]
            join(moved(programs, source, [], larger[size].active_B.shape[0]), departing(programs, source, [], rows), [], [])
    return costs


def _rehearsal(state):
    """Empty slots as rows that decode nonsense into half of their cache: what a round costs can be measured with them."""
    active_B, remaining_B = np.ones(state.active_B.shape, bool), np.full(state.remaining_B.shape, state.cache.slots // 2, np.int32)
    active_B, remaining_B = movement.to_device((active_B, remaining_B), (state.active_B.sharding, state.remaining_B.sharding))
    return jax.block_until_ready(state.replace(active_B=active_B, remaining_B=remaining_B))
