"""The selector on replayed tables of costs: what it loses against the best fixed arm, when it explores, and that it decides from observations alone."""

import dataclasses
import json
import random

import hypothesis
import pytest
from hypothesis import strategies as draws

from tlt_jax.scheduling.strategy_selector import Observation, Outcome, SelectorSettings, SelectorState, choose, record
from tlt_jax.strategies import OFF, Strategy

SHORT, LONG = Strategy(3, 1, 3), Strategy(6, 2, 12)
READY = frozenset({SHORT, LONG})
SETTINGS = SelectorSettings("beg", (SHORT, LONG))
# Tokens per row and second of each arm by active rows: what pays with few rows costs with many.
TABLE = {1: {OFF: 30, SHORT: 40, LONG: 48}, 4: {OFF: 22, SHORT: 27, LONG: 25}, 16: {OFF: 12, SHORT: 11, LONG: 7}}
USELESS = {rows: {OFF: 30, SHORT: 21, LONG: 15} for rows in (1, 4, 16)}


def replay(settings, table, dispatches=4000, seconds=0.1, noise=0.1, state=None, seed=1):
    """(state, seconds spent, seconds the best arm of each bucket would have taken for the same tokens, arms by rows)."""
    state, generator, spent, best, chosen = state or SelectorState(), random.Random(seed), 0.0, 0.0, {rows: [] for rows in table}
    for turn in range(dispatches):
        rows = list(table)[turn * len(table) // dispatches]
        seen = Observation(rows, 100, READY)
        state, arm = choose(settings, state, seen)
        tokens = table[rows][arm] * seconds
        measured = seconds * generator.lognormvariate(0, noise)
        state = record(settings, state, seen, Outcome(arm, tokens, measured, False))
        spent, best = spent + seconds, best + tokens / max(table[rows].values())
        chosen[rows].append(arm)
    return state, spent, best, chosen


@pytest.mark.parametrize("rows", TABLE)
def test_it_loses_at_most_5_percent_against_the_best_arm_of_every_bucket(rows):
    _, spent, best, chosen = replay(SETTINGS, {rows: TABLE[rows]}, dispatches=2000)
    assert spent / best <= 1.05
    assert max(set(chosen[rows]), key=chosen[rows].count) == max(TABLE[rows], key=TABLE[rows].get)


def test_over_a_rollout_that_shrinks_from_16_rows_to_1_it_loses_at_most_5_percent():
    _, spent, best, _ = replay(SETTINGS, {16: TABLE[16], 4: TABLE[4], 1: TABLE[1]}, dispatches=3000)
    assert spent / best <= 1.05


def test_a_useless_drafter_costs_at_most_3_percent():
    _, spent, best, _ = replay(SETTINGS, USELESS)
    assert spent / best <= 1.03


def test_it_switches_on_and_off_again_when_what_pays_changes():
    state, _, _, first = replay(SETTINGS, {1: TABLE[1]}, dispatches=1500)
    state, _, _, then = replay(SETTINGS, {1: USELESS[1]}, dispatches=3000, state=state)
    _, _, _, back = replay(SETTINGS, {1: TABLE[1]}, dispatches=3000, state=state)
    assert first[1][-100:].count(LONG) > 80 and then[1][-100:].count(OFF) > 80 and back[1][-100:].count(LONG) > 80


def test_time_spent_beyond_the_best_arm_stays_within_the_budget():
    state, *_ = replay(SETTINGS, USELESS, noise=0.0)
    assert state.overspent <= SETTINGS.credit_seconds + SETTINGS.explore_fraction * state.seconds + 0.1


@pytest.mark.parametrize("kind", ["beg", "ucb1"])
def test_every_arm_of_a_bucket_is_tried(kind):
    _, _, _, chosen = replay(dataclasses.replace(SETTINGS, kind=kind), {4: TABLE[4]}, dispatches=400)
    assert set(chosen[4]) == {OFF, SHORT, LONG}


def test_ucb1_settles_on_the_best_arm():
    _, _, _, chosen = replay(dataclasses.replace(SETTINGS, kind="ucb1"), {1: TABLE[1]}, dispatches=1000)
    assert chosen[1][-200:].count(LONG) > 120


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
    state, *_ = replay(SETTINGS, {1: TABLE[1]}, dispatches=1500)
    seen, no_time = Observation(2, 100, READY), dataclasses.replace(SETTINGS, explore_fraction=1e-9, credit_seconds=0.0)
    state = record(no_time, state, seen, Outcome(OFF, 5, 0.1, False))
    assert choose(no_time, state, seen)[1] == LONG


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
        outcome = Outcome(arm, tokens, seconds, compiled)
        state, other = record(settings, state, seen, outcome), record(settings, other, seen, outcome)
    assert {key: value for key, value in state.rates.items()} == dict(other.rates)
