"""Speed metrics of a phase from its dispatches: measured gain, shares of rounds, tail over all slices."""

import pytest

from tlt_jax.scheduling.decode_report import Dispatch, report, tail
from tlt_jax.scheduling.strategy_selector import Bucket
from tlt_jax.strategies import OFF, Strategy

CHAIN, ONE, FOUR = Strategy(3, 1, 3), Bucket(1, False), Bucket(4, False)


def dispatch(started, seconds, strategy=OFF, bucket=ONE, rows=1, tokens=10, rounds=10, compiled=False):
    return Dispatch(started, seconds, strategy, bucket, rows, tokens, rounds, rows * rounds, compiled)


def test_the_gain_is_plain_time_for_the_same_tokens_over_the_time_it_took():
    own = [dispatch(0, 1.0), dispatch(1, 1.0, CHAIN, tokens=30)]
    assert report([(own, {ONE: 10.0})])["spec/speedup_vs_plain"] == pytest.approx((1 + 3) / 2)


def test_numbers_of_rows_without_a_plain_rate_and_dispatches_that_compiled_say_nothing_about_the_gain():
    own = [dispatch(0, 1.0, CHAIN, tokens=20), dispatch(1, 9.0, CHAIN, FOUR, tokens=1), dispatch(10, 9.0, CHAIN, tokens=1, compiled=True)]
    assert report([(own, {ONE: 10.0})])["spec/speedup_vs_plain"] == pytest.approx(2)
    assert "spec/speedup_vs_plain" not in report([(own, {})])


def test_a_phase_without_drafts_reports_no_gain():
    metrics = report([([dispatch(0, 1.0)], {ONE: 10.0})])
    assert "spec/speedup_vs_plain" not in metrics and metrics["spec/rounds_share_plain"] == 1


def test_shares_count_rounds_and_not_dispatches():
    metrics = report([([dispatch(0, 1, rounds=30)], {}), ([dispatch(0, 1, CHAIN, rounds=10)], {})])
    assert metrics["spec/rounds_share_plain"] == 0.75 and metrics["spec/rounds_share_3_1_3"] == 0.25


def test_the_accept_length_of_drafted_rounds_leaves_plain_rounds_out_and_counts_every_row():
    own = [dispatch(0, 1.0, rows=4, tokens=40), dispatch(1, 1.0, CHAIN, rows=2, tokens=30), dispatch(2, 1.0, CHAIN, rows=1, tokens=30)]
    assert report([(own, {})])["spec/accept_length_drafted"] == pytest.approx(60 / 30)
    assert "spec/accept_length_drafted" not in report([(own[:1], {})])


def test_no_dispatch_gives_no_metric():
    assert report([([], {})]) == {}


def test_the_tail_is_where_the_last_tenth_of_active_row_time_goes():
    # 9 row-seconds in 1 s, then 1 row-second in 1 s: that second is the tail.
    assert tail([dispatch(0, 1.0, rows=9), dispatch(1, 1.0, rows=1)]) == pytest.approx((1.0, 0.5))


def test_the_tail_looks_at_all_slices_together():
    # Two slices: 6 rows for 1 s beside 3 rows for 1 s, then one slice goes on alone with one row.
    apart = [dispatch(0, 1.0, rows=6), dispatch(0, 1.0, rows=3), dispatch(1, 1.0, rows=1)]
    assert tail(apart) == pytest.approx((1.0, 0.5))


def test_even_work_has_a_tail_of_a_tenth_and_gaps_are_no_part_of_it():
    assert tail([dispatch(0, 5.0, rows=4), dispatch(15, 5.0, rows=4)]) == pytest.approx((1.0, 0.1))


def test_a_shorter_tail_of_the_same_work_shows():
    slow = [dispatch(0, 1.0, rows=9), dispatch(1, 2.0, rows=1)]
    fast = [dispatch(0, 1.0, rows=9), dispatch(1, 1.0, rows=1)]
    assert tail(fast)[0] < tail(slow)[0]
