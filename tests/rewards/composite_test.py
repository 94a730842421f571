"""Composite rewards: weights, components that do not apply, diversity within the group, length terms."""

import pytest

from tlt_jax.rewards import composite
from tlt_jax.rewards.items import Component, RewardError, RewardItem, Scorer
from tlt_jax.rewards.scorers import build_scorer


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0), (24576, -1.0)])
def test_the_overlong_penalty_falls_through_the_buffer_and_is_capped(length, penalty):
    assert composite.overlong_penalty(length, 20480, 4096) == penalty


def test_a_buffer_that_cannot_be_is_an_error():
    for buffer in (0, -1, 11):
        with pytest.raises(ValueError, match="buffer"):
            composite.overlong_penalty(1, 10, buffer)


def test_diversity_rewards_what_the_others_do_not_say():
    same, own = [1, 2, 3], [7, 8, 9]
    assert composite.diversity([same, same, own]) == [0.0, 0.0, 1.0]
    assert composite.diversity([[1, 2, 3], [1, 2, 4]]) == [0.5, 0.5]
    assert composite.diversity([[1], own]) == [0.0, 1.0]
    assert composite.diversity([own]) == [0.0]


def test_distinct_n_counts_the_group():
    assert composite.distinct_n([[1, 2, 3], [1, 2, 4]]) == 3 / 4
    assert composite.distinct_n([[1], []]) == 0.0


def test_a_component_that_does_not_apply_is_left_out_of_the_sum():
    totals = composite.weighted_sum({"a": [1.0, None, 0.0, None], "b": [1.0, 1.0, None, None]}, {"a": 2.0, "b": 0.5})
    assert totals == [2.5, 0.5, 0.0, None]


def test_weights_must_name_the_components():
    with pytest.raises(ValueError, match="weights"):
        composite.weighted_sum({"a": [1.0]}, {"b": 1.0})


def test_a_composite_scorer_reports_each_component_and_the_answer():
    spec = Scorer(
        "composite",
        components=(
            Component("quality", 1.0, Scorer("math")),
            Component("speed", 0.5, Scorer("speed", {"limit": 10})),
            Component("diversity", 0.25, Scorer("diversity", {"n": 1})),
            Component("format", 0.1, Scorer("format", {"name": "boxed"})),
        ),
    )
    group = tuple(
        RewardItem(prompt="2+2?", response=response, answer="4", response_ids=ids)
        for response, ids in ((r"\boxed{4}", (1, 2, 3, 4, 5)), ("5", (1,)), ("none", ()))
    )
    scorer = build_scorer(spec)
    right, wrong, empty = scorer.score(group)
    assert scorer.grouped
    assert right.score == pytest.approx(1.0 + 0.5 * 0.5 + 0.25 * 0.8 + 0.1)
    assert right.components == {"quality": 1.0, "speed": 0.5, "diversity": 0.8, "format": 1.0}
    assert (right.pred, wrong.pred) == ("4", "5")
    assert wrong.score == pytest.approx(0.5 * 0.9)
    assert empty.components["speed"] == 1.0


def test_scorer_specs_are_checked_when_built():
    for spec, words in (
        (Scorer("maths"), "unknown reward kind 'maths'"),
        (Scorer("speed"), "limit"),
        (Scorer("speed", {"limit": 3, "n": 1}), "'n'"),
        (Scorer("format", {"name": "x"}), "think_answer"),
        (Scorer("composite"), "components"),
    ):
        with pytest.raises(RewardError, match=words):
            build_scorer(spec)
