"""The clock of the strategy selector: asks it before a dispatch of rounds, and tells it afterwards what the dispatch brought and how long it took."""

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from tlt_jax.runtime.programs import compile_counter
from tlt_jax.scheduling.decode_report import Dispatch
from tlt_jax.scheduling.strategy_selector import Bucket, Observation, Outcome, SelectorSettings, SelectorState, choose, plain_rate, record, with_cost
from tlt_jax.strategies import Strategy


class Choice(NamedTuple):
    """What a dispatch was queued with."""

    seen: Observation
    strategy: Strategy
    queued: float  # seconds of the clock
    compiles: int  # programs compiled in this process until then


class MeasuredChoice:
    """One slice's selector, over all phases of a run."""

    def __init__(self, settings: SelectorSettings):
        self.settings, self.state = settings, SelectorState()
        self.dispatches: list[Dispatch] = []  # of the phase
        self._read = 0.0

    def start(self) -> None:
        """A phase begins."""
        self.dispatches = []

    def next(self, rows: int, longest: int, ready: Collection[Strategy]) -> Choice:
        """The strategy of a dispatch of `rows` slots whose longest text has `longest` tokens; ask just before it is queued."""
        seen = Observation(rows, longest, frozenset(ready))
        self.state, strategy = choose(self.settings, self.state, seen)
        return Choice(seen, strategy, time.monotonic(), compile_counter().count)

    def passed(self) -> None:
        """Something that is no dispatch of rounds was read: what is queued behind it starts now."""
        self._read = time.monotonic()

    def reward(self, choice: Choice, tokens: int, rows: int, rounds: int, forwards: int) -> None:
        """A dispatch was read: it committed `tokens` in `rows` active rows, in `forwards` rounds of one row.

        It ran from when the one before it was read, or from when it was queued.
        """
        now, compiled = time.monotonic(), compile_counter().count > choice.compiles
        started = max(choice.queued, self._read)
        outcome = Outcome(choice.strategy, tokens / max(rows, 1), now - started, compiled, rounds)
        self.state, self._read = record(self.settings, self.state, choice.seen, outcome), now
        self.dispatches.append(Dispatch(started, now - started, choice.strategy, choice.seen.bucket, rows, tokens, rounds, forwards, compiled))

    def measured(self, costs: Mapping[tuple[int, Strategy], float]) -> None:
        """Seconds of one round by (rows, strategy)."""
        for (rows, strategy), seconds in costs.items():
            self.state = with_cost(self.state, rows, strategy, seconds)

    def plain_rates(self) -> dict[Bucket, float]:
        """Plain tokens per second and active row, by the buckets of the phase in which plain rounds were measured."""
        rates = {bucket: plain_rate(self.state, bucket) for bucket in {dispatch.bucket for dispatch in self.dispatches}}
        return {bucket: rate for bucket, rate in rates.items() if rate is not None}
