"""The selector on replayed tables of costs: what it loses against the best fixed arm, when it explores, and that it decides from observations alone."""

import dataclasses
import json

import hypothesis
import pytest
from hypothesis import strategies as draws

from tlt_jax.scheduling.selector_replay import Conditions, replay
from tlt_jax.scheduling.strategy_selector import Observation, Outcome, SelectorSettings, SelectorState, choose, record, with_cost
from tlt_jax.strategies import OFF, Strategy

SHORT, LONG = Strategy(3, 1, 3), Strategy(6, 2, 12)
READY = frozenset({SHORT, LONG})
SETTINGS = SelectorSettings("beg", (SHORT, LONG))
# Tokens per row and second of each arm by active rows: what pays with few rows costs with many.
TABLE = {1: {OFF: 30, SHORT: 40, LONG: 48}, 4: {OFF: 22, SHORT: 27, LONG: 25}, 16: {OFF: 12, SHORT: 11, LONG: 7}}
USELESS = {rows: {OFF: 30, SHORT: 21, LONG: 15} for rows in (1, 4, 16)}


@pytest.mark.parametrize("rows", TABLE)
def test_it_loses_at_most_5_percent_against_the_best_arm_of_every_bucket(rows):
    done = replay(SETTINGS, {rows: TABLE[rows]}, Conditions(dispatches=2000))
    assert done.spent / done.best <= 1.05
    assert max(set(done.chosen[rows]), key=done.chosen[rows].count) == max(TABLE[rows], key=TABLE[rows].get)


def test_over_a_rollout_that_shrinks_from_16_rows_to_1_it_loses_at_most_5_percent():
    done = replay(SETTINGS, {16: TABLE[16], 4: TABLE[4], 1: TABLE[1]}, Conditions(dispatches=3000))
    assert done.spent / done.best <= 1.05


def test_a_useless_drafter_costs_at_most_3_percent():
    done = replay(SETTINGS, USELESS)
    assert done.spent / done.plain <= 1.03


def test_it_switches_on_and_off_again_when_what_pays_changes():
    first = replay(SETTINGS, {1: TABLE[1]}, Conditions(dispatches=1500))
    then = replay(SETTINGS, {1: USELESS[1]}, Conditions(dispatches=3000), first.state)
    back = replay(SETTINGS, {1: TABLE[1]}, Conditions(dispatches=3000), then.state)
    assert first.chosen[1][-100:].count(LONG) > 80 and then.chosen[1][-100:].count(OFF) > 80 and back.chosen[1][-100:].count(LONG) > 80


def test_time_spent_beyond_the_best_arm_stays_within_the_budget():
    state = replay(SETTINGS, USELESS, Conditions(noise=0.0)).state
    assert state.overspent <= SETTINGS.credit_seconds + SETTINGS.explore_fraction * state.seconds + 0.1


@pytest.mark.parametrize("kind", ["beg", "ucb1"])
def test_every_arm_of_a_bucket_is_tried(kind):
    done = replay(dataclasses.replace(SETTINGS, kind=kind), {4: TABLE[4]}, Conditions(dispatches=400))
    assert set(done.chosen[4]) == {OFF, SHORT, LONG}


def test_ucb1_settles_on_the_best_arm():
    done = replay(dataclasses.replace(SETTINGS, kind="ucb1"), {1: TABLE[1]}, Conditions(dispatches=1000))
    assert done.chosen[1][-200:].count(LONG) > 120


def test_fixed_always_takes_the_first_strategy_when_rows_are_few_and_it_is_compiled():
    settings, state = dataclasses.replace(SETTINGS, kind="fixed", max_rows=8), SelectorState()
    for rows, ready, expected in ((8, READY, SHORT), (9, READY, OFF), (1, frozenset({LONG}), OFF), (1, READY, SHORT)):
        state, arm = choose(settings, state, Observation(rows, 10, ready))
        assert arm == expected


def test_an_arm_that_is_not_compiled_is_never_chosen():
    state = SelectorState()
    for _ in range(300):
        seen = Observation(2, 10, frozenset({LONG}))
        state, arm = choose(SETTINGS, state, seen)
        state = record(SETTINGS, state, seen, Outcome(arm, 5, 0.1, False))
        assert arm != SHORT


def test_patience_counts_choices_with_few_rows_in_a_row():
    settings, state, arms = dataclasses.replace(SETTINGS, kind="fixed", max_rows=4, patience=3), SelectorState(), []
    for rows in (4, 4, 5, 4, 4, 4, 4):
        state, arm = choose(settings, state, Observation(rows, 10, READY))
        arms.append(arm)
    assert arms == [OFF] * 5 + [SHORT] * 2


def test_a_dispatch_that_compiled_is_not_rewarded():
    seen = Observation(1, 10, READY)
    assert record(SETTINGS, SelectorState(), seen, Outcome(SHORT, 3, 20.0, True)).rates == {}


def test_what_was_learned_in_one_bucket_is_the_first_guess_in_the_next():
    state = replay(SETTINGS, {1: TABLE[1]}, Conditions(dispatches=1500)).state
    seen, no_time = Observation(2, 100, READY), dataclasses.replace(SETTINGS, explore_fraction=1e-9, credit_seconds=0.0)
    state = record(no_time, state, seen, Outcome(OFF, 5, 0.1, False))
    assert choose(no_time, state, seen)[1] == LONG


NO_TIME = dataclasses.replace(SETTINGS, explore_fraction=1e-9, credit_seconds=0.0)


def costed(rows, **seconds):
    state = SelectorState()
    for arm, cost in zip((OFF, SHORT, LONG), seconds.values(), strict=True):
        state = with_cost(state, rows, arm, cost)
    return state


def test_measured_costs_decide_the_first_choice():
    cheap, dear = costed(1, plain=1.0, short=1.1, long=3.0), costed(1, plain=1.0, short=2.0, long=3.0)
    assert choose(NO_TIME, cheap, Observation(1, 10, READY))[1] == SHORT
    assert choose(NO_TIME, dear, Observation(1, 10, READY))[1] == OFF


def test_what_rounds_committed_with_one_row_decides_with_costs_where_nothing_was_measured():
    costs = with_cost(with_cost(with_cost(costed(1, plain=1, short=1, long=1), 4, OFF, 1.0), 4, SHORT, 2.0), 4, LONG, 2.0)
    for tokens, expected in ((1.0, OFF), (6.0, LONG)):
        state = record(NO_TIME, costs, Observation(1, 10, READY), Outcome(LONG, tokens * 8, 8.0, False, rounds=8))
        assert choose(NO_TIME, state, Observation(4, 10, READY))[1] == expected


def test_a_measurement_counts_more_than_the_cost_model():
    state = costed(1, plain=1.0, short=1.1, long=3.0)
    for arm, tokens in ((OFF, 10), (SHORT, 5)):
        state = record(NO_TIME, state, Observation(1, 10, READY), Outcome(arm, tokens, 1.0, False))
    assert choose(NO_TIME, state, Observation(1, 10, READY))[1] == OFF


def test_an_arm_whose_tries_all_compiled_keeps_its_turn_in_a_saved_state():
    state = SelectorState()
    for _ in range(4):
        seen = Observation(1, 10, READY)
        state, arm = choose(SETTINGS, state, seen)
        state = record(SETTINGS, state, seen, Outcome(arm, 4, 1.0, compiled=arm != OFF))
    saved = SelectorState.from_json(json.loads(json.dumps(state.to_json())))
    assert dict(saved.tried) == dict(state.tried) and any(arm != OFF for _, arm in saved.tried)


observations = draws.tuples(draws.integers(1, 64), draws.integers(1, 5000), draws.sets(draws.sampled_from([SHORT, LONG])), draws.floats(0.001, 2.0),
                            draws.integers(1, 50), draws.booleans())


@hypothesis.given(draws.lists(observations, max_size=40), draws.sampled_from(["beg", "ucb1", "fixed"]), draws.integers(0, 3))
def test_equal_observations_give_equal_choices_from_a_saved_state_too(events, kind, seed):
    settings = dataclasses.replace(SETTINGS, kind=kind, seed=seed)
    state, other = SelectorState(), SelectorState()
    for rows, length, ready, seconds, tokens, compiled in events:
        seen = Observation(rows, length, frozenset(ready))
        state, arm = choose(settings, state, seen)
        other, again = choose(settings, SelectorState.from_json(json.loads(json.dumps(other.to_json()))), seen)
        assert arm == again and (arm == OFF or arm in ready)
        outcome = Outcome(arm, tokens, seconds, compiled, rounds=2)
        state, other = record(settings, state, seen, outcome), record(settings, other, seen, outcome)
    assert dict(state.rates) == dict(other.rates) and dict(state.tried) == dict(other.tried) and dict(state.accepted) == dict(other.accepted)
