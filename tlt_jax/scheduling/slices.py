"""Who owns each rollout slice: the rollout, or for a while the drafter's training. A pure state machine; time is a field of what it is shown.

A slice that holds rows is never lent. A loan ends by a recall, after which no other quantum of training is started on the slice, so it is back within the
quantum that runs. What the thresholds mean: settings `scheduler.*`.
"""

import enum
from typing import NamedTuple


class Owner(enum.Enum):
    """ROLLOUT decodes rows, or waits for some; DISTILLING is lent; RECALLED is lent until its quantum ends."""

    ROLLOUT = "rollout"
    DISTILLING = "distilling"
    RECALLED = "recalled"


class LoanSettings(NamedTuple):
    """When a slice counts as idle while the phase may still send it rows."""

    idle_utilization: float = 0.30  # share of the time in which it had work
    idle_seconds: float = 0.5  # for how long it had less


class Reading(NamedTuple):
    """One slice at a tick."""

    rows: int  # that decode
    busy: bool  # whether it has had work of the rollout since the last tick
    in_quantum: bool  # whether a quantum of training runs on it


class Observation(NamedTuple):
    """What is seen at a tick."""

    now: float  # seconds of the host's clock
    queued: int  # requests that no slice has taken
    more_may_come: bool  # the phase may still queue requests
    remaining: float  # estimated seconds until the phase ends for all processes; infinity when nothing is known
    quantum: float  # seconds that a quantum takes, as measured
    slices: tuple[Reading, ...]
    elsewhere: bool = False  # other processes still hold rows of the phase


class Slice(NamedTuple):
    """What is remembered of a slice: its owner, and when it was busy, as (from, to, busy) over the last `idle_seconds`."""

    owner: Owner = Owner.ROLLOUT
    seen: tuple[tuple[float, float, bool], ...] = ()


class Slices(NamedTuple):
    """The state: every slice, and the time of the last tick."""

    slices: tuple[Slice, ...]
    last: float | None = None


class Commands(NamedTuple):
    """Slices to lend and to recall, by number."""

    lend: tuple[int, ...] = ()
    recall: tuple[int, ...] = ()


def all_rolling_out(count: int) -> Slices:
    """The state at the start of a phase."""
    return Slices((Slice(),) * count)


def decide(settings: LoanSettings, state: Slices, seen: Observation) -> tuple[Slices, Commands]:
    """The state after a tick, and what to do. The same observations give the same commands."""
    ended = not (seen.queued or seen.more_may_come or seen.elsewhere or any(reading.rows for reading in seen.slices))
    worth_it = not seen.queued and not ended and seen.remaining >= seen.quantum
    slices, lend, recall = [], [], []
    for number, (one, reading) in enumerate(zip(state.slices, seen.slices, strict=True)):
        one = _noted(settings, one, state.last, seen.now, reading.busy)
        if one.owner is Owner.DISTILLING and not worth_it:
            one = one._replace(owner=Owner.RECALLED)
            recall.append(number)
        if one.owner is Owner.RECALLED and not reading.in_quantum:
            one = Slice()
        if one.owner is Owner.ROLLOUT and worth_it and not reading.rows and (not seen.more_may_come or _idle(settings, one, seen.now)):
            one = Slice(Owner.DISTILLING)
            lend.append(number)
        slices.append(one)
    return Slices(tuple(slices), seen.now), Commands(tuple(lend), tuple(recall))


def allowances(state: Slices, rows: tuple[int, ...], queued: int) -> tuple[int, ...]:
    """The rows that each slice may hold: an even share of all that are left, none where a slice is lent; what is held stays."""
    own = [one.owner is Owner.ROLLOUT for one in state.slices]
    share = -(-(sum(rows) + queued) // max(sum(own), 1))
    return tuple(max(held, share if ours else 0) for held, ours in zip(rows, own, strict=True))


def _noted(settings: LoanSettings, one: Slice, last: float | None, now: float, busy: bool) -> Slice:
    if last is None or one.owner is not Owner.ROLLOUT:
        return one
    recent = tuple(span for span in one.seen if span[1] > now - settings.idle_seconds)
    return one._replace(seen=(*recent, (last, now, busy)))


def _idle(settings: LoanSettings, one: Slice, now: float) -> bool:
    """Whether it had little work over the whole of the last `idle_seconds`."""
    start = now - settings.idle_seconds
    if not one.seen or one.seen[0][0] > start:
        return False
    worked = sum(end - max(begin, start) for begin, end, busy in one.seen if busy)
    return worked < settings.idle_utilization * settings.idle_seconds
