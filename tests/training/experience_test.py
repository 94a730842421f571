"""Packing of finished sequences: nothing is lost, moved or mixed, whatever the lengths, and results find their way back."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_jax.training.experience import Packing, Trajectory, pack, packing_for, unpack

FIELDS = {
    "advantages": "advantages_BT", "old_logprobs": "old_logprobs_BT", "reference_logprobs": "reference_logprobs_BT", "old_values": "old_values_BT",
    "returns": "returns_BT", "rollout_logprobs": "rollout_logprobs_BT"}
shapes = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.booleans()), min_size=1, max_size=20)


def make(lengths):
    """Trajectories whose every number occurs once."""
    numbers = iter(np.arange(1, 100_000, dtype=np.float32))

    def some(count):
        return np.array([next(numbers) for _ in range(count)], np.float32)

    return [
        Trajectory(some(prompt + answer).astype(np.int32), prompt, some(answer), trained, *(some(answer) for _ in range(5)))
        for prompt, answer, trained in lengths]


@settings(max_examples=60, deadline=None)
@given(lengths=shapes, rows=st.sampled_from([1, 2, 4]), budget=st.integers(1, 4))
def test_every_number_of_every_sequence_is_there_once_at_its_token(lengths, rows, budget):
    trajectories = make(lengths)
    columns = max(len(one.tokens) for one in trajectories)
    packed = pack(trajectories, Packing(columns * rows * budget, rows, columns))
    assert len({batch.tokens_BT.shape for batch in packed.batches}) == len({batch.targets_BM.shape for batch in packed.batches}) == 1
    assert all(batch.tokens_BT.size <= columns * rows * budget and len(batch.tokens_BT) % rows == 0 for batch in packed.batches)
    for (number, row, column), one in zip(packed.places, trajectories, strict=True):
        batch, whole = packed.batches[number], slice(column, column + len(one.tokens))
        answer = slice(column + one.prompt_length, whole.stop)
        np.testing.assert_array_equal(batch.tokens_BT[row, whole], one.tokens)
        np.testing.assert_array_equal(batch.positions_BT[row, whole], np.arange(len(one.tokens)))
        assert len(set(batch.segments_BT[row, whole])) == 1 and batch.segments_BT[row, column] > 0
        assert set(range(answer.start, answer.stop)) <= set(batch.targets_BM[row].tolist())
        np.testing.assert_array_equal(batch.mask_BT[row, answer], float(one.trained))
        for mine, theirs in FIELDS.items():
            np.testing.assert_array_equal(getattr(batch, theirs)[row, answer], getattr(one, mine))
    for theirs in FIELDS.values():
        assert sum((getattr(batch, theirs) != 0).sum() for batch in packed.batches) == sum(answer for _, answer, _ in lengths)
    assert sum(batch.mask_BT.sum() for batch in packed.batches) == sum(answer for _, answer, trained in lengths if trained)
    assert sum((batch.segments_BT > 0).sum() for batch in packed.batches) == sum(prompt + answer for prompt, answer, _ in lengths)
    assert sum((batch.targets_BM < columns).sum() for batch in packed.batches) == sum(answer for _, answer, _ in lengths)


@settings(max_examples=30, deadline=None)
@given(lengths=shapes)
def test_results_come_back_to_the_sequence_that_they_are_about(lengths):
    trajectories = make(lengths)
    packed = pack(trajectories, Packing(256, 1, 64))
    for one, found in zip(trajectories, unpack(packed, [batch.returns_BT for batch in packed.batches], trajectories), strict=True):
        np.testing.assert_array_equal(found, one.returns)


def test_numbers_that_an_algorithm_does_not_have_are_zeros():
    (one,) = make([(3, 4, True)])
    bare = dataclasses.replace(one, advantages=None, old_logprobs=None, reference_logprobs=None, old_values=None, returns=None)
    (batch,) = pack([bare], Packing(64, 1, 64)).batches
    assert not any(getattr(batch, name).any() for name in FIELDS.values() if name != "rollout_logprobs_BT")


def test_packed_rows_hold_the_longest_sequence_and_two_usual_ones_where_the_budget_allows():
    assert packing_for([100, 100, 300], 128, 4096, 1).row_length == 640  # 2 · 1.05 · (167 + 128), in steps of 32
    assert packing_for([100, 100, 900], 128, 4096, 1).row_length == 1056
    assert packing_for([100, 100, 300], 128, 1000, 2).row_length == 500
    assert packing_for([100], 20, 64, 1).row_length == 120
