"""The clock of the strategy selector: asks it before a dispatch of rounds, and tells it afterwards what the dispatch brought and how long it took."""

import time
from typing import NamedTuple

from tlt_jax.runtime.programs import compile_counter
from tlt_jax.scheduling.strategy_selector import Observation, Outcome, SelectorSettings, SelectorState, choose, record
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
        self._read = 0.0

    def next(self, rows: int, longest: int) -> Choice:
        """The strategy of a dispatch of `rows` slots whose longest text has `longest` tokens; ask just before it is queued."""
        seen = Observation(rows, longest, frozenset(self.settings.strategies))
        self.state, strategy = choose(self.settings, self.state, seen)
        return Choice(seen, strategy, time.monotonic(), compile_counter().count)

    def reward(self, choice: Choice, tokens: int, rows: int) -> None:
        """A dispatch was read: it committed `tokens` in `rows` active rows, and ran from when the one before it was read, or from when it was queued."""
        now, compiled = time.monotonic(), compile_counter().count > choice.compiles
        outcome = Outcome(choice.strategy, tokens / max(rows, 1), now - max(choice.queued, self._read), compiled)
        self.state, self._read = record(self.settings, self.state, choice.seen, outcome), now
