"""Prompt lookup: what followed the last tokens where they stood before, in the row's own text (Saxena's prompt lookup decoding) or in another text of the
same prompt: the samples beside it and answers of earlier steps (as RhymeRL, arXiv 2508.18588, reuses them). No parameters.

The places that match the longest suffix give one chain each; of equal ones the row's own come first, the latest first. A match close to the end of the own
text continues periodically, since the text may be repeating itself. Without a match the chains are filled with the text's first tokens and cost their
verification.
"""

import dataclasses

import jax
import jax.numpy as jnp

from tlt_jax.drafters.drafter import Pick, PolicyView, Root, Stateless
from tlt_jax.records import Tree
from tlt_jax.strategies import Strategy

NOTHING = -1  # no token, no place


@dataclasses.dataclass(frozen=True)
class PromptLookup(Stateless):
    """Suffixes of up to `longest` tokens are looked up; `segments` texts are kept beside the rows' own (0 = none)."""

    longest: int = 4
    segments: int = 0

    def propose(self, params: dict, policy: PolicyView, state, root: Root, pick: Pick, strategy: Strategy) -> Tree:
        """As many chains as the budget holds; the branching only bounds the budget."""
        lengths, rows = chain_lengths(strategy), root.token_B.shape[0]
        own_B1S = root.tokens_BS[:, None]
        texts_BKS = own_B1S if root.peers_BKS is None else jnp.concatenate([own_B1S, root.peers_BKS], axis=1)
        text_BE, place_BE = matches(texts_BKS, root, self.longest, len(lengths))
        step = jnp.arange(max(lengths))[None, None, :]
        period_BE = jnp.where(text_BE == 0, jnp.maximum(root.position_B[:, None] - place_BE, 1), max(lengths))
        place_BEJ = jnp.clip(place_BE[:, :, None] + 1 + step % period_BE[:, :, None], 0, texts_BKS.shape[2] - 1)
        found_BEJ = jnp.maximum(texts_BKS[jnp.arange(rows)[:, None, None], text_BE[:, :, None], place_BEJ], 0)
        tokens_BN = jnp.concatenate([found_BEJ[:, chain, :length] for chain, length in enumerate(lengths)], axis=1)
        parents, depths = [], []
        for length in lengths:
            parents += [0, *range(len(depths) + 1, len(depths) + length)]
            depths += range(1, length + 1)
        whole = (rows, strategy.budget)
        return Tree(tokens_BN, jnp.broadcast_to(jnp.array([parents], jnp.int32), whole), jnp.broadcast_to(jnp.array([depths], jnp.int32), whole))


def chain_lengths(strategy: Strategy) -> list[int]:
    """Whole chains of `depth` tokens while the budget lasts, and a shorter one of what is left."""
    whole, left = divmod(strategy.budget, strategy.depth)
    return [strategy.depth] * whole + [left] * (left > 0)


def matches(texts_BKS: jax.Array, root: Root, longest: int, count: int) -> tuple[jax.Array, jax.Array]:
    """(text [B, count], position [B, count]) that end the longest suffixes equal to that of the row's text, best first; position −1 where nothing matches.

    Text 0 is the row's own, of which only positions before the root count; of the others only those that a token follows.
    """
    rows, texts, slots = texts_BKS.shape
    alike_BKS, length_BKS = jnp.ones(texts_BKS.shape, bool), jnp.zeros(texts_BKS.shape, jnp.int32)
    for back in range(longest):
        wanted_B = jnp.take_along_axis(root.tokens_BS, jnp.maximum(root.position_B - back, 0)[:, None], axis=1)[:, 0]
        shifted_BKS = jnp.pad(texts_BKS, ((0, 0), (0, 0), (back, 0)), constant_values=NOTHING)[:, :, :slots]
        alike_BKS = alike_BKS & (shifted_BKS == wanted_B[:, None, None]) & (root.position_B >= back)[:, None, None]
        length_BKS = length_BKS + alike_BKS
    text, place = jnp.arange(texts)[None, :, None], jnp.arange(slots)[None, None, :]
    followed_BKS = jnp.pad(texts_BKS[:, :, 1:], ((0, 0), (0, 0), (0, 1)), constant_values=NOTHING) >= 0
    counts_BKS = jnp.where(text == 0, place < root.position_B[:, None, None], followed_BKS)
    score_BKS = jnp.where(counts_BKS, length_BKS, 0) * (texts * slots) + (texts - 1 - text) * slots + place
    score_BE, best_BE = jax.lax.top_k(score_BKS.reshape(rows, -1).astype(jnp.float32), count)  # exact below 2^24
    matched_BE = score_BE >= texts * slots
    return jnp.where(matched_BE, best_BE // slots, 0), jnp.where(matched_BE, best_BE % slots, -1)
