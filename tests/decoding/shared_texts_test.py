"""Texts that rows share: those of their own prompt, as far as they were written."""

import jax.numpy as jnp

from tlt_jax.decoding import shared_texts
from tlt_jax.decoding.shared_texts import Entering

SLOTS = 5
TEXTS = jnp.array([[1, 2, -1, -1, -1], [5, 1, -1, -1, -1], [1, 2, -1, -1, -1]])


def entered():
    """Rows 0 and 1 of one prompt, row 2 of another, an earlier answer of 0 and 1 in segment 3 and one padding entry."""
    texts = shared_texts.init_texts(5, 3, SLOTS)
    earlier = jnp.array([[9, 9, 8, -1, -1], [4, 4, 4, 4, 4]])
    return shared_texts.enter(texts, jnp.arange(3), TEXTS, Entering(jnp.array([2, 0, 1]), jnp.array([0, 0, 7]), earlier, jnp.array([3, 5]), jnp.array([0, 0])))


def read(texts, row):
    return {tuple(text) for text in shared_texts.readable(texts)[row].tolist()} - {(-1,) * SLOTS}


def test_a_row_reads_the_other_texts_of_its_prompt():
    texts = entered()
    assert read(texts, 0) == {(5, 1, -1, -1, -1), (9, 9, 8, -1, -1)}
    assert read(texts, 1) == {(1, 2, -1, -1, -1), (9, 9, 8, -1, -1)}
    assert read(texts, 2) == set()


def test_what_a_row_emits_is_read_by_its_peers_and_positions_past_the_end_are_not():
    texts = shared_texts.hear(entered(), jnp.array([[7, 7], [2, 9], [6, 6]]), jnp.array([[2, SLOTS], [2, 3], [SLOTS, SLOTS]]))
    assert read(texts, 0) == {(5, 1, 2, 9, -1), (9, 9, 8, -1, -1)}
    assert read(texts, 1) == {(1, 2, 7, -1, -1), (9, 9, 8, -1, -1)}


def test_a_text_stays_readable_when_its_row_is_gone_and_moved_rows_keep_their_place():
    texts = shared_texts.gather_rows(entered(), jnp.array([1]))
    assert read(texts, 0) == {(1, 2, -1, -1, -1), (9, 9, 8, -1, -1)}
    assert read(shared_texts.hear(texts, jnp.array([[3]]), jnp.array([[2]])), 0) == {(1, 2, -1, -1, -1), (9, 9, 8, -1, -1)}


def test_a_row_that_never_entered_reads_and_writes_nothing():
    texts = shared_texts.hear(shared_texts.init_texts(2, 1, SLOTS), jnp.array([[3]]), jnp.array([[2]]))
    assert (texts.segments_MS == -1).all() and read(texts, 0) == set()
