"""The clock of a slice: how long admissions and dispatches of rounds took. It asks the strategy selector before a dispatch, and tells it what came of it."""

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tlt_jax.runtime.programs import compile_counter
from tlt_jax.scheduling.decode_report import Admission, Dispatch
from tlt_jax.scheduling.strategy_selector import Bucket, Observation, Outcome, SelectorSettings, SelectorState, choose, plain_rate, record, with_cost
from tlt_jax.strategies import Strategy


class Queued(NamedTuple):
    """When something was queued."""

    moment: float  # seconds of the clock
    compiles: int  # programs compiled in this process until then


class Choice(NamedTuple):
    """What a dispatch of rounds was queued with."""

    seen: Observation
    strategy: Strategy
    queued: Queued


def queued_now() -> Queued:
    """Ask before what is queued is compiled."""
    return Queued(time.monotonic(), compile_counter().count)


class MeasuredChoice:
    """One slice's selector, over all phases of a run."""

    def __init__(self, settings: SelectorSettings):
        self.settings, self.state = settings, SelectorState()
        self.costs: dict[tuple[int, Strategy], float] = {}  # measured seconds of one round, by number of rows and strategy
        self.dispatches: list[Dispatch] = []  # of the phase
        self.admissions: list[Admission] = []  # of the phase
        self._read = 0.0

    def start(self) -> None:
        """A phase begins."""
        self.dispatches, self.admissions = [], []

    def next(self, rows: int, longest: int, ready: Collection[Strategy]) -> Choice:
        """The strategy of a dispatch of `rows` slots whose longest text has `longest` tokens; ask just before it is queued."""
        seen = Observation(rows, longest, frozenset(ready))
        self.state, strategy = choose(self.settings, self.state, seen)
        return Choice(seen, strategy, queued_now())

    def admitted(self, queued: Queued) -> None:
        """An admission was read."""
        self.admissions.append(Admission(*self._ran(queued)))

    def reward(self, choice: Choice, tokens: int, rows: int, rounds: int, forwards: int) -> None:
        """A dispatch was read: it committed `tokens` in `rows` active rows, in `forwards` rounds of one row."""
        started, seconds, compiled = self._ran(choice.queued)
        self.state = record(self.settings, self.state, choice.seen, Outcome(choice.strategy, tokens / max(rows, 1), seconds, compiled, rounds))
        self.dispatches.append(Dispatch(started, seconds, choice.strategy, choice.seen.bucket, rows, tokens, rounds, forwards, compiled))

    def _ran(self, queued: Queued) -> tuple[float, float, bool]:
        """(start, seconds, whether something was compiled) of what is read now: it ran from when the one before it was read, or from when it was queued."""
        now, started = time.monotonic(), max(queued.moment, self._read)
        self._read = now
        return started, now - started, compile_counter().count > queued.compiles

    def measured(self, costs: Mapping[tuple[int, Strategy], float]) -> None:
        """Seconds of one round by (rows, strategy)."""
        self.costs.update(costs)
        for (rows, strategy), seconds in costs.items():
            self.state = with_cost(self.state, rows, strategy, seconds)

    def plain_rates(self) -> dict[Bucket, float]:
        """Plain tokens per second and active row, by the buckets of the phase in which plain rounds were measured."""
        rates = {bucket: plain_rate(self.state, bucket) for bucket in {dispatch.bucket for dispatch in self.dispatches}}
        return {bucket: rate for bucket, rate in rates.items() if rate is not None}
