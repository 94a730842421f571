"""The key/value cache: layout, appending, attention over it, and moves of rows.

Slot s of a row holds the token at position s of that row; `lengths_B` counts the committed slots, so rolling back is
moving the length. Layout is [L, B, S, K, C] (measured: 2–5× faster than heads-first at 16–64 rows on CPU) and is
private to this file. The cache never holds padding between tokens and is not shared between rows.
"""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.models import attention
from tlt_jax.models.specs import PolicySpec


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer."""

    keys_LBSKC: jax.Array
    values_LBSKC: jax.Array
    lengths_B: jax.Array  # int32, committed slots
    block: int = flax.struct.field(pytree_node=False, default=64)  # slots read at a time; divides S


def init_cache(spec: PolicySpec, rows: int, length: int, dtype, *, block: int = 64) -> KVCache:
    """An empty cache of `rows` × `length` slots. `length` is rounded up to whole blocks (a block is at most `length`)."""
    block = min(block, length)
    length = -(-length // block) * block
    shape = (spec.num_layers, rows, length, spec.num_kv_heads, spec.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((rows,), jnp.int32), block)


def append(cache: KVCache, layer: jax.Array, key_BTKC: jax.Array, value_BTKC: jax.Array) -> KVCache:
    """Write T new entries of one layer after each row's committed slots; entries past the end are dropped, never shifted."""
    rows, count = key_BTKC.shape[:2]
    row_BT = jnp.arange(rows)[:, None]
    slot_BT = cache.lengths_B[:, None] + jnp.arange(count)[None, :]

    def write(stored, new):
        return stored.at[layer, row_BT, slot_BT].set(new.astype(stored.dtype), mode="drop")

    return cache.replace(keys_LBSKC=write(cache.keys_LBSKC, key_BTKC), values_LBSKC=write(cache.values_LBSKC, value_BTKC))


class NewTokens(NamedTuple):
    """The T new tokens of each row: their keys and values, where they stand, and what they may see."""

    key_BTKC: jax.Array
    value_BTKC: jax.Array
    positions_BT: jax.Array
    mask_BTT: jax.Array  # which new tokens see which
    window: jax.Array  # int32: only slots closer than this are seen


def attend(cache: KVCache, layer: jax.Array, query_BTHC: jax.Array, new: NewTokens) -> jax.Array:
    """New tokens against the committed slots of one layer, then against each other; [B, T, H, C].

    The loop stops at the longest row, so cost follows real lengths inside one program.
    """
    rows, block = query_BTHC.shape[0], cache.block
    kv_heads, channels = cache.keys_LBSKC.shape[3:]
    query_BTKGC = attention.grouped(query_BTHC, kv_heads)
    blocks = (jnp.max(cache.lengths_B) + block - 1) // block

    def read(stored, start):
        return jax.lax.dynamic_slice(stored, (layer, 0, start, 0, 0), (1, rows, block, kv_heads, channels))[0].astype(query_BTHC.dtype)

    def step(index, running):
        start = index * block
        slots_BS = jnp.broadcast_to(start + jnp.arange(block)[None, :], (rows, block))
        mask_BTS = attention.visible(new.positions_BT, slots_BS, new.window) & (slots_BS < cache.lengths_B[:, None])[:, None, :]
        return attention.merge_block(running, query_BTKGC, read(cache.keys_LBSKC, start), read(cache.values_LBSKC, start), mask_BTS)

    running = jax.lax.fori_loop(0, blocks, step, attention.start_softmax(query_BTKGC))
    running = attention.merge_block(running, query_BTKGC, new.key_BTKC, new.value_BTKC, new.mask_BTT)
    return attention.finish_softmax(running, query_BTHC.dtype)


def gather_rows(cache: KVCache, index_B: jax.Array) -> KVCache:
    """Rows in a new order or number (compaction, moves); every index must be a valid row."""
    return cache.replace(
        keys_LBSKC=cache.keys_LBSKC[:, index_B], values_LBSKC=cache.values_LBSKC[:, index_B], lengths_B=cache.lengths_B[index_B])


def insert_rows(cache: KVCache, slots_A: jax.Array, source: KVCache, source_A: jax.Array) -> KVCache:
    """Copy rows `source_A` of a prefill cache into slots `slots_A`; a slot past the last row is dropped (padding)."""
    length = min(source.keys_LBSKC.shape[2], cache.keys_LBSKC.shape[2])

    def put(stored, new):
        return stored.at[:, slots_A, :length].set(new[:, source_A, :length].astype(stored.dtype), mode="drop")

    return cache.replace(
        keys_LBSKC=put(cache.keys_LBSKC, source.keys_LBSKC), values_LBSKC=put(cache.values_LBSKC, source.values_LBSKC),
        lengths_B=cache.lengths_B.at[slots_A].set(source.lengths_B[source_A], mode="drop"))
