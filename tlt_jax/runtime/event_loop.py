"""The one host loop: feeds every slice from one queue and polls what is in flight.

No locks and no threads: each turn is bounded, and waiting is a short sleep when nothing moved.
"""

import collections
import time
from collections.abc import Callable, Iterable, Sequence

from tlt_jax.runtime.lending import Lending
from tlt_jax.runtime.rollout_driver import RolloutDriver
from tlt_jax.scheduling.slices import all_rolling_out, allowances
from tlt_jax.strategies import Completion, Request

POLL_SECONDS = 0.005  # a dispatch is queued ahead, so reading late costs nothing, and waking often disturbs a CPU's workers
LENDING_POLL_SECONDS = 0.001  # no quantum is queued ahead, and a lent slice would wait


def roll_out(drivers: Sequence[RolloutDriver], requests: Iterable[Request], on_completion: Callable[[Completion], None],
             on_turn: Callable[[], None] | None = None, lending: Lending | None = None) -> None:
    """Run all requests on started drivers; `on_completion` sees each as it finishes, `on_turn` runs between turns.

    A slice may hold at most its even share of the rows that are left, so none idles while work waits. `lending`, started, lends those that have none, also
    while only other processes have rows left.
    """
    queue, whole = collections.deque(requests), all_rolling_out(len(drivers))
    while queue or any(driver.active or driver.in_flight for driver in drivers) or (lending is not None and lending.outlook.others()):
        moved = False
        rows = tuple(driver.active for driver in drivers)
        for driver, allowance in zip(drivers, allowances(whole if lending is None else lending.state, rows, len(queue)), strict=True):
            for completion in driver.step(queue, allowance):
                on_completion(completion)
                moved = True
        if lending is not None:
            moved |= lending.turn(drivers, len(queue))
        if on_turn is not None:
            on_turn()
        if not moved:
            time.sleep(POLL_SECONDS if lending is None else LENDING_POLL_SECONDS)
