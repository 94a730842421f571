"""From scores to advantages, held against the reference fixture: two prompts of four completions, 19 tokens."""

import numpy as np
import pytest

from tests.training.settings_test import changed
from tlt_jax.rewards.items import Scored
from tlt_jax.training.credit import overlong_penalties, set_advantages, shaped_rewards
from tlt_jax.training.experience import Trajectory
from tlt_jax.training.presets import PRESETS, apply_preset
from tlt_jax.training.settings import SettingsError, default_config
from tlt_jax.training.settings_rules import validate

REWARDS, LENGTHS = (1, 0, 0, 0, 1, 1, 0, 0), (2, 3, 1, 4, 2, 2, 4, 1)


def scores(rewards):
    return [Scored(0, row, reward, {}, None, None, 0.0) for row, reward in enumerate(rewards)]


def trajectories(lengths=LENGTHS, **values):
    """Prompts of two tokens."""
    return [
        Trajectory(np.arange(2 + length), 2, np.zeros(length, np.float32), **{name: np.full(length, value, np.float32) for name, value in values.items()})
        for length in lengths]


def advantages_of(config, rewards=REWARDS, **values):
    """Of each trajectory the first token's, after a look at the others."""
    config.algorithm.num_generations = 4
    some = trajectories(**values)
    set_advantages(config, scores(rewards), some, config.algorithm.beta)
    assert [len(one.advantages) for one in some] == list(LENGTHS)
    return some


@pytest.mark.parametrize(
    ("changes", "right", "wrong", "second"),
    [
        ({}, 1.499997, -0.499999, 0.866024), ({"algorithm__scale_rewards": False}, 0.75, -0.25, 0.5), ({"algorithm__name": "dr_grpo"}, 0.75, -0.25, 0.5),
        ({"algorithm__name": "rloo"}, 1.0, -0.333333, 0.666667), ({"algorithm__name": "reinforce_plus_plus"}, 1.432701, -0.661247, 1.432701),
        ({"algorithm__name": "reinforce_plus_plus_baseline"}, 1.741751, -0.428300, 1.199239),
        ({"algorithm__whiten_advantages": True}, 1.875778, -0.471568, 1.131702)])
def test_every_estimator_holds_the_reference_vectors_on_all_its_tokens(changes, right, wrong, second):
    some = advantages_of(changed(**changes))
    for row, expected in ((0, right), (1, wrong), (4, second)):
        np.testing.assert_allclose(some[row].advantages, expected, atol=5e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_equal_rewards_give_exactly_zero(name):
    assert not any(one.advantages.any() for one in advantages_of(changed(algorithm__name=name), rewards=(0.9,) * 8))


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_an_answer_without_a_score_is_not_trained_and_counts_nowhere(name):
    some = advantages_of(changed(algorithm__name=name), rewards=(1, 0, 0, None, 1, 1, 0, 0))
    assert [one.trained for one in some] == [True] * 3 + [False] + [True] * 4 and not some[3].advantages.any()


def test_a_critic_gives_returns_and_gae():
    config = changed(algorithm__name="gae", algorithm__gae_lambda=1.0)
    some = advantages_of(config, old_values=0.5)
    np.testing.assert_allclose(some[0].advantages, [0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(some[3].returns, [0.0] * 4, atol=1e-6)


def test_the_kl_in_the_reward_is_a_tokens_own_without_groups_and_an_answers_with_them():
    places = {"old_logprobs": -1.0, "reference_logprobs": -2.0}  # k1 of 1 a token
    kl = {"algorithm__beta": 0.1, "algorithm__kl_kind": "k1", "algorithm__kl_placement": "reward"}
    some = trajectories(**places)
    config = changed(algorithm__name="dr_grpo", algorithm__num_generations=4, **kl)
    set_advantages(config, scores(REWARDS), some, 0.1)
    expected = np.array(REWARDS[:4]) - 0.1 * np.array(LENGTHS[:4])
    np.testing.assert_allclose([one.advantages[0] for one in some[:4]], expected - expected.mean(), atol=1e-6)
    some = trajectories(**places)
    config = changed(algorithm__name="gae", algorithm__gae_lambda=1.0, algorithm__num_generations=4, **kl)
    for one in some:
        one.old_values = np.zeros(one.response_length, np.float32)
    set_advantages(config, scores(REWARDS), some, 0.1)
    np.testing.assert_allclose(some[0].advantages, [0.8, 0.9], atol=1e-6)


def test_long_answers_lose_up_to_the_whole_penalty_counted_in_tokens():
    config = changed(rollout__max_new_tokens=20480, reward__overlong_share=0.2)
    np.testing.assert_allclose(overlong_penalties(config, [16384, 17408, 18432, 20480, 24576]), [0, -0.25, -0.5, -1, -1])
    config.reward.overlong_penalty = 0.5
    rewards, valid = shaped_rewards(config, scores((1.0, None)), [20480, 20480])
    assert rewards.tolist() == [0.5, 0.0] and valid.tolist() == [True, False]
    assert not overlong_penalties(changed(), [10**6]).any()


def test_whitened_rewards_have_mean_zero_and_deviation_one_over_the_answers_with_a_score():
    config = changed(algorithm__name="gae", reward__whiten=True)
    rewards, _ = shaped_rewards(config, scores((3.0, 5.0, None, 7.0)), [1] * 4)
    np.testing.assert_allclose(rewards, [-1, 0, 0, 1], atol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_config(name):
    config = default_config()
    apply_preset(config, name)
    validate(config)


def test_an_unknown_preset_names_the_nearest_one():
    with pytest.raises(SettingsError, match="the nearest is dapo"):
        apply_preset(default_config(), "dopa")
