"""What becomes of a step's clock: spans that fill it for every slice, and what the drafter's training added to it."""

import pytest

from tlt_jax.runtime.lending import LoanReport
from tlt_jax.scheduling.timeline import Span
from tlt_jax.training import rl_metrics
from tlt_jax.training.rl_metrics import Stopwatch, of_loans, step_spans


@pytest.fixture
def timing(monkeypatch):
    """A step from 0 to 12."""
    monkeypatch.setattr(rl_metrics.time, "monotonic", lambda: 12.0)
    timing = Stopwatch()
    timing.started = 0.0
    ends = {"publish": 1.0, "rollout": 6.0, "reward": 7.0, "score": 8.0, "update": 10.0, "distill": 12.0}
    timing.parts = {name: [(start, end)] for (name, end), start in zip(ends.items(), (0.0, *ends.values()), strict=False)}
    return timing


def test_a_step_is_filled_with_its_rollout_and_what_all_slices_do(timing):
    rollout = [Span(0, "prefill", 1.0, 2.0), Span(0, "rollout", 2.0, 6.0), Span(1, "speculative", 1.5, 4.0), Span(1, "distilling", 4.0, 5.0)]
    after = [("update", 7.0, 10.0), ("distilling", 10.0, 12.0)]
    one = [("publish", 0.0, 1.0), ("prefill", 1.0, 2.0), ("rollout", 2.0, 6.0), ("idle", 6.0, 7.0), *after]
    other = [("publish", 0.0, 1.0), ("idle", 1.0, 1.5), ("speculative", 1.5, 4.0), ("distilling", 4.0, 5.0), ("idle", 5.0, 7.0), *after]
    assert step_spans(timing, rollout, 2) == [*(Span(0, *part) for part in one), *(Span(1, *part) for part in other)]


def test_a_part_that_comes_several_times_is_added_up(timing):
    timing.parts["rollout"].append((7.0, 7.5))
    assert timing.seconds["rollout"] == 5.5 and timing.seconds["reward"] == 1.0


def test_the_drafter_adds_to_a_step_its_training_after_the_update_and_what_it_held_up_the_rollout(timing):
    spans = [Span(0, "rollout", 1.0, 5.0), Span(1, "compile", 1.0, 2.0), Span(1, "distilling", 4.0, 5.0)]
    metrics = of_loans([LoanReport(added_seconds=1.5)], spans, 2, timing)
    assert metrics["scheduler/added_seconds"] == 1.5 + 2.0 and metrics["scheduler/distilling_seconds"] == 1.0
    assert metrics["scheduler/idle_share"] == 2 / 8 and metrics["scheduler/distilling_share"] == 1 / 8
    assert of_loans([], [], 2, timing) == {}


def test_loans_of_several_processes_are_counted_together_and_hold_a_step_up_side_by_side(timing):
    reports = [
        LoanReport(loans=2, trained=3, lent_seconds=1.0, added_seconds=0.5, recall_seconds=0.1),
        LoanReport(loans=1, trained=4, lent_seconds=2.0, recall_seconds=0.3)]
    metrics = of_loans(reports, [Span(3, "rollout", 1.0, 5.0)], 4, timing)
    assert (metrics["scheduler/loans"], metrics["scheduler/quanta"], metrics["scheduler/lent_seconds"]) == (3, 7, 3.0)
    assert (metrics["scheduler/recall_seconds"], metrics["scheduler/added_seconds"]) == (0.3, 0.5 + 2.0)
