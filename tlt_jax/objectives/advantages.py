"""Advantages: how much better an answer (or a token) did than expected. All float32.

Group estimators work on one reward per sequence; token rewards, GAE, returns and whitening on unpacked rows [B, T] with mask 1 = response token.
Not here: scoring, reward shaping, and the losses that use the advantages.
"""

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.masked import keep, masked_mean, masked_variance


def check_groups(group_ids_B, num_generations: int | None = None) -> None:
    """Host check of group ids: inside 0..B−1, at least two members a group, and exactly `num_generations` when given. ValueError otherwise."""
    if num_generations is not None and num_generations < 2:
        raise ValueError(f"a group advantage needs at least 2 generations per prompt, got {num_generations}: raise num_generations or use a critic (gae)")
    ids = np.asarray(group_ids_B)
    if ids.size and (ids.min() < 0 or ids.max() >= ids.size):
        raise ValueError(f"group ids must lie in 0..{ids.size - 1} for {ids.size} rows, got {ids.min()}..{ids.max()}: number the prompts inside the batch")
    groups, sizes = np.unique(ids, return_counts=True)
    wrong = sizes < 2 if num_generations is None else sizes != num_generations
    if wrong.any():
        wanted = "at least 2" if num_generations is None else f"exactly {num_generations}"
        found = ", ".join(f"group {group} has {size}" for group, size in list(zip(groups[wrong], sizes[wrong], strict=True))[:5])
        raise ValueError(f"every group needs {wanted} members, but {found} ({wrong.sum()} of {groups.size} groups are wrong)")


def group_relative(rewards_B, group_ids_B, *, scale_by_std: bool = True, eps: float = 1e-6, valid_B=None) -> jax.Array:
    """GRPO: (r − mean) / (std + eps) within each group, std with ddof 1; `scale_by_std=False` is Dr.GRPO's r − mean. Returns [B].

    Group ids lie in 0..B−1 in any order. Exactly 0 for a group of equal rewards, whose float32 std is rounding noise, and for rows with
    `valid_B` False, which count in no statistic. Concrete inputs are checked (`check_groups`, finite rewards); traced ones cannot be.
    """
    centred_B, count_B, groups_B = _centred(rewards_B, group_ids_B, valid_B)
    if not scale_by_std:
        return centred_B
    variance_B = _group_totals(centred_B**2, groups_B) / jnp.maximum(count_B - 1, 1)
    return centred_B / (jnp.sqrt(variance_B) + eps)


def leave_one_out(rewards_B, group_ids_B, *, valid_B=None) -> jax.Array:
    """RLOO: r − mean of the other valid members = n / (n − 1) · (r − mean). Returns [B]; groups, zeros and checks as in `group_relative`."""
    centred_B, count_B, _ = _centred(rewards_B, group_ids_B, valid_B)
    return centred_B * count_B / jnp.maximum(count_B - 1, 1)


def token_rewards(scores_B, mask_BT, *, kl_BT=None, beta: float = 0.0) -> jax.Array:
    """−beta · kl on every response token plus the sequence's score on its last one. Returns [B, T]; their sum is score − beta · Σ kl.

    `kl_BT` is the k1 estimate (unbiased, may be negative) and needed when beta is not 0. A row without response tokens gets no reward at all.
    """
    if kl_BT is None and (isinstance(beta, jax.core.Tracer) or beta != 0):
        raise ValueError("token_rewards: beta is set, so kl_BT = kl_estimate(logprobs, ref_logprobs, 'k1') is needed")
    mask_BT = jnp.asarray(mask_BT) != 0
    later_BT = jnp.cumsum(mask_BT[:, ::-1], axis=1)[:, ::-1]
    terminal_BT = jnp.where(mask_BT & (later_BT == 1), jnp.asarray(scores_B, jnp.float32)[:, None], 0.0)
    return terminal_BT if kl_BT is None else terminal_BT - beta * keep(kl_BT, mask_BT)


def generalized_advantage_estimation(rewards_BT, values_BT, mask_BT, *, gamma, lam) -> tuple[jax.Array, jax.Array]:
    """GAE: δ_t = r_t + γ V_{t+1} − V_t, A_t = δ_t + γ λ A_{t+1}, return = A + V. Returns (advantages, returns), both [B, T], 0 where masked.

    Masked steps take no time: the next value and advantage pass through them, so the numbers are those of the row with these steps deleted.
    What stands on them (values, rewards, NaN) is never read; `token_rewards` puts the score on the last unmasked token.
    """
    mask_BT = jnp.asarray(mask_BT) != 0
    rewards_BT, values_BT = keep(rewards_BT, mask_BT), keep(values_BT, mask_BT)
    end_B = jnp.zeros(rewards_BT.shape[0], jnp.float32)
    rates = jnp.asarray(gamma, jnp.float32), jnp.asarray(gamma * lam, jnp.float32)
    _, advantages_TB = jax.lax.scan(_gae_step, (end_B, end_B, rates), (rewards_BT.T, values_BT.T, mask_BT.T), reverse=True)
    return advantages_TB.T, advantages_TB.T + values_BT


def reward_to_go(rewards_BT, mask_BT, *, gamma) -> jax.Array:
    """Discounted sum of this and all later rewards [B, T] (REINFORCE++); masked steps as in GAE, of which it is the case V = 0, λ = 1."""
    rewards_BT = jnp.asarray(rewards_BT, jnp.float32)
    return generalized_advantage_estimation(rewards_BT, jnp.zeros_like(rewards_BT), mask_BT, gamma=gamma, lam=1.0)[0]


def masked_whiten(values_BT, mask_BT, *, ddof: int = 1, eps: float = 1e-8) -> jax.Array:
    """(x − mean) / √(variance + eps) over all unmasked tokens of the batch, 0 where masked; exactly 0 when they are all equal. Returns [B, T]."""
    mask_BT = jnp.asarray(mask_BT) != 0
    values_BT = jnp.asarray(values_BT, jnp.float32)
    lowest = jnp.min(values_BT, where=mask_BT, initial=jnp.inf)
    highest = jnp.max(values_BT, where=mask_BT, initial=-jnp.inf)
    whitened_BT = (values_BT - masked_mean(values_BT, mask_BT)) * jax.lax.rsqrt(masked_variance(values_BT, mask_BT, ddof=ddof) + eps)
    return jnp.where(mask_BT & (lowest != highest), whitened_BT, 0.0)


def _gae_step(later, now):
    # A module-level function with its rates in the carry: a closure would compile anew at every call outside jit.
    next_value_B, next_advantage_B, (gamma, decay) = later
    reward_B, value_B, mask_B = now
    advantage_B = reward_B + gamma * next_value_B - value_B + decay * next_advantage_B
    carried = jnp.where(mask_B, value_B, next_value_B), jnp.where(mask_B, advantage_B, next_advantage_B), (gamma, decay)
    return carried, jnp.where(mask_B, advantage_B, 0.0)


def _centred(rewards_B, group_ids_B, valid_B) -> tuple[jax.Array, jax.Array, jax.Array]:
    """r − group mean (0 for equal groups and rows that are not valid), valid members of the row's group, and the group ids as an array; each [B]."""
    if not any(isinstance(array, jax.core.Tracer) for array in (rewards_B, group_ids_B, valid_B)):
        check_groups(group_ids_B)
        _check_rewards(rewards_B, valid_B)
    groups_B = jnp.asarray(group_ids_B)
    valid_B = jnp.ones(groups_B.shape, bool) if valid_B is None else jnp.asarray(valid_B) != 0
    rewards_B = keep(rewards_B, valid_B)
    count_B = _group_totals(valid_B.astype(jnp.float32), groups_B)
    mean_B = _group_totals(rewards_B, groups_B) / jnp.maximum(count_B, 1)
    rows = groups_B.shape[0]
    highest_B = jax.ops.segment_max(jnp.where(valid_B, rewards_B, -jnp.inf), groups_B, rows)[groups_B]
    lowest_B = jax.ops.segment_min(jnp.where(valid_B, rewards_B, jnp.inf), groups_B, rows)[groups_B]
    return jnp.where(valid_B & (highest_B != lowest_B), rewards_B - mean_B, 0.0), count_B, groups_B


def _group_totals(values_B, groups_B) -> jax.Array:
    return jax.ops.segment_sum(values_B, groups_B, num_segments=groups_B.shape[0])[groups_B]


def _check_rewards(rewards_B, valid_B) -> None:
    rewards = np.asarray(rewards_B, np.float32)
    wrong = np.flatnonzero(~np.isfinite(rewards) & (True if valid_B is None else np.asarray(valid_B) != 0))
    if wrong.size:
        raise ValueError(f"reward of row {wrong[0]} is {rewards[wrong[0]]} ({wrong.size} rows in all): a row without a score needs valid_B False")
