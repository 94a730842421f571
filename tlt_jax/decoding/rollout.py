"""The bounded decode loop of one dispatch, admission of prompts into slots, and moves of rows.

A dispatch runs at most `rounds` rounds and leaves early when every row ended, so the host regains control often. What
is compiled, donated and queued is decided in `runtime/`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.decoding import sampling as drawing
from tlt_jax.decoding.rounds import RowState, finish_codes, plain_round
from tlt_jax.models import decoder, kv_cache
from tlt_jax.models.kv_cache import KVCache
from tlt_jax.models.specs import PolicySpec
from tlt_jax.records import Emitted, SamplingParams

PREFILL_ROWS = 4  # prompts in one forward; measured on CPU: 20 % less time than one prompt at a time, and more only adds padding


class Admission(NamedTuple):
    """Prompts to prefill and the slots that continue them; several slots may share a prompt.

    Each prompt is cut into I pieces of T tokens, since one forward takes one piece of a few prompts; similar lengths side by side cost least. The entries
    are in the order of their prompts; slots at or past the number of rows are padding, come last and are dropped.
    """

    tokens_PIT: jax.Array  # int32, padded at the end
    lengths_P: jax.Array  # int32; 0: no prompt, and none after it
    slots_A: jax.Array  # int32
    source_A: jax.Array  # int32, the prompt of each entry
    key_A2: jax.Array  # uint32
    remaining_A: jax.Array  # int32


def init_state(spec: PolicySpec, rows: int, length: int, dtype, *, block: int) -> RowState:
    """Empty slots."""
    return RowState(
        cache=kv_cache.init_cache(spec, rows, length, dtype, block=block), key_B2=jnp.zeros((rows, 2), jnp.uint32), last_token_B=jnp.zeros((rows,), jnp.int32),
        remaining_B=jnp.zeros((rows,), jnp.int32), active_B=jnp.zeros((rows,), bool))


def prefill(spec: PolicySpec, params: dict, tokens_QIT: jax.Array, lengths_Q: jax.Array, cache: KVCache):
    """Prompts into the rows of a cache, piece by piece: cost follows the longest of these prompts, not the longest one that may come.

    Returns (cache, features [Q, D] of each prompt's last token).
    """
    prompts, _, width = tokens_QIT.shape

    def step(carry):
        piece, cache, last_QD = carry
        out = decoder.forward(spec, params, tokens_QIT[:, piece], cache=cache, compute_logits=False)
        column_Q = lengths_Q - 1 - piece * width
        here_QD = jnp.take_along_axis(out.features_BTD, jnp.clip(column_Q, 0, width - 1)[:, None, None], axis=1)[:, 0]
        last_QD = jnp.where(((column_Q >= 0) & (column_Q < width))[:, None], here_QD, last_QD)
        return piece + 1, out.cache.replace(lengths_B=jnp.minimum(lengths_Q, (piece + 1) * width)), last_QD

    cache = cache.replace(lengths_B=jnp.zeros((prompts,), jnp.int32))
    last_QD = jnp.zeros((prompts, spec.hidden_size), params["embed"]["embedding"].dtype)
    _, cache, last_QD = jax.lax.while_loop(lambda carry: carry[0] * width < jnp.max(lengths_Q), step, (jnp.int32(0), cache, last_QD))
    return cache, last_QD


def fill_slots(spec: PolicySpec, params: dict, cache: KVCache, admission: Admission):
    """Prefill every prompt of an admission, a few at a time, and copy it into its slots; (cache, features [P, D] of the prompts' last tokens)."""
    rows, (prompts, pieces, width), entries = cache.lengths_B.shape[0], admission.tokens_PIT.shape, admission.slots_A.shape[0]
    together = math.gcd(prompts, PREFILL_ROWS)
    own = kv_cache.init_cache(spec, together, pieces * width, cache.keys_LBKSC.dtype, block=cache.block)

    def waits(entry, end):
        place = jnp.minimum(entry, entries - 1)
        return (entry < entries) & (admission.source_A[place] < end) & (admission.slots_A[place] < rows)

    def put(carry, start):
        entry, cache, own = carry
        return entry + 1, kv_cache.put_row(cache, admission.slots_A[entry], own, admission.source_A[entry] - start), own

    def step(carry):
        start, entry, own, cache, last_PD = carry
        tokens_QIT = jax.lax.dynamic_slice_in_dim(admission.tokens_PIT, start, together)
        own, last_QD = prefill(spec, params, tokens_QIT, jax.lax.dynamic_slice_in_dim(admission.lengths_P, start, together), own)
        entry, cache, own = jax.lax.while_loop(lambda inner: waits(inner[0], start + together), lambda inner: put(inner, start), (entry, cache, own))
        return start + together, entry, own, cache, jax.lax.dynamic_update_slice_in_dim(last_PD, last_QD, start, axis=0)

    count = jnp.sum(admission.lengths_P > 0)
    last_PD = jnp.zeros((prompts, spec.hidden_size), params["embed"]["embedding"].dtype)
    *_, cache, last_PD = jax.lax.while_loop(lambda carry: carry[0] < count, step, (jnp.int32(0), jnp.int32(0), own, cache, last_PD))
    return cache, last_PD


def admit(spec: PolicySpec, params: dict, state: RowState, admission: Admission, sampling: SamplingParams, stop_ids_Z: jax.Array):
    """Prefill prompts, copy them into slots and draw each slot's first token; (state, sampled of A rows, finish_A)."""
    cache, last_PD = fill_slots(spec, params, state.cache, admission)
    logits_AV = decoder.head_logits(spec, params, last_PD[admission.source_A])
    sampled = drawing.sample(logits_AV, admission.key_A2, admission.lengths_P[admission.source_A], sampling)
    remaining_A = admission.remaining_A - 1
    finish_A = finish_codes(sampled.token_B, remaining_A, stop_ids_Z)

    def put(stored, new):
        return stored.at[admission.slots_A].set(new, mode="drop")

    active_B = put(state.active_B, finish_A == 0)
    state = RowState(
        cache=cache.replace(lengths_B=jnp.where(active_B, cache.lengths_B, 0)), key_B2=put(state.key_B2, admission.key_A2),
        last_token_B=put(state.last_token_B, sampled.token_B), remaining_B=put(state.remaining_B, remaining_A), active_B=active_B)
    return state, sampled, finish_A


def advance(spec: PolicySpec, params: dict, state: RowState, sampling: SamplingParams, stop_ids_Z: jax.Array, rounds: int) -> tuple[RowState, Emitted]:
    """Up to `rounds` plain rounds; ends early when no row is active."""
    rows = state.active_B.shape[0]
    row_B = jnp.arange(rows)
    empty = Emitted(
        tokens_BR=jnp.zeros((rows, rounds), jnp.int32), logprobs_BR=jnp.zeros((rows, rounds), jnp.float32),
        sampling_logprobs_BR=jnp.zeros((rows, rounds), jnp.float32), count_B=jnp.zeros((rows,), jnp.int32), finish_B=jnp.zeros((rows,), jnp.int32),
        rounds=jnp.int32(0))

    def step(carry):
        state, emitted = carry
        column_B = jnp.where(state.active_B, emitted.count_B, rounds)  # past the end: dropped

        def put(stored, new):
            return stored.at[row_B, column_B].set(new, mode="drop")

        after, sampled, finish_B = plain_round(spec, params, state, sampling, stop_ids_Z)
        emitted = Emitted(
            tokens_BR=put(emitted.tokens_BR, sampled.token_B), logprobs_BR=put(emitted.logprobs_BR, sampled.logprob_B),
            sampling_logprobs_BR=put(emitted.sampling_logprobs_BR, sampled.sampling_logprob_B), count_B=emitted.count_B + state.active_B,
            finish_B=jnp.maximum(emitted.finish_B, finish_B), rounds=emitted.rounds + 1)
        return after, emitted

    return jax.lax.while_loop(lambda carry: (carry[1].rounds < rounds) & jnp.any(carry[0].active_B), step, (state, empty))


def gather_rows(state: RowState, index_B: jax.Array, keep_B: jax.Array) -> RowState:
    """Rows `index_B` in a new order or number; rows with `keep_B` False become empty slots."""
    cache = kv_cache.gather_rows(state.cache, index_B)
    active_B = state.active_B[index_B] & keep_B
    return RowState(
        cache=cache.replace(lengths_B=jnp.where(active_B, cache.lengths_B, 0)), key_B2=state.key_B2[index_B], last_token_B=state.last_token_B[index_B],
        remaining_B=state.remaining_B[index_B], active_B=active_B)
