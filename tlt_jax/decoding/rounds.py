"""One plain decode round, and the state of the rows of a slice.

Invariant: `last_token_B` stands at position `cache.lengths_B` of its row and is not in the cache yet. A row that ends
gives its slot up (length 0), so the cost of attention follows the rows that still decode.
"""

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.decoding import sampling as drawing
from tlt_jax.models import decoder
from tlt_jax.models.kv_cache import KVCache
from tlt_jax.models.specs import PolicySpec
from tlt_jax.records import SamplingParams
from tlt_jax.strategies import FINISH_LENGTH, FINISH_RUNNING, FINISH_STOP


@flax.struct.dataclass
class RowState:
    """Everything a slice keeps on device for its rows."""

    cache: KVCache
    key_B2: jax.Array  # uint32 noise key of (seed, step, prompt, sample, draw)
    last_token_B: jax.Array  # int32
    remaining_B: jax.Array  # int32, tokens the row may still emit
    active_B: jax.Array  # bool


def finish_codes(token_B: jax.Array, remaining_B: jax.Array, stop_ids_Z: jax.Array) -> jax.Array:
    """FINISH_* per row after emitting `token_B` with `remaining_B` tokens left; stop wins over the limit."""
    stopped = jnp.any(token_B[:, None] == stop_ids_Z[None, :], axis=1)
    return jnp.where(stopped, FINISH_STOP, jnp.where(remaining_B <= 0, FINISH_LENGTH, FINISH_RUNNING)).astype(jnp.int32)


def plain_round(spec: PolicySpec, params: dict, state: RowState, sampling: SamplingParams, stop_ids_Z: jax.Array):
    """Forward one token a row and draw the next; returns (state, sampled, finish_B). Ended rows emit nothing."""
    lengths_B = state.cache.lengths_B
    out = decoder.forward(spec, params, state.last_token_B[:, None], cache=state.cache, compute_logits=False)
    logits_BV = decoder.head_logits(spec, params, out.features_BTD[:, 0])
    sampled = drawing.sample(logits_BV, state.key_B2, lengths_B + 1, sampling)
    remaining_B = state.remaining_B - state.active_B
    finish_B = jnp.where(state.active_B, finish_codes(sampled.token_B, remaining_B, stop_ids_Z), FINISH_RUNNING)
    active_B = state.active_B & (finish_B == FINISH_RUNNING)
    state = state.replace(
        cache=out.cache.replace(lengths_B=jnp.where(active_B, lengths_B + 1, 0)), last_token_B=sampled.token_B, remaining_B=remaining_B, active_B=active_B)
    return state, sampled, finish_B
