"""What a drafter learns from: packed text with the policy's features, and the shifts that pair a feature with the tokens after it.

Slot t holds the feature of position t and the token t + 1; unroll step s of it predicts token t + 2 + s. A pair never crosses the end of a text.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.drafters.feature_drafter import FeatureDrafter, policy_head
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec


@flax.struct.dataclass
class DraftBatch:
    """Packed rows as in `records.PackedBatch`, and what the policy made of them."""

    tokens_BT: jax.Array  # int32
    positions_BT: jax.Array  # int32
    segments_BT: jax.Array  # int32, 0 = padding
    mask_BT: jax.Array  # float32, 1 on tokens whose drafting counts (the responses)
    features_BTF: jax.Array  # what the drafter reads
    final_BTD: jax.Array  # the feature behind the policy's head


@flax.struct.dataclass
class Frozen:
    """Of the policy: its embedding, and the head's columns of the draft tokens. No gradient reaches them."""

    embedding_VD: jax.Array
    head_DE: jax.Array
    target_DE: jax.Array | None = None  # those of the older policy that made the features; None: this one made them


class Lesson(NamedTuple):
    """What an update of a drafter reads.

    `final_BTD` says what an older policy would have said next only through that policy's own head: the newer head would give the distribution of neither.
    """

    batch: DraftBatch
    head_DE: jax.Array | None = None  # of the policy that made the batch's features, for the draft tokens; None: they are still to be made


def teach(spec: PolicySpec, capture_layers: tuple[int, ...], params: dict, batch: DraftBatch) -> tuple[jax.Array, jax.Array]:
    """(features_BTF, final_BTD) of one forward of the policy over packed rows; the batch's own features are not read."""
    out = decoder.forward(
        spec, params, batch.tokens_BT, positions_BT=batch.positions_BT, segments_BT=batch.segments_BT, capture_layers=capture_layers, compute_logits=False)
    return (out.aux_features_BTF if capture_layers else out.features_BTD), out.features_BTD


def frozen_part(drafter: FeatureDrafter, policy_params: dict, ids_E: jax.Array | None) -> Frozen:
    """What a drafter's loss reads of a policy."""
    return Frozen(policy_params["embed"]["embedding"], policy_head(drafter.spec, policy_params, ids_E))


def taught(drafter: FeatureDrafter, policy_params: dict, ids_E: jax.Array | None, lesson: Lesson) -> tuple[Frozen, DraftBatch]:
    """What a drafter's loss reads: the policy's part, and the batch with its features, made here where the lesson brings none.

    In float32 whatever the policy computes in.
    """
    batch = lesson.batch
    if lesson.head_DE is None:
        features_BTF, final_BTD = teach(drafter.spec, drafter.capture_layers, policy_params, batch)
        batch = batch.replace(features_BTF=features_BTF.astype(jnp.float32), final_BTD=final_BTD.astype(jnp.float32))
    frozen = frozen_part(drafter, policy_params, ids_E).replace(target_DE=lesson.head_DE)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), frozen), batch


def shifted(values_BT: jax.Array, by: int) -> jax.Array:
    """Column t holds what column t + `by` held; zeros enter at the end."""
    rest = ((0, 0),) * (values_BT.ndim - 2)
    return jnp.pad(values_BT[:, by:], ((0, 0), (0, by), *rest))


def counted(batch: DraftBatch, step: int) -> jax.Array:
    """float32 [B, T]: slots whose prediction at an unroll step is about a counted token of the same text."""
    there = shifted(batch.segments_BT, 2 + step)
    return shifted(batch.mask_BT, 2 + step) * ((there == batch.segments_BT) & (batch.segments_BT > 0))
