"""The bounded decode loop of one dispatch, admission of prompts into slots, and moves of rows.

A dispatch runs at most `rounds` rounds and leaves early when every row ended, so the host regains control often. What
is compiled, donated and queued is decided in `runtime/`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.decoding import sampling as drawing
from tlt_jax.decoding import shared_texts
from tlt_jax.decoding.rounds import Decoding, DraftState, RowState, Weights, features, plain_round, speculative_round
from tlt_jax.decoding.shared_texts import Entering
from tlt_jax.decoding.verification import finish_codes
from tlt_jax.models import decoder, kv_cache
from tlt_jax.models.kv_cache import KVCache
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
    texts: Entering | None = None  # for a drafter that looks into other texts


class Slots(NamedTuple):
    """Rows of a slice, cache slots of a row, and columns of the feature ring."""

    rows: int
    length: int
    ring: int = 512
    block: int = 128


def init_state(decoding: Decoding, slots: Slots, dtype) -> RowState:
    """Empty slots."""
    rows, drafter = slots.rows, decoding.drafter
    cache = kv_cache.init_cache(decoding.spec, rows, slots.length, dtype, block=slots.block)
    draft = None
    if drafter is not None:
        ring = jnp.zeros((rows, slots.ring, decoding.ring_width), dtype) if drafter.features else None
        draft = DraftState(
            jnp.zeros((rows, cache.slots), jnp.int32), ring, jnp.zeros((rows,), jnp.int32), drafter.init_state(rows, cache.slots, dtype, slots.block),
            shared_texts.init_texts(drafter.segments, rows, cache.slots))
    return RowState(
        cache=cache, key_B2=jnp.zeros((rows, 2), jnp.uint32), last_token_B=jnp.zeros((rows,), jnp.int32), remaining_B=jnp.zeros((rows,), jnp.int32),
        active_B=jnp.zeros((rows,), bool), draft=draft)


class Prefilled(NamedTuple):
    """Prompts that went through the policy: their cache, the last W features the drafter reads (or None), and the final feature of the last token."""

    cache: KVCache
    ring_QWF: jax.Array | None
    last_QD: jax.Array


def prefill(decoding: Decoding, params: dict, tokens_QIT: jax.Array, lengths_Q: jax.Array, into: Prefilled) -> Prefilled:
    """Prompts into the rows of a cache, piece by piece: cost follows the longest of these prompts, not the longest one that may come."""
    prompts, _, width = tokens_QIT.shape
    drafter = decoding.drafter

    def step(carry):
        piece, now = carry
        out = decoder.forward(
            decoding.spec, params, tokens_QIT[:, piece], cache=now.cache, compute_logits=False,
            capture_layers=() if drafter is None else drafter.capture_layers)
        column_Q = lengths_Q - 1 - piece * width
        here_QD = jnp.take_along_axis(out.features_BTD, jnp.clip(column_Q, 0, width - 1)[:, None, None], axis=1)[:, 0]
        last_QD = jnp.where(((column_Q >= 0) & (column_Q < width))[:, None], here_QD, now.last_QD)
        ring_QWF = now.ring_QWF
        if ring_QWF is not None:
            ring, position = ring_QWF.shape[1], piece * width + jnp.arange(width)[None, :]
            last = (position < lengths_Q[:, None]) & (position >= lengths_Q[:, None] - ring)
            ring_QWF = ring_QWF.at[jnp.arange(prompts)[:, None], jnp.where(last, position % ring, ring)].set(
                features(decoding, out).astype(ring_QWF.dtype), mode="drop")
        return piece + 1, Prefilled(out.cache.replace(lengths_B=jnp.minimum(lengths_Q, (piece + 1) * width)), ring_QWF, last_QD)

    start = into._replace(cache=into.cache.replace(lengths_B=jnp.zeros((prompts,), jnp.int32)), last_QD=jnp.zeros_like(into.last_QD))
    return jax.lax.while_loop(lambda carry: carry[0] * width < jnp.max(lengths_Q), step, (jnp.int32(0), start))[1]


def fill_slots(decoding: Decoding, params: dict, state: RowState, admission: Admission):
    """Prefill every prompt of an admission, a few at a time, and copy it into its slots; (cache, ring or None, features [P, D] of the prompts' last tokens)."""
    cache, ring_BWF = state.cache, None if state.draft is None else state.draft.ring_BWF
    rows, (prompts, pieces, width), entries = cache.lengths_B.shape[0], admission.tokens_PIT.shape, admission.slots_A.shape[0]
    together = math.gcd(prompts, PREFILL_ROWS)
    dtype = params["embed"]["embedding"].dtype
    own = Prefilled(
        kv_cache.init_cache(decoding.spec, together, pieces * width, cache.keys_LBKSC.dtype, block=cache.block),
        None if ring_BWF is None else jnp.zeros((together, *ring_BWF.shape[1:]), ring_BWF.dtype), jnp.zeros((together, decoding.spec.hidden_size), dtype))

    def waits(entry, end):
        place = jnp.minimum(entry, entries - 1)
        return (entry < entries) & (admission.source_A[place] < end) & (admission.slots_A[place] < rows)

    def put(carry, start):
        entry, cache, ring_BWF, own = carry
        slot, row = admission.slots_A[entry], admission.source_A[entry] - start
        ring_BWF = None if ring_BWF is None else ring_BWF.at[slot].set(own.ring_QWF[row])
        return entry + 1, kv_cache.put_row(cache, slot, own.cache, row), ring_BWF, own

    def step(carry):
        start, entry, own, cache, ring_BWF, last_PD = carry
        tokens_QIT = jax.lax.dynamic_slice_in_dim(admission.tokens_PIT, start, together)
        own = prefill(decoding, params, tokens_QIT, jax.lax.dynamic_slice_in_dim(admission.lengths_P, start, together), own)
        last_PD = jax.lax.dynamic_update_slice_in_dim(last_PD, own.last_QD, start, axis=0)
        entry, cache, ring_BWF, own = jax.lax.while_loop(
            lambda inner: waits(inner[0], start + together), lambda inner: put(inner, start), (entry, cache, ring_BWF, own))
        return start + together, entry, own, cache, ring_BWF, last_PD

    count = jnp.sum(admission.lengths_P > 0)
    first = (jnp.int32(0), jnp.int32(0), own, cache, ring_BWF, jnp.zeros((prompts, decoding.spec.hidden_size), dtype))
    *_, cache, ring_BWF, last_PD = jax.lax.while_loop(lambda carry: carry[0] < count, step, first)
    return cache, ring_BWF, last_PD


def admit(decoding: Decoding, weights: Weights, state: RowState, admission: Admission, sampling: SamplingParams, stop_ids_Z: jax.Array):
    """Prefill prompts, copy them into slots and draw each slot's first token; (state, sampled of A rows, finish_A)."""
    cache, ring_BWF, last_PD = fill_slots(decoding, weights.policy, state, admission)
    logits_AV = decoder.head_logits(decoding.spec, weights.policy, last_PD[admission.source_A])
    lengths_A = admission.lengths_P[admission.source_A]
    sampled = drawing.sample(logits_AV, admission.key_A2, lengths_A, sampling)
    remaining_A = admission.remaining_A - 1
    finish_A = finish_codes(sampled.token_B, remaining_A, stop_ids_Z)

    def put(stored, new):
        return stored.at[admission.slots_A].set(new, mode="drop")

    draft = state.draft
    if draft is not None:
        tokens_PS = admission.tokens_PIT.reshape(admission.tokens_PIT.shape[0], -1)[:, : draft.tokens_BS.shape[1]]
        text_AS = jnp.pad(tokens_PS, ((0, 0), (0, draft.tokens_BS.shape[1] - tokens_PS.shape[1])))[admission.source_A]
        text_AS = text_AS.at[jnp.arange(len(lengths_A)), lengths_A].set(sampled.token_B, mode="drop")
        texts = draft.texts
        if texts is not None and admission.texts is not None:
            written_AS = jnp.where(jnp.arange(text_AS.shape[1])[None, :] <= lengths_A[:, None], text_AS, shared_texts.NOTHING)
            texts = shared_texts.enter(texts, admission.slots_A, written_AS, admission.texts)
        new_B = put(jnp.zeros_like(state.active_B), jnp.ones_like(finish_A, bool))
        draft = DraftState(put(draft.tokens_BS, text_AS), ring_BWF, jnp.where(new_B, 0, draft.reach_B), decoding.drafter.forget(draft.own, new_B), texts)
    active_B = put(state.active_B, finish_A == 0)
    state = RowState(
        cache=cache.replace(lengths_B=jnp.where(active_B, cache.lengths_B, 0)), key_B2=put(state.key_B2, admission.key_A2),
        last_token_B=put(state.last_token_B, sampled.token_B), remaining_B=put(state.remaining_B, remaining_A), active_B=active_B, draft=draft)
    return state, sampled, finish_A


def advance(decoding: Decoding, weights: Weights, state: RowState, sampling: SamplingParams, stop_ids_Z: jax.Array) -> tuple[RowState, Emitted]:
    """Up to `decoding.rounds` rounds of its strategy; ends early when no row is active."""
    rows, rounds, columns = state.active_B.shape[0], decoding.rounds, decoding.rounds * decoding.width
    one_round = speculative_round if decoding.strategy.depth else plain_round
    row_B1, place = jnp.arange(rows)[:, None], jnp.arange(decoding.width)[None, :]
    empty = Emitted(
        tokens_BR=jnp.zeros((rows, columns), jnp.int32), logprobs_BR=jnp.zeros((rows, columns), jnp.float32),
        sampling_logprobs_BR=jnp.zeros((rows, columns), jnp.float32), count_B=jnp.zeros((rows,), jnp.int32), forwards_B=jnp.zeros((rows,), jnp.int32),
        finish_B=jnp.zeros((rows,), jnp.int32), rounds=jnp.int32(0))

    def step(carry):
        state, emitted = carry
        after, new = one_round(decoding, weights, state, sampling, stop_ids_Z)
        column_BJ = jnp.where(place < new.count_B[:, None], emitted.count_B[:, None] + place, columns)  # past the end: dropped

        def put(stored, values):
            return stored.at[row_B1, column_BJ].set(values, mode="drop")

        return after, Emitted(
            tokens_BR=put(emitted.tokens_BR, new.tokens_BJ), logprobs_BR=put(emitted.logprobs_BR, new.logprobs_BJ),
            sampling_logprobs_BR=put(emitted.sampling_logprobs_BR, new.sampling_logprobs_BJ), count_B=emitted.count_B + new.count_B,
            forwards_B=emitted.forwards_B + state.active_B, finish_B=jnp.maximum(emitted.finish_B, new.finish_B), rounds=emitted.rounds + 1)

    start_B = state.cache.lengths_B
    state, emitted = jax.lax.while_loop(lambda carry: (carry[1].rounds < rounds) & jnp.any(carry[0].active_B), step, (state, empty))
    if not decoding.streams:
        return state, emitted
    # Rows that ended stay in the ring until their slot is filled again.
    window, column_BR = state.draft.ring_BWF.shape[1], start_B[:, None] + jnp.arange(columns)[None, :]
    return state, emitted.replace(features_BRF=state.draft.ring_BWF[row_B1, column_BR % window])


def prompt_features(positions: int, state: RowState, slot: jax.Array) -> jax.Array:
    """[positions, F] of a slot that has just been filled, from position 0; unspecified behind its prompt."""
    return state.draft.ring_BWF[slot, :positions]


def gather_rows(decoding: Decoding, state: RowState, index_B: jax.Array, keep_B: jax.Array) -> RowState:
    """Rows `index_B` in a new order or number; rows with `keep_B` False become empty slots."""
    cache, draft = kv_cache.gather_rows(state.cache, index_B), state.draft
    active_B = state.active_B[index_B] & keep_B
    if draft is not None:
        ring_BWF = None if draft.ring_BWF is None else draft.ring_BWF[index_B]
        draft = DraftState(draft.tokens_BS[index_B], ring_BWF, draft.reach_B[index_B], decoding.drafter.gather_rows(draft.own, index_B),
                           None if draft.texts is None else shared_texts.gather_rows(draft.texts, index_B))
    return RowState(
        cache=cache.replace(lengths_B=jnp.where(active_B, cache.lengths_B, 0)), key_B2=state.key_B2[index_B], last_token_B=state.last_token_B[index_B],
        remaining_B=state.remaining_B[index_B], active_B=active_B, draft=draft)


def put_rows(decoding: Decoding, state: RowState, source: RowState, slots_A: jax.Array, texts: Entering | None) -> RowState:
    """The A rows of another slice's state, which comes without the texts of its slice, in slots of this one; a slot past the end is none."""

    def put(stored, new):
        return stored.at[slots_A].set(new, mode="drop")

    draft, coming = state.draft, source.draft
    if draft is not None:
        shared = draft.texts
        if shared is not None:
            place = jnp.arange(coming.tokens_BS.shape[1])[None, :]
            shared = shared_texts.enter(shared, slots_A, jnp.where(place <= source.cache.lengths_B[:, None], coming.tokens_BS, shared_texts.NOTHING), texts)
        draft = DraftState(
            put(draft.tokens_BS, coming.tokens_BS), None if draft.ring_BWF is None else put(draft.ring_BWF, coming.ring_BWF),
            put(draft.reach_B, coming.reach_B), decoding.drafter.put_rows(draft.own, slots_A, coming.own), shared)
    return RowState(
        cache=kv_cache.put_rows(state.cache, slots_A, source.cache), key_B2=put(state.key_B2, source.key_B2),
        last_token_B=put(state.last_token_B, source.last_token_B), remaining_B=put(state.remaining_B, source.remaining_B),
        active_B=put(state.active_B, source.active_B), draft=draft)
