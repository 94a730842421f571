"""Which strategy a slice decodes its next rounds with: plain decoding or one of the draft trees, whichever commits most tokens per second.

A bandit for each bucket of active rows (and of long texts), after TLT's bucketed ε-greedy, with exploration bounded in time and not in tries: an arm that is
not the best is tried only while all time spent beyond the best arm stays below `explore_fraction` of the rollout's time. Pure: `choose` and `record` take a
state and what was seen, and return the next state; the same observations give the same choices. What is compiled and when it runs is decided elsewhere.

An arm that was never measured in a bucket is judged by the cost model: tokens that its rounds committed anywhere (before the first, a guess by depth), over
the seconds that its round took there when it was compiled.
"""

import bisect
import dataclasses
import math
import random
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from tlt_jax.strategies import OFF, Strategy

ROW_EDGES = (1, 2, 4, 8, 16, 32, 64, 128)  # a bucket holds the numbers of rows up to its edge
LONG_TEXT = 2048  # tokens of a row from which acceptance and costs are learned apart
UCB_WIDTH = 0.1  # rates of one arm spread by about a tenth
UNKNOWN_LOSS = 0.5  # share of a try's time that an arm nobody has measured is taken to waste
LEVEL_ACCEPTANCE = 0.4  # taken for a draft level of an arm that was never tried: a mediocre drafter


@dataclasses.dataclass(frozen=True)
class SelectorSettings:
    """`kind`: beg, ucb1 or fixed (always the first strategy). Plain decoding is always an arm of the first two."""

    kind: str
    strategies: tuple[Strategy, ...]
    max_rows: int = 32  # speculation is considered for at most this many active rows
    patience: int = 1  # choices in a row with so few rows before it starts
    explore_fraction: float = 0.02
    credit_seconds: float = 1.0  # may be spent beyond the best arm from the start
    window: int = 32  # latest measurements of an arm that count
    seed: int = 0


class Bucket(NamedTuple):
    """Active rows up to an edge, and whether the longest text is long."""

    rows: int
    long: bool


class Observation(NamedTuple):
    """Before a dispatch: rows that the program computes, tokens of the longest one, and the strategies whose programs are compiled for them."""

    rows: int
    length: int
    ready: frozenset[Strategy]

    @property
    def bucket(self) -> Bucket:
        """Where its measurements belong."""
        place = bisect.bisect_left(ROW_EDGES, self.rows)
        return Bucket(ROW_EDGES[min(place, len(ROW_EDGES) - 1)], self.length > LONG_TEXT)


class Outcome(NamedTuple):
    """After a dispatch."""

    strategy: Strategy
    tokens: float  # committed for each active row
    seconds: float
    compiled: bool  # a compilation ran in it: its time says nothing
    rounds: int = 1


_COUNTERS = ("choices", "calm", "seconds", "overspent", "dispatches")


@dataclasses.dataclass(frozen=True)
class SelectorState:
    """What has been measured.

    `rates`: latest committed tokens per second and active row, by (bucket, strategy); `tried`: when an arm was chosen last; `costs`: seconds of one round,
    measured when it was compiled; `accepted`: latest tokens of a round of one row, by strategy.
    """

    rates: Mapping[tuple[Bucket, Strategy], tuple[float, ...]] = dataclasses.field(default_factory=dict)
    tried: Mapping[tuple[Bucket, Strategy], int] = dataclasses.field(default_factory=dict)
    costs: Mapping[tuple[Bucket, Strategy], float] = dataclasses.field(default_factory=dict)
    accepted: Mapping[Strategy, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    choices: int = 0
    calm: int = 0  # choices in a row with few rows
    seconds: float = 0.0
    overspent: float = 0.0  # seconds beyond what the best arm would have taken
    dispatches: int = 0

    def to_json(self) -> dict:
        """As plain values for a checkpoint; costs are left out, since each process measures its own."""
        known = dict.fromkeys([*self.rates, *self.tried])  # an arm whose first try compiled has no rates yet
        arms = [[*arm[0], *arm[1], list(self.rates.get(arm, ())), self.tried.get(arm, 0)] for arm in known]
        accepted = [[*strategy, list(tokens)] for strategy, tokens in self.accepted.items()]
        return {name: vars(self)[name] for name in _COUNTERS} | {"arms": arms, "accepted": accepted}

    @staticmethod
    def from_json(value: dict) -> "SelectorState":
        """The inverse of `to_json`."""
        keys = [(Bucket(rows, long), Strategy(*strategy)) for rows, long, *strategy, _, _ in value["arms"]]
        rates = {key: tuple(arm[-2]) for key, arm in zip(keys, value["arms"], strict=True) if arm[-2]}
        tried = {key: arm[-1] for key, arm in zip(keys, value["arms"], strict=True) if arm[-1]}
        accepted = {Strategy(*strategy): tuple(tokens) for *strategy, tokens in value["accepted"]}
        return SelectorState(rates, tried, {}, accepted, **{name: value[name] for name in _COUNTERS})


def choose(settings: SelectorSettings, state: SelectorState, seen: Observation) -> tuple[SelectorState, Strategy]:
    """The strategy of the next dispatch."""
    few = seen.rows <= settings.max_rows
    state = dataclasses.replace(state, calm=state.calm + 1 if few else 0, choices=state.choices + 1)
    arms = [strategy for strategy in settings.strategies if strategy in seen.ready]
    if state.calm < settings.patience or not few or not arms:
        return _taken(state, seen, OFF)
    if settings.kind == "fixed":
        return _taken(state, seen, settings.strategies[0] if settings.strategies[0] in seen.ready else OFF)
    pick = _upper_bound if settings.kind == "ucb1" else _budgeted
    return _taken(state, seen, pick(settings, state, seen.bucket, [OFF, *arms]))


def record(settings: SelectorSettings, state: SelectorState, seen: Observation, outcome: Outcome) -> SelectorState:
    """Take in what a dispatch brought; one that compiled is not rewarded."""
    state = dataclasses.replace(state, seconds=state.seconds + outcome.seconds, dispatches=state.dispatches + 1)
    if outcome.compiled or outcome.seconds <= 0:
        return state
    rate = outcome.tokens / outcome.seconds
    key, bucket = (seen.bucket, outcome.strategy), seen.bucket
    best = max((statistics.median(rates) for (place, strategy), rates in state.rates.items() if place == bucket and strategy != outcome.strategy), default=0.0)
    wasted = outcome.seconds * max(0.0, 1 - rate / best) if best > 0 else 0.0
    rates = (*state.rates.get(key, ()), rate)[-settings.window :]
    accepted = (*state.accepted.get(outcome.strategy, ()), outcome.tokens / max(outcome.rounds, 1))[-settings.window :]
    return dataclasses.replace(
        state, rates={**state.rates, key: rates}, accepted={**state.accepted, outcome.strategy: accepted}, overspent=state.overspent + wasted)


def with_cost(state: SelectorState, rows: int, strategy: Strategy, seconds: float) -> SelectorState:
    """Take in what one round of `rows` short rows took."""
    bucket = Observation(rows, 0, frozenset()).bucket
    return dataclasses.replace(state, costs={**state.costs, (bucket, strategy): seconds})


def plain_rate(state: SelectorState, bucket: Bucket) -> float | None:
    """Median tokens per second and active row of the latest plain dispatches in a bucket; None when there was none."""
    rates = state.rates.get((bucket, OFF))
    return statistics.median(rates) if rates else None


def _taken(state: SelectorState, seen: Observation, strategy: Strategy) -> tuple[SelectorState, Strategy]:
    return dataclasses.replace(state, tried={**state.tried, (seen.bucket, strategy): state.choices}), strategy


def _values(state: SelectorState, bucket: Bucket, arms: list[Strategy]) -> dict[Strategy, float]:
    """Rates of the arms that are known here: measured, or in proportion to a measured one by the cost model, or by the nearest bucket that has both."""
    measured = {arm: statistics.median(state.rates[bucket, arm]) for arm in arms if (bucket, arm) in state.rates}
    modelled = _modelled(state, bucket, arms)
    if not measured:
        return modelled
    known = max(measured, key=measured.get) if OFF not in measured else OFF
    values = dict(measured)
    for arm in [arm for arm in arms if arm not in measured]:
        if arm in modelled and known in modelled:
            values[arm] = measured[known] * modelled[arm] / modelled[known]
        elif known == OFF:
            ratio = _nearest_ratio(state, bucket, arm)
            values |= {} if ratio is None else {arm: measured[OFF] * ratio}
    return values


def _modelled(state: SelectorState, bucket: Bucket, arms: list[Strategy]) -> dict[Strategy, float]:
    """Tokens of a round over its seconds, of the arms whose cost was measured for so many rows."""
    values = {}
    for arm in arms:
        seconds = state.costs.get((bucket._replace(long=False), arm))
        if seconds is not None:
            tried = state.accepted.get(arm)
            values[arm] = (statistics.fmean(tried) if tried else sum(LEVEL_ACCEPTANCE**level for level in range(arm.depth + 1))) / seconds
    return values


def _nearest_ratio(state: SelectorState, bucket: Bucket, arm: Strategy) -> float | None:
    """An arm's rate over plain decoding's in the nearest bucket that has both."""
    others = sorted(
        {place for place, _ in state.rates if place != bucket}, key=lambda place: (place.long != bucket.long, abs(place.rows - bucket.rows), place.rows))
    near = next((place for place in others if (place, arm) in state.rates and (place, OFF) in state.rates), None)
    if near is None:
        return None
    return statistics.median(state.rates[near, arm]) / max(statistics.median(state.rates[near, OFF]), 1e-9)


def _budgeted(settings: SelectorSettings, state: SelectorState, bucket: Bucket, arms: list[Strategy]) -> Strategy:
    """The best known arm, measured or not, or another one when there is time for it: first what was never measured here, then what was measured longest ago."""
    values = _values(state, bucket, arms)
    if not values:
        return OFF
    best = max(values, key=values.get)
    if (bucket, best) not in state.rates:
        return best
    typical = state.seconds / max(state.dispatches, 1)
    left = settings.explore_fraction * state.seconds + settings.credit_seconds - state.overspent
    rest = [arm for arm in arms if arm != best]
    random.Random(f"{settings.seed} {state.choices}").shuffle(rest)
    for arm in sorted(rest, key=lambda arm: ((bucket, arm) in state.rates, state.tried.get((bucket, arm), 0))):
        loss = max(0.0, 1 - values[arm] / values[best]) if arm in values else UNKNOWN_LOSS
        overdue = (bucket, arm) not in state.rates or state.choices - state.tried.get((bucket, arm), 0) > 1 / settings.explore_fraction
        if overdue and loss * typical <= left:
            return arm
    return best


def _upper_bound(settings: SelectorSettings, state: SelectorState, bucket: Bucket, arms: list[Strategy]) -> Strategy:
    """UCB1 (Auer et al. 2002) on rates relative to the best one; arms never measured here come first."""
    for arm in arms:
        if (bucket, arm) not in state.rates:
            return arm
    return max(arms, key=_bounds(state, bucket, arms).get)


def _bounds(state: SelectorState, bucket: Bucket, arms: list[Strategy]) -> dict[Strategy, float]:
    means = {arm: statistics.fmean(state.rates[bucket, arm]) for arm in arms}
    counts = {arm: len(state.rates[bucket, arm]) for arm in arms}
    highest, total = max(means.values()), sum(counts.values())
    spread = {arm: (2 * math.log(total) / counts[arm]) ** 0.5 for arm in arms}
    return {arm: means[arm] / max(highest, 1e-9) + UCB_WIDTH * spread[arm] for arm in arms}
