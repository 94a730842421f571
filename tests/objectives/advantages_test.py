import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_jax.objectives.advantages import (
    check_groups,
    generalized_advantage_estimation,
    group_relative,
    leave_one_out,
    masked_whiten,
    reward_to_go,
    token_rewards,
)

# Two prompts, four answers each, and the answers' lengths: the fixture of the reference vectors.
REWARDS = np.asarray([1, 0, 0, 0, 1, 1, 0, 0], np.float32)
GROUPS = np.repeat([0, 1], 4)
LENGTHS = np.asarray([2, 3, 1, 4, 2, 2, 4, 1])
MASK = (np.arange(4) < LENGTHS[:, None]).astype(np.float32)

grpo = group_relative


def dr_grpo(rewards_B, group_ids_B, **options):
    return group_relative(rewards_B, group_ids_B, scale_by_std=False, **options)


@pytest.fixture
def compilations():
    events = []

    def record(name, _, **options):
        if name.endswith("backend_compile_duration"):
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(record)
    yield events
    jax.monitoring.unregister_event_duration_listener(record)


ESTIMATORS = [grpo, dr_grpo, leave_one_out]


@pytest.mark.parametrize(
    ("estimate", "options", "right", "wrong", "half"),
    [
        (grpo, {}, 1.499997, -0.499999, 0.866024),
        (grpo, {"eps": 1e-4}, 1.499700, -0.499900, 0.865875),
        (dr_grpo, {}, 0.75, -0.25, 0.5),
        (leave_one_out, {}, 1.0, -0.333333, 0.666667),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_group_advantages_hold_the_reference_vectors(estimate, options, right, wrong, half, jit):
    def call(rewards_B, group_ids_B):
        return estimate(rewards_B, group_ids_B, **options)

    advantages_B = (jax.jit(call) if jit else call)(REWARDS, GROUPS)
    np.testing.assert_allclose(advantages_B, [right, wrong, wrong, wrong, half, half, -half, -half], atol=2e-6)
    assert advantages_B.dtype == jnp.float32


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("size", [2, 8, 16])
@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 0.9, 1.0, 0.0, 1e4 / 3])
def test_equal_rewards_give_exactly_zero(estimate, size, reward):
    assert not estimate(np.full(size, reward, np.float32), np.zeros(size, int), **({"eps": 1e-9} if estimate is grpo else {})).any()


@pytest.mark.parametrize("estimate", ESTIMATORS)
@given(st.randoms(use_true_random=False), st.lists(st.floats(-2, 2, width=16), min_size=12, max_size=12))
@settings(max_examples=15, deadline=None)
def test_permuting_rows_and_renaming_groups_permutes_the_advantages(estimate, random, rewards):
    rewards, groups = np.asarray(rewards, np.float32), np.repeat(np.arange(4), 3)
    order, names = list(range(12)), list(range(12))
    random.shuffle(order)
    random.shuffle(names)
    expected = np.asarray(estimate(rewards, groups))
    np.testing.assert_allclose(estimate(rewards[order], np.asarray(names)[groups][order]), expected[order], atol=1e-5, rtol=1e-3)


def test_the_same_prompt_drawn_twice_is_two_groups():
    rewards, groups = np.asarray([1.0, 1.0, 0.0, 1.0]), np.asarray([0, 1, 0, 1])
    np.testing.assert_allclose(dr_grpo(rewards, groups), [0.5, 0.0, -0.5, 0.0])


@pytest.mark.parametrize("common", [0.3, 0.35, 0.4])
def test_seven_equal_rewards_and_one_other_stay_in_proportion(common):
    rewards = np.asarray([common] * 7 + [0.0], np.float32)
    exact = rewards.astype(np.float64)
    np.testing.assert_allclose(leave_one_out(rewards, np.zeros(8, int)), [common / 7] * 7 + [-common], rtol=1e-5)
    np.testing.assert_allclose(grpo(rewards, np.zeros(8, int)), (exact - exact.mean()) / (exact.std(ddof=1) + 1e-6), rtol=1e-5)


@pytest.mark.parametrize("unread", [np.nan, np.inf, 7.0])
def test_a_row_that_was_not_scored_has_advantage_zero_and_counts_in_no_statistic(unread):
    rewards, valid, groups = np.asarray([1, unread, 0, 1], np.float32), np.asarray([True, False, True, True]), np.zeros(4, int)
    np.testing.assert_allclose(dr_grpo(rewards, groups, valid_B=valid), [1 / 3, 0, -2 / 3, 1 / 3], atol=1e-6)
    np.testing.assert_allclose(leave_one_out(rewards, groups, valid_B=valid), [0.5, 0, -1, 0.5], atol=1e-6)
    std = np.std([1, 0, 1], ddof=1)
    np.testing.assert_allclose(grpo(rewards, groups, valid_B=valid), np.asarray([1 / 3, 0, -2 / 3, 1 / 3]) / std, atol=1e-5)


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("valid", [[False] * 3, [False, True, False]])
def test_a_group_with_fewer_than_two_scores_gives_zero(estimate, valid):
    assert not estimate(np.asarray([np.nan, 0.4, np.nan]) if any(valid) else np.full(3, np.nan), np.zeros(3, int), valid_B=np.asarray(valid)).any()


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_a_group_of_one_is_an_error_that_names_the_group(estimate):
    with pytest.raises(ValueError, match="at least 2 members, but group 2 has 1"):
        estimate(np.asarray([1.0, 0.0, 1.0]), np.asarray([0, 0, 2]))


@pytest.mark.parametrize("ids", [[0, 0, 4, 4], [-1, -1, 0, 0]])
def test_a_group_id_outside_the_batch_is_an_error_and_no_silent_drop(ids):
    with pytest.raises(ValueError, match="group ids must lie in 0..3"):
        grpo(np.zeros(4), np.asarray(ids))


def test_a_reward_that_is_not_finite_is_an_error_that_names_the_row():
    with pytest.raises(ValueError, match="reward of row 2 is nan"):
        grpo(np.asarray([1.0, 0.0, np.nan, 0.0]), np.zeros(4, int))


def test_the_number_of_generations_is_checked_when_given():
    check_groups([1, 0, 1, 0], 2)
    with pytest.raises(ValueError, match="exactly 3 members, but group 0 has 2"):
        check_groups([0, 0, 1, 1, 1], 3)
    with pytest.raises(ValueError, match="at least 2 generations"):
        check_groups([0, 1], 1)


def test_token_rewards_and_rewards_to_go_hold_the_reference_vector():
    kl_BT = np.asarray([[0.2, -0.1, 0.05, 0.0]])
    rewards_BT = token_rewards([1.0], np.ones((1, 4)), kl_BT=kl_BT, beta=0.1)
    np.testing.assert_allclose(rewards_BT, [[-0.02, 0.01, -0.005, 1.0]], atol=1e-7)
    np.testing.assert_allclose(reward_to_go(rewards_BT, np.ones((1, 4)), gamma=1.0), [[0.985, 1.005, 0.995, 1.0]], atol=1e-6)
    np.testing.assert_allclose(reward_to_go([[1.0, 9.0, 2.0]], [[1, 0, 1]], gamma=0.5), [[2.0, 0.0, 2.0]])


@pytest.mark.parametrize(
    ("mask", "last"),
    [
        ([0, 0, 1, 1, 1, 0, 0], 4),  # prompt, answer with eos, padding
        ([0, 0, 0, 0, 0, 1, 1], 6),  # the prompt is padded on the left, the answer fills the row
        ([1, 1, 0, 0, 1, 0, 0], 4),  # a hole in the answer
    ],
)
def test_the_score_lands_on_the_last_unmasked_token(mask, last):
    kl_BT = np.where(mask, 0.5, np.nan)[None]
    rewards_BT = token_rewards([2.0], [mask], kl_BT=kl_BT, beta=0.1)
    np.testing.assert_allclose(rewards_BT[0, last], 1.95)
    np.testing.assert_allclose(rewards_BT.sum(), 2.0 - 0.1 * 0.5 * sum(mask), rtol=1e-6)
    assert not rewards_BT[0][np.asarray(mask) == 0].any()


def test_a_row_without_response_tokens_gets_no_reward():
    assert not token_rewards([3.0, 1.0], np.asarray([[0, 0], [0, 1]]))[0].any()


def test_a_kl_weight_without_kl_is_an_error():
    with pytest.raises(ValueError, match="kl_BT"):
        token_rewards([1.0], np.ones((1, 2)), beta=0.1)


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        (1, 1, [0.5, 0.4, 0.6, 0.2], [1, 1, 1, 1]),
        (1, 0.95, [0.442475, 0.3605, 0.59, 0.2], [0.942475, 0.9605, 0.99, 1]),
        (0.99, 0.95, [0.415260, 0.341584, 0.5801, 0.2], [0.915260, 0.941584, 0.9801, 1]),
        (1, 0, [0.1, -0.2, 0.4, 0.2], [0.6, 0.4, 0.8, 1]),
    ],
)
def test_gae_holds_the_reference_vectors(gamma, lam, advantages, returns):
    got, got_returns = generalized_advantage_estimation([[0, 0, 0, 1]], [[0.5, 0.6, 0.4, 0.8]], np.ones((1, 4)), gamma=gamma, lam=lam)
    np.testing.assert_allclose(got[0], advantages, atol=1e-6)
    np.testing.assert_allclose(got_returns[0], returns, atol=1e-6)


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages"),
    [
        (1, 1, [0.5, 0.4, 0, 0, 0.6, 0.2]),
        (1, 0.95, [0.442475, 0.3605, 0, 0, 0.59, 0.2]),
        (1, 0.5, [0.125, 0.05, 0, 0, 0.5, 0.2]),
        (0.9, 0.95, [0.193733, 0.179805, 0, 0, 0.491, 0.2]),
    ],
)
@pytest.mark.parametrize("unread", [0.9, np.nan])
def test_gae_passes_through_the_holes_of_a_multi_turn_answer(gamma, lam, advantages, unread):
    values = [[0.5, 0.6, unread, unread, 0.4, 0.8]]
    got, returns = generalized_advantage_estimation([[0, 0, unread, 0, 0, 1]], values, [[1, 1, 0, 0, 1, 1]], gamma=gamma, lam=lam)
    np.testing.assert_allclose(got[0], advantages, atol=1e-6)
    np.testing.assert_allclose(returns[0], np.asarray(advantages) + [0.5, 0.6, 0, 0, 0.4, 0.8], atol=1e-6)


def test_masked_tokens_after_the_last_trainable_one_neither_decay_nor_take_the_reward():
    mask_BT = np.asarray([[1, 1, 1, 0, 0, 0, 0]])
    for seed, gamma, expected in ((0, 1.0, [0.81, 0.9, 1.0]), (1, 1.0, [0.81, 0.9, 1.0]), (2, 0.0, [0.0, 0.0, 1.0])):
        values_BT = np.random.default_rng(seed).standard_normal((1, 7)) * (1 - mask_BT)
        advantages_BT, _ = generalized_advantage_estimation(token_rewards([1.0], mask_BT), values_BT, mask_BT, gamma=gamma, lam=0.9)
        np.testing.assert_allclose(advantages_BT[0], [*expected, 0, 0, 0, 0], atol=1e-6)


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_gae_equals_gae_of_the_row_with_its_masked_steps_deleted(mask, seed):
    random = np.random.default_rng(seed)
    rewards, values, mask = random.standard_normal(8), random.standard_normal(8), np.asarray(mask)
    expected, later_value, later = np.zeros(8), 0.0, 0.0
    for step in np.flatnonzero(mask)[::-1]:
        later = rewards[step] + 0.9 * later_value - values[step] + 0.9 * 0.8 * later
        later_value = values[step]
        expected[step] = later
    got, _ = generalized_advantage_estimation(rewards[None], values[None], mask[None], gamma=0.9, lam=0.8)
    np.testing.assert_allclose(got[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("ddof", "expected"),
    [(1, [0.271792, -0.231928, 1.178305, -1.218169]), (0, [0.313839, -0.267807, 1.360589, -1.406620])],
)
def test_whitening_uses_the_variance_of_all_unmasked_tokens(ddof, expected):
    whitened_BT = masked_whiten([[0.442475, 0.3605, np.nan], [0.59, 0.2, 99.0]], np.asarray([[1, 1, 0], [1, 1, 0]]), ddof=ddof)
    np.testing.assert_allclose(whitened_BT, [[*expected[:2], 0], [*expected[2:], 0]], atol=2e-6)


def test_reinforce_plus_plus_holds_the_reference_vector():
    whitened_BT = masked_whiten(reward_to_go(token_rewards(REWARDS, MASK), MASK, gamma=1.0), MASK)
    np.testing.assert_allclose(whitened_BT, np.where(REWARDS[:, None] == 1, 1.432701, -0.661247) * MASK, atol=2e-6)


@pytest.mark.parametrize(("ddof", "first", "second"), [(1, [1.741751, -0.428300], [1.199239, -0.970812]), (0, [1.789480, -0.440036], [1.232101, -0.997415])])
def test_reinforce_plus_plus_with_a_group_baseline_holds_the_reference_vectors(ddof, first, second):
    whitened_BT = masked_whiten(dr_grpo(REWARDS, GROUPS)[:, None] * MASK, MASK, ddof=ddof)
    expected = np.asarray([first[0], *[first[1]] * 3, *[second[0]] * 2, *[second[1]] * 2])
    np.testing.assert_allclose(whitened_BT, expected[:, None] * MASK, atol=3e-6)


def test_a_second_call_compiles_nothing(compilations):
    arrays = np.ones((2, 5), np.float32), np.zeros((2, 5), np.float32), np.ones((2, 5), bool)
    generalized_advantage_estimation(*arrays, gamma=1.0, lam=0.9)
    before = len(compilations)
    generalized_advantage_estimation(*arrays, gamma=0.9, lam=0.8)
    assert len(compilations) == before


def test_whitening_equal_single_or_no_values_gives_exactly_zero():
    for count in range(8):  # whose float32 means differ from the value by rounding
        assert not masked_whiten(np.full((1, 8), 0.9) + (np.arange(8) >= count), np.arange(8)[None] < count).any()
