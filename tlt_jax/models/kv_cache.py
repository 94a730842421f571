"""The key/value cache: layout, appending, attention over it, and moves of rows.

Slot s of a row holds the token at position s of that row; `lengths_B` counts the committed slots, so rolling back is
moving the length. Layout is [L, B, K, S, C], in which the two products of attention need no transposed copy (measured on
CPU at 200 tokens: 1.5 to 2 times faster than [L, B, S, K, C]), and is private to this file and the placement rules. The
cache never holds padding between tokens and is not shared between rows.
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

    keys_LBKSC: jax.Array
    values_LBKSC: jax.Array
    lengths_B: jax.Array  # int32, committed slots
    block: int = flax.struct.field(pytree_node=False, default=128)  # slots read at a time; divides S

    @property
    def slots(self) -> int:
        """S."""
        return self.keys_LBKSC.shape[3]


def init_cache(spec: PolicySpec, rows: int, length: int, dtype, *, block: int = 128) -> KVCache:
    """An empty cache of `rows` × `length` slots. `length` is rounded up to whole blocks (a block is at most `length`)."""
    block = min(block, length)
    length = -(-length // block) * block
    shape = (spec.num_layers, rows, spec.num_kv_heads, length, spec.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((rows,), jnp.int32), block)


def append(cache: KVCache, layer: jax.Array, key_BTKC: jax.Array, value_BTKC: jax.Array) -> KVCache:
    """Write T new entries of one layer after each row's committed slots; entries past the end are dropped, never shifted."""
    rows, count = key_BTKC.shape[:2]
    row_BT = jnp.arange(rows)[:, None]
    slot_BT = cache.lengths_B[:, None] + jnp.arange(count)[None, :]

    def write(stored, new):
        return stored.at[layer, row_BT, :, slot_BT].set(new.astype(stored.dtype), mode="drop")

    return cache.replace(keys_LBKSC=write(cache.keys_LBKSC, key_BTKC), values_LBKSC=write(cache.values_LBKSC, value_BTKC))


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
    _, _, kv_heads, _, channels = cache.keys_LBKSC.shape
    # Small batched products of bfloat16 are slow on a CPU: measured 2.5 times slower at 64 rows than widening what was read.
    dtype = jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else query_BTHC.dtype
    query_BTKGC = attention.grouped(query_BTHC, kv_heads).astype(dtype)
    blocks = (jnp.max(cache.lengths_B) + block - 1) // block

    def read(stored, start):
        return jax.lax.dynamic_slice(stored, (layer, 0, 0, start, 0), (1, rows, kv_heads, block, channels))[0].astype(dtype)

    def step(index, running):
        start = index * block
        slots_BS = jnp.broadcast_to(start + jnp.arange(block)[None, :], (rows, block))
        mask_BTS = attention.visible(new.positions_BT, slots_BS, new.window) & (slots_BS < cache.lengths_B[:, None])[:, None, :]
        return attention.merge_block(running, query_BTKGC, read(cache.keys_LBKSC, start), read(cache.values_LBKSC, start), mask_BTS)

    def heads_first(new_BTKC):
        return jnp.swapaxes(new_BTKC, 1, 2).astype(dtype)

    running = jax.lax.fori_loop(0, blocks, step, attention.start_softmax(query_BTKGC))
    running = attention.merge_block(running, query_BTKGC, heads_first(new.key_BTKC), heads_first(new.value_BTKC), new.mask_BTT)
    return attention.finish_softmax(running, query_BTHC.dtype)


def compact(cache: KVCache, path_BJ: jax.Array, count_B: jax.Array) -> KVCache:
    """Move the new entries `path_BJ` of each row, counted from its committed slots on, to the places 0, 1, … `count_B` − 1 after these; lengths stay."""
    row_BJ = jnp.arange(path_BJ.shape[0])[:, None]
    place = jnp.arange(path_BJ.shape[1])[None, :]
    source_BJ = jnp.minimum(cache.lengths_B[:, None] + path_BJ, cache.slots - 1)
    target_BJ = jnp.where(place < count_B[:, None], cache.lengths_B[:, None] + place, cache.slots)  # past the end: dropped

    def move(stored):
        return stored.at[:, row_BJ, :, target_BJ].set(stored[:, row_BJ, :, source_BJ], mode="drop")

    return cache.replace(keys_LBKSC=move(cache.keys_LBKSC), values_LBKSC=move(cache.values_LBKSC))


def gather_rows(cache: KVCache, index_B: jax.Array) -> KVCache:
    """Rows in a new order or number (compaction, moves); every index must be a valid row."""
    return cache.replace(
        keys_LBKSC=cache.keys_LBKSC[:, index_B], values_LBKSC=cache.values_LBKSC[:, index_B], lengths_B=cache.lengths_B[index_B])


def put_rows(cache: KVCache, slots_A: jax.Array, source: KVCache) -> KVCache:
    """The rows of a `source` with as many positions copied into slots; a slot past the end is none."""

    def put(stored, new):
        return stored.at[:, slots_A].set(new, mode="drop")

    return cache.replace(
        keys_LBKSC=put(cache.keys_LBKSC, source.keys_LBKSC), values_LBKSC=put(cache.values_LBKSC, source.values_LBKSC),
        lengths_B=cache.lengths_B.at[slots_A].set(source.lengths_B, mode="drop"))


def put_row(cache: KVCache, slot: jax.Array, source: KVCache, row: jax.Array) -> KVCache:
    """One row of `source` copied into a slot, as many positions as both have."""
    layers, _, kv_heads, _, channels = cache.keys_LBKSC.shape
    size = (layers, 1, kv_heads, min(source.slots, cache.slots), channels)

    def put(stored, new):
        return jax.lax.dynamic_update_slice(stored, jax.lax.dynamic_slice(new, (0, row, 0, 0, 0), size).astype(stored.dtype), (0, slot, 0, 0, 0))

    return cache.replace(
        keys_LBKSC=put(cache.keys_LBKSC, source.keys_LBKSC), values_LBKSC=put(cache.values_LBKSC, source.values_LBKSC),
        lengths_B=cache.lengths_B.at[slot].set(source.lengths_B[row]))
