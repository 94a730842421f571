"""Position-keyed noise: the exponential of (row key, absolute position, global vocabulary id).

Counter-based, so the noise of a token never depends on batch shape, row, slice, bucket or strategy, and a sharded
vocabulary gives the same values. Row keys come from `strategies.Request.noise_words`. No random state is kept anywhere.
"""

import jax
import jax.numpy as jnp

SERIES_BELOW = 2.0**-4
LARGEST = 1.0 - 2.0**-24  # u = 1 would make the exponential infinite


def _mix(x: jax.Array) -> jax.Array:
    """A bijective 32-bit finaliser (lowbias32: multiply-xorshift with measured bias below 0.2 %)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def position_key(key_B2: jax.Array, position_B: jax.Array) -> jax.Array:
    """uint32 [B, 2]: the row key advanced to an absolute position."""
    position = position_B.astype(jnp.uint32)
    first = _mix(key_B2[:, 0] ^ _mix(position + jnp.uint32(0x9E3779B9)))
    second = _mix(key_B2[:, 1] + _mix(first ^ jnp.uint32(0x85EBCA6B)))
    return jnp.stack([first, second], axis=1)


def hash_words(key_B2: jax.Array, ids_V: jax.Array) -> jax.Array:
    """uint32 [B, V] for vocabulary ids; both key words enter, the second after the first multiplication."""
    x = ids_V.astype(jnp.uint32)[None, :] * jnp.uint32(0x9E3779B1) + key_B2[:, :1]
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = x ^ key_B2[:, 1:]
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def exponential(hashed: jax.Array) -> jax.Array:
    """Standard exponential draws in (0, 17] from 32-bit words, float32, finite and positive for every word.

    −log(1 − u) cancels for small u, where rare tokens win the race, so a series takes over there.
    """
    u = jnp.minimum((hashed.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32), jnp.float32(LARGEST))
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u / 5))))
    return jnp.where(u < SERIES_BELOW, series, -jnp.log(1 - u))


def exponentials(key_B2: jax.Array, position_B: jax.Array, ids_V: jax.Array) -> jax.Array:
    """float32 [B, V]: the noise of the tokens that may stand at `position_B` of each row."""
    return exponential(hash_words(position_key(key_B2, position_B), ids_V))
