"""Which seconds a dispatch or an admission is charged with."""

import itertools

import pytest

from tlt_jax.runtime import measured_choice
from tlt_jax.runtime.measured_choice import MeasuredChoice, queued_now
from tlt_jax.scheduling.decode_report import Admission
from tlt_jax.scheduling.strategy_selector import SelectorSettings
from tlt_jax.strategies import OFF


@pytest.fixture
def clock(monkeypatch):
    """Sets what the clock says next."""
    times = []
    monkeypatch.setattr(measured_choice.time, "monotonic", lambda: times.pop(0))
    return times


def test_a_dispatch_runs_from_when_the_one_before_it_was_read(clock):
    choice = MeasuredChoice(SelectorSettings("fixed", ()))
    clock += [0.0, 1.0, 10.0, 14.0]  # both queued, then both read
    first, second = choice.next(1, 8, ()), choice.next(1, 8, ())
    choice.reward(first, 5, 1, 5, 5)
    choice.reward(second, 5, 1, 5, 5)
    assert [(one.started, one.seconds) for one in choice.dispatches] == [(0.0, 10.0), (10.0, 4.0)]


def test_a_prefill_is_not_charged_to_the_rounds_behind_it(clock):
    choice = MeasuredChoice(SelectorSettings("fixed", ()))
    clock += [1.0, 2.0, 7.0, 9.0]  # rounds queued behind an admission, which is read at 7
    admission, rounds = queued_now(), choice.next(1, 8, ())
    choice.admitted(admission)
    choice.reward(rounds, 5, 1, 5, 5)
    assert choice.admissions == [Admission(1.0, 6.0, False)]
    assert choice.dispatches[0].seconds == 2.0 and choice.state.rates[rounds.seen.bucket, OFF] == (2.5,)


def test_a_prefill_runs_from_when_the_rounds_before_it_were_read(clock):
    choice = MeasuredChoice(SelectorSettings("fixed", ()))
    clock += [0.0, 1.0, 4.0, 5.0]
    rounds, admission = choice.next(1, 8, ()), queued_now()
    choice.reward(rounds, 5, 1, 5, 5)
    choice.admitted(admission)
    assert choice.admissions == [Admission(4.0, 1.0, False)]


def test_a_phase_starts_with_nothing_that_ran_and_keeps_what_was_learned(monkeypatch):
    choice, ticks = MeasuredChoice(SelectorSettings("fixed", ())), itertools.count()
    monkeypatch.setattr(measured_choice.time, "monotonic", lambda: float(next(ticks)))
    choice.admitted(queued_now())
    choice.reward(choice.next(1, 8, ()), 5, 1, 5, 5)
    choice.start()
    assert choice.dispatches == choice.admissions == [] and choice.state.rates
