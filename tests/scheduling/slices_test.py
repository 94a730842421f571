"""Lending of idle slices, as properties of many simulated phases with a fake clock."""

import dataclasses
import math
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_jax.scheduling.slices import LoanSettings, Observation, Owner, Reading, all_rolling_out, allowances, decide

SETTINGS = LoanSettings()
EMPTY = Reading(0, False, False)


class Phase(NamedTuple):
    """What a simulated phase is made of."""

    count: int  # slices
    slots: int
    quantum: float
    arrivals: list[tuple[float, float]]  # (when a request is queued, how long it decodes)
    others_until: float  # when the last row of other processes ends
    ticks: list[float]


@dataclasses.dataclass
class Plant:
    """Slices as the event loop sees them: rows that end at known times, quanta that take `quantum` seconds, requests that arrive."""

    slots: int
    quantum: float
    arrivals: list[tuple[float, float]]
    others_until: float
    slices: list = dataclasses.field(default_factory=list)  # rows of each, as the times of their ends
    queue: list = dataclasses.field(default_factory=list)  # (queued since, seconds)
    quanta: list = dataclasses.field(default_factory=list)  # end of the quantum that runs on each slice, or None
    recalled_at: dict = dataclasses.field(default_factory=dict)

    def pass_time(self, now: float) -> None:
        """What happened since the last tick."""
        self.slices = [[end for end in rows if end > now] for rows in self.slices]
        self.quanta = [None if end is not None and end <= now else end for end in self.quanta]
        while self.arrivals and self.arrivals[0][0] <= now:
            self.queue.append((now, self.arrivals.pop(0)[1]))

    def seen(self, now: float, worked: list[bool]) -> Observation:
        ends = [end for rows in self.slices for end in rows]
        remaining = math.inf if self.arrivals else max(self.others_until, *ends, now) - now
        readings = tuple(Reading(len(rows), busy, quantum is not None) for rows, busy, quantum in zip(self.slices, worked, self.quanta, strict=True))
        return Observation(now, len(self.queue), bool(self.arrivals), remaining, self.quantum, readings, now < self.others_until)


def simulate(phase, check):
    """`check(plant, state, commands, seen)` after every tick."""
    count, slots, quantum, arrivals, others_until, ticks = phase
    plant = Plant(slots, quantum, sorted(arrivals), others_until, [[] for _ in range(count)], [], [None] * count)
    state, now, worked = all_rolling_out(count), 0.0, [False] * count
    for tick in ticks:
        now += tick
        plant.pass_time(now)
        seen = plant.seen(now, worked)
        state, commands = decide(SETTINGS, state, seen)
        check(plant, state, commands, seen)
        for number, (rows, allowed) in enumerate(zip(plant.slices, allowances(state, tuple(map(len, plant.slices)), len(plant.queue)), strict=True)):
            while plant.queue and len(rows) < min(allowed, slots):
                rows.append(now + plant.queue.pop(0)[1])
            if state.slices[number].owner is Owner.DISTILLING and plant.quanta[number] is None:
                plant.quanta[number] = now + quantum
        worked = [bool(rows) for rows in plant.slices]
    return plant, state


TIMES = st.floats(0.001, 0.2)
PHASES = st.builds(
    Phase, st.integers(1, 5), st.integers(1, 4), st.floats(0.01, 0.4), st.lists(st.tuples(st.floats(0, 3), st.floats(0.001, 4)), max_size=25),
    st.just(0.0) | st.floats(0.001, 8), st.lists(TIMES, min_size=5, max_size=80))


@settings(max_examples=700, deadline=None)
@given(PHASES)
def test_a_slice_with_rows_is_never_lent_and_never_has_two_owners(phase):
    def check(plant, state, commands, seen):
        for number, (one, rows, quantum) in enumerate(zip(state.slices, plant.slices, plant.quanta, strict=True)):
            assert not (rows and quantum is not None)
            assert not (rows and one.owner is not Owner.ROLLOUT)
            if number in commands.lend:
                assert not rows and not plant.queue and quantum is None
        assert not set(commands.lend) & set(commands.recall)

    simulate(phase, check)


@settings(max_examples=700, deadline=None)
@given(PHASES)
def test_a_recalled_slice_starts_no_quantum_and_is_back_within_one(phase):
    def check(plant, state, commands, seen):
        for number, one in enumerate(state.slices):
            if number in commands.recall:
                plant.recalled_at[number] = seen.now
            since = plant.recalled_at.get(number)
            if one.owner is Owner.RECALLED:
                assert plant.quanta[number] <= since + plant.quantum
            elif since is not None:
                del plant.recalled_at[number]

    simulate(phase, check)


@settings(max_examples=700, deadline=None)
@given(PHASES)
def test_the_rollout_never_starves(phase):
    """A request waits only while every slice is full, or for slices that were recalled at once and are back within their quantum."""

    def check(plant, state, commands, seen):
        if plant.queue:
            assert Owner.DISTILLING not in {one.owner for one in state.slices}
            room = [one.owner is Owner.ROLLOUT and len(rows) < plant.slots for one, rows in zip(state.slices, plant.slices, strict=True)]
            share = allowances(state, tuple(map(len, plant.slices)), len(plant.queue))
            assert not any(room) or any(free and allowed > len(rows) for free, allowed, rows in zip(room, share, plant.slices, strict=True))

    simulate(phase, check)


@settings(max_examples=200, deadline=None)
@given(PHASES)
def test_the_same_observations_give_the_same_commands(phase):
    log = []
    simulate(phase, lambda plant, state, commands, seen: log.append((seen, commands)))
    state = all_rolling_out(phase.count)
    for seen, commands in log:
        state, again = decide(SETTINGS, state, seen)
        assert again == commands


@settings(max_examples=300, deadline=None)
@given(PHASES)
def test_once_no_more_rows_can_come_an_empty_slice_is_lent_at_the_first_tick_as_long_as_a_quantum_fits(phase):
    def check(plant, state, commands, seen):
        if not seen.more_may_come and not plant.queue and (any(plant.slices) or seen.elsewhere) and seen.remaining >= seen.quantum:
            assert all(rows or one.owner is Owner.DISTILLING or quantum is not None for rows, one, quantum in zip(
                plant.slices, state.slices, plant.quanta, strict=True))

    simulate(phase, check)


def test_while_rows_may_come_a_slice_is_lent_only_after_it_was_idle_for_long_enough():
    state, lent = all_rolling_out(1), []
    for tick in range(30):
        seen = Observation(0.1 * tick, 0, True, math.inf, 0.05, (Reading(0, tick < 10, False),))
        state, commands = decide(SETTINGS, state, seen)
        lent += [tick] * len(commands.lend)
    # Work until 0.9 s; less than 30 % of half a second are busy from 0.9 + 0.35 s on.
    assert lent == [13]


def test_a_loan_ends_when_the_phase_does_or_when_no_quantum_fits_any_more():
    lent, _ = decide(SETTINGS, all_rolling_out(2), Observation(0.0, 0, False, 9.0, 0.5, (EMPTY, Reading(3, True, False))))
    assert [one.owner for one in lent.slices] == [Owner.DISTILLING, Owner.ROLLOUT]
    running = Reading(0, False, True)
    for seen in (Observation(1.0, 0, False, 0.4, 0.5, (running, Reading(1, True, False))), Observation(1.0, 0, False, 9.0, 0.5, (running, EMPTY))):
        state, commands = decide(SETTINGS, lent, seen)
        assert commands.recall == (0,) and state.slices[0].owner is Owner.RECALLED
        state, _ = decide(SETTINGS, state, seen._replace(slices=(EMPTY, seen.slices[1])))
        assert state.slices[0].owner is Owner.ROLLOUT


def test_a_process_without_rows_lends_all_its_slices_until_no_quantum_fits_before_the_others_are_done():
    state, commands = decide(SETTINGS, all_rolling_out(2), Observation(0.0, 0, False, 9.0, 0.5, (EMPTY, EMPTY), elsewhere=True))
    assert commands.lend == (0, 1)
    running = Reading(0, False, True)
    state, commands = decide(SETTINGS, state, Observation(1.0, 0, False, 8.0, 0.5, (running, running), elsewhere=True))
    assert not commands.recall
    for elsewhere, remaining in ((True, 0.4), (False, 0.0)):
        assert decide(SETTINGS, state, Observation(9.0, 0, False, remaining, 0.5, (running, running), elsewhere))[1].recall == (0, 1)


@pytest.mark.parametrize(("owners", "rows", "queued", "expected"), [
    ("rr", (0, 0), 5, (3, 3)), ("rd", (2, 0), 4, (6, 0)), ("cr", (0, 1), 0, (0, 1)), ("rrd", (5, 1, 0), 0, (5, 3, 0))])
def test_rows_are_shared_evenly_among_the_slices_that_are_not_lent(owners, rows, queued, expected):
    names = {"r": Owner.ROLLOUT, "d": Owner.DISTILLING, "c": Owner.RECALLED}
    state = all_rolling_out(len(owners))
    state = state._replace(slices=tuple(one._replace(owner=names[name]) for one, name in zip(state.slices, owners, strict=True)))
    assert allowances(state, rows, queued) == expected
