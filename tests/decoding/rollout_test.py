"""The decode loop below the drivers: what a dispatch, an admission and a move touch, and what they leave alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.decoding import rollout
from tlt_jax.decoding.rollout import Admission
from tlt_jax.decoding.rounds import Decoding, Weights
from tlt_jax.decoding.sampling import make_sampling
from tlt_jax.decoding.verification import finish_codes
from tlt_jax.models.decoder import abstract_params
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.strategies import FINISH_LENGTH, FINISH_RUNNING, FINISH_STOP

SPEC = PolicySpec(
    family="llama", vocab_size=29, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, rope=RopeSpec("default", 100.0),
    rms_norm_eps=1e-5, max_position_embeddings=64, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None, 9))
SAMPLING = make_sampling(1.0, vocabulary=29)
NO_STOP = np.full((2,), -1, np.int32)
KEYS = np.random.default_rng(1).integers(0, 2**32, (4, 2), dtype=np.uint32)
admit = jax.jit(functools.partial(rollout.admit, Decoding(SPEC)))


@functools.partial(jax.jit, static_argnames="rounds")
def advance(weights, state, sampling, stop_ids, *, rounds):
    return rollout.advance(Decoding(SPEC, rounds=rounds), weights, state, sampling, stop_ids)


@pytest.fixture(scope="module")
def params():
    random = np.random.default_rng(0)
    return Weights(jax.tree.map(lambda leaf: (random.normal(size=leaf.shape) * 0.4).astype(np.float32), abstract_params(SPEC)))


def admission(slots, remaining, lengths=(5, 12), *, width=16):
    """Rows alternate between two prompts of 16 columns, cut into pieces of `width`; padding slots come last."""
    tokens = np.random.default_rng(2).integers(0, 29, (2, 16)).astype(np.int32)
    tokens = np.pad(tokens, ((0, 0), (0, -16 % width))).reshape(2, -1, width)
    slots, remaining, source = np.array(slots, np.int32), np.array(remaining, np.int32), np.arange(len(slots)) % 2
    order = np.lexsort((source, slots >= 4))
    return Admission(tokens, np.array(lengths, np.int32), slots[order], source[order].astype(np.int32), KEYS[: len(slots)][order], remaining[order])


def started(params, remaining=(9, 9, 9, 9), lengths=(5, 12)):
    empty = rollout.init_state(Decoding(SPEC), rollout.Slots(4, 32, block=8), jnp.float32)
    return admit(params, empty, admission((0, 1, 2, 3), remaining, lengths), SAMPLING, NO_STOP)


def emitted_tokens(emitted):
    return [tuple(np.asarray(row)[:count]) for row, count in zip(emitted.tokens_BR, np.asarray(emitted.count_B), strict=True)]


@pytest.mark.parametrize(("token", "remaining", "code"), [
    (7, 3, FINISH_STOP), (7, 0, FINISH_STOP), (8, 0, FINISH_LENGTH), (8, 1, FINISH_RUNNING), (9, -1, FINISH_STOP)])
def test_a_stop_id_ends_a_row_before_the_limit_does(token, remaining, code):
    assert finish_codes(jnp.array([token]), jnp.array([remaining]), jnp.array([-1, 7, 9])) == code


def test_an_ended_row_emits_nothing_more_and_its_end_changes_nothing_for_the_others(params):
    state, first, _ = started(params, (9, 3, 1, 9))
    np.testing.assert_array_equal(state.active_B, [True, True, False, True])
    _, emitted = advance(params, state, SAMPLING, NO_STOP, rounds=6)
    np.testing.assert_array_equal(emitted.count_B, [6, 2, 0, 6])
    np.testing.assert_array_equal(emitted.finish_B, [FINISH_RUNNING, FINISH_LENGTH, FINISH_RUNNING, FINISH_RUNNING])
    assert not np.asarray(emitted.tokens_BR)[2].any() and not np.asarray(emitted.tokens_BR)[1, 2:].any()
    full, first_again, _ = started(params)
    np.testing.assert_array_equal(first.token_B, first_again.token_B)
    _, everything = advance(params, full, SAMPLING, NO_STOP, rounds=6)
    for row, tokens in enumerate(emitted_tokens(emitted)):
        assert tokens == emitted_tokens(everything)[row][: len(tokens)]


def test_nan_in_free_slots_and_past_the_end_of_rows_changes_no_token(params):
    state, _, _ = started(params, (9, 1, 9, 9))
    _, clean = advance(params, state, SAMPLING, NO_STOP, rounds=6)
    unused = np.arange(32)[None, :] >= np.asarray(state.cache.lengths_B)[:, None]
    assert unused[1].all()

    def spoil(stored):
        return jnp.where(unused[None, :, None, :, None], jnp.nan, stored)

    spoiled = state.replace(cache=state.cache.replace(keys_LBKSC=spoil(state.cache.keys_LBKSC), values_LBKSC=spoil(state.cache.values_LBKSC)))
    _, emitted = advance(params, spoiled, SAMPLING, NO_STOP, rounds=6)
    live = np.array([0, 2, 3])
    np.testing.assert_array_equal(emitted.tokens_BR[live], clean.tokens_BR[live])
    np.testing.assert_array_equal(emitted.logprobs_BR[live], clean.logprobs_BR[live])


def test_a_dispatch_leaves_early_when_every_row_has_ended_and_runs_nothing_when_none_is_active(params):
    state, _, _ = started(params, (3, 2, 1, 3))
    state, emitted = advance(params, state, SAMPLING, NO_STOP, rounds=6)
    assert emitted.rounds == 2 and not state.active_B.any()
    after, nothing = advance(params, state, SAMPLING, NO_STOP, rounds=6)
    assert nothing.rounds == 0 and not nothing.count_B.any() and not nothing.finish_B.any()
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_one_long_dispatch_equals_many_short_ones(params):
    state, _, _ = started(params, (9, 4, 9, 7))
    _, whole = advance(params, state, SAMPLING, NO_STOP, rounds=6)
    pieces = [()] * 4
    for _ in range(3):
        state, emitted = advance(params, state, SAMPLING, NO_STOP, rounds=2)
        pieces = [so_far + more for so_far, more in zip(pieces, emitted_tokens(emitted), strict=True)]
    assert pieces == emitted_tokens(whole)


def test_admitting_into_free_slots_leaves_the_other_rows_bit_for_bit_and_padding_slots_touch_nothing(params):
    state, _, _ = started(params, (9, 1, 9, 1))
    after, sampled, finish = admit(params, state, admission((3, 4, 1, 4), (5, 5, 1, 5)), SAMPLING, NO_STOP)
    for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        axis = 1 if old.ndim == 5 else 0
        np.testing.assert_array_equal(np.take(new, [0, 2], axis), np.take(old, [0, 2], axis))
    np.testing.assert_array_equal(after.active_B, [True, False, True, True])
    np.testing.assert_array_equal(after.cache.lengths_B, [5, 0, 5, 5])  # slot 1 ended with its first token
    assert finish[0] == FINISH_RUNNING and finish[1] == FINISH_LENGTH  # entries of slots 3 and 1
    assert after.last_token_B[3] == sampled.token_B[0] and after.remaining_B[3] == 4


def test_a_prompt_that_enters_in_pieces_gives_the_same_row_as_one_that_enters_whole(params):
    """16 columns in pieces of 6: the last piece, of 4, holds the end of a prompt."""
    whole, first, _ = started(params, lengths=(5, 15))
    empty = rollout.init_state(Decoding(SPEC), rollout.Slots(4, 32, block=8), jnp.float32)
    pieces, also_first, _ = admit(params, empty, admission((0, 1, 2, 3), (9, 9, 9, 9), (5, 15), width=6), SAMPLING, NO_STOP)
    np.testing.assert_array_equal(first.token_B, also_first.token_B)
    np.testing.assert_array_equal(whole.cache.lengths_B, pieces.cache.lengths_B)
    for row, length in enumerate((5, 15, 5, 15)):
        np.testing.assert_allclose(whole.cache.keys_LBKSC[:, row, :, :length], pieces.cache.keys_LBKSC[:, row, :, :length], atol=1e-5)
        np.testing.assert_allclose(whole.cache.values_LBKSC[:, row, :, :length], pieces.cache.values_LBKSC[:, row, :, :length], atol=1e-5)


def test_moving_rows_to_other_slots_and_another_number_of_slots_changes_no_token(params):
    state, _, _ = started(params, (9, 9, 1, 9))
    _, expected = advance(params, state, SAMPLING, NO_STOP, rounds=4)
    moved = rollout.gather_rows(Decoding(SPEC), state, np.array([3, 0, 0, 1, 0, 0]), np.array([True, True, False, True, False, False]))
    np.testing.assert_array_equal(moved.active_B, [True, True, False, True, False, False])
    np.testing.assert_array_equal(moved.cache.lengths_B, [12, 5, 0, 12, 0, 0])
    _, emitted = advance(params, moved, SAMPLING, NO_STOP, rounds=4)
    tokens = emitted_tokens(emitted)
    assert [tokens[1], tokens[3], tokens[0]] == [emitted_tokens(expected)[row] for row in (0, 1, 3)]
    assert tokens[2] == tokens[4] == tokens[5] == ()
