"""Policy, KL, entropy and value losses, as weighted sums that the caller divides once by the weight of the whole optimizer step.

Every loss returns a WeightedMean for its micro-batch: gradients of `sum`, added over micro-batches and divided by the added `weight`, do not depend on
the split. Metrics are WeightedMeans over response tokens. Inputs are float32 log-probs by `tlt_jax.logprobs`; whatever stands on masked positions is never
read. Not here: advantages, and the optimizer step.

Formulas: PPO clip (Schulman 2017), dual clip (Ye 2020), clip-higher and token mean (DAPO), fixed-length mean (Dr.GRPO), sequence ratio (GSPO),
CISPO (MiniMax-M1), k1/k2/k3 (Schulman's note on approximating KL), truncated importance sampling between sampler and trainer.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.masked import WeightedMean, keep, segment_totals

# exp of more than this is no ratio to learn from; the clamp keeps value and gradient finite (verl, OpenRLHF and NeMo use the same).
LOG_RATIO_LIMIT = 20.0
# k3 above this is cut, with gradient 0: one drifted token must not outweigh a batch (same bound as verl and NeMo).
K3_LIMIT = 10.0

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "constant")
KL_KINDS = ("k1", "k2", "k3")


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """What the losses need to know; hashable, so usable as a static value. ValueError names a setting that makes no sense."""

    epsilon: float = 0.2
    epsilon_high: float = 0.28
    dual_clip: float | None = None  # bound c of the loss, −c · A, where A < 0
    loss_agg_mode: str = "token-mean"
    max_length: int | None = None  # divisor of "constant" (Dr.GRPO): the configured response limit
    entropy_coef: float = 0.0
    beta: float = 0.0  # weight of the KL loss
    kl_kind: str = "k3"
    importance_sampling_cap: float | None = None  # None: rollout log-probs are only measured
    importance_sampling_floor: float = 0.0
    importance_sampling_mode: str = "truncate"  # or "mask": weights outside [floor, cap] become 0
    ratio_level: str = "token"  # or "sequence": GSPO's length-normalised ratio
    cispo_cap: float | None = None  # c: the loss is CISPO's −min(ρ, c) · A · lp, without gradient through the weight; None: the clipped one
    value_clip: float | None = 0.2
    value_coef: float = 1.0

    def __post_init__(self):
        _one_of("loss_agg_mode", self.loss_agg_mode, AGGREGATIONS)
        _one_of("kl_kind", self.kl_kind, KL_KINDS)
        _one_of("ratio_level", self.ratio_level, ("token", "sequence"))
        _one_of("importance_sampling_mode", self.importance_sampling_mode, ("truncate", "mask"))
        if self.kl_kind == "k1":
            raise ValueError(
                "kl_kind 'k1' in a loss has expected gradient 0 on samples of the policy itself (pure noise): use 'k3', or 'k2' whose gradient is that"
                " of KL(policy || reference); k1 belongs in the reward"
            )
        if self.loss_agg_mode == "constant" and not (self.max_length and self.max_length > 0):
            raise ValueError(f"loss_agg_mode 'constant' needs max_length, the response limit in tokens, got {self.max_length}")
        if not (0 <= self.epsilon <= 1 and self.epsilon_high >= 0):
            raise ValueError(f"clip range needs 0 <= epsilon <= 1 and epsilon_high >= 0, got {self.epsilon} and {self.epsilon_high}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1 (3 is usual), got {self.dual_clip}")
        if self.cispo_cap is not None and (self.cispo_cap <= 0 or self.dual_clip is not None or self.ratio_level != "token"):
            raise ValueError(f"cispo_cap {self.cispo_cap} must be above 0, with token ratios and without dual_clip: CISPO bounds the weight of every token")
        if self.importance_sampling_cap is not None and not 0 <= self.importance_sampling_floor < self.importance_sampling_cap:
            raise ValueError(f"importance sampling needs 0 <= floor < cap, got floor {self.importance_sampling_floor} and cap {self.importance_sampling_cap}")


class PolicyRatios(NamedTuple):
    """Current policy against the policy at the start of the update; 0 log-ratio where masked."""

    log_ratio_BT: jax.Array
    ratio_BT: jax.Array


def clipped_policy_loss(
    logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, settings: LossSettings, *, segments_BT=None, rollout_logprobs_BT=None
) -> tuple[WeightedMean, dict[str, WeightedMean]]:
    """PPO's max(−A ρ, −A clip(ρ)), or CISPO's −min(ρ, c) A lp, with the options of `settings`, aggregated by `loss_agg_mode`; metrics policy/ and sampler/.

    `segments_BT` numbers the sequences packed into a row from 1 (0 = padding); None means one sequence a row. `rollout_logprobs_BT` are the sampler's,
    at the same definition; with a cap they weigh the loss (see `importance_weights`), without one their mismatch is only reported.
    """
    mask_BT, segments_BT = _sequences(mask_BT, segments_BT)
    advantages_BT = keep(advantages_BT, mask_BT)
    log_ratio_BT, ratio_BT = policy_ratios(logprobs_BT, old_logprobs_BT, mask_BT, segments_BT, settings)
    if settings.cispo_cap is None:
        losses_BT, is_clipped_BT, is_dual_BT = _clipped(advantages_BT, ratio_BT, settings)
    else:
        weight_BT = jax.lax.stop_gradient(jnp.minimum(ratio_BT, settings.cispo_cap))
        losses_BT, is_clipped_BT = -weight_BT * advantages_BT * keep(logprobs_BT, mask_BT), ratio_BT > settings.cispo_cap
        is_dual_BT = jnp.zeros_like(is_clipped_BT)
    fractions = {
        "policy/clip_fraction": is_clipped_BT,
        "policy/clip_fraction_low": is_clipped_BT & (ratio_BT < 1),
        "policy/clip_fraction_high": is_clipped_BT & (ratio_BT > 1),
        "policy/dual_clip_fraction": is_dual_BT,
        "policy/ratio_mean": ratio_BT,
        "policy/approx_kl": jnp.expm1(log_ratio_BT) - log_ratio_BT,
        "policy/ppo_kl": -log_ratio_BT,
    }
    metrics = {name: WeightedMean.over(jax.lax.stop_gradient(values_BT), mask_BT) for name, values_BT in fractions.items()}
    if rollout_logprobs_BT is not None:
        weights_BT = importance_weights(old_logprobs_BT, rollout_logprobs_BT, mask_BT, settings)
        losses_BT = losses_BT * weights_BT
        metrics |= sampler_mismatch(old_logprobs_BT, rollout_logprobs_BT, mask_BT) | {"sampler/weight_mean": WeightedMean.over(weights_BT, mask_BT)}
    elif settings.importance_sampling_cap is not None:
        raise ValueError("importance_sampling_cap is set, so clipped_policy_loss needs rollout_logprobs_BT")
    return aggregate(losses_BT, mask_BT, settings, segments_BT=segments_BT), metrics


def _clipped(advantages_BT, ratio_BT, settings: LossSettings) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(losses, where the clip of the ratio holds, where the bound of negative advantages does)."""
    free_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * jnp.clip(ratio_BT, 1 - settings.epsilon, 1 + settings.epsilon_high)
    is_clipped_BT = clipped_BT > free_BT
    losses_BT = jnp.where(is_clipped_BT, clipped_BT, free_BT)
    if settings.dual_clip is None:
        return losses_BT, is_clipped_BT, jnp.zeros_like(is_clipped_BT)
    bound_BT = -settings.dual_clip * advantages_BT
    is_dual_BT = (advantages_BT < 0) & (losses_BT > bound_BT)
    return jnp.where(is_dual_BT, bound_BT, losses_BT), is_clipped_BT, is_dual_BT


def policy_ratios(logprobs_BT, old_logprobs_BT, mask_BT, segments_BT, settings: LossSettings) -> PolicyRatios:
    """exp(lp − lp_old) per token, or GSPO's exp(mean over the sequence), in its token form: value of the sequence, gradient through the token itself."""
    log_ratio_BT = jnp.clip(keep(logprobs_BT, mask_BT) - keep(old_logprobs_BT, mask_BT), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if settings.ratio_level == "token":
        return PolicyRatios(log_ratio_BT, jnp.exp(log_ratio_BT))
    fixed_BT = jax.lax.stop_gradient(log_ratio_BT)
    mean_BT = segment_totals(fixed_BT, segments_BT) / jnp.maximum(segment_totals(mask_BT, segments_BT), 1)
    return PolicyRatios(log_ratio_BT, jnp.where(mask_BT > 0, jnp.exp(mean_BT + log_ratio_BT - fixed_BT), 1.0))


def importance_weights(old_logprobs_BT, rollout_logprobs_BT, mask_BT, settings: LossSettings) -> jax.Array:
    """w = p_old / p_rollout per token, without gradient; 1 everywhere when there is no cap.

    "truncate" bounds w to [floor, cap]; "mask" (IcePop) sets w outside [floor, cap] to 0. Token level on purpose: products over a sequence are
    length-biased (their log has a spread of σ√length).
    """
    log_weight_BT = keep(old_logprobs_BT, mask_BT) - keep(rollout_logprobs_BT, mask_BT)
    weights_BT = jax.lax.stop_gradient(jnp.exp(jnp.clip(log_weight_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)))
    floor, cap = settings.importance_sampling_floor, settings.importance_sampling_cap
    if cap is None:
        return jnp.ones_like(weights_BT)
    if settings.importance_sampling_mode == "truncate":
        return jnp.clip(weights_BT, floor, cap)
    return jnp.where((weights_BT >= floor) & (weights_BT <= cap), weights_BT, 0.0)


def sampler_mismatch(old_logprobs_BT, rollout_logprobs_BT, mask_BT) -> dict[str, WeightedMean]:
    """How far the trainer's log-probs are from the sampler's, as token means; all 0 (ratio 1) when they agree."""
    old_BT = jax.lax.stop_gradient(keep(old_logprobs_BT, mask_BT))
    rollout_BT = jax.lax.stop_gradient(keep(rollout_logprobs_BT, mask_BT))
    log_ratio_BT = jnp.clip(old_BT - rollout_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values = {
        "sampler/logprob_diff_mean": jnp.abs(old_BT - rollout_BT),
        "sampler/prob_diff_mean": jnp.abs(jnp.exp(old_BT) - jnp.exp(rollout_BT)),
        "sampler/kl_k1": -log_ratio_BT,
        "sampler/kl_k3": jnp.expm1(log_ratio_BT) - log_ratio_BT,
        "sampler/ratio_mean": jnp.exp(log_ratio_BT),
        "sampler/chi_square": jnp.expm1(2 * log_ratio_BT),
    }
    return {name: WeightedMean.over(values_BT, mask_BT) for name, values_BT in values.items()}


def kl_estimate(logprobs, ref_logprobs, kind: str) -> jax.Array:
    """Per-token estimate of KL(policy || reference), same shape: with d = lp − lp_ref, k1 = d, k2 = d² / 2, k3 = e^−d − 1 + d ≥ 0.

    d is clamped to ±20 and k3 to 10, so value and gradient are always finite. Where either is −inf (padding) value and gradient are 0; NaN stays NaN.
    """
    _one_of("kl kind", kind, KL_KINDS)
    read = (logprobs != -jnp.inf) & (ref_logprobs != -jnp.inf)
    difference = jnp.clip(keep(logprobs, read) - keep(ref_logprobs, read), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference**2 / 2
    return jnp.minimum(jnp.expm1(-difference) + difference, K3_LIMIT)


def kl_loss(
    logprobs_BT, ref_logprobs_BT, mask_BT, settings: LossSettings, *, segments_BT=None, beta=None
) -> tuple[WeightedMean, dict[str, WeightedMean]]:
    """beta · KL to the reference, aggregated like the policy loss (its sum may be added to that sum); policy/kl is the plain token mean.

    `beta` (scalar, may be traced) goes before the one of `settings`.
    """
    mask_BT, segments_BT = _sequences(mask_BT, segments_BT)
    kl_BT = kl_estimate(keep(logprobs_BT, mask_BT), keep(ref_logprobs_BT, mask_BT), settings.kl_kind)
    loss = aggregate((settings.beta if beta is None else beta) * kl_BT, mask_BT, settings, segments_BT=segments_BT)
    return loss, {"policy/kl": WeightedMean.over(jax.lax.stop_gradient(kl_BT), mask_BT)}


def entropy_loss(entropy_BT, mask_BT, settings: LossSettings, *, segments_BT=None) -> tuple[WeightedMean, dict[str, WeightedMean]]:
    """−entropy_coef · entropy, aggregated like the policy loss; policy/entropy is the plain token mean in nats."""
    mask_BT, segments_BT = _sequences(mask_BT, segments_BT)
    entropy_BT = keep(entropy_BT, mask_BT)
    loss = aggregate(-settings.entropy_coef * entropy_BT, mask_BT, settings, segments_BT=segments_BT)
    return loss, {"policy/entropy": WeightedMean.over(jax.lax.stop_gradient(entropy_BT), mask_BT)}


def value_loss(values_BT, old_values_BT, returns_BT, mask_BT, settings: LossSettings) -> tuple[WeightedMean, dict[str, WeightedMean]]:
    """value_coef · ½ max((V − R)², (V_old + clip(V − V_old, ±value_clip) − R)²), always a token mean; `value_clip` None is the plain squared error."""
    values_BT, old_values_BT, returns_BT = (keep(array, mask_BT) for array in (values_BT, old_values_BT, returns_BT))
    errors_BT = (values_BT - returns_BT) ** 2
    worst_BT, is_clipped_BT = errors_BT, jnp.zeros(errors_BT.shape, bool)
    if settings.value_clip is not None:
        near_BT = jnp.clip(values_BT, old_values_BT - settings.value_clip, old_values_BT + settings.value_clip)
        clipped_BT = (near_BT - returns_BT) ** 2
        is_clipped_BT = clipped_BT > errors_BT
        worst_BT = jnp.where(is_clipped_BT, clipped_BT, errors_BT)
    metrics = {"value/clip_fraction": is_clipped_BT, "value/squared_error": jax.lax.stop_gradient(errors_BT), "value/mean": jax.lax.stop_gradient(values_BT)}
    return (
        WeightedMean.over(settings.value_coef * 0.5 * worst_BT, _weights(mask_BT)),
        {name: WeightedMean.over(array_BT, _weights(mask_BT)) for name, array_BT in metrics.items()},
    )


def loss_weights(mask_BT, segments_BT, settings: LossSettings) -> jax.Array:
    """Weight of each token's loss [B, T]; a batch's loss is Σ weight · loss / Σ `total_weight`.

    token-mean: mask. seq-mean-token-mean: mask / unmasked tokens of its sequence. constant: mask / max_length.
    """
    mask_BT, segments_BT = _sequences(mask_BT, segments_BT)
    if settings.loss_agg_mode == "token-mean":
        return mask_BT
    if settings.loss_agg_mode == "constant":
        return mask_BT / settings.max_length
    return mask_BT / jnp.maximum(segment_totals(mask_BT, segments_BT), 1)


def total_weight(mask_BT, segments_BT, settings: LossSettings) -> jax.Array:
    """What this micro-batch adds to the divisor: its unmasked tokens for token-mean, else its sequences that have at least one unmasked token."""
    mask_BT, segments_BT = _sequences(mask_BT, segments_BT)
    if settings.loss_agg_mode == "token-mean":
        return mask_BT.sum()
    return jnp.round((mask_BT / jnp.maximum(segment_totals(mask_BT, segments_BT), 1)).sum())


def aggregate(losses_BT, mask_BT, settings: LossSettings, *, segments_BT=None) -> WeightedMean:
    """Token losses as one WeightedMean under `loss_agg_mode`."""
    weighted = keep(losses_BT, mask_BT) * loss_weights(mask_BT, segments_BT, settings)
    return WeightedMean(weighted.sum(), total_weight(mask_BT, segments_BT, settings))


def _sequences(mask_BT, segments_BT) -> tuple[jax.Array, jax.Array]:
    """The mask as 0/1 float32 without padding, and segment ids (all 1 when each row is one sequence)."""
    mask_BT = _weights(mask_BT)
    if segments_BT is None:
        return mask_BT, jnp.ones(mask_BT.shape, jnp.int32)
    segments_BT = jnp.asarray(segments_BT)
    return jnp.where(segments_BT > 0, mask_BT, 0.0), segments_BT


def _weights(mask_BT) -> jax.Array:
    return (jnp.asarray(mask_BT) != 0).astype(jnp.float32)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} {value!r} is unknown: use one of {', '.join(known)}")
