"""What a rollout phase's dispatches say about its speed: gain over plain decoding, use of each strategy, length of the tail. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tlt_jax.scheduling.strategy_selector import Bucket
from tlt_jax.strategies import OFF, Strategy, strategy_name

TAIL_SHARE = 0.1  # of the active-row time, at its end


class Dispatch(NamedTuple):
    """One dispatch of rounds on one slice, after it was read."""

    started: float  # seconds of the host's clock
    seconds: float
    strategy: Strategy
    bucket: Bucket
    rows: int  # active ones
    tokens: int  # committed in all of them
    rounds: int
    forwards: int  # rounds of every active row, added up
    compiled: bool


class Admission(NamedTuple):
    """One admission of rows on one slice, with the prefill of their prompts, after it was read."""

    started: float  # seconds of the host's clock
    seconds: float
    compiled: bool


def from_the_start(slices: Sequence[Sequence[Dispatch]]) -> list[list[Dispatch]]:
    """The dispatches of a host's slices in seconds since the first of them: the clocks of two hosts have nothing in common, their phases start together."""
    first = min((own[0].started for own in slices if own), default=0.0)
    return [[one._replace(started=one.started - first) for one in own] for own in slices]


def report(slices: Sequence[tuple[Sequence[Dispatch], Mapping[Bucket, float]]]) -> dict[str, float]:
    """spec/ and perf/ metrics of a phase, from each slice's dispatches and its plain rates (tokens per second and active row by bucket).

    `spec/speedup_vs_plain` is left out where no plain round was measured for the numbers of rows at hand, and when nothing was drafted; a dispatch that
    compiled counts for no speed.
    """
    dispatches = [dispatch for own, _ in slices for dispatch in own]
    rounds = sum(dispatch.rounds for dispatch in dispatches)
    if not rounds:
        return {}
    shares = {strategy: 0 for strategy in sorted({OFF, *(dispatch.strategy for dispatch in dispatches)})}
    for dispatch in dispatches:
        shares[dispatch.strategy] += dispatch.rounds
    metrics = {f"spec/rounds_share_{strategy_name(strategy)}": count / rounds for strategy, count in shares.items()}
    drafted = [dispatch for dispatch in dispatches if dispatch.strategy != OFF]
    if drafted:
        metrics["spec/accept_length_drafted"] = sum(dispatch.tokens for dispatch in drafted) / sum(dispatch.forwards for dispatch in drafted)
    plain, spent = _plain_seconds(slices)
    if spent > 0 and shares[OFF] < rounds:
        metrics["spec/speedup_vs_plain"] = plain / spent
    seconds, share = tail(dispatches)
    return metrics | {"perf/tail_seconds": seconds, "perf/tail_share": share}


def _plain_seconds(slices: Sequence[tuple[Sequence[Dispatch], Mapping[Bucket, float]]]) -> tuple[float, float]:
    """(seconds that plain decoding would have taken, seconds it took) over the dispatches whose number of rows has a plain rate."""
    plain = spent = 0.0
    for dispatches, rates in slices:
        for one in dispatches:
            if not one.compiled and rates.get(one.bucket) and one.rows:
                plain += one.tokens / one.rows / rates[one.bucket]
                spent += one.seconds
    return plain, spent


def tail(dispatches: Iterable[Dispatch], share: float = TAIL_SHARE) -> tuple[float, float]:
    """(seconds, share of the whole) of wall time in which the last `share` of the active-row time is spent, all slices together."""
    changes = [(one.started, one.rows) for one in dispatches] + [(one.started + one.seconds, -one.rows) for one in dispatches]
    changes.sort()
    spans, rows = [], 0
    for (now, change), (then, _) in zip(changes, changes[1:], strict=False):
        rows += change
        spans.append((then - now, rows))
    left = share * math.fsum(seconds * rows for seconds, rows in spans)
    whole, tail_seconds = math.fsum(seconds for seconds, rows in spans if rows), 0.0
    for seconds, rows in reversed(spans):
        if not rows:
            continue
        part = min(seconds, left / rows)
        tail_seconds, left = tail_seconds + part, left - part * rows
        if part < seconds:
            break
    return tail_seconds, tail_seconds / whole if whole else 0.0
