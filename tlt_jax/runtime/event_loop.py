"""The one host loop: feeds every slice from one queue and polls what is in flight.

No locks and no threads: each turn is bounded, and waiting is a short sleep when nothing moved.
"""

import collections
import time
from collections.abc import Callable, Iterable, Sequence

from tlt_jax.runtime.rollout_driver import RolloutDriver
from tlt_jax.strategies import Completion, Request

POLL_SECONDS = 0.005  # a dispatch is queued ahead, so reading late costs nothing, and waking often disturbs a CPU's workers


def roll_out(drivers: Sequence[RolloutDriver], requests: Iterable[Request], on_completion: Callable[[Completion], None],
             on_turn: Callable[[], None] | None = None) -> None:
    """Run all requests on started drivers; `on_completion` sees each as it finishes, `on_turn` runs between turns.

    A slice may hold at most its even share of the rows that are left, so none idles while work waits.
    """
    queue = collections.deque(requests)
    while queue or any(driver.active or driver.in_flight for driver in drivers):
        moved = False
        for driver in drivers:
            left = len(queue) + sum(other.active for other in drivers)
            for completion in driver.step(queue, allowance=-(-left // len(drivers))):
                on_completion(completion)
                moved = True
        if on_turn is not None:
            on_turn()
        if not moved:
            time.sleep(POLL_SECONDS)
