import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_jax.scheduling.batching import length_bucket, microbatches, pack, power_bucket

LENGTHS = st.lists(st.integers(1, 64), max_size=60)


def flat(rows):
    return sorted(index for row in rows for index in row)


@given(LENGTHS, st.integers(64, 200), st.integers(1, 4))
def test_packing_loses_nothing_and_keeps_the_capacity(lengths, capacity, row_multiple):
    rows = pack(lengths, capacity, row_multiple=row_multiple)
    assert flat(rows) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= capacity for row in rows)
    assert len(rows) % row_multiple == 0 and sum(not row for row in rows) < row_multiple


@given(LENGTHS, st.integers(64, 200))
def test_packing_wastes_less_than_half_of_the_rows(lengths, capacity):
    rows = pack(lengths, capacity)
    assert len(rows) <= 1 + 2 * sum(lengths) / capacity
    assert rows == pack(lengths, capacity) == sorted(rows)


@given(st.permutations(range(12)), st.lists(st.integers(1, 40), min_size=12, max_size=12))
def test_the_order_of_the_sequences_does_not_change_the_row_loads(order, lengths):
    def loads(lengths):
        return sorted(sum(lengths[index] for index in row) for row in pack(lengths, 50))

    assert loads(lengths) == loads([lengths[index] for index in order])


def test_packing_fills_the_fullest_row_that_still_fits():
    assert pack([2, 6, 3, 5, 4], 10) == [[0, 2, 3], [1, 4]]
    assert pack([], 10) == [] and pack([3], 10, row_multiple=4) == [[0], [], [], []]


@pytest.mark.parametrize(("lengths", "message"), [([3, 11], "sequence 1 has 11 tokens, more than the row capacity of 10"), ([3, 0], "sequence 1 has length 0")])
def test_a_sequence_that_cannot_be_packed_is_an_error_that_names_it(lengths, message):
    with pytest.raises(ValueError, match=message):
        pack(lengths, 10)


def test_twenty_thousand_sequences_pack_without_quadratic_search():
    lengths = [1 + (index * 7919) % 4096 for index in range(20_000)]
    rows = pack(lengths, 8192)
    assert sum(lengths) / (8192 * len(rows)) > 0.98


@given(LENGTHS, st.integers(1, 3), st.integers(1, 5))
def test_microbatches_have_one_shape_within_the_budget_and_lose_nothing(lengths, row_multiple, scale):
    budget = 64 * row_multiple * scale
    plan = microbatches(lengths, budget, row_multiple=row_multiple)
    assert flat(row for batch in plan.microbatches for row in batch) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= plan.row_length for batch in plan.microbatches for row in batch)
    shapes = {len(batch) for batch in plan.microbatches}
    assert len(shapes) <= 1 and all(rows % row_multiple == 0 and rows * plan.row_length <= budget for rows in shapes)


def test_the_row_length_is_a_bucket_unless_only_the_longest_itself_fits():
    assert microbatches([5, 40, 9], 256).row_length == 64
    assert microbatches([5, 40, 9], 50).row_length == 40
    assert microbatches([5, 40, 9], 256, row_length=128).row_length == 128


def test_a_budget_below_the_longest_sequence_is_an_error_that_says_what_to_raise():
    with pytest.raises(ValueError, match="raise batch.tokens_per_microbatch to at least 80"):
        microbatches([40, 3], 79, row_multiple=2)
    with pytest.raises(ValueError, match="sequence 0 has 40 tokens"):
        microbatches([40, 3], 79, row_length=32)


def test_buckets_are_the_smallest_that_fit():
    assert [length_bucket(length, [64, 16, 256]) for length in (1, 16, 17, 256)] == [16, 16, 64, 256]
    assert [power_bucket(length, 16) for length in (1, 16, 17, 100)] == [16, 16, 32, 128]
    assert [power_bucket(length, 16, factor=4) for length in (16, 17, 65)] == [16, 64, 256]
    with pytest.raises(ValueError, match=r"length 300 fits in no bucket of \[16, 64\]"):
        length_bucket(300, [64, 16])
    with pytest.raises(ValueError, match="minimum >= 1"):
        power_bucket(5, 0)
