"""Masked reductions, and means that are combined exactly across micro-batches and hosts.

A masked-out entry contributes nothing, in value and in gradient, even when it holds NaN or an infinity. Everything is float32.
Segments are the sequences packed into one row: ids 1.. inside a row, 0 for padding. Nothing here knows what the numbers mean.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class WeightedMean(NamedTuple):
    """A mean kept as (sum of weighted values, sum of weights), so that parts merge into exactly the mean of the whole.

    `+` merges (a plain tuple would concatenate); being a pytree it also goes through psum and jit.
    """

    sum: jax.Array
    weight: jax.Array

    @classmethod
    def over(cls, values, weights) -> "WeightedMean":
        """The mean of `values` with `weights` of the same shape; values under weight 0 are never read."""
        weights = jnp.asarray(weights, jnp.float32)
        return cls(masked_sum(values * weights, weights), weights.sum())

    def merge(self, other: "WeightedMean") -> "WeightedMean":
        """The mean over both parts."""
        return WeightedMean(self.sum + other.sum, self.weight + other.weight)

    __add__ = merge

    @property
    def value(self) -> jax.Array:
        """sum / weight, and 0 when the weight is 0 (an empty mean is no NaN)."""
        empty = jnp.equal(self.weight, 0)
        return jnp.where(empty, 0.0, self.sum / jnp.where(empty, 1.0, self.weight))


def keep(values, mask) -> jax.Array:
    """float32 values where the mask is non-zero, 0 elsewhere. Apply it to inputs, before any exp: a `where` after an overflow gives NaN gradients."""
    return jnp.where(jnp.asarray(mask) != 0, jnp.asarray(values, jnp.float32), 0.0)


def masked_sum(values, mask, axis=None) -> jax.Array:
    """Sum of the values whose mask is non-zero."""
    return keep(values, mask).sum(axis)


def masked_mean(values, mask, axis=None) -> jax.Array:
    """Mean of the values whose mask is non-zero; 0 when there are none."""
    count = (jnp.asarray(mask) != 0).sum(axis)
    return masked_sum(values, mask, axis) / jnp.maximum(count, 1)


def masked_variance(values, mask, *, ddof: int = 1) -> jax.Array:
    """Variance of all unmasked values around their mean (two passes: E[x²] − E[x]² cancels in float32); 0 when at most `ddof` values are left."""
    count = (jnp.asarray(mask) != 0).sum()
    centred = keep(values, mask) - masked_mean(values, mask)
    return masked_sum(centred**2, mask) / jnp.maximum(count - ddof, 1)


def segment_totals(values_BT, segments_BT) -> jax.Array:
    """For every position the sum of `values_BT` over its own segment [B, T]; a segment id above T gives NaN, never a neighbour's sum."""
    length = segments_BT.shape[1]
    sums_BS = jax.vmap(lambda values, segments: jax.ops.segment_sum(values, segments, num_segments=length + 1))(values_BT, segments_BT)
    return jnp.take_along_axis(sums_BS, segments_BT, axis=1, mode="fill", fill_value=jnp.nan)
