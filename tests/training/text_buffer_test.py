"""The ring of texts: bounded, deterministic, and never without long answers as long as there are any."""

import json
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_jax.training.text_buffer import Text, TextBuffer

shares = st.sampled_from([0.0, 0.25, 0.5, 0.8])
steps = st.lists(st.lists(st.integers(1, 40), max_size=12), max_size=6)


def text(length, step=0, index=0, width=0):
    """A text whose tokens say where it is from; with features when `width` is not 0."""
    features = np.arange(length * width, dtype=np.float32).reshape(length, width) + index if width else None
    return Text(np.full(length, 1000 * step + index, np.int32), min(length, 2), step, index, features, features[:, :1].copy() if width else None)


def filled(lengths_of_steps, capacity=1000, share=0.25, shuffle=None):
    buffer = TextBuffer(capacity, share)
    for step, lengths in enumerate(lengths_of_steps):
        texts = [text(length, step, index) for index, length in enumerate(lengths)]
        for one in shuffle(texts) if shuffle else texts:
            buffer.add(one)
        buffer.end_step()
    return buffer


def places(texts):
    return [(one.step, one.index, len(one.tokens)) for one in texts]


def all_of(buffer):
    """Everything held, in an order that its content decides."""
    return places(buffer.draw((0,), 10**9))


@settings(deadline=None)
@given(steps, st.integers(0, 400), shares)
def test_the_buffer_never_holds_more_than_its_bound(lengths_of_steps, capacity, share):
    buffer, added = TextBuffer(capacity, share), 0
    for step, lengths in enumerate(lengths_of_steps):
        for index, length in enumerate(lengths):
            buffer.add(text(length, step, index))
            added += 1
            held = buffer.draw((0,), 10**9)
            assert buffer.bytes == sum(one.tokens.nbytes for one in held) <= capacity
            assert len(buffer) == len(held) <= added - buffer.left_out
        buffer.end_step()
        assert buffer.bytes <= capacity


@settings(deadline=None)
@given(steps, st.integers(0, 400), shares, st.randoms())
def test_the_order_in_which_texts_finish_decides_nothing_once_the_step_is_over(lengths_of_steps, capacity, share, random):
    one = filled(lengths_of_steps, capacity, share)
    other = filled(lengths_of_steps, capacity, share, shuffle=lambda texts: random.sample(texts, len(texts)))
    assert all_of(one) == all_of(other) and one.left_out == other.left_out
    assert places(one.draw((1, 2), 30)) == places(other.draw((1, 2), 30))


def test_a_long_text_that_loses_its_guard_saves_no_short_ones_that_came_late():
    steps = [[5] * 3, [45, *[5] * 16, 20]]  # the 45 tokens are guarded until the 20 come, and then too old
    assert all_of(filled(steps, 400, 0.5)) == all_of(filled(steps, 400, 0.5, shuffle=reversed))


@settings(deadline=None)
@given(st.lists(st.integers(50, 60), min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 200))
def test_a_flood_of_short_texts_leaves_the_newest_long_ones_up_to_their_share(long, short, flood):
    buffer = filled([[*long, *[short] * 5], [short] * flood, [short] * flood], capacity=1600, share=0.25)
    guarded = [index for index in range(len(long)) if sum(long[index:]) * 4 <= 400]
    assert {(0, index, long[index]) for index in guarded} <= set(all_of(buffer)) and guarded


def test_the_oldest_text_goes_first_when_all_are_alike():
    assert sorted(all_of(filled([[10] * 3, [10] * 2], capacity=160))) == [(0, 1, 10), (0, 2, 10), (1, 0, 10), (1, 1, 10)]


def test_long_texts_give_way_to_newer_long_ones():
    held = all_of(filled([[50, *[5] * 9], [51, *[5] * 9], [52, *[5] * 30]], capacity=900, share=0.25))
    assert (2, 0, 52) in held and (0, 0, 50) not in held


def test_a_text_too_long_to_be_guarded_takes_the_guard_of_no_other():
    assert (0, 0, 20) in all_of(filled([[20, *[5] * 5], [60], [5] * 30], capacity=400, share=0.25))


def test_a_text_that_had_to_leave_is_not_kept_in_memory():
    buffer, first = TextBuffer(100, 0.0), text(20)
    alive = weakref.ref(first)
    buffer.add(first)
    del first
    assert alive() is not None
    buffer.add(text(20, index=1))
    assert alive() is None


def test_a_text_larger_than_its_room_is_left_out_and_counted():
    buffer = TextBuffer(400, 0.25)
    buffer.add(text(76))
    assert (len(buffer), buffer.bytes, buffer.left_out) == (0, 0, 1)
    buffer.add(text(75, index=1))
    assert (len(buffer), buffer.bytes, buffer.left_out) == (1, 300, 1)


@settings(deadline=None)
@given(steps, shares, st.integers(1, 100), st.integers(0, 9))
def test_a_draw_repeats_nothing_fits_and_gives_long_texts_their_share(lengths_of_steps, share, tokens, key):
    buffer = filled(lengths_of_steps, capacity=10**6, share=share)
    drawn, held = places(buffer.draw((key, 3), tokens)), all_of(buffer)
    assert drawn == places(buffer.draw((key, 3), tokens)) and len(set(drawn)) == len(drawn) and bool(drawn) == bool(held)
    total = sum(length for *_, length in drawn)
    assert total <= tokens or len(drawn) == 1
    middle = np.median([length for *_, length in held]) if held else 0
    long = sum(length for *_, length in drawn if length > middle)
    could_come = [one for one in held if one[2] > middle and one not in drawn and long + one[2] <= tokens]
    assert long >= share * total or not could_come


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_chance_of_a_text_does_not_fall_with_its_length(share):
    # One long text among short ones that would fit where it does not: shuffling and skipping what does not fit would draw it a third as often.
    buffer = filled([[*[3] * 40, *[8] * 10, *[25] * 10, *[61] * 10]], capacity=10**6, share=share)
    times = dict.fromkeys((3, 8, 25, 61), 0)
    for key in range(3000):
        for one in buffer.draw((key,), 100):
            times[len(one.tokens)] += 1
    chance = [times[3] / 40, times[8] / 10, times[25] / 10, times[61] / 10]
    assert all(longer > 0.9 * shorter for shorter, longer in zip(chance, chance[1:], strict=False)), chance


def test_texts_of_the_running_step_can_be_drawn_and_are_not_part_of_the_state():
    buffer = filled([[4, 5]])
    buffer.add(text(6, step=1))
    assert (1, 0, 6) in all_of(buffer) and len(buffer) == 3
    assert len(buffer.state()[1]["texts"]) == 2


@settings(deadline=None)
@given(steps, st.sampled_from([0, 3]), st.integers(40, 4000), shares)
def test_a_restored_ring_draws_and_goes_on_as_the_saved_one(lengths_of_steps, width, capacity, share):
    saved, restored = TextBuffer(capacity, share), TextBuffer(capacity, share)
    for step, lengths in enumerate(lengths_of_steps):
        for index, length in enumerate(lengths):
            saved.add(text(length, step, index, width))
        saved.end_step()
    arrays, host = saved.state()
    assert all(array.size for array in arrays.values())
    restored.restore(arrays, json.loads(json.dumps(host)))
    assert (len(restored), restored.bytes, restored.left_out) == (len(saved), saved.bytes, saved.left_out)
    for one, other in zip(saved.draw((7,), 10**9), restored.draw((7,), 10**9), strict=True):
        assert (one.prompt_length, one.step, one.index) == (other.prompt_length, other.step, other.index)
        for mine, theirs in ((one.tokens, other.tokens), (one.features, other.features), (one.final, other.final)):
            np.testing.assert_array_equal(mine, theirs)
            assert theirs is None or theirs.base is None and theirs.dtype == mine.dtype
    for buffer in (saved, restored):
        for index, length in enumerate((30, 2, 9, 2)):
            buffer.add(text(length, 99, index, width))
        buffer.end_step()
    assert places(saved.draw((8,), 50)) == places(restored.draw((8,), 50)) and all_of(saved) == all_of(restored)


def test_a_ring_restored_into_a_smaller_buffer_keeps_the_bound():
    saved, smaller = filled([[10] * 8]), TextBuffer(200, 0.25)
    smaller.restore(*saved.state())
    assert smaller.bytes <= 200 and sorted(all_of(smaller))[-1] == (0, 7, 10)
