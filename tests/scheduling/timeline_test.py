"""Spans of slices: each moment belongs to one, whatever overlaps; shares by kind; what a phase becomes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlt_jax.scheduling.decode_report import Admission, Dispatch
from tlt_jax.scheduling.strategy_selector import Bucket
from tlt_jax.scheduling.timeline import KINDS, Span, loan_metrics, of_phase, with_idle
from tlt_jax.strategies import OFF, Strategy

SLICES = 3
MOMENTS = st.one_of(st.integers(-2, 12), st.floats(-2, 12))  # whole numbers meet each other and the ends of the window


@st.composite
def one_span(draw):
    start, end = sorted((draw(MOMENTS), draw(MOMENTS)))
    return Span(draw(st.integers(0, SLICES - 1)), draw(st.sampled_from(KINDS)), start, end)


def kind_at(spans, slice, moment):
    """By the rule as it is told: the latest start wins, then the shorter, then the later in KINDS."""
    there = [span for span in spans if span.slice == slice and span.start <= moment < span.end]
    return max(there, key=lambda span: (span.start, -span.end, KINDS.index(span.kind))).kind if there else "idle"


@given(st.lists(one_span(), max_size=12), MOMENTS, MOMENTS)
def test_every_moment_of_every_slice_belongs_to_the_span_that_started_last(spans, one, other):
    start, end = sorted((one, other))
    parts = with_idle(spans, SLICES, start, end)
    for slice in range(SLICES):
        own = [part for part in parts if part.slice == slice]
        assert [part.start for part in own] + [end] == [start, *(part.end for part in own)]  # no gap, no overlap, the window exactly
        assert all(part.start < part.end for part in own)
        borders = sorted({start, end, *(moment for span in (*spans, *own) for moment in (span.start, span.end) if start <= moment <= end)})
        for moment in borders[:-1]:
            assert [part.kind for part in own if part.start <= moment < part.end] == [kind_at(spans, slice, moment)]


@given(st.lists(one_span(), max_size=12).flatmap(lambda spans: st.tuples(st.just(spans), st.permutations(spans))))
def test_the_order_in_which_spans_were_noted_changes_nothing(spans):
    noted, shuffled = spans
    assert with_idle(noted, SLICES, 0, 10) == with_idle(shuffled, SLICES, 0, 10)


def test_neighbours_of_one_kind_are_one_span_and_work_goes_on_after_what_interrupted_it():
    spans = [Span(0, "rollout", 0, 2), Span(0, "rollout", 2, 9), Span(0, "compile", 3, 4)]
    assert with_idle(spans, 1, 0, 10) == [Span(0, "rollout", 0, 3), Span(0, "compile", 3, 4), Span(0, "rollout", 4, 9), Span(0, "idle", 9, 10)]


def test_a_span_on_a_slice_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="slice 4: there are 4 slices"):
        with_idle([Span(4, "rollout", 0, 1)], 4, 0, 1)


def test_an_admission_is_a_prefill_a_dispatch_speculative_when_it_drafts_and_either_a_compile_when_it_compiled():
    chain = Strategy(3, 1, 3)
    dispatches = [
        Dispatch(started, 0.5, strategy, Bucket(1, False), 1, 10, 10, 10, compiled)
        for started, strategy, compiled in ((0, OFF, True), (1, OFF, False), (2, chain, False), (3, chain, True))]
    admissions = [Admission(started, 0.25, compiled) for started, compiled in ((0.5, True), (1.5, False))]
    assert of_phase(7, admissions, dispatches) == [
        Span(7, "compile", 0.5, 0.75), Span(7, "prefill", 1.5, 1.75), Span(7, "compile", 0, 0.5),
        Span(7, "rollout", 1, 1.5), Span(7, "speculative", 2, 2.5), Span(7, "compile", 3, 3.5)]


def test_the_loan_metrics_are_shares_of_the_time_of_all_slices():
    spans = with_idle([Span(0, "rollout", 0, 10), Span(1, "rollout", 0, 4), Span(1, "distilling", 5, 10)], 2, 0, 10)
    assert loan_metrics(spans) == pytest.approx({"scheduler/idle_share": 1 / 20, "scheduler/distilling_share": 5 / 20})
    assert loan_metrics(with_idle([], 2, 0, 0)) == {}
