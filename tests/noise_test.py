"""The noise: its law down to the rarest draws, its extremes, and that it depends on (key, position, id) and on nothing else."""

import jax
import numpy as np
import pytest
from scipy import stats

from tlt_jax import noise

draw = jax.jit(noise.exponentials)


def keys(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (rows, 2), dtype=np.uint32)


def correlation_bound(samples):
    return 5 / np.sqrt(samples)


def test_the_first_and_the_last_word_give_finite_positive_noise():
    words = np.array([0, 1, 2, 2**24, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1], np.uint32)
    values = np.asarray(noise.exponential(words))
    assert np.isfinite(values).all() and (values > 0).all()
    assert values[0] == pytest.approx(2.0**-33) and values[-1] == pytest.approx(24 * np.log(2), rel=1e-3)


def test_noise_is_the_exponential_of_its_word_at_every_size():
    """−log(1 − u) in float64; the relative error counts, since the smallest values decide which rare token wins."""
    random = np.random.default_rng(0)
    words = np.unique((2.0 ** random.uniform(0, 32, 200_000)).astype(np.uint32))
    words = words[words < 2**32 - 2**12]  # above, u is as coarse as float32 near 1
    exact = -np.log1p(-(words + 0.5) * 2.0**-32)
    np.testing.assert_allclose(noise.exponential(words), exact, rtol=3e-4)
    small = words < 2**31
    rounded = -np.log1p(-(words[small].astype(np.float32).astype(np.float64) + 0.5) * 2.0**-32)
    np.testing.assert_allclose(noise.exponential(words[small]), rounded, rtol=2e-6)
    assert (np.diff(np.asarray(noise.exponential(np.sort(words)))) >= 0).all()


def test_noise_over_rows_positions_and_ids_is_standard_exponential():
    values = np.concatenate([np.asarray(draw(keys(50), np.full((50,), position), np.arange(400))).ravel() for position in (0, 1, 77, 100_000)])
    counts, _ = np.histogram(-np.expm1(-values.astype(np.float64)), bins=100, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-3


def test_the_smallest_noise_of_many_ids_follows_its_law():
    """n · min of n exponentials is standard exponential: what lets rare tokens win exactly as often as they should."""
    n, rows = 2000, 3000
    smallest = np.asarray(draw(keys(rows), np.arange(rows) % 512, np.arange(n))).min(axis=1)
    assert stats.kstest(n * smallest, "expon").pvalue > 1e-3


@pytest.mark.parametrize("bit", [0, 7, 31])
@pytest.mark.parametrize("word", [0, 1])
def test_keys_that_differ_in_one_bit_give_unrelated_noise(word, bit):
    first = keys(1000)
    second = first.copy()
    second[:, word] ^= np.uint32(1 << bit)
    one, other = (np.asarray(draw(key, np.full((1000,), 9), np.arange(100))).ravel() for key in (first, second))
    assert abs(np.corrcoef(one, other)[0, 1]) < correlation_bound(one.size)
    assert (one == other).mean() < 1e-4


@pytest.mark.parametrize("step", [1, 2, 64, 4096])
def test_neighbouring_positions_and_neighbouring_ids_give_unrelated_noise(step):
    rows, key = 400, keys(400)
    at = np.asarray(draw(key, np.arange(rows), np.arange(250)))
    later = np.asarray(draw(key, np.arange(rows) + step, np.arange(250)))
    assert abs(np.corrcoef(at.ravel(), later.ravel())[0, 1]) < correlation_bound(at.size)
    shifted = np.asarray(draw(key, np.arange(rows), np.arange(250) + step))
    assert abs(np.corrcoef(at.ravel(), shifted.ravel())[0, 1]) < correlation_bound(at.size)
    moved_against = np.asarray(draw(key, np.arange(rows) + step, np.arange(250) + step))
    assert abs(np.corrcoef(at.ravel(), moved_against.ravel())[0, 1]) < correlation_bound(at.size)


def test_consecutive_small_keys_give_unrelated_rows():
    """A row must not be its neighbour's noise shifted by an id or a position."""
    small = np.stack([np.arange(300), np.zeros(300)], axis=1).astype(np.uint32)
    words = np.asarray(noise.hash_words(noise.position_key(small, np.zeros((300,), np.int32)), np.arange(300)))
    assert words.size - len(np.unique(words)) <= 6  # a birthday or two among 2^32
    for shift in (0, 1, 2):
        one, other = words[:-1, shift:].ravel().astype(float), words[1:, : 300 - shift].ravel().astype(float)
        assert abs(np.corrcoef(one, other)[0, 1]) < correlation_bound(one.size)


def test_words_rarely_repeat_over_rows_and_positions():
    key, positions = np.repeat(keys(8), 16, axis=0), np.tile(np.arange(16), 8)
    words = np.asarray(noise.hash_words(noise.position_key(key, positions), np.arange(512)))
    assert words.size - len(np.unique(words)) <= 5  # 0.5 are expected


def test_noise_does_not_depend_on_the_place_in_the_batch_nor_on_which_part_of_the_vocabulary_is_asked_for():
    key, position, ids = keys(6), np.array([3, 9, 9, 0, 511, 70_000]), np.arange(1000)
    whole = np.asarray(draw(key, position, ids))
    order = np.array([4, 2, 0, 5, 1, 3])
    np.testing.assert_array_equal(draw(key[order], position[order], ids), whole[order])
    np.testing.assert_array_equal(draw(key[2:3], position[2:3], ids)[0], whole[2])
    np.testing.assert_array_equal(draw(key, position, ids[700:]), whole[:, 700:])
    np.testing.assert_array_equal(draw(key, position, np.array([77, 5, 999])), whole[:, [77, 5, 999]])
    assert not (whole[1] == whole[2]).any()
