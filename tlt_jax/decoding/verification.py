"""Verification by sample-then-match: which nodes of a draft tree the policy's own draws walk through, and what a row keeps of them.

The policy draws one token at every node with the noise of the node's position; the walk starts at the root and follows the drawn token while it is a child.
What is emitted is what plain decoding emits, whatever tree was drafted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tlt_jax.records import Tree
from tlt_jax.strategies import FINISH_LENGTH, FINISH_RUNNING, FINISH_STOP


class Kept(NamedTuple):
    """What each row emits of the drawn tokens on its path."""

    count_B: jax.Array  # int32, tokens emitted
    finish_B: jax.Array  # int32, FINISH_*


def finish_codes(token_B: jax.Array, remaining_B: jax.Array, stop_ids_Z: jax.Array) -> jax.Array:
    """FINISH_* per row after emitting `token_B` with `remaining_B` tokens left; stop wins over the limit."""
    stopped = jnp.any(token_B[:, None] == stop_ids_Z[None, :], axis=1)
    return jnp.where(stopped, FINISH_STOP, jnp.where(remaining_B <= 0, FINISH_LENGTH, FINISH_RUNNING)).astype(jnp.int32)


def ancestors(parents_BN: jax.Array, depth: int) -> jax.Array:
    """bool [B, X, X]: entry (n, m) says that node m is node n or one of its ancestors; node 0 is the root."""
    rows, count = parents_BN.shape
    parents_BX = jnp.concatenate([jnp.zeros((rows, 1), parents_BN.dtype), parents_BN], axis=1)
    node = jnp.arange(count + 1)[None, :]
    place_BX, seen_BXX = jnp.broadcast_to(node, parents_BX.shape), jnp.zeros((rows, count + 1, count + 1), bool)
    for _ in range(depth + 1):
        seen_BXX = seen_BXX | (place_BX[:, :, None] == node[:, None, :])
        place_BX = jnp.take_along_axis(parents_BX, place_BX, axis=1)
    return seen_BXX


def walk(tree: Tree, drawn_BX: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
    """(path [B, J] of node numbers from the root on, accepted nodes [B]); places of the path past the accepted nodes repeat the last one."""
    rows = drawn_BX.shape[0]
    here_B, accepted_B, alive_B = jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), jnp.int32), jnp.ones((rows,), bool)
    path = [here_B]
    for _ in range(depth):
        token_B = jnp.take_along_axis(drawn_BX, here_B[:, None], axis=1)
        hit_BN = (tree.parents_BN == here_B[:, None]) & (tree.tokens_BN == token_B)
        alive_B = alive_B & jnp.any(hit_BN, axis=1)
        here_B = jnp.where(alive_B, jnp.argmax(hit_BN, axis=1).astype(jnp.int32) + 1, here_B)
        accepted_B = accepted_B + alive_B
        path.append(here_B)
    return jnp.stack(path, axis=1), accepted_B


def cut(tokens_BJ: jax.Array, accepted_B: jax.Array, remaining_B: jax.Array, stop_ids_Z: jax.Array) -> Kept:
    """End a row at its first stop id or at its limit, whichever comes first on the path; at the same token stop wins."""
    place = jnp.arange(tokens_BJ.shape[1])[None, :]
    offered_B = jnp.minimum(accepted_B + 1, remaining_B)
    stop_BJ = jnp.any(tokens_BJ[:, :, None] == stop_ids_Z[None, None, :], axis=2) & (place < offered_B[:, None])
    stopped_B = jnp.any(stop_BJ, axis=1)
    count_B = jnp.where(stopped_B, jnp.argmax(stop_BJ, axis=1) + 1, offered_B).astype(jnp.int32)
    finish_B = jnp.where(stopped_B, FINISH_STOP, jnp.where(count_B >= remaining_B, FINISH_LENGTH, FINISH_RUNNING)).astype(jnp.int32)
    return Kept(count_B, finish_B)
