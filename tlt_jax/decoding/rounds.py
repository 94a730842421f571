"""One decode round, plain or speculative, and the state of the rows of a slice.

Invariant: `last_token_B` stands at position `cache.lengths_B` of its row and is not in the cache yet. A row that ends
gives its slot up (length 0), so the cost of attention follows the rows that still decode.
"""

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from tlt_jax.decoding import sampling as drawing
from tlt_jax.decoding import shared_texts, verification
from tlt_jax.decoding.shared_texts import SharedTexts
from tlt_jax.drafters.drafter import Drafter, PolicyView, Root, Window
from tlt_jax.models import decoder, kv_cache
from tlt_jax.models.decoder import DecoderOutput
from tlt_jax.models.kv_cache import KVCache
from tlt_jax.models.specs import PolicySpec
from tlt_jax.records import SamplingParams
from tlt_jax.strategies import FINISH_RUNNING, OFF, Strategy

CATCH_UP = 32  # positions that a drafter takes in at a time when it is switched on late


@flax.struct.dataclass
class DraftState:
    """What speculation keeps of each row. While it is off, plain rounds keep text and ring up to date, so that it can be switched on at any time."""

    tokens_BS: jax.Array  # int32, the text by position, up to the last token
    ring_BWF: jax.Array | None  # features of the last W committed positions, position p in column p mod W; None: the drafter reads none
    reach_B: jax.Array  # int32, positions that the drafter has taken in
    own: object  # the drafter's own state
    texts: SharedTexts | None = None  # for a drafter that looks into other texts


@flax.struct.dataclass
class RowState:
    """Everything a slice keeps on device for its rows."""

    cache: KVCache
    key_B2: jax.Array  # uint32 noise key of (seed, step, prompt, sample, draw)
    last_token_B: jax.Array  # int32
    remaining_B: jax.Array  # int32, tokens the row may still emit
    active_B: jax.Array  # bool
    draft: DraftState | None = None  # None: no drafter


class Ring(NamedTuple):
    """The ring of features of each row."""

    columns: int = 512
    streams: bool = False  # what is new in it leaves with every dispatch; it then holds the final feature, too, where the drafter reads others


RING = Ring()


class Decoding(NamedTuple):
    """What a decode program is compiled for."""

    spec: PolicySpec
    drafter: Drafter | None = None
    strategy: Strategy = OFF
    rounds: int = 1  # most rounds in one dispatch
    streams: bool = False  # as in `Ring`

    @property
    def width(self) -> int:
        """Tokens that one round emits at most (J)."""
        return self.strategy.depth + 1

    @property
    def ring_width(self) -> int:
        """Numbers that the ring holds of a position; 0 = there is none."""
        if self.drafter is None:
            return 0
        return self.drafter.features + self.spec.hidden_size * (self.streams and bool(self.drafter.capture_layers))


class Weights(NamedTuple):
    """Parameters of the policy, and what its drafter made ready from its own and the policy's."""

    policy: dict
    drafter: dict | None = None


class Round(NamedTuple):
    """What one round emits: column j is the jth token of the row, real when j < count."""

    tokens_BJ: jax.Array
    logprobs_BJ: jax.Array
    sampling_logprobs_BJ: jax.Array
    count_B: jax.Array
    finish_B: jax.Array


def features(decoding: Decoding, out: DecoderOutput) -> jax.Array:
    """[B, T, F]: what the ring holds of a forward; what the drafter reads comes first."""
    if not decoding.drafter.capture_layers:
        return out.features_BTD
    return jnp.concatenate([out.aux_features_BTF, out.features_BTD], axis=-1) if decoding.streams else out.aux_features_BTF


def plain_round(decoding: Decoding, weights: Weights, state: RowState, sampling: SamplingParams, stop_ids_Z: jax.Array) -> tuple[RowState, Round]:
    """Forward one token a row and draw the next. Ended rows emit nothing."""
    spec, drafter, lengths_B = decoding.spec, decoding.drafter, state.cache.lengths_B
    out = decoder.forward(
        spec, weights.policy, state.last_token_B[:, None], cache=state.cache, compute_logits=False,
        capture_layers=() if drafter is None else drafter.capture_layers)
    logits_BV = decoder.head_logits(spec, weights.policy, out.features_BTD[:, 0])
    sampled = drawing.sample(logits_BV, state.key_B2, lengths_B + 1, sampling)
    remaining_B = state.remaining_B - state.active_B
    finish_B = jnp.where(state.active_B, verification.finish_codes(sampled.token_B, remaining_B, stop_ids_Z), FINISH_RUNNING)
    emitted = Round(
        sampled.token_B[:, None], sampled.logprob_B[:, None], sampled.sampling_logprob_B[:, None], state.active_B.astype(jnp.int32), finish_B)
    draft = state.draft
    if draft is not None:
        draft = remember(draft, lengths_B, emitted, features(decoding, out) if drafter.features else None)
    return _commit(state, out.cache, emitted, sampled.token_B, draft), emitted


def remember(draft: DraftState, lengths_B: jax.Array, emitted: Round, features_BJF: jax.Array | None) -> DraftState:
    """Text and ring after a round: column j holds the feature of position lengths + j and the token one further on."""
    row_B1, place = jnp.arange(lengths_B.shape[0])[:, None], jnp.arange(emitted.tokens_BJ.shape[1])[None, :]
    position_BJ, real_BJ = lengths_B[:, None] + place, place < emitted.count_B[:, None]
    text_BJ = jnp.where(real_BJ, position_BJ + 1, draft.tokens_BS.shape[1])
    draft = draft.replace(
        tokens_BS=draft.tokens_BS.at[row_B1, text_BJ].set(emitted.tokens_BJ, mode="drop"),
        texts=None if draft.texts is None else shared_texts.hear(draft.texts, emitted.tokens_BJ, text_BJ))
    if features_BJF is None:
        return draft
    window = draft.ring_BWF.shape[1]
    column_BJ = jnp.where(real_BJ, position_BJ % window, window)
    return draft.replace(ring_BWF=draft.ring_BWF.at[row_B1, column_BJ].set(features_BJF.astype(draft.ring_BWF.dtype), mode="drop"))


def _commit(state: RowState, cache: KVCache, emitted: Round, last_token_B: jax.Array, draft: DraftState | None) -> RowState:
    """The rows after a round; what ended gives its slot up."""
    active_B = state.active_B & (emitted.finish_B == FINISH_RUNNING)
    lengths_B = jnp.where(active_B, state.cache.lengths_B + emitted.count_B, 0)
    return state.replace(
        cache=cache.replace(lengths_B=lengths_B), last_token_B=last_token_B, remaining_B=state.remaining_B - emitted.count_B, active_B=active_B, draft=draft)


def catch_up(drafter: Drafter, weights: Weights, draft: DraftState, lengths_B: jax.Array, width: int) -> DraftState:
    """Let the drafter take in every committed position that the ring still holds; a row that overran the ring starts anew at the ring's oldest."""
    window, row_B1 = draft.ring_BWF.shape[1], jnp.arange(lengths_B.shape[0])[:, None]
    overran_B = lengths_B - draft.reach_B > window
    draft = draft.replace(reach_B=jnp.where(overran_B, lengths_B - window, draft.reach_B), own=drafter.forget(draft.own, overran_B))

    def take(width, draft):
        position_BT = draft.reach_B[:, None] + jnp.arange(width)[None, :]
        count_B = jnp.clip(lengths_B - draft.reach_B, 0, width)
        next_tokens_BT = jnp.take_along_axis(draft.tokens_BS, jnp.minimum(position_BT + 1, draft.tokens_BS.shape[1] - 1), axis=1)
        new = Window(next_tokens_BT, draft.ring_BWF[row_B1, position_BT % window][..., : drafter.features], draft.reach_B, count_B)
        own = drafter.extend(weights.drafter, weights.policy, draft.own, new)
        return draft.replace(reach_B=draft.reach_B + count_B, own=own)

    # After a round there are at most `width` positions to take in; after a prompt, or a while without speculation, many.
    draft = jax.lax.while_loop(lambda draft: jnp.any(lengths_B - draft.reach_B > width), lambda draft: take(CATCH_UP, draft), draft)
    return jax.lax.while_loop(lambda draft: jnp.any(draft.reach_B < lengths_B), lambda draft: take(width, draft), draft)


def speculative_round(decoding: Decoding, weights: Weights, state: RowState, sampling: SamplingParams, stop_ids_Z: jax.Array) -> tuple[RowState, Round]:
    """Draft a tree, run the policy over root and nodes, draw at every node, keep what the drawn tokens walk through and one more."""
    spec, drafter, strategy, draft = decoding.spec, decoding.drafter, decoding.strategy, state.draft
    rows, lengths_B = state.last_token_B.shape[0], state.cache.lengths_B
    if drafter.features:
        draft = catch_up(drafter, weights, draft, lengths_B, decoding.width)
    noise_BJV = drawing.race_noise(state.key_B2, lengths_B + 1, decoding.width, spec.vocab_size, sampling)
    root = Root(state.last_token_B, lengths_B, draft.tokens_BS, None if draft.texts is None else shared_texts.readable(draft.texts))
    pick = functools.partial(_pick, noise_BJV, sampling)
    tree = drafter.propose(weights.drafter, PolicyView(weights.policy, state.cache), draft.own, root, pick, strategy)
    zero_B1 = jnp.zeros((rows, 1), jnp.int32)
    depth_BX = jnp.concatenate([zero_B1, tree.depth_BN], axis=1)
    out = decoder.forward(
        spec, weights.policy, jnp.concatenate([state.last_token_B[:, None], tree.tokens_BN], axis=1), positions_BT=lengths_B[:, None] + depth_BX,
        cache=state.cache, mask=verification.ancestors(tree.parents_BN, strategy.depth), capture_layers=drafter.capture_layers, compute_logits=False)
    drawn = _draw_at_nodes(spec, weights.policy, out.features_BTD, noise_BJV, depth_BX, sampling)
    path_BJ, accepted_B = verification.walk(tree, drawn.token_B, strategy.depth)

    def along(drawn_BX):
        return jnp.take_along_axis(drawn_BX, path_BJ, axis=1)

    tokens_BJ = along(drawn.token_B)
    kept = verification.cut(tokens_BJ, accepted_B, state.remaining_B, stop_ids_Z)
    count_B, finish_B = jnp.where(state.active_B, kept.count_B, 0), jnp.where(state.active_B, kept.finish_B, FINISH_RUNNING)
    emitted = Round(tokens_BJ, along(drawn.logprob_B), along(drawn.sampling_logprob_B), count_B, finish_B)
    cache = out.cache if strategy.branching == 1 else kv_cache.compact(out.cache, path_BJ, count_B)
    features_BJF = jnp.take_along_axis(features(decoding, out), path_BJ[:, :, None], axis=1) if drafter.features else None
    last_token_B = jnp.take_along_axis(tokens_BJ, jnp.maximum(count_B - 1, 0)[:, None], axis=1)[:, 0]
    return _commit(state, cache, emitted, last_token_B, remember(draft, lengths_B, emitted, features_BJF)), emitted


def _pick(noise_BJV: jax.Array, sampling: SamplingParams, logits_BUV: jax.Array, level: int, count: int, ids_V: jax.Array | None = None):
    """Children of nodes at `level`: see drafters.drafter.Pick."""
    rows, nodes, vocabulary = logits_BUV.shape
    ids_V = jnp.arange(vocabulary) if ids_V is None else ids_V
    noise_BV = noise_BJV[:, level] if vocabulary == noise_BJV.shape[2] else noise_BJV[:, level, ids_V]
    flat = jnp.broadcast_to(noise_BV[:, None], logits_BUV.shape).reshape(-1, vocabulary)
    column, score = drawing.candidates(logits_BUV.reshape(-1, vocabulary), flat, ids_V, count, sampling)
    return ids_V[column].reshape(rows, nodes, count), score.reshape(rows, nodes, count)


def _draw_at_nodes(spec: PolicySpec, params: dict, features_BXD: jax.Array, noise_BJV: jax.Array, depth_BX: jax.Array, sampling: SamplingParams):
    """The policy's draw at every node, as `Sampled` of [B, X] arrays; a node of depth d has the noise of position root + d + 1."""
    rows, nodes, _ = features_BXD.shape
    logits = decoder.head_logits(spec, params, features_BXD.reshape(rows * nodes, -1))

    def noise():
        return jnp.take_along_axis(noise_BJV, depth_BX[:, :, None], axis=1).reshape(rows * nodes, -1)

    return drawing.Sampled(*(drawn.reshape(rows, nodes) for drawn in drawing.draw(logits, noise, sampling)))
