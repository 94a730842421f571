"""The drafter's loss: soft cross-entropy to the policy at the rollout temperature over the draft tokens, unrolled as drafting unrolls (EAGLE-3's
training-time test), and for EAGLE SmoothL1 to the next feature.

Normalised by counted slots of the first step, so that micro-batching changes nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp

from tlt_jax.distillation.pairs import DraftBatch, Frozen, counted, shifted
from tlt_jax.drafters.feature_drafter import FeatureDrafter
from tlt_jax.logprobs import scale_logits
from tlt_jax.masked import WeightedMean


@dataclasses.dataclass(frozen=True)
class DraftLoss:
    """`steps` unroll steps with weights decay^s."""

    temperature: float
    steps: int = 3
    decay: float = 0.8
    feature_weight: float = 0.0  # eagle: weight of SmoothL1; outlier channels of some models would swamp the token loss


def draft_objective(drafter: FeatureDrafter, settings: DraftLoss, params: dict, data: tuple[Frozen, DraftBatch]) -> tuple[WeightedMean, dict]:
    """(summed loss with its weight, metrics): drafter/acceptance_s is 1 − TV between drafter and policy at step s, drafter/agreement_s equal best tokens."""
    frozen, batch = jax.lax.stop_gradient(data)  # the policy is the teacher: neither its features nor its arrays are trained
    total, metrics, weight = jnp.float32(0), {}, jnp.sum(counted(batch, 0))
    embedded_BTD = frozen.embedding_VD[batch.tokens_BT]
    unroll = drafter.unroll(params, embedded_BTD, batch.features_BTF, (batch.positions_BT, batch.segments_BT), settings.steps)
    for step, hidden_BTD in enumerate(unroll):
        mask_BT, target_BTD = counted(batch, step), shifted(batch.final_BTD, 1 + step)
        cross, overlap, agrees = jax.checkpoint(lambda hidden, target: _compare(drafter, params, frozen, (hidden, target), settings.temperature))(
            hidden_BTD, target_BTD)
        total = total + settings.decay**step * WeightedMean.over(cross, mask_BT).sum
        if settings.feature_weight:
            distance = jnp.abs(hidden_BTD.astype(jnp.float32) - target_BTD)
            smooth_BT = jnp.mean(jnp.where(distance < 1, 0.5 * distance**2, distance - 0.5), axis=-1)
            total = total + settings.feature_weight * settings.decay**step * WeightedMean.over(smooth_BT, mask_BT).sum
        metrics |= {f"drafter/acceptance_{step}": WeightedMean.over(overlap, mask_BT), f"drafter/agreement_{step}": WeightedMean.over(agrees, mask_BT)}
    loss = WeightedMean(total, weight)
    return loss, metrics | {"drafter/loss": loss}


def _compare(drafter: FeatureDrafter, params: dict, frozen: Frozen, pair: tuple[jax.Array, jax.Array], temperature: float):
    """Per slot: cross-entropy, Σ min(p, q) and whether the best tokens agree."""
    hidden_BTD, target_BTD = pair
    drafted = jax.nn.log_softmax(scale_logits(drafter.training_logits(params, frozen.head_DE, hidden_BTD), temperature), axis=-1)
    teacher_DE = frozen.head_DE if frozen.target_DE is None else frozen.target_DE
    wanted = scale_logits(jnp.einsum("btd,de->bte", target_BTD, teacher_DE, preferred_element_type=jnp.float32), temperature)
    policy = jax.nn.softmax(wanted, axis=-1)
    overlap = jnp.sum(jnp.minimum(policy, jnp.exp(drafted)), axis=-1)
    return -jnp.sum(policy * drafted, axis=-1), overlap, (jnp.argmax(wanted, -1) == jnp.argmax(drafted, -1)).astype(jnp.float32)
