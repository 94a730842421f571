"""Which decode programs a slice compiles."""

import hypothesis
from hypothesis import strategies as draws

from tlt_jax.scheduling.compile_plan import compile_plan
from tlt_jax.scheduling.strategy_selector import SelectorSettings
from tlt_jax.strategies import Strategy

ARMS = (Strategy(3, 1, 3), Strategy(4, 2, 8))


def test_every_strategy_is_planned_where_rows_are_few_enough():
    assert compile_plan((1, 4, 16, 64), SelectorSettings("beg", ARMS, max_rows=16), 24) == {1: ARMS, 4: ARMS, 16: ARMS, 64: ()}


def test_fixed_plans_the_one_strategy_it_uses():
    assert compile_plan((1, 4), SelectorSettings("fixed", ARMS), 24) == {1: ARMS[:1], 4: ARMS[:1]}


def test_a_small_budget_goes_to_few_rows_and_first_strategies():
    assert compile_plan((1, 4, 16), SelectorSettings("beg", ARMS), 6) == {1: ARMS, 4: ARMS[:1], 16: ()}


@hypothesis.given(draws.sets(draws.integers(1, 256), min_size=1), draws.integers(1, 40), draws.integers(0, 64), draws.sampled_from(["beg", "ucb1", "fixed"]))
def test_plain_decoding_is_never_left_out_and_the_budget_is_kept(sizes, most, max_rows, kind):
    plan = compile_plan(tuple(sizes), SelectorSettings(kind, ARMS, max_rows=max_rows), most)
    assert set(plan) == sizes
    assert sum(map(len, plan.values())) <= max(most - len(sizes), 0)
    assert not any(arms for size, arms in plan.items() if size > max_rows)
