"""Format rewards: full reward for the form, none for anything else, whatever stands after the end or in the prompt."""

import pytest

from tlt_jax.rewards.formats import FORMATS, boxed, think_answer, thought_then_answer, until_stop
from tlt_jax.rewards.items import RewardItem, Scorer
from tlt_jax.rewards.scorers import build_scorer

GOOD = "<think>a\nb</think>\n<answer>4</answer>"


@pytest.mark.parametrize("response", [GOOD, GOOD + "\n", GOOD + "<|im_end|>\njunk <think>", GOOD + "</s>" * 3, "<think></think><answer>4\n5</answer>"])
def test_the_think_answer_form_gets_the_full_reward(response):
    assert think_answer(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "4",
        GOOD[:-3],
        GOOD + " more",
        GOOD + GOOD,
        "<answer>4</answer>",
        "<think>a</think>",
        "<think>a</think><answer></answer>",
        "x" + GOOD,
        "<|im_end|>" + GOOD,
        "<think><think>a</think></think><answer>4</answer>",
    ],
)
def test_any_other_form_gets_none(response):
    assert think_answer(response) == 0.0


def test_a_template_that_opens_the_thought_asks_only_for_its_end():
    assert thought_then_answer(GOOD.removeprefix("<think>")) == 1.0
    assert thought_then_answer("<answer>4</answer>") == 0.0


@pytest.mark.parametrize(
    ("response", "reward"),
    [(r"\boxed{4}", 1.0), (r"\boxed{\frac{1}{2}}", 1.0), (r"\boxed{}", 0.0), (r"\boxed{4", 0.0), ("4", 0.0), (r"4<|im_end|>\boxed{4}", 0.0)],
)
def test_a_box_counts_when_it_is_closed_and_full(response, reward):
    assert boxed(response) == reward


def test_the_prompt_is_never_seen():
    item = RewardItem(prompt=r"Put the answer in \boxed{}: <think>a</think><answer>b</answer> #### 1", response="It is four.", answer="4")
    for name in FORMATS:
        assert build_scorer(Scorer("format", {"name": name})).score((item,))[0].score == 0.0


def test_the_first_stop_token_ends_the_text():
    assert until_stop("a</s>b<|im_end|>c") == "a"
    assert until_stop("abc") == "abc"
