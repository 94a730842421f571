"""Speculation changes no token: every drafter, tree and way of sampling against plain decoding of the same rows, and what a round leaves behind."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.decoding import rollout, shared_texts
from tlt_jax.decoding.rollout import Admission, Slots
from tlt_jax.decoding.rounds import Decoding, Weights
from tlt_jax.decoding.sampling import make_sampling
from tlt_jax.decoding.shared_texts import Entering
from tlt_jax.drafters.drafter import Window
from tlt_jax.drafters.eagle import Eagle
from tlt_jax.drafters.eagle3 import Eagle3
from tlt_jax.drafters.feature_drafter import layer_like
from tlt_jax.drafters.prompt_lookup import PromptLookup
from tlt_jax.drafters.truncated import Truncated
from tlt_jax.models import decoder, kv_cache
from tlt_jax.models.decoder import abstract_params
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.strategies import FINISH_LENGTH, FINISH_STOP, OFF, Strategy

SPEC = PolicySpec(
    family="llama", vocab_size=29, hidden_size=16, intermediate_size=20, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, rope=RopeSpec("default", 100.0),
    rms_norm_eps=1e-5, max_position_embeddings=128, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None, 9))
VOCABULARY, ROWS, SLOTS = 28, 4, 64
NO_STOP = np.full((2,), -1, np.int32)
KEYS = np.random.default_rng(1).integers(0, 2**32, (ROWS, 2), dtype=np.uint32)
LENGTHS = (5, 12)
STRATEGIES = {"chain": Strategy(3, 1, 3), "tree": Strategy(3, 2, 6), "whole tree": Strategy(2, 3, 12)}
DRAFTERS = {"oracle": Truncated(SPEC, 2), "truncated": Truncated(SPEC, 1), "prompt_lookup": PromptLookup(), "eagle": Eagle(SPEC, layer_like(SPEC)),
            "eagle3": Eagle3(SPEC, layer_like(SPEC), 17, (0, 1))}
SAMPLINGS = {
    "greedy": dict(temperature=0.0), "cool": dict(temperature=0.7), "plain": dict(temperature=1.0), "hot": dict(temperature=1.5),
    "top_k": dict(temperature=1.0, top_k=5), "top_p": dict(temperature=0.9, top_p=0.8), "min_p": dict(temperature=1.2, min_p=0.1)}


@functools.cache
def policy() -> dict:
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) * 0.4, jnp.float32), abstract_params(SPEC))


@functools.cache
def program(function, decoding):
    return jax.jit(functools.partial(function, decoding))


def weights_of(drafter):
    return Weights(policy(), None if drafter is None else drafter.prepare(drafter.init_params(jax.random.key(5), policy()), policy()))


def admission(remaining):
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, (2, 1, 16)).astype(np.int32)
    source = np.array([0, 0, 1, 1], np.int32)
    return Admission(tokens, np.array(LENGTHS, np.int32), np.array([2, 0, 3, 1], np.int32), source, KEYS, np.array(remaining, np.int32))


class Rows:
    """Four rows of two prompts, decoded dispatch by dispatch with a strategy each."""

    def __init__(self, drafter=None, remaining=(20, 17, 20, 9), *, sampling=None, stop_ids=NO_STOP, ring=512):
        self.drafter, self.weights, self.stop_ids = drafter, weights_of(drafter), np.asarray(stop_ids)
        self.sampling = make_sampling(**(sampling or dict(temperature=1.0)), vocabulary=VOCABULARY)
        decoding = Decoding(SPEC, drafter)
        state = rollout.init_state(decoding, Slots(ROWS, SLOTS, ring, 8), jnp.float32)
        entries = admission(remaining)
        self.state, first, finish = program(rollout.admit, decoding)(self.weights, state, entries, self.sampling, self.stop_ids)
        self.finish, self.forwards = np.zeros(ROWS, int), np.zeros(ROWS, int)
        self.tokens, self.logprobs = [[] for _ in range(ROWS)], [[] for _ in range(ROWS)]
        for entry, slot in enumerate(entries.slots_A):
            self.tokens[slot].append(int(first.token_B[entry]))
            self.logprobs[slot].append(float(first.logprob_B[entry]))
            self.finish[slot] = finish[entry]
        self.prompts = [entries.tokens_PIT[source].reshape(-1)[: LENGTHS[source]].tolist() for source in entries.source_A[np.argsort(entries.slots_A)]]

    def advance(self, strategy=OFF):
        """One dispatch of one round: few programs to compile."""
        self.state, emitted = program(rollout.advance, Decoding(SPEC, self.drafter, strategy))(self.weights, self.state, self.sampling, self.stop_ids)
        for row, count in enumerate(np.asarray(emitted.count_B)):
            self.tokens[row] += np.asarray(emitted.tokens_BR)[row, :count].tolist()
            self.logprobs[row] += np.asarray(emitted.logprobs_BR)[row, :count].tolist()
        self.finish = np.maximum(self.finish, emitted.finish_B)
        self.forwards += np.asarray(emitted.forwards_B)
        return emitted

    def finished(self, strategies=(OFF,)):
        turns = itertools.cycle(strategies)
        while np.any(self.state.active_B):
            self.advance(next(turns))
        return self


@functools.cache
def plain(sampling="plain", remaining=(20, 17, 20, 9), stop_ids=(-1, -1)):
    return Rows(None, remaining, sampling=SAMPLINGS[sampling], stop_ids=stop_ids).finished()


def assert_same(actual, expected):
    assert actual.tokens == expected.tokens
    np.testing.assert_array_equal(actual.finish, expected.finish)
    for one, other in zip(actual.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("strategy", ["chain", "tree"])
def test_every_drafter_and_tree_returns_the_tokens_of_plain_decoding(drafter, strategy):
    assert_same(Rows(DRAFTERS[drafter]).finished((STRATEGIES[strategy],)), plain())


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["truncated", "prompt_lookup"])
def test_every_way_of_sampling_returns_the_tokens_of_plain_decoding(drafter, sampling):
    assert_same(Rows(DRAFTERS[drafter], sampling=SAMPLINGS[sampling]).finished((STRATEGIES["tree"],)), plain(sampling))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_switching_the_strategy_every_round_changes_no_token(drafter):
    order = [OFF, STRATEGIES["chain"], STRATEGIES["tree"]]
    turns = [order[choice] for choice in np.random.default_rng(7).integers(0, len(order), 40)]
    assert_same(Rows(DRAFTERS[drafter]).finished(turns), plain())


@pytest.mark.parametrize("strategy", ["chain", "whole tree"])
@pytest.mark.parametrize("sampling", ["greedy", "plain", "top_k"])
def test_the_policy_as_its_own_drafter_is_accepted_whole(sampling, strategy):
    """Each round then emits depth + 1 tokens. A tree that is cut to a budget may lose the right path: its scores know no oracle."""
    rows, width = Rows(DRAFTERS["oracle"], (13,) * ROWS, sampling=SAMPLINGS[sampling]), STRATEGIES[strategy].depth + 1
    for _ in range(12 // width):
        np.testing.assert_array_equal(rows.advance(STRATEGIES[strategy]).count_B, [width] * ROWS)
    assert not np.any(rows.state.active_B) and set(rows.finish) == {FINISH_LENGTH}
    assert_same(rows, Rows(None, (13,) * ROWS, sampling=SAMPLINGS[sampling]).finished())


@pytest.mark.parametrize("strategy", ["chain", "tree"])
def test_the_cache_equals_a_fresh_prefill_of_the_text_after_every_round(strategy):
    """Rows accept different numbers, and rejected entries are overwritten."""
    rows = Rows(DRAFTERS["truncated"], (14, 12, 14, 9))
    while np.any(rows.state.active_B):
        rows.advance(STRATEGIES[strategy])
        for row in np.flatnonzero(np.asarray(rows.state.active_B)):
            text = rows.prompts[row] + rows.tokens[row]
            length = int(rows.state.cache.lengths_B[row])
            assert length == len(text) - 1 and text == np.asarray(rows.state.draft.tokens_BS)[row, : len(text)].tolist()
            fresh = prefill()(np.pad(np.array(text, np.int32), (0, WIDTH - len(text))))
            np.testing.assert_allclose(rows.state.cache.keys_LBKSC[:, row, :, :length], fresh.keys_LBKSC[:, 0, :, :length], atol=1e-5)
            np.testing.assert_allclose(rows.state.cache.values_LBKSC[:, row, :, :length], fresh.values_LBKSC[:, 0, :, :length], atol=1e-5)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("drafter", ["oracle", "truncated"])
def test_a_limit_inside_an_accepted_run_cuts_it_there(drafter, limit):
    remaining = (limit, 9, limit + 1, limit)
    assert_same(Rows(DRAFTERS[drafter], remaining).finished((STRATEGIES["chain"],)), plain(remaining=remaining))


@pytest.mark.parametrize("place", [1, 2, 3, 4])
def test_a_stop_id_inside_an_accepted_run_ends_the_row_at_it(place):
    """The stop id is what row 0 emits there: the oracle drafts past it."""
    stop_ids = (plain().tokens[0][place], -1)
    rows = Rows(DRAFTERS["oracle"], stop_ids=stop_ids).finished((STRATEGIES["chain"],))
    assert_same(rows, plain(stop_ids=stop_ids))
    assert rows.finish[0] == FINISH_STOP and rows.tokens[0][-1] == stop_ids[0] and stop_ids[0] not in rows.tokens[0][:-1]


@pytest.mark.parametrize("strategy", ["chain", "tree"])
def test_nan_in_unused_slots_changes_nothing(strategy):
    rows = Rows(DRAFTERS["truncated"])
    rows.advance(STRATEGIES[strategy])
    unused = np.arange(SLOTS)[None, :] >= np.asarray(rows.state.cache.lengths_B)[:, None]

    def spoil(stored):
        return jnp.where(unused[None, :, None, :, None], jnp.nan, stored)

    cache = rows.state.cache
    rows.state = rows.state.replace(cache=cache.replace(keys_LBKSC=spoil(cache.keys_LBKSC), values_LBKSC=spoil(cache.values_LBKSC)))
    assert_same(rows.finished((STRATEGIES[strategy],)), plain())


def test_a_tree_that_reaches_past_the_end_of_the_cache_touches_no_other_slot():
    """Row limits that fill the cache to its last slot: the nodes behind it are dropped."""
    remaining = (SLOTS - 11, 9, 9, 9)
    assert_same(Rows(DRAFTERS["oracle"], remaining).finished((STRATEGIES["whole tree"],)), plain(remaining=remaining))


def test_moved_rows_go_on_with_the_same_tokens():
    rows = Rows(DRAFTERS["truncated"])
    rows.advance(STRATEGIES["tree"])
    order = np.array([2, 0, 3, 1])
    rows.state = rollout.gather_rows(Decoding(SPEC, rows.drafter), rows.state, order, np.ones(4, bool))
    for name in ("tokens", "logprobs", "prompts"):
        setattr(rows, name, [getattr(rows, name)[row] for row in order])
    rows.finish = rows.finish[order]
    rows.finished((STRATEGIES["tree"],))
    assert rows.tokens == [plain().tokens[row] for row in order]


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("name", ["truncated", "eagle"])
def test_rows_in_slots_of_another_state_keep_all_that_is_theirs_and_leave_the_other_slots_alone(name):
    decoding, rows = Decoding(SPEC, DRAFTERS[name]), Rows(DRAFTERS[name], ring=16)
    rows.advance(STRATEGIES["tree"])
    rows.advance()
    gather = functools.partial(rollout.gather_rows, decoding)
    held = gather(Rows(DRAFTERS[name], (5, 9, 7, 9), ring=16).state, np.arange(8) % 4, np.arange(8) < 4)
    put = rollout.put_rows(decoding, held, rows.state, np.array([6, 8, 0, 5]), None)  # 8: nowhere
    equal(gather(put, np.array([6, 0, 5]), np.ones(3, bool)), gather(rows.state, np.array([0, 2, 3]), np.ones(3, bool)))
    others = np.array([1, 2, 3, 4, 7])
    equal(gather(put, others, np.ones(5, bool)), gather(held, others, np.ones(5, bool)))


def test_a_row_from_another_slice_brings_its_text_and_finds_the_samples_of_its_prompt():
    drafter = PromptLookup(segments=6)
    decoding, rows = Decoding(SPEC, drafter), Rows(PromptLookup())
    rows.advance()
    held = rollout.init_state(decoding, Slots(4, SLOTS, 512, 8), jnp.float32)
    nothing = np.zeros((0, SLOTS), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32)
    put = rollout.put_rows(decoding, held, rows.state, np.array([3, 1, 4, 4]), Entering(np.array([5, 2, 6, 6]), np.array([9, 9, 0, 0]), *nothing))
    texts = [rows.prompts[row] + rows.tokens[row] for row in (0, 1)]
    for slot, text in zip((1, 3), texts, strict=True):  # each reads the other's
        read = np.asarray(shared_texts.readable(put.draft.texts))[slot]
        assert [line[line >= 0].tolist() for line in read if line.max() >= 0] == [text]


def test_forwards_count_the_rounds_in_which_a_row_decoded():
    rows = Rows(DRAFTERS["oracle"], (9, 5, 9, 2)).finished((STRATEGIES["chain"],))
    by_slot = dict(zip((2, 0, 3, 1), (9, 5, 9, 2), strict=True))
    assert rows.forwards.tolist() == [-(-(by_slot[slot] - 1) // 4) for slot in range(ROWS)]


WIDTH = 40  # columns of a text that is taken in at once


@functools.cache
def take_in(drafter):
    """(padded text, tokens) → a drafter's state after taking a text in at once, with the features of one full forward."""

    def run(weights, text_T, count):
        out = decoder.forward(SPEC, policy(), text_T[None], capture_layers=drafter.capture_layers)
        features = out.aux_features_BTF if drafter.capture_layers else out.features_BTD
        window = Window(text_T[None, 1:], features[:, :-1], jnp.zeros((1,), jnp.int32), count[None])
        return drafter.extend(weights.drafter, policy(), drafter.init_state(1, SLOTS, jnp.float32, 8), window)

    return jax.jit(run)


def drafter_slots(rows, text):
    """State of a drafter that saw all of a text but its last token."""
    padded = np.zeros((WIDTH,), np.int32)
    padded[: len(text)] = text
    return take_in(rows.drafter)(rows.weights, padded, np.int32(len(text) - 1))


@functools.cache
def prefill():
    """Padded text → the policy's cache of a fresh prefill."""
    return jax.jit(lambda text_T: decoder.forward(SPEC, policy(), text_T[None], cache=kv_cache.init_cache(SPEC, 1, 48, jnp.float32, block=8)).cache)


@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
@pytest.mark.parametrize("strategy", ["chain", "tree"])
def test_a_drafter_has_taken_in_the_true_features_of_its_text_after_every_speculative_round(drafter, strategy):
    """Its slots lag one round behind: those before the round's last token. Plain rounds in between are made up for."""
    rows, turns = Rows(DRAFTERS[drafter]), itertools.cycle((STRATEGIES[strategy], OFF, STRATEGIES[strategy]))
    for _ in range(7):
        before, turn = [prompt + tokens for prompt, tokens in zip(rows.prompts, rows.tokens, strict=True)], next(turns)
        was_active = np.asarray(rows.state.active_B)
        rows.advance(turn)
        for row in np.flatnonzero(np.asarray(rows.state.active_B) & was_active) if turn.depth else ():
            own, fresh, length = rows.state.draft.own, drafter_slots(rows, before[row]), len(before[row]) - 1
            assert own.cache.lengths_B[row] == rows.state.draft.reach_B[row] == length
            np.testing.assert_allclose(own.cache.keys_LBKSC[:, row, :, :length], fresh.cache.keys_LBKSC[:, 0, :, :length], atol=2e-5)
            np.testing.assert_allclose(own.cache.values_LBKSC[:, row, :, :length], fresh.cache.values_LBKSC[:, 0, :, :length], atol=2e-5)
            np.testing.assert_allclose(own.hidden_BD[row], fresh.hidden_BD[0], atol=2e-5)


def test_a_row_that_overran_the_ring_drafts_from_the_ring_on_and_changes_no_token():
    rows = Rows(DRAFTERS["eagle"], ring=8)
    for strategy in (STRATEGIES["tree"], *[OFF] * 10):
        rows.advance(strategy)
    length = np.asarray(rows.state.cache.lengths_B)
    rows.advance(STRATEGIES["tree"])
    active = np.asarray(rows.state.active_B)
    np.testing.assert_array_equal(np.asarray(rows.state.draft.own.cache.lengths_B)[active], 8)
    np.testing.assert_array_equal(np.asarray(rows.state.draft.reach_B)[active], length[active])
    assert_same(rows.finished((STRATEGIES["tree"],)), plain())


@pytest.mark.parametrize("drafter", ["eagle", "eagle3"])
def test_drafter_weights_may_change_between_rounds(drafter):
    rows = Rows(DRAFTERS[drafter])
    rows.advance(STRATEGIES["tree"])
    rows.weights = rows.weights._replace(drafter=jax.tree.map(lambda leaf: leaf * 3 if leaf.dtype == jnp.float32 else leaf, rows.weights.drafter))
    assert_same(rows.finished((STRATEGIES["tree"],)), plain())


def test_a_drafter_is_hashable_and_equal_to_its_copy():
    assert dataclasses.replace(DRAFTERS["truncated"]) == DRAFTERS["truncated"] and len({*DRAFTERS.values()}) == len(DRAFTERS)
