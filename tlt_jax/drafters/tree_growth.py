"""Growing a draft tree level by level, and attention over its nodes (EAGLE-2, arXiv 2406.16858, on scores that know the policy's noise).

Each level expands the best `branching` nodes by cumulative log-score; at the end the best `budget` of all candidates are kept. Scores are at most 0, so a
parent never ranks below its child and the kept set is a tree.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.drafters.drafter import Pick
from tlt_jax.models import attention, kv_cache
from tlt_jax.models.kv_cache import KVCache, NewTokens
from tlt_jax.models.specs import PolicySpec
from tlt_jax.records import Tree
from tlt_jax.strategies import Strategy


class Nodes(NamedTuple):
    """Keys and values of the nodes expanded so far, by layer, and which of them each node of the last level sees (itself included)."""

    keys: tuple[jax.Array, ...]  # [B, n, K, C]
    values: tuple[jax.Array, ...]
    positions_Bn: jax.Array
    seen_BUn: jax.Array


class Beam(NamedTuple):
    """The nodes that the next level expands."""

    tokens_BU: jax.Array
    score_BU: jax.Array  # cumulative
    place_BU: jax.Array  # in the pool of candidates
    parent_BU: jax.Array  # in the beam before


def no_nodes(spec: PolicySpec, layers: int, rows: int, dtype) -> Nodes:
    """Before the first expansion, with a beam of one node: the root."""
    empty = jnp.zeros((rows, 0, spec.num_kv_heads, spec.head_dim), dtype)
    return Nodes((empty,) * layers, (empty,) * layers, jnp.zeros((rows, 0), jnp.int32), jnp.zeros((rows, 1, 0), bool))


def next_level(nodes: Nodes, parent_BU: jax.Array, positions_BU: jax.Array) -> Nodes:
    """Room for a level: each new node sees what its parent sees, and itself. Keys and values follow with `attend_level`."""
    seen = jnp.take_along_axis(nodes.seen_BUn, parent_BU[:, :, None], axis=1)
    own = jnp.broadcast_to(jnp.eye(parent_BU.shape[1], dtype=bool)[None], (*parent_BU.shape, parent_BU.shape[1]))
    return nodes._replace(positions_Bn=jnp.concatenate([nodes.positions_Bn, positions_BU], axis=1), seen_BUn=jnp.concatenate([seen, own], axis=2))


def attend_level(cache: KVCache, index: int, nodes: Nodes, projected: tuple, window: int) -> tuple[jax.Array, Nodes]:
    """A level's nodes against the committed slots of the cache's layer `index` and against their ancestors: ([B, U, H, C], nodes with their keys)."""
    query_BUHC, key_BUKC, value_BUKC = projected
    positions_BU = nodes.positions_Bn[:, -query_BUHC.shape[1]:]
    keys, values = list(nodes.keys), list(nodes.values)
    keys[index], values[index] = jnp.concatenate([keys[index], key_BUKC], axis=1), jnp.concatenate([values[index], value_BUKC], axis=1)
    mask = nodes.seen_BUn & attention.visible(positions_BU, nodes.positions_Bn, window)
    attended = kv_cache.attend(cache, index, query_BUHC, NewTokens(keys[index], values[index], positions_BU, mask, window))
    return attended, nodes._replace(keys=tuple(keys), values=tuple(values))


def grow(first_logits_BV: jax.Array, expand: Callable, carry, pick: Pick, strategy: Strategy) -> Tree:
    """The tree whose first level comes from `first_logits_BV`; `expand(carry, level, beam)` gives (logits_BUV, carry) of the nodes at `level` ≥ 1."""
    depth, branching, budget = strategy
    rows = first_logits_BV.shape[0]
    ids, score = pick(first_logits_BV[:, None], 0, branching)
    beam = Beam(ids[:, 0], score[:, 0], jnp.broadcast_to(jnp.arange(branching)[None], (rows, branching)), jnp.zeros((rows, branching), jnp.int32))
    tokens, scores, parents, levels = [beam.tokens_BU], [beam.score_BU], [jnp.full((rows, branching), -1)], [1] * branching
    for level in range(1, depth):
        logits_BUV, carry = expand(carry, level, beam)
        ids, score = pick(logits_BUV, level, branching)
        children = (beam.score_BU[:, :, None] + score).reshape(rows, -1)
        start = len(levels)
        tokens.append(ids.reshape(rows, -1))
        scores.append(children)
        parents.append(jnp.repeat(beam.place_BU, branching, axis=1))
        levels += [level + 1] * branching**2
        best_score, best = jax.lax.top_k(children, branching)
        beam = Beam(jnp.take_along_axis(tokens[-1], best, axis=1), best_score, start + best, best // branching)
    return _kept(jnp.concatenate(tokens, 1), jnp.concatenate(scores, 1), jnp.concatenate(parents, 1), jnp.array(levels), budget)


def _kept(tokens, scores, parents, levels, budget: int) -> Tree:
    """The `budget` best candidates of a pool, in the order in which they were made."""
    rows, size = tokens.shape
    chosen = jnp.sort(jax.lax.top_k(scores, budget)[1], axis=1)
    row = jnp.arange(rows)[:, None]
    number = jnp.zeros((rows, size + 1), jnp.int32).at[row, chosen].set(jnp.arange(1, budget + 1)[None, :])  # the extra place stands for the root
    parent = jnp.take_along_axis(parents, chosen, axis=1)
    parent = jnp.where(parent < 0, size, parent)
    return Tree(
        jnp.take_along_axis(tokens, chosen, axis=1).astype(jnp.int32), jnp.take_along_axis(number, parent, axis=1), levels[chosen].astype(jnp.int32))
