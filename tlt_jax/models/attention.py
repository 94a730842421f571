"""Attention arithmetic: a causal forward over whole sequences, and new tokens against a cache.

Both take grouped queries ([B, T, H, C] with H = K · G) and keep the softmax in float32. Masks are built here from
positions, segments and windows; cache layout is private to `kv_cache.py`, which hands over blocks.
"""

import jax
import jax.numpy as jnp

NEGATIVE = -1e30  # finite, so that a row with nothing to see yields zeros and not NaN
QUERY_BLOCK = 1024  # longer sequences attend in blocks of queries, recomputed in the backward pass


def grouped(query_BTHC: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, H, C] → [B, T, K, G, C], scaled by C^-0.5."""
    rows, length, heads, channels = query_BTHC.shape
    return query_BTHC.reshape(rows, length, kv_heads, heads // kv_heads, channels) * jnp.asarray(channels**-0.5, query_BTHC.dtype)


def visible(query_positions_BT: jax.Array, key_positions_BT: jax.Array, window: jax.Array) -> jax.Array:
    """[B, T, T'] booleans: key not after the query and closer than `window` (int32 scalar)."""
    distance = query_positions_BT[:, :, None] - key_positions_BT[:, None, :]
    return (distance >= 0) & (distance < window)


def causal_attention(query_BTHC: jax.Array, key_BTKC: jax.Array, value_BTKC: jax.Array, mask_BTT: jax.Array) -> jax.Array:
    """Attention inside each row under a boolean mask [B, T, T]; returns [B, T, H, C]."""
    rows, length, heads, channels = query_BTHC.shape
    query_BTKGC = grouped(query_BTHC, key_BTKC.shape[2])

    def attend(query, mask):
        scores = jnp.einsum("btkgc,bskc->bkgts", query, key_BTKC, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, NEGATIVE), axis=-1)
        return jnp.einsum("bkgts,bskc->btkgc", weights.astype(value_BTKC.dtype), value_BTKC)

    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return attend(query_BTKGC, mask_BTT).reshape(rows, length, heads, channels)
    blocks = length // QUERY_BLOCK
    queries = jnp.moveaxis(query_BTKGC.reshape(rows, blocks, QUERY_BLOCK, *query_BTKGC.shape[2:]), 1, 0)
    masks = jnp.moveaxis(mask_BTT.reshape(rows, blocks, QUERY_BLOCK, length), 1, 0)
    attended = jax.lax.map(jax.checkpoint(lambda block: attend(*block)), (queries, masks))
    return jnp.moveaxis(attended, 0, 1).reshape(rows, length, heads, channels)


def start_softmax(query_BTKGC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Empty running softmax (maximum, denominator, numerator) in float32 for `merge_block`."""
    rows, length, kv_heads, group, channels = query_BTKGC.shape
    shape = (rows, kv_heads, group, length)
    return jnp.full(shape, NEGATIVE, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, channels), jnp.float32)


def merge_block(running, query_BTKGC: jax.Array, key_BKSC: jax.Array, value_BKSC: jax.Array, mask_BTS: jax.Array):
    """Fold one block of keys and values into the running softmax (the online softmax of Milakov & Gimelshein)."""
    maximum, denominator, numerator = running
    scores = jnp.einsum("btkgc,bksc->bkgts", query_BTKGC, key_BKSC, preferred_element_type=jnp.float32)
    mask = mask_BTS[:, None, None]
    scores = jnp.where(mask, scores, NEGATIVE)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    weights = jnp.where(mask, jnp.exp(scores - new_maximum[..., None]), 0.0)
    fade = jnp.exp(maximum - new_maximum)
    # A masked slot may hold NaN (an unused cache slot); 0 · NaN is NaN, so masked values are cleared too.
    seen_BS = jnp.any(mask_BTS, axis=1)[:, None, :, None]
    value_BKSC = jnp.where(seen_BS, value_BKSC, jnp.zeros((), value_BKSC.dtype))
    added = jnp.einsum("bkgts,bksc->bkgtc", weights.astype(value_BKSC.dtype), value_BKSC, preferred_element_type=jnp.float32)
    return new_maximum, denominator * fade + jnp.sum(weights, axis=-1), numerator * fade[..., None] + added


def finish_softmax(running, dtype) -> jax.Array:
    """[B, T, H, C] from the running softmax."""
    _, denominator, numerator = running
    rows, kv_heads, group, length, channels = numerator.shape
    attended = numerator / jnp.maximum(denominator, 1e-30)[..., None]
    return jnp.transpose(attended, (0, 3, 1, 2, 4)).reshape(rows, length, kv_heads * group, channels).astype(dtype)
