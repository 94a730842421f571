"""Which seconds a dispatch is charged with."""

import itertools

import pytest

from tlt_jax.runtime import measured_choice
from tlt_jax.runtime.measured_choice import MeasuredChoice
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
    clock += [0.0, 7.0, 9.0]  # rounds queued behind an admission, which is read at 7
    queued = choice.next(1, 8, ())
    choice.passed()
    choice.reward(queued, 5, 1, 5, 5)
    assert choice.dispatches[0].seconds == 2.0 and choice.state.rates[queued.seen.bucket, OFF] == (2.5,)


def test_a_phase_starts_with_no_dispatches_and_keeps_what_was_learned(monkeypatch):
    choice, ticks = MeasuredChoice(SelectorSettings("fixed", ())), itertools.count()
    monkeypatch.setattr(measured_choice.time, "monotonic", lambda: float(next(ticks)))
    choice.reward(choice.next(1, 8, ()), 5, 1, 5, 5)
    choice.start()
    assert choice.dispatches == [] and choice.state.rates
