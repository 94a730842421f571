"""Texts that the rows of a slice can look into: running and finished samples of their prompt, and earlier answers to it, in segments by position."""

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

NOTHING = -1  # no token, no segment, no group
PEERS = 8  # texts that one row looks into


@flax.struct.dataclass
class SharedTexts:
    """M segments, and where each row stands."""

    segments_MS: jax.Array  # int32, −1 past a text's end
    group_M: jax.Array  # which rows may read it
    segment_B: jax.Array  # where a row writes
    group_B: jax.Array


class Entering(NamedTuple):
    """Where texts go; a segment or slot past the end is none. Earlier answers come with their text."""

    segment_A: jax.Array
    group_A: jax.Array
    earlier_HS: jax.Array
    earlier_segment_H: jax.Array
    earlier_group_H: jax.Array


def init_texts(segments: int, rows: int, length: int) -> SharedTexts | None:
    """No texts; None when no segment is kept."""
    if not segments:
        return None
    return SharedTexts(
        jnp.full((segments, length), NOTHING), jnp.full((segments,), NOTHING), jnp.full((rows,), NOTHING), jnp.full((rows,), NOTHING))


def enter(texts: SharedTexts, slots_A: jax.Array, text_AS: jax.Array, new: Entering) -> SharedTexts:
    """Rows in `slots_A` with their text so far (−1 past its end), and earlier answers to their prompts."""
    return SharedTexts(
        texts.segments_MS.at[new.segment_A].set(text_AS, mode="drop").at[new.earlier_segment_H].set(new.earlier_HS, mode="drop"),
        texts.group_M.at[new.segment_A].set(new.group_A, mode="drop").at[new.earlier_segment_H].set(new.earlier_group_H, mode="drop"),
        texts.segment_B.at[slots_A].set(new.segment_A, mode="drop"), texts.group_B.at[slots_A].set(new.group_A, mode="drop"))


def hear(texts: SharedTexts, tokens_BJ: jax.Array, position_BJ: jax.Array) -> SharedTexts:
    """What rows emitted becomes readable; a position past the end is no token."""
    row_B1 = jnp.where(texts.segment_B < 0, texts.segments_MS.shape[0], texts.segment_B)[:, None]
    return texts.replace(segments_MS=texts.segments_MS.at[row_B1, position_BJ].set(tokens_BJ, mode="drop"))


def readable(texts: SharedTexts) -> jax.Array:
    """int32 [B, K, S]: up to `PEERS` texts of the row's group that are not its own."""
    segment_M = jnp.arange(texts.group_M.shape[0])
    same_BM = (texts.group_M[None, :] == texts.group_B[:, None]) & (texts.group_B >= 0)[:, None] & (segment_M[None, :] != texts.segment_B[:, None])
    found_BK, index_BK = jax.lax.top_k(same_BM.astype(jnp.float32), min(PEERS, len(segment_M)))
    return jnp.where((found_BK > 0)[:, :, None], texts.segments_MS[index_BK], NOTHING)


def gather_rows(texts: SharedTexts, index_B: jax.Array) -> SharedTexts:
    """Rows move, texts stay."""
    return texts.replace(segment_B=texts.segment_B[index_B], group_B=texts.group_B[index_B])
