"""From the scores of a step to the advantages of its tokens, by the configured estimator: shaping, KL in the reward, baseline, whitening. Host order of the
formulas in `objectives/advantages.py`; which one is what: docs/algorithms.md.
"""

from collections.abc import Sequence

import numpy as np

from tlt_jax.objectives import advantages as estimators
from tlt_jax.objectives import losses
from tlt_jax.rewards.composite import overlong_penalty
from tlt_jax.rewards.items import Scored
from tlt_jax.scheduling.batching import power_bucket
from tlt_jax.training.algorithm_rules import GROUPED, has_critic, kl_in_reward, whitens
from tlt_jax.training.experience import Trajectory
from tlt_jax.training.settings import Config


def overlong_penalties(config: Config, lengths: Sequence[int]) -> np.ndarray:
    """What is taken from the score of each answer because it comes near the limit, at most 0; all 0 when that is off."""
    limit = config.rollout.max_new_tokens
    buffer = round(config.reward.overlong_share * limit)
    if not buffer:
        return np.zeros(len(lengths), np.float32)
    return np.array([config.reward.overlong_penalty * overlong_penalty(length, limit, buffer) for length in lengths], np.float32)


def shaped_rewards(config: Config, scores: Sequence[Scored], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(rewards [B], whether there is one [B]): the scores with the penalty of long answers, then brought to mean 0 and deviation 1 where that is asked for."""
    valid = np.array([score.score is not None for score in scores])
    rewards = np.array([0.0 if score.score is None else score.score for score in scores], np.float32) + overlong_penalties(config, lengths)
    if config.reward.whiten:
        rewards = np.asarray(estimators.masked_whiten(rewards[None], valid[None]))[0]
    return np.where(valid, rewards, 0).astype(np.float32), valid


def set_advantages(config: Config, scores: Sequence[Scored], trajectories: Sequence[Trajectory], beta: float) -> np.ndarray:
    """Advantages (and the critic's returns) on every trajectory, groups side by side; the mean of each one for the sample table.

    `beta` weighs the KL to the reference in the reward.
    """
    lengths = [trajectory.response_length for trajectory in trajectories]
    rewards, valid = shaped_rewards(config, scores, lengths)
    mask_BT = padded([np.ones(length) for length in lengths])
    penalties_BT = beta * kl_of_tokens(config, trajectories) if kl_in_reward(config) else np.zeros_like(mask_BT)
    returns_BT = None
    if config.algorithm.name in GROUPED:
        advantages_BT = _of_groups(config, rewards - penalties_BT.sum(1), valid)[:, None] * mask_BT
    elif has_critic(config):
        advantages_BT, returns_BT = _of_critic(config, np.asarray(estimators.token_rewards(rewards, mask_BT)) - penalties_BT, mask_BT, trajectories)
    else:
        advantages_BT = estimators.reward_to_go(np.asarray(estimators.token_rewards(rewards, mask_BT)) - penalties_BT, mask_BT, gamma=config.algorithm.gamma)
    if whitens(config):
        advantages_BT = estimators.masked_whiten(advantages_BT, mask_BT * valid[:, None])
    advantages_BT = np.asarray(advantages_BT, np.float32)
    for row, (trajectory, length) in enumerate(zip(trajectories, lengths, strict=True)):
        trajectory.trained, trajectory.advantages = bool(valid[row]), advantages_BT[row, :length]
        trajectory.returns = None if returns_BT is None else returns_BT[row, :length]
    return np.array([trajectory.advantages.mean() for trajectory in trajectories])


def kl_of_tokens(config: Config, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """The estimate of KL(policy ‖ reference) at every response token [B, T], 0 beyond each end."""
    old, reference = padded([one.old_logprobs for one in trajectories]), padded([one.reference_logprobs for one in trajectories])
    return np.asarray(losses.kl_estimate(old, reference, config.algorithm.kl_kind))


def padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Numbers of responses as rows [B, T] with 0 beyond each end; T comes from few lengths, so that few programs are compiled."""
    rows = np.zeros((len(arrays), power_bucket(max(map(len, arrays)), 64)), np.float32)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return rows


def _of_groups(config, rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    algorithm, groups = config.algorithm, np.arange(len(rewards)) // config.algorithm.num_generations
    if algorithm.name == "rloo":
        return np.asarray(estimators.leave_one_out(rewards, groups, valid_B=valid))
    scaled = algorithm.name == "grpo" and algorithm.scale_rewards
    return np.asarray(estimators.group_relative(rewards, groups, scale_by_std=scaled, valid_B=valid))


def _of_critic(config, rewards_BT: np.ndarray, mask_BT: np.ndarray, trajectories: Sequence[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """GAE: the policy's lambda for advantages, the critic's for returns."""
    algorithm, values_BT = config.algorithm, padded([trajectory.old_values for trajectory in trajectories])
    advantages_BT, _ = estimators.generalized_advantage_estimation(rewards_BT, values_BT, mask_BT, gamma=algorithm.gamma, lam=algorithm.gae_lambda)
    _, returns_BT = estimators.generalized_advantage_estimation(rewards_BT, values_BT, mask_BT, gamma=algorithm.gamma, lam=algorithm.value_lambda)
    return advantages_BT, np.asarray(returns_BT)
