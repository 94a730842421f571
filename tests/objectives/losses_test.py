import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.logprobs import token_logprobs
from tlt_jax.masked import WeightedMean
from tlt_jax.objectives.advantages import group_relative, leave_one_out
from tlt_jax.objectives.losses import (
    LossSettings,
    aggregate,
    clipped_policy_loss,
    entropy_loss,
    importance_weights,
    kl_estimate,
    kl_loss,
    loss_weights,
    sampler_mismatch,
    total_weight,
    value_loss,
)

RATIOS = np.asarray([[0.7, 0.9, 1.1, 1.25, 1.5, 4.0]])
SYMMETRIC = LossSettings(epsilon_high=0.2)
GSPO = LossSettings(epsilon=3e-4, epsilon_high=4e-4, ratio_level="sequence", loss_agg_mode="seq-mean-token-mean")
AGGREGATIONS = [
    LossSettings(),
    LossSettings(loss_agg_mode="seq-mean-token-mean"),
    LossSettings(loss_agg_mode="constant", max_length=8),
]


def row(values):
    return jnp.asarray(values, jnp.float32)[None]


def policy(log_ratios_BT, advantages_BT, mask_BT, settings, **options):
    """Loss value, its gradient with respect to the log-probs, and the metrics as numbers; the old log-probs are −1."""

    def mean(log_ratios_BT):
        loss, metrics = clipped_policy_loss(log_ratios_BT - 1.0, jnp.full_like(log_ratios_BT, -1.0), advantages_BT, mask_BT, settings, **options)
        return loss.value, metrics

    (value, metrics), gradient_BT = jax.jit(jax.value_and_grad(mean, has_aux=True))(jnp.asarray(log_ratios_BT, jnp.float32))
    return float(value), gradient_BT, {name: float(metric.value) for name, metric in metrics.items()}


@pytest.mark.parametrize(
    ("settings", "sign", "losses"),
    [
        (SYMMETRIC, 1, [-0.7, -0.9, -1.1, -1.2, -1.2, -1.2]),
        (SYMMETRIC, -1, [0.8, 0.9, 1.1, 1.25, 1.5, 4.0]),
        (LossSettings(), 1, [-0.7, -0.9, -1.1, -1.25, -1.28, -1.28]),
        (LossSettings(), -1, [0.8, 0.9, 1.1, 1.25, 1.5, 4.0]),
        (LossSettings(dual_clip=3.0), 1, [-0.7, -0.9, -1.1, -1.25, -1.28, -1.28]),
        (LossSettings(dual_clip=3.0), -1, [0.8, 0.9, 1.1, 1.25, 1.5, 3.0]),
    ],
)
def test_the_clipped_loss_of_each_ratio_holds_the_reference_vectors(settings, sign, losses):
    mean, _, _ = policy(np.log(RATIOS), sign * np.ones((1, 6)), np.ones((1, 6)), settings)
    np.testing.assert_allclose(mean, np.mean(losses), atol=1e-6)
    one = jnp.ones((1, 1))
    each, _ = jax.jit(jax.vmap(lambda log_ratio: clipped_policy_loss(log_ratio * one, 0 * one, sign * one, one, settings)))(np.log(RATIOS[0]))
    np.testing.assert_allclose(each.value, losses, atol=1e-6)


@pytest.mark.parametrize(("sign", "expected"), [(1, [-0.7, -0.9, -1.1, 0, 0, 0]), (-1, [0, 0.9, 1.1, 1.25, 1.5, 0])])
def test_clipped_tokens_have_no_gradient_and_the_others_their_ratio(sign, expected):
    settings = LossSettings(epsilon_high=0.2, dual_clip=3.0)
    _, gradient_BT, metrics = policy(np.log(RATIOS), sign * np.ones((1, 6)), np.ones((1, 6)), settings)
    np.testing.assert_allclose(6 * gradient_BT[0], expected, atol=1e-6)
    np.testing.assert_allclose(metrics["policy/ppo_kl"], -0.274696, atol=1e-6)
    np.testing.assert_allclose(metrics["policy/clip_fraction"], 0.5 if sign > 0 else 1 / 6, atol=1e-6)
    np.testing.assert_allclose(metrics["policy/dual_clip_fraction"], 0 if sign > 0 else 1 / 6, atol=1e-6)
    np.testing.assert_allclose(metrics["policy/ratio_mean"], RATIOS.mean(), atol=1e-6)
    np.testing.assert_allclose(metrics["policy/approx_kl"], (RATIOS - 1 - np.log(RATIOS)).mean(), atol=1e-6)


def test_the_clip_fraction_follows_the_sign_of_the_advantage_and_leaves_padding_out():
    _, gradient_BT, metrics = policy(np.log([[1.5, 1.5, 0.5, 0.5, 9.0]]), np.asarray([[1, -1, 1, -1, 1]]), np.asarray([[1, 1, 1, 1, 0]]), SYMMETRIC)
    assert metrics["policy/clip_fraction"] == 0.5
    assert metrics["policy/clip_fraction_high"] == metrics["policy/clip_fraction_low"] == 0.25
    np.testing.assert_array_equal(gradient_BT[0] == 0, [True, False, False, True, True])


def test_on_policy_nothing_is_clipped_and_every_token_keeps_its_full_gradient():
    value, gradient_BT, metrics = policy(np.zeros((1, 4)), np.asarray([[2.0, -1.0, 0.5, 0.0]]), np.ones((1, 4)), LossSettings())
    np.testing.assert_allclose(4 * gradient_BT[0], [-2.0, 1.0, -0.5, 0.0], atol=1e-6)
    assert metrics["policy/clip_fraction"] == metrics["policy/approx_kl"] == 0 and metrics["policy/ratio_mean"] == 1
    np.testing.assert_allclose(value, -0.375, atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_ratio_beyond_float32_is_finite_in_value_and_gradient(sign):
    value, gradient_BT, _ = policy([[200.0, -200.0]], sign * np.ones((1, 2)), np.ones((1, 2)), LossSettings())
    assert np.isfinite(value) and np.isfinite(gradient_BT).all()


@pytest.mark.parametrize(("sign", "loss", "gradient"), [(1, -1.0004, 0.0), (-1, 1.013715, 0.253429)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_sequence_ratio_is_the_length_normalised_one_of_each_packed_sequence(sign, loss, gradient, packed):
    log_ratios = np.log([0.6, 0.5, 0.4, 0.55]) - np.log(0.5)
    if not packed:
        value, gradient_BT, _ = policy(log_ratios[None], sign * np.ones((1, 4)), np.ones((1, 4)), GSPO)
    else:  # one row holds a prompt token, the sequence, another sequence far off, and padding
        log_ratios = np.concatenate([[9.0], log_ratios, [5.0, 7.0], [np.nan]])[None]
        mask, segments = np.asarray([[0, 1, 1, 1, 1, 1, 0, 1]]), np.asarray([[1, 1, 1, 1, 1, 2, 2, 0]])
        advantages = np.asarray([[9, sign, sign, sign, sign, 0, 0, 9]])
        value, gradient_BT, _ = policy(log_ratios, advantages, mask, GSPO, segments_BT=segments)
        assert not gradient_BT[0, np.asarray([0, 5, 6, 7])].any()
        value, gradient_BT = 2 * value, 2 * gradient_BT[:, 1:5]
    np.testing.assert_allclose(value, loss, atol=1e-6)
    np.testing.assert_allclose(gradient_BT[0], [gradient] * 4, atol=1e-6)


def test_under_the_sequence_ratio_each_token_keeps_its_own_advantage():
    _, gradient_BT, _ = policy(np.log([[1.2, 1.0, 0.8, 1.1]]), -np.asarray([[1.0, 2.0, 0.5, 3.0]]), np.ones((1, 4)), GSPO)
    np.testing.assert_allclose(gradient_BT[0], np.prod([1.2, 0.8, 1.1]) ** 0.25 / 4 * np.asarray([1.0, 2.0, 0.5, 3.0]), atol=1e-6)


@pytest.mark.parametrize(("cap", "weights"), [(5.0, [0.7, 0.9, 1.1, 1.25, 1.5, 4.0]), (1.28, [0.7, 0.9, 1.1, 1.25, 1.28, 1.28])])
@pytest.mark.parametrize("sign", [1, -1])
def test_cispo_cuts_the_weight_and_keeps_the_gradient_of_every_token(cap, weights, sign):
    value, gradient_BT, metrics = policy(np.log(RATIOS), sign * np.ones((1, 6)), np.ones((1, 6)), LossSettings(cispo_cap=cap))
    np.testing.assert_allclose(6 * gradient_BT[0], -sign * np.asarray(weights), atol=1e-6)
    np.testing.assert_allclose(value, -sign * np.mean(weights * (np.log(RATIOS[0]) - 1.0)), atol=1e-6)
    assert metrics["policy/clip_fraction"] == pytest.approx(np.greater(RATIOS, cap).mean()) and metrics["policy/dual_clip_fraction"] == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LossSettings(), 2.5),
        (LossSettings(loss_agg_mode="seq-mean-token-mean"), 2.25),
        (LossSettings(loss_agg_mode="constant", max_length=4), 1.875),
        (LossSettings(loss_agg_mode="constant", max_length=8), 0.9375),
    ],
)
def test_the_three_normalisations_hold_the_reference_vector_in_rows_and_packed(settings, expected):
    rows = aggregate(jnp.asarray([[1.0, 2, 9, 9], [3, 3, 3, 3]]), jnp.asarray([[1, 1, 0, 0], [1, 1, 1, 1]]), settings)
    segments_BT = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0]])
    packed = aggregate(row([9, 1, 2, 3, 3, 3, 3, 9]), row([0, 1, 1, 1, 1, 1, 1, 1]), settings, segments_BT=segments_BT)
    np.testing.assert_allclose([rows.value, packed.value], expected, atol=1e-6)
    np.testing.assert_allclose(rows.weight, packed.weight)


def test_the_reported_loss_of_an_on_policy_batch_holds_the_reference_vectors():
    lengths, rewards = np.asarray([2, 3, 1, 4, 2, 2, 4, 1]), np.asarray([1.0, 0, 0, 0, 1, 1, 0, 0])
    mask_BT, groups_B = (np.arange(4) < lengths[:, None]).astype(np.float32), np.repeat([0, 1], 4)

    def loss(advantages_B, settings):
        return clipped_policy_loss(0 * mask_BT, 0 * mask_BT, np.asarray(advantages_B)[:, None] * mask_BT, mask_BT, settings)[0].value

    token, sequence, constant = (dataclasses.replace(settings, max_length=4) for settings in AGGREGATIONS)
    np.testing.assert_allclose(loss(group_relative(rewards, groups_B), token), 0.098212, atol=1e-6)
    np.testing.assert_allclose(loss(group_relative(rewards, groups_B), sequence), 0.0, atol=1e-6)
    np.testing.assert_allclose(loss(group_relative(rewards, groups_B, scale_by_std=False), constant), 0.03125, atol=1e-6)
    np.testing.assert_allclose(loss(leave_one_out(rewards, groups_B), token), 0.070175, atol=1e-6)


@pytest.mark.parametrize("settings", AGGREGATIONS)
@pytest.mark.parametrize("truncated", [1, 6, 30])
def test_a_truncated_and_masked_sample_moves_neither_side_of_the_mean(settings, truncated):
    losses_BT, mask_BT = jnp.ones((2, 32)), jnp.zeros((2, 32)).at[0, :2].set(1)
    alone, beside = aggregate(losses_BT[:1], mask_BT[:1], settings), aggregate(losses_BT.at[1, :truncated].set(1e6), mask_BT, settings)
    assert alone == beside
    assert settings.loss_agg_mode == "constant" or beside.value == 1


@pytest.mark.parametrize("settings", AGGREGATIONS)
def test_a_batch_that_is_all_masked_has_loss_zero_and_zero_gradients(settings):
    poison_BT = jnp.full((4, 3), -jnp.inf)

    def loss(logprobs_BT):
        part, metrics = clipped_policy_loss(logprobs_BT, poison_BT, jnp.ones((4, 3)), jnp.zeros((4, 3)), settings)
        return part.value + sum(metric.value for metric in metrics.values())

    value, gradient_BT = jax.value_and_grad(loss)(poison_BT)
    assert value == 0 and not gradient_BT.any()


@pytest.mark.parametrize(("parts", "mean"), [([[1, 1], [3] * 8], 2.6), ([[1], [2, 2, 2], [4] * 8], 3.25)])
def test_micro_batches_of_unequal_length_add_up_to_the_token_mean(parts, mean):
    merged = sum((aggregate(row(part), jnp.ones((1, len(part))), LossSettings()) for part in parts), start=WeightedMean(0.0, 0.0))
    np.testing.assert_allclose(merged.value, mean, atol=1e-6)


@pytest.mark.parametrize(
    "settings", [*(dataclasses.replace(settings, beta=0.1, entropy_coef=0.01, importance_sampling_cap=2.0) for settings in AGGREGATIONS), GSPO]
)
def test_gradients_do_not_depend_on_the_micro_batches_nor_on_packing(settings):
    random = np.random.default_rng(0)
    lengths = np.asarray([5, 1, 4, 6, 2, 6, 3, 5])
    mask_BT = (np.arange(6) < lengths[:, None]) & (random.random((8, 6)) < 0.8)
    logits_BTV = random.standard_normal((8, 6, 5))
    targets_BT, advantages_BT = random.integers(0, 5, (8, 6)), random.standard_normal((8, 1)) * np.ones((8, 6))
    old_BT, rollout_BT, reference_BT = (-np.abs(random.standard_normal((8, 6))) for _ in range(3))
    kernel = jnp.asarray(random.standard_normal((5, 5)), jnp.float32)

    def terms(kernel, logits_BTV, targets_BT, old_BT, rollout_BT, reference_BT, advantages_BT, mask_BT, segments_BT):
        logprobs_BT, entropy_BT = token_logprobs(logits_BTV @ kernel, targets_BT, 0.9)
        rollout_BT = None if settings is GSPO else rollout_BT
        policy_part, _ = clipped_policy_loss(logprobs_BT, old_BT, advantages_BT, mask_BT, settings, segments_BT=segments_BT, rollout_logprobs_BT=rollout_BT)
        kl_part, _ = kl_loss(logprobs_BT, reference_BT, mask_BT, settings, segments_BT=segments_BT)
        entropy_part, _ = entropy_loss(entropy_BT, mask_BT, settings, segments_BT=segments_BT)
        return policy_part.sum + kl_part.sum + entropy_part.sum, policy_part.weight

    arrays = [np.asarray(array, np.float32) for array in (logits_BTV, targets_BT, old_BT, rollout_BT, reference_BT, advantages_BT, mask_BT)]
    arrays[1] = arrays[1].astype(np.int32)

    part_gradient = jax.jit(jax.grad(terms, has_aux=True))

    def gradient(batches):
        gradients, weights = zip(*(part_gradient(kernel, *batch) for batch in batches), strict=True)
        return sum(gradients) / sum(weights)

    ones_BT = np.ones((8, 6), np.int32)
    whole = gradient([[*arrays, ones_BT]])
    for size in (4, 1):
        split = gradient([[array[start : start + size] for array in (*arrays, ones_BT)] for start in range(0, 8, size)])
        np.testing.assert_allclose(split, whole, atol=1e-6)
    packed = [array.reshape(2, 24, *array.shape[2:]) for array in (*arrays, ones_BT * np.tile([[1], [2], [3], [4]], (2, 1)))]
    np.testing.assert_allclose(gradient([packed]), whole, atol=1e-6)
    assert np.abs(whole).max() > 1e-3


def test_the_total_weight_counts_tokens_or_sequences_with_a_token():
    mask_BT, segments_BT = jnp.asarray([[1, 0, 1, 1, 0, 1]]), jnp.asarray([[1, 1, 2, 2, 3, 0]])
    assert [float(total_weight(mask_BT, segments_BT, settings)) for settings in AGGREGATIONS] == [3, 2, 2]
    weights = [loss_weights(mask_BT, segments_BT, settings)[0] for settings in AGGREGATIONS]
    np.testing.assert_allclose(weights, [[1, 0, 1, 1, 0, 0], [1, 0, 0.5, 0.5, 0, 0], [0.125, 0, 0.125, 0.125, 0, 0]])


OLD = np.log(np.full((1, 4), 0.5))
ROLLOUT = np.log([[0.4, 0.1, 0.55, 0.5]])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LossSettings(), [1, 1, 1, 1]),
        (LossSettings(importance_sampling_cap=2.0), [1.25, 2, 0.909091, 1]),
        (LossSettings(importance_sampling_cap=2.0, importance_sampling_floor=0.95), [1.25, 2, 0.95, 1]),
        (LossSettings(importance_sampling_cap=2.0, importance_sampling_floor=0.5, importance_sampling_mode="mask"), [1.25, 0, 0.909091, 1]),
        (LossSettings(importance_sampling_cap=5.5, importance_sampling_floor=0.5, importance_sampling_mode="mask"), [1.25, 5, 0.909091, 1]),
    ],
)
def test_importance_weights_are_truncated_or_masked_and_weigh_the_gradient(settings, expected):
    np.testing.assert_allclose(importance_weights(OLD, ROLLOUT, np.ones((1, 4)), settings)[0], expected, atol=1e-6)

    def loss(logprobs_BT):
        return clipped_policy_loss(logprobs_BT, OLD, np.ones((1, 4)), np.ones((1, 4)), settings, rollout_logprobs_BT=ROLLOUT)[0].sum

    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(OLD, jnp.float32))[0], -np.asarray(expected), atol=1e-6)


def test_mismatch_metrics_hold_the_reference_vector_and_leave_padding_out():
    padded = [np.concatenate([array, [[-np.inf]]], axis=1) for array in (OLD, ROLLOUT)]
    metrics = {name: float(metric.value) for name, metric in sampler_mismatch(*padded, np.asarray([[1, 1, 1, 1, 0]])).items()}
    expected = {"logprob_diff_mean": 0.481973, "kl_k1": -0.434318, "kl_k3": 0.605455, "chi_square": 6.097237}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[f"sampler/{name}"], value, atol=2e-6)
    np.testing.assert_allclose(metrics["sampler/prob_diff_mean"], np.abs(0.5 - np.exp(ROLLOUT)).mean(), atol=1e-6)
    np.testing.assert_allclose(metrics["sampler/ratio_mean"] ** 2 / (1 + metrics["sampler/chi_square"]), 0.586, atol=5e-4)
    assert all(metric.value == (name == "sampler/ratio_mean") for name, metric in sampler_mismatch(OLD, OLD, np.ones((1, 4))).items())


def test_a_cap_without_rollout_logprobs_is_an_error():
    with pytest.raises(ValueError, match="rollout_logprobs_BT"):
        clipped_policy_loss(OLD, OLD, OLD, np.ones((1, 4)), LossSettings(importance_sampling_cap=2.0))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", [0.223144, -0.693147, 0]), ("k2", [0.024897, 0.240227, 0]), ("k3", [0.023144, 0.306853, 0])],
)
def test_kl_estimates_hold_the_reference_vectors(kind, expected):
    np.testing.assert_allclose(kl_estimate(jnp.log(jnp.asarray([0.5, 0.25, 0.2])), jnp.log(jnp.asarray([0.4, 0.5, 0.2])), kind), expected, atol=1e-6)


POLICY, REFERENCE = np.asarray([0.5, 0.25, 0.25]), np.asarray([0.4, 0.4, 0.2])
EXACT_GRADIENT = [0.086643, -0.129965, 0.043322]


@pytest.mark.parametrize(
    ("kind", "times_ratio", "mean", "gradient"),
    [
        ("k1", False, 0.049857, [0, 0, 0]),
        ("k2", False, 0.046285, EXACT_GRADIENT),
        ("k3", False, 0.049857, [0.1, -0.15, 0.05]),
        ("k3", True, 0.049857, EXACT_GRADIENT),
    ],
)
def test_the_expected_gradient_of_each_estimator_as_a_loss_holds_the_table(kind, times_ratio, mean, gradient):
    def expected_loss(logits):  # on-policy samples: the sampling probabilities carry no gradient
        logprobs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs)) if times_ratio else 1.0
        return (POLICY * ratio * kl_estimate(logprobs, jnp.log(jnp.asarray(REFERENCE, jnp.float32)), kind)).sum()

    value, got = jax.value_and_grad(expected_loss)(jnp.log(jnp.asarray(POLICY, jnp.float32)))
    np.testing.assert_allclose(value, mean, atol=1e-6)
    np.testing.assert_allclose(got, gradient, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_drifted_reference_and_padding_leave_value_and_gradient_finite(kind, dtype):
    logprobs_BT = jnp.asarray([[-100.5, -0.5, -0.5, -jnp.inf, -1.0, -200.0]], dtype)
    reference_BT = jnp.asarray([[-0.5, -0.4, -90.0, -jnp.inf, -jnp.inf, -1.0]], dtype)

    def total(logprobs_BT):
        return kl_estimate(logprobs_BT, reference_BT, kind).sum(), kl_estimate(logprobs_BT, reference_BT, kind)

    (value, kl_BT), gradient_BT = jax.jit(jax.value_and_grad(total, has_aux=True))(logprobs_BT)
    assert kl_BT.dtype == jnp.float32 and np.isfinite(value) and np.isfinite(gradient_BT.astype(jnp.float32)).all()
    assert not kl_BT[0, 3:5].any() and not gradient_BT[0, 3:5].any()
    if kind == "k3":
        assert (kl_BT >= 0).all()
        np.testing.assert_allclose(kl_BT[0, 1], 0.0051709, atol=1e-6 if dtype == jnp.float32 else 1e-3)


def test_k3_is_never_negative_for_tiny_differences():
    differences = jnp.asarray(np.random.default_rng(0).normal(0, 1e-4, 1000), jnp.float32)
    assert float(kl_estimate(differences, jnp.zeros(1000), "k3").min()) >= -1e-10


def test_the_kl_loss_is_beta_times_the_mean_without_reading_padding():
    def loss(logprobs_BT):
        part, metrics = kl_loss(logprobs_BT, jnp.log(row([0.4, 0.5, 0.2, 1.0])), row([1, 1, 1, 0]), LossSettings(beta=0.5, kl_kind="k2"))
        return part.value, metrics["policy/kl"].value

    (value, kl), gradient_BT = jax.value_and_grad(loss, has_aux=True)(jnp.log(row([0.5, 0.25, 0.2, 0.0])))
    np.testing.assert_allclose([value, kl], [0.5 * 0.265124 / 3, 0.265124 / 3], atol=1e-6)
    np.testing.assert_allclose(gradient_BT[0], 0.5 / 3 * np.asarray([0.223144, -0.693147, 0, 0]), atol=1e-6)


def test_a_weight_of_the_kl_that_changes_from_step_to_step_goes_before_the_fixed_one():
    arguments = jnp.log(row([0.5, 0.25])), jnp.log(row([0.4, 0.5])), row([1, 1])
    settings = LossSettings(beta=0.5)
    fixed, _ = kl_loss(*arguments, settings)
    steered, metrics = jax.jit(lambda beta: kl_loss(*arguments, settings, beta=beta))(0.25)
    np.testing.assert_allclose(2 * steered.value, fixed.value, rtol=1e-6)
    np.testing.assert_allclose(metrics["policy/kl"].value, 2 * fixed.value, rtol=1e-6)


def test_the_entropy_term_lowers_the_loss_by_its_coefficient():
    part, metrics = entropy_loss(row([1.0, 2.0, np.nan]), row([1, 1, 0]), LossSettings(entropy_coef=0.1))
    np.testing.assert_allclose([part.value, metrics["policy/entropy"].value], [-0.15, 1.5], atol=1e-6)


@pytest.mark.parametrize(("clip", "expected", "fraction"), [(0.2, 0.0990625, 0.25), (0.5, 0.0853125, 0), (None, 0.0853125, 0)])
def test_the_value_loss_holds_the_reference_vectors(clip, expected, fraction):
    values, old, returns = ([[*array, np.nan]] for array in ([0.5, 0.6, 0.4, 0.8], [0.2, 0.6, 0.9, 0.8], [1, 0.9, 0.95, 1]))

    def loss(values_BT):
        part, metrics = value_loss(values_BT, jnp.asarray(old), jnp.asarray(returns), jnp.asarray([[1, 1, 1, 1, 0]]), LossSettings(value_clip=clip))
        return part.value, metrics["value/clip_fraction"].value

    (value, clipped), gradient_BT = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(values))
    np.testing.assert_allclose(value, expected, atol=1e-6)
    assert clipped == fraction
    np.testing.assert_allclose(4 * gradient_BT[0], [0 if clip == 0.2 else -0.5, -0.3, -0.55, -0.2, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_kind": "k1"}, "expected gradient 0"),
        ({"kl_kind": "k4"}, "kl_kind 'k4' is unknown: use one of k1, k2, k3"),
        ({"loss_agg_mode": "mean"}, "loss_agg_mode"),
        ({"loss_agg_mode": "constant"}, "needs max_length"),
        ({"ratio_level": "row"}, "ratio_level"),
        ({"epsilon": 1.5}, "clip range"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"cispo_cap": 0.0}, "cispo_cap"),
        ({"cispo_cap": 5.0, "dual_clip": 3.0}, "cispo_cap"),
        ({"importance_sampling_cap": 0.0}, "floor < cap"),
        ({"importance_sampling_mode": "drop"}, "importance_sampling_mode"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        LossSettings(**options)
