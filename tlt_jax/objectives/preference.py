"""Scores of a reward model, and the Bradley–Terry loss of pairs: mean of −log σ(score of the better − score of the worse − margin).

A sequence's score is that of its last token, as in transformers' sequence classification.
"""

import jax
import jax.numpy as jnp

from tlt_jax.masked import WeightedMean
from tlt_jax.objectives.policy_update import Pass, trunk
from tlt_jax.records import PackedBatch, PairBatch


def score_columns(run: Pass, params: dict, batch: PackedBatch | PairBatch) -> jax.Array:
    """The score [B, T], float32, that each text has up to and with each token."""
    features_BTD = trunk(run, params, batch).features_BTD
    return jnp.einsum("btd,ds->bts", features_BTD, params["head"]["kernel"].astype(features_BTD.dtype), preferred_element_type=jnp.float32)[..., 0]


def score_pairs(run: Pass, params: dict, batch: PairBatch) -> jax.Array:
    """How much higher the better one's score is [B, Y], float32; 0 where there is no pair."""
    scores_BT = score_columns(run, params, batch)

    def at(columns_BY):
        return jnp.take_along_axis(scores_BT, jnp.clip(columns_BY, 0, scores_BT.shape[1] - 1), axis=1)

    return jnp.where(batch.better_BY < scores_BT.shape[1], at(batch.better_BY) - at(batch.worse_BY), 0.0)


def pair_losses(gaps: jax.Array, margin: float) -> jax.Array:
    """−log σ(gap − margin) of each gap."""
    return jax.nn.softplus(margin - gaps)


def preference_objective(run: Pass, margin: float, params: dict, batch: PairBatch) -> tuple[WeightedMean, dict]:
    """Mean loss of the pairs, the share of those in which the better one has the higher score, and the mean gap."""
    gaps_BY = score_pairs(run, params, batch)
    mask_BY = (batch.better_BY < batch.tokens_BT.shape[1]).astype(jnp.float32)
    loss = WeightedMean.over(pair_losses(gaps_BY, margin), mask_BY)
    means = {"reward/model_accuracy": WeightedMean.over((gaps_BY > 0).astype(jnp.float32), mask_BY), "reward/model_gap": WeightedMean.over(gaps_BY, mask_BY)}
    return loss, {"reward/model_loss": loss} | means
