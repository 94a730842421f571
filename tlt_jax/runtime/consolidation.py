"""Moves the rows of one slice to another, cache and all, so that the first becomes free. Which rows move when: `scheduling/consolidation.py`."""

from collections.abc import Sequence

from tlt_jax.runtime import resizing
from tlt_jax.runtime.rollout_driver import RolloutDriver, row_bucket, row_buckets
from tlt_jax.scheduling.consolidation import Holding, Move, costs_nothing, next_move
from tlt_jax.sharding import movement


class Consolidation:
    """The moves of one phase, one at a time: the source reads what it has dispatched, then its rows go."""

    def __init__(self):
        self.moved_rows = 0
        self._move: Move | None = None  # whose source drains

    def turn(self, drivers: Sequence[RolloutDriver], queued: int, *, worth_it: bool) -> None:
        """One turn of the event loop. No move begins, and none is made, that is not `worth_it`."""
        slices = [Holding(driver.active, row_buckets(driver.slots), driver.choice.costs) for driver in drivers]
        if self._move is None:
            self._move = next_move(slices, queued) if worth_it else None
            if self._move is not None:
                drivers[self._move.source].draining = True
            return
        source, target = self._move
        if drivers[source].in_flight:
            return
        drivers[source].draining, self._move = False, None
        if worth_it and costs_nothing(slices[source], slices[target]):  # rows may have ended since
            self.moved_rows += move_rows(drivers[source], drivers[target])


def move_rows(source: RolloutDriver, target: RolloutDriver) -> int:
    """All rows of a slice that has nothing in flight go on in another one, which has room; their number. The source is left without rows and without cache."""
    kept = [slot for slot, row in enumerate(source.rows) if row is not None]
    rows = [source.rows[slot] for slot in kept]
    leaving = resizing.departing(source.programs, source.state, kept, row_bucket(len(rows), source.slots))
    source.state, source.rows = None, []
    arriving = movement.to_slice(leaving, source.programs.mesh, target.programs.mesh)
    target.fit(target.active + len(rows))
    slots = [slot for slot, row in enumerate(target.rows) if row is None][: len(rows)]
    places, target.state = target.entrance.join(target.state, arriving, [row.request for row in rows], slots)
    for slot, row, place in zip(slots, rows, places, strict=True):
        if row.place is not None:
            source.entrance.texts.move_away(row.place)
        target.rows[slot], row.place = row, place
    return len(rows)
