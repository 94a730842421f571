"""The bounded decode loop of one dispatch, admission of prompts into slots, and moves of rows.

A dispatch runs at most `rounds` rounds and leaves early when every row ended, so the host regains control often. What
is compiled, donated and queued is decided in `runtime/`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.decoding import sampling as drawing
from tlt_jax.decoding.rounds import RowState, finish_codes, plain_round
from tlt_jax.models import decoder, kv_cache
from tlt_jax.models.specs import PolicySpec
from tlt_jax.records import Emitted, SamplingParams

PREFILL_CHUNK = 1024  # longer prompts enter the cache in pieces, which bounds the attention scores


class Loop(NamedTuple):
    """Static shape of a dispatch: most rounds it runs, and layers unrolled in one turn of the layer scan."""

    rounds: int
    unroll: int = 1


class Admission(NamedTuple):
    """Prompts to prefill and the slots that continue them; several slots may share a prompt.

    Slots at or past the number of rows are padding and are dropped.
    """

    tokens_PT: jax.Array  # int32, padded on the right
    lengths_P: jax.Array  # int32
    slots_A: jax.Array  # int32
    source_A: jax.Array  # int32, row of tokens_PT
    key_A2: jax.Array  # uint32
    remaining_A: jax.Array  # int32


def init_state(spec: PolicySpec, rows: int, length: int, dtype, *, block: int) -> RowState:
    """Empty slots."""
    return RowState(
        cache=kv_cache.init_cache(spec, rows, length, dtype, block=block), key_B2=jnp.zeros((rows, 2), jnp.uint32), last_token_B=jnp.zeros((rows,), jnp.int32),
        remaining_B=jnp.zeros((rows,), jnp.int32), active_B=jnp.zeros((rows,), bool))


def prefill(spec: PolicySpec, params: dict, tokens_PT: jax.Array, lengths_P: jax.Array, dtype, *, block: int):
    """Cache of the prompts and the features of each prompt's last token [P, D]."""
    prompts, length = tokens_PT.shape
    chunk = min(length, PREFILL_CHUNK)
    tokens_PT = jnp.pad(tokens_PT, ((0, 0), (0, -length % chunk)))  # a slice over the edge would be shifted back
    cache = kv_cache.init_cache(spec, prompts, length, dtype, block=block)
    last_PD = jnp.zeros((prompts, spec.hidden_size), params["embed"]["embedding"].dtype)

    def step(carry, start):
        cache, last_PD = carry
        tokens = jax.lax.dynamic_slice_in_dim(tokens_PT, start, chunk, axis=1)
        out = decoder.forward(spec, params, tokens, cache=cache, compute_logits=False)
        column_P = lengths_P - 1 - start
        here = jnp.take_along_axis(out.features_BTD, jnp.clip(column_P, 0, chunk - 1)[:, None, None], axis=1)[:, 0]
        last_PD = jnp.where(((column_P >= 0) & (column_P < chunk))[:, None], here, last_PD)
        return (out.cache.replace(lengths_B=jnp.minimum(lengths_P, start + chunk)), last_PD), None

    (cache, last_PD), _ = jax.lax.scan(step, (cache, last_PD), jnp.arange(0, length, chunk))
    return cache, last_PD


def admit(spec: PolicySpec, params: dict, state: RowState, admission: Admission, sampling: SamplingParams, stop_ids_Z: jax.Array):
    """Prefill prompts, copy them into slots and draw each slot's first token; (state, sampled of A rows, finish_A)."""
    cache, last_PD = prefill(spec, params, admission.tokens_PT, admission.lengths_P, state.cache.keys_LBSKC.dtype, block=state.cache.block)
    logits_AV = decoder.head_logits(spec, params, last_PD)[admission.source_A]
    sampled = drawing.sample(logits_AV, admission.key_A2, admission.lengths_P[admission.source_A], sampling)
    remaining_A = admission.remaining_A - 1
    finish_A = finish_codes(sampled.token_B, remaining_A, stop_ids_Z)
    active_A = finish_A == 0

    def put(stored, new):
        return stored.at[admission.slots_A].set(new, mode="drop")

    state = RowState(
        cache=kv_cache.insert_rows(state.cache, admission.slots_A, cache, admission.source_A), key_B2=put(state.key_B2, admission.key_A2),
        last_token_B=put(state.last_token_B, sampled.token_B), remaining_B=put(state.remaining_B, remaining_A), active_B=put(state.active_B, active_A))
    lengths_B = jnp.where(state.active_B, state.cache.lengths_B, 0)
    return state.replace(cache=state.cache.replace(lengths_B=lengths_B)), sampled, finish_A


def advance(spec: PolicySpec, params: dict, state: RowState, sampling: SamplingParams, stop_ids_Z: jax.Array, loop: Loop) -> tuple[RowState, Emitted]:
    """Up to `loop.rounds` plain rounds; ends early when no row is active."""
    rounds = loop.rounds
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

        after, sampled, finish_B = plain_round(spec, params, state, sampling, stop_ids_Z, unroll=loop.unroll)
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
