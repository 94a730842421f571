"""The decoder's building blocks as Flax NNX modules: definitions and initialisation only.

A layer splits around attention (`project` before it, `finish` after it), because the key/value cache travels in the
scan's carry and is owned by `decoder.py`. Nothing here knows a cache, a mesh or a mask.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from tlt_jax.models.rope import rotate
from tlt_jax.models.specs import PolicySpec

FAST_ROWS = 8  # of a bfloat16 product on a CPU


def fan_in_normal(rng: jax.Array, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> jax.Array:
    """A new kernel [in…, out…] of standard deviation fan_in^-0.5: about the usual 0.02 at width 2,500, and right for small widths too."""
    return jax.random.normal(rng, inputs + outputs) * math.prod(inputs) ** -0.5


def product(x: jax.Array, kernel: jax.Array, axes: tuple[tuple[int, ...], tuple[int, ...]], dtype=None) -> jax.Array:
    """x · kernel over `axes` (trailing ones of x), in x's dtype or in `dtype`.

    XLA on CPU has no fast bfloat16 product with few rows, so that these are padded (jax 0.10, 0.12; one layer's kernels: one row 4 ms, eight rows 0.4 ms).
    """
    whole, lead = kernel.astype(x.dtype), x.shape[: x.ndim - len(axes[0])]
    rows = math.prod(lead)
    if jax.default_backend() != "cpu" or x.dtype != jnp.bfloat16 or rows >= FAST_ROWS:
        return jax.lax.dot_general(x, whole, (axes, ((), ())), preferred_element_type=dtype)
    flat = jnp.pad(x.reshape(rows, -1), ((0, FAST_ROWS - rows), (0, 0))).reshape(FAST_ROWS, *x.shape[len(lead) :])
    inner = tuple(axis - len(lead) + 1 for axis in axes[0])
    y = jax.lax.dot_general(flat, whole, ((inner, axes[1]), ((), ())), preferred_element_type=dtype)
    return y[:rows].reshape(*lead, *y.shape[1:])


class RMSNorm(nnx.Module):
    """x / rms(x) · scale with the statistics in float32."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones((size,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return normed.astype(x.dtype) * self.scale[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Projection(nnx.Module):
    """A linear map stored [in…, out…]; `contract` input axes are summed over."""

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], bias: bool, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(fan_in_normal(rngs.params(), inputs, outputs))
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None
        self.contract = len(inputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        axes = (tuple(range(x.ndim - self.contract, x.ndim)), tuple(range(self.contract)))
        y = product(x, self.kernel[...], axes)
        if self.bias is not None:
            bias = self.bias[...].astype(x.dtype)
            y = y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y


class Attention(nnx.Module):
    """The projections of grouped-query attention; `inputs` is the width they read when it is not the model's."""

    def __init__(self, spec: PolicySpec, *, inputs: int | None = None, rngs: nnx.Rngs):
        width, channels = spec.hidden_size, spec.head_dim
        read = inputs or width
        self.query = Projection((read,), (spec.num_heads, channels), spec.qkv_bias, rngs=rngs)
        self.key = Projection((read,), (spec.num_kv_heads, channels), spec.qkv_bias, rngs=rngs)
        self.value = Projection((read,), (spec.num_kv_heads, channels), spec.qkv_bias, rngs=rngs)
        self.output = Projection((spec.num_heads, channels), (width,), spec.output_bias, rngs=rngs)
        self.query_norm = RMSNorm(channels, spec.rms_norm_eps) if spec.qk_norm else None
        self.key_norm = RMSNorm(channels, spec.rms_norm_eps) if spec.qk_norm else None


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, spec: PolicySpec, *, rngs: nnx.Rngs):
        width, hidden = spec.hidden_size, spec.intermediate_size
        self.gate = Projection((width,), (hidden,), spec.mlp_bias, rngs=rngs)
        self.up = Projection((width,), (hidden,), spec.mlp_bias, rngs=rngs)
        self.down = Projection((hidden,), (width,), spec.mlp_bias, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_BTD)) * self.up(x_BTD))


class DecoderLayer(nnx.Module):
    """One pre-norm decoder layer, cut in two around attention."""

    def __init__(self, spec: PolicySpec, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention = Attention(spec, rngs=rngs)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec, rngs=rngs)

    def project(self, x_BTD: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [B, T, H, C], rotated keys and values [B, T, K, C]."""
        attention = self.attention
        normed = self.attention_norm(x_BTD)
        query, key, value = attention.query(normed), attention.key(normed), attention.value(normed)
        if attention.query_norm is not None:
            query, key = attention.query_norm(query), attention.key_norm(key)
        return rotate(query, *rotation), rotate(key, *rotation), value

    def finish(self, x_BTD: jax.Array, attended_BTHC: jax.Array) -> jax.Array:
        """Residual stream after the layer."""
        x_BTD = x_BTD + self.attention.output(attended_BTHC)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))
