"""Rotary position embedding: inverse frequencies per scaling rule, and the rotation itself.

The rules (default, linear, dynamic, yarn, llama3) follow transformers' `modeling_rope_utils.py` number for number.
Longrope and partial rotation are refused by `specs.py` before this module is reached.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models.specs import PolicySpec, RopeSpec


def inverse_frequencies(rope: RopeSpec, head_dim: int, length: int | jax.Array = 0) -> tuple[np.ndarray | jax.Array, float]:
    """Inverse frequencies [C / 2] in float32 and the factor on cos and sin.

    `length` (highest position of a full forward + 1, may be traced) matters to the dynamic rule only, whose base grows with it.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain.astype(np.float32), 1.0
    if rope.kind == "linear":
        return (plain / rope.factor).astype(np.float32), 1.0
    if rope.kind == "dynamic":
        return _dynamic(rope, head_dim, length, exponents), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    return _yarn(rope, head_dim, plain)


def _dynamic(rope: RopeSpec, head_dim: int, length: int | jax.Array, exponents: np.ndarray) -> jax.Array:
    original = rope.original_max_position_embeddings
    stretched = jnp.maximum(length, original)
    base = rope.theta * ((rope.factor * stretched / original) - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    return (1.0 / base**exponents).astype(jnp.float32)


def _llama3(rope: RopeSpec, plain: np.ndarray) -> np.ndarray:
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    slow = wavelengths > original / rope.low_freq_factor
    fast = wavelengths < original / rope.high_freq_factor
    return np.where(slow, plain / rope.factor, np.where(fast, plain, blended)).astype(np.float32)


def _yarn(rope: RopeSpec, head_dim: int, plain: np.ndarray) -> tuple[np.ndarray, float]:
    original = rope.original_max_position_embeddings

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / span, 0, 1)
    blended = (plain / rope.factor) * ramp + plain * (1 - ramp)
    return blended.astype(np.float32), yarn_attention_factor(rope)


def yarn_attention_factor(rope: RopeSpec) -> float:
    """Scale on cos and sin: the explicit `attention_factor`, else from `mscale` pairs, else 0.1 ln(factor) + 1."""

    def mscale(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return mscale(rope.factor)


def rotation(spec: PolicySpec, positions_BT: jax.Array, *, length: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of shape [B, T, C / 2] in float32 for absolute positions."""
    frequencies, scale = inverse_frequencies(spec.rope, spec.head_dim, length)
    angles_BTC = positions_BT.astype(jnp.float32)[..., None] * frequencies[None, None, :]
    return jnp.cos(angles_BTC) * scale, jnp.sin(angles_BTC) * scale


def rotate(x_BTHC: jax.Array, cos_BTC: jax.Array, sin_BTC: jax.Array) -> jax.Array:
    """Rotate the channel pairs (c, c + C/2), the layout of Hugging Face checkpoints; float32 inside."""
    first, second = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BTC[:, :, None, :], sin_BTC[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTHC.dtype)
