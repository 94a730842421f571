"""Which rows move together, as properties of slices whose rows end while others move."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_jax.scheduling.batching import length_bucket
from tlt_jax.scheduling.consolidation import SLOTS_TO_COPY, TOLERANCE, Holding, Move, next_move
from tlt_jax.strategies import OFF, Strategy

CHAIN = Strategy(3, 1, 3)
SIZES = (1, 4, 16, 64)
FLAT = {(size, strategy): 1.0 for size in SIZES for strategy in (OFF, CHAIN)}


@st.composite
def holdings(draw):
    sizes = draw(st.sampled_from([SIZES, (1, 4, 16), (1, 4, 8), (1,), (1, 4, 16, 60)]))
    seconds = st.one_of(st.just(1.0), st.floats(0.9, 1.3))
    costs = {(size, strategy): draw(seconds) for size in sizes for strategy in (OFF, CHAIN) if draw(st.integers(0, 9))}
    return Holding(draw(st.integers(0, sizes[-1])), sizes, costs)


PHASES = st.tuples(st.lists(holdings(), min_size=1, max_size=6), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=10))


@settings(max_examples=500, deadline=None)
@given(PHASES)
def test_moves_lose_no_row_overfill_no_slice_make_no_row_measurably_slower_and_come_to_an_end(phase):
    slices, ends = phase
    for turn in range(100):
        move = next_move(slices, 0)
        assert move == next_move(slices, 0)
        if move is None:
            return
        source, target = slices[move.source], slices[move.target]
        together = source.rows + target.rows
        assert source.rows and target.rows and move.source != move.target and together <= target.sizes[-1]
        held, copied, after = (length_bucket(rows, target.sizes) for rows in (target.rows, source.rows, together))
        assert SLOTS_TO_COPY * copied <= target.sizes[-1]
        for size in (held, copied):
            assert (size, OFF) in target.costs or (size, CHAIN) in target.costs
            for strategy in (OFF, CHAIN):
                if (size, strategy) in target.costs:
                    assert target.costs[after, strategy] <= (1 + TOLERANCE) * target.costs[size, strategy]
        before = slices
        slices = [held._replace(rows={move.source: 0, move.target: together}.get(number, held.rows)) for number, held in enumerate(slices)]
        assert sum(held.rows for held in slices) == sum(held.rows for held in before)
        assert sum(held.rows > 0 for held in slices) == sum(held.rows > 0 for held in before) - 1
        number, ended = ends[turn] if turn < len(ends) else (0, 0)
        number %= len(slices)
        slices[number] = slices[number]._replace(rows=max(0, slices[number].rows - ended))
    raise AssertionError("rows move for ever")


@settings(max_examples=100, deadline=None)
@given(st.lists(holdings(), min_size=1, max_size=6), st.integers(1, 9))
def test_nothing_moves_while_requests_wait(slices, queued):
    assert next_move(slices, queued) is None


@pytest.mark.parametrize(("rows", "costs", "move"), [
    ((1, 3), FLAT, Move(0, 1)),  # together they fill the size that one of them has
    ((0, 2, 9, 1), FLAT, Move(3, 2)),  # the fewest to the most
    ((17, 17), FLAT, None),  # the copy would take as much memory as a full cache
    ((16, 60), FLAT, None),  # no room
    ((0, 5), FLAT, None),
    ((1, 1), FLAT | {(4, OFF): 1.04}, Move(0, 1)),  # as slow as two measurements of the same
    ((1, 1), FLAT | {(4, OFF): 1.2}, None),
    ((1, 1), FLAT | {(4, CHAIN): 1.2}, None),  # faster plainly, and yet slower as the slice may decode
    ((1, 3), FLAT | {(1, OFF): 0.5}, None),  # the row that is alone would take twice as long
    ((1, 1), {key: 1.0 for key in FLAT if key != (4, CHAIN)}, None),  # they would lose their drafts
    ((1, 1), {key: 1.0 for key in FLAT if key[0] != 1}, None), ((1, 1), {}, None)], ids=str)
def test_rows_move_only_where_every_measured_round_says_that_none_gets_slower(rows, costs, move):
    assert next_move([Holding(count, SIZES, costs) for count in rows], 0) == move
