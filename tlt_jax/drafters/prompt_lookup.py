"""Prompt lookup: what followed the last tokens where the row's own text had them before (Saxena's prompt lookup decoding). No parameters.

The places that match the longest suffix, the latest first, give one chain each. A match close to the end continues periodically, since the text may be
repeating itself. Without a match the chains are filled with the row's first token and cost their verification.
"""

import dataclasses

import jax
import jax.numpy as jnp

from tlt_jax.drafters.drafter import Pick, PolicyView, Root, Stateless
from tlt_jax.records import Tree
from tlt_jax.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class PromptLookup(Stateless):
    """Suffixes of up to `longest` tokens are looked up."""

    longest: int = 4

    def propose(self, params: dict, policy: PolicyView, state, root: Root, pick: Pick, strategy: Strategy) -> Tree:
        """As many chains as the budget holds; the branching only bounds the budget."""
        lengths = chain_lengths(strategy)
        place_BE = matches(root.tokens_BS, root.position_B, self.longest, len(lengths))
        step = jnp.arange(max(lengths))[None, None, :]
        period_BE = jnp.maximum(root.position_B[:, None] - place_BE, 1)
        follow = place_BE[:, :, None] + 1 + step % period_BE[:, :, None]
        rows = root.token_B.shape[0]
        found = jnp.take_along_axis(root.tokens_BS, jnp.maximum(follow, 0).reshape(rows, -1), axis=1).reshape(follow.shape)
        tokens = jnp.concatenate([found[:, chain, :length] for chain, length in enumerate(lengths)], axis=1)
        parents, depths = [], []
        for length in lengths:
            parents += [0, *range(len(depths) + 1, len(depths) + length)]
            depths += range(1, length + 1)
        whole = (rows, strategy.budget)
        return Tree(tokens, jnp.broadcast_to(jnp.array([parents], jnp.int32), whole), jnp.broadcast_to(jnp.array([depths], jnp.int32), whole))


def chain_lengths(strategy: Strategy) -> list[int]:
    """Whole chains of `depth` tokens while the budget lasts, and a shorter one of what is left."""
    whole, left = divmod(strategy.budget, strategy.depth)
    return [strategy.depth] * whole + [left] * (left > 0)


def matches(tokens_BS: jax.Array, position_B: jax.Array, longest: int, count: int) -> jax.Array:
    """int32 [B, count]: positions before `position_B` that end the longest equal suffixes, best first; −1 where nothing matches."""
    rows, slots = tokens_BS.shape
    place = jnp.arange(slots)[None, :]
    alike_BS, length_BS = jnp.ones((rows, slots), bool), jnp.zeros((rows, slots), jnp.int32)
    for back in range(longest):
        wanted_B = jnp.take_along_axis(tokens_BS, jnp.maximum(position_B - back, 0)[:, None], axis=1)
        shifted_BS = jnp.pad(tokens_BS, ((0, 0), (back, 0)), constant_values=-1)[:, :slots]
        alike_BS = alike_BS & (shifted_BS == wanted_B) & (position_B[:, None] >= back)
        length_BS = length_BS + alike_BS
    length_BS = jnp.where(place < position_B[:, None], length_BS, 0)
    score, best = jax.lax.top_k((length_BS * slots + place).astype(jnp.float32), count)  # exact below 2^24
    return jnp.where(score >= slots, best, -1)
