import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_jax.masked import WeightedMean, masked_mean, masked_sum, masked_variance, segment_totals

POISON = [np.nan, np.inf, -np.inf]


@given(st.lists(st.tuples(st.floats(-5, 5, width=32), st.booleans(), st.integers(0, 3)), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_merging_the_parts_of_any_split_gives_the_mean_of_the_whole(rows):
    values, mask, part = (np.asarray(column) for column in zip(*rows, strict=True))
    mask = mask.astype(np.float32)
    pieces = [WeightedMean.over(values[part == index], mask[part == index]) for index in range(4)]
    merged = pieces[0] + pieces[1] + pieces[2] + pieces[3]
    expected = (values * mask).sum() / mask.sum() if mask.sum() else 0.0
    np.testing.assert_allclose(merged.value, expected, atol=1e-6, rtol=1e-5)
    assert float(merged.weight) == mask.sum()


def test_plus_merges_and_does_not_concatenate_the_pairs():
    merged = sum([WeightedMean(2.0, 1.0), WeightedMean(4.0, 2.0)], start=WeightedMean(0.0, 0.0))
    assert merged == (6.0, 3.0) and merged == WeightedMean(2.0, 1.0).merge(WeightedMean(4.0, 2.0))


def test_an_empty_mean_is_zero_with_zero_gradient():
    def mean(values):
        return WeightedMean.over(values, jnp.zeros(3)).value

    value, gradient = jax.value_and_grad(mean)(jnp.asarray([1.0, np.nan, np.inf]))
    assert value == 0 and not gradient.any()


@pytest.mark.parametrize("poison", POISON)
def test_what_is_masked_out_is_never_read(poison):
    values, mask = jnp.asarray([1.0, poison, 3.0, 8.0]), jnp.asarray([1, 0, 1, 1])
    assert masked_sum(values, mask) == 12 and masked_mean(values, mask) == 4
    assert masked_variance(values, mask) == 13
    gradient = jax.grad(lambda values: masked_variance(values, mask) + WeightedMean.over(values, mask).value)(values)
    assert np.isfinite(gradient).all() and gradient[1] == 0


def test_a_mean_along_an_axis_counts_that_axis_only():
    np.testing.assert_allclose(masked_mean(jnp.asarray([[1.0, 3.0], [5.0, 9.0]]), jnp.asarray([[1, 1], [1, 0]]), axis=1), [2.0, 5.0])


def test_the_variance_survives_a_large_common_offset():
    values = np.asarray([4000.35, 4000.35, 4000.0], np.float32)
    np.testing.assert_allclose(masked_variance(values, np.ones(3)), np.var(values.astype(np.float64), ddof=1), rtol=1e-3)


def test_segments_of_two_rows_with_the_same_ids_are_kept_apart():
    values_BT = jnp.asarray([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 128.0]])
    segments_BT = jnp.asarray([[1, 1, 2, 0], [1, 2, 2, 2]])
    np.testing.assert_array_equal(segment_totals(values_BT, segments_BT), [[3, 3, 4, 8], [16, 224, 224, 224]])
    np.testing.assert_array_equal(segment_totals(values_BT, jnp.asarray([[1, 2, 3, 4]] * 2)), values_BT)


def test_a_segment_id_beyond_the_row_gives_nan_and_leaves_the_other_row_alone():
    totals_BT = segment_totals(jnp.ones((2, 3)), jnp.asarray([[1, 1, 4], [1, 1, 1]]))
    np.testing.assert_array_equal(totals_BT, [[2, 2, np.nan], [3, 3, 3]])
