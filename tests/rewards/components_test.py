"""Components of a composite reward, from text to a weighted sum whose first part is the verdict."""

import pytest

from tlt_jax.rewards.components import NamedReward, parse_components
from tlt_jax.rewards.items import Component, RewardItem, Scored, Scorer
from tlt_jax.rewards.scorers import build_scorer


def test_every_form_is_understood():
    assert parse_components(("math=1", "speed=0.1", "format:boxed=-0.5", "my/rewards.py:style=2e-1")) == [
        NamedReward("math", 1.0, "math"), NamedReward("speed", 0.1, "speed"), NamedReward("boxed", -0.5, "format", "boxed"),
        NamedReward("style", 0.2, "user", "my/rewards.py:style")]


@pytest.mark.parametrize("text", ["math", "math=", "math=much", "math=inf", "=1", "format:box=1", "rewards.py=1", "model=1"])
def test_anything_else_is_named(text):
    with pytest.raises(ValueError, match="reward"if "=" in text and text[-1] == "1" else "KIND=WEIGHT"):
        parse_components((text,))


def test_what_is_right_is_said_by_the_first_component_alone():
    parts = (Component("right", 0.5, Scorer("exact")), Component("speed", 1.0, Scorer("speed", {"limit": 10})))
    scorer = build_scorer(Scorer("composite", components=parts))
    right, wrong = scorer.score((RewardItem("", "7", answer="7", response_ids=(1,) * 10), RewardItem("", "8", answer="7")))
    assert (right.score, right.verdict, wrong.score, wrong.verdict) == (0.5, 1.0, 1.0, 0.0)
    assert wrong.components == {"right": 0.0, "speed": 1.0}
    assert Scored(0, 0, right.score, {}, None, None, 0.0, right.verdict).judged == 1.0 and Scored(0, 0, 0.5, {}, None, None, 0.0).judged == 0.5
