"""Numbers of an RL step under the names that people know, from completions, scores and update statistics. Plain Python and numpy."""

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tlt_jax.runtime.lending import LoanReport
from tlt_jax.scheduling import timeline
from tlt_jax.scheduling.timeline import Span
from tlt_jax.training import credit
from tlt_jax.training.scoring import Rollouts
from tlt_jax.training.settings import Config

ALL_SLICES = {"publish": "publish", "score": "update", "update": "update", "distill": "distilling"}  # kind of span by the part of a step that takes them all


class Stopwatch:
    """The named parts of a step on the clock, each of them once or several times."""

    def __init__(self):
        self.parts: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        self.started = time.monotonic()

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """The block is the part `name`."""
        started = time.monotonic()
        yield
        self.parts[name].append((started, time.monotonic()))

    @property
    def seconds(self) -> dict[str, float]:
        """How long each part took."""
        return {name: sum(end - start for start, end in times) for name, times in self.parts.items()}

    def total(self) -> float:
        """Seconds since the watch was made."""
        return time.monotonic() - self.started


def of_rollout(rollouts: Rollouts, timing: Stopwatch) -> dict[str, float]:
    """reward/ completions/ timing/ perf/ metrics of a step."""
    rewards, judged = (np.array([np.nan if one is None else one for one in some]) for some in (
        [score.score for score in rollouts.scores], [score.judged for score in rollouts.scores]))
    scored = rewards[~np.isnan(rewards)]
    lengths = np.array([len(completion.token_ids) for completion in rollouts.completions])
    cut = np.array([completion.finish_reason == "length" for completion in rollouts.completions])
    prompt_lengths = np.array([len(completion.request.prompt_ids) for completion in rollouts.completions])
    groups, verdicts = ([row[~np.isnan(row)] for row in some.reshape(-1, rollouts.generations) if not np.isnan(row).all()] for some in (rewards, judged))
    metrics = {
        "completions/length_mean": lengths.mean(), "completions/length_min": lengths.min(), "completions/length_max": lengths.max(),
        "completions/truncated_fraction": cut.mean(), "completions/prompt_length_mean": prompt_lengths.mean(),
        "spec/accept_length_mean": lengths.sum() / sum(completion.forwards for completion in rollouts.completions),
        "reward/unscored": int(np.isnan(rewards).sum()), "perf/tokens": int(lengths.sum() + prompt_lengths.sum()),
        "perf/tokens_per_second": lengths.sum() / max(timing.seconds["rollout"], 1e-9), "timing/step_seconds": timing.total(),
    } | {f"timing/{name}_seconds": seconds for name, seconds in timing.seconds.items()}
    if len(scored):
        metrics |= {
            "reward/mean": scored.mean(), "reward/std": scored.std(), "reward/max": scored.max(), "reward/min": scored.min(),
            "reward/accuracy": (judged[~np.isnan(judged)] >= 1.0).mean()}
    if len(scored) and rollouts.generations > 1:  # a group of one says nothing about its prompt
        metrics |= {
            "reward/groups_equal_fraction": np.mean([row.max() == row.min() for row in groups]),
            "reward/groups_all_right_fraction": np.mean([row.min() >= 1.0 for row in verdicts]),
            "reward/groups_all_wrong_fraction": np.mean([row.max() <= 0.0 for row in verdicts])}
    names = {name for score in rollouts.scores for name in score.components}
    for name in names:
        metrics[f"reward/{name}"] = np.mean([score.components[name] for score in rollouts.scores if name in score.components])
    for name, chosen in (("right", judged >= 1.0), ("wrong", judged < 1.0)):
        if chosen.any():
            metrics[f"completions/length_{name}"] = lengths[chosen].mean()
    return {name: float(value) for name, value in metrics.items()}


def of_shaping(config: Config, rollouts: Rollouts) -> dict[str, float]:
    """What shaping took from the rewards of a step; none where nothing is shaped."""
    if not config.reward.overlong_share:
        return {}
    penalties = credit.overlong_penalties(config, [len(completion.token_ids) for completion in rollouts.completions])
    return {"reward/overlong_penalty": float(penalties.mean())}


def of_updates(stats: list[dict[str, float]]) -> dict[str, float]:
    """policy/ value/ sampler/ metrics: means over the updates of the step; skipped updates are counted."""
    names = {name for numbers in stats for name in numbers}
    means = {name: float(np.mean([numbers[name] for numbers in stats if name in numbers])) for name in names}
    metrics = {name: value for name, value in means.items() if "/" in name}
    renamed = {"grad_norm": "policy/grad_norm", "total_loss": "policy/total_loss"}
    metrics |= {renamed[name]: means[name] for name in renamed if name in means}
    metrics["policy/skipped_updates"] = float(sum(numbers.get("skipped", 0.0) for numbers in stats))
    if "value/skipped_updates" in metrics:
        metrics["value/skipped_updates"] = float(sum(numbers["value/skipped_updates"] for numbers in stats))
    if "sampler/logprob_diff_mean" in metrics:
        metrics["sampler/logprob_difference_mean"] = metrics.pop("sampler/logprob_diff_mean")
    return metrics


def of_pool(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Errors and time-outs of the rewards of a step, from what the pools of all processes counted in it."""
    errors, timeouts = (sum(one.get(name, 0) for one in counts) for name in ("errors", "timeouts"))
    return {"reward/errors": errors - timeouts, "reward/timeouts": timeouts}


def of_loans(reports: Sequence[LoanReport], spans: Sequence[Span], slices: int, timing: Stopwatch) -> dict[str, float]:
    """scheduler/ metrics of a step from the loans of each process and the spans of its rollout on all `slices`; none when nothing could be lent."""
    if not reports:
        return {}
    window = min((span.start for span in spans), default=0.0), max((span.end for span in spans), default=0.0)
    return {
        "scheduler/loans": sum(report.loans for report in reports), "scheduler/lent_seconds": sum(report.lent_seconds for report in reports),
        "scheduler/distilling_seconds": sum(span.end - span.start for span in spans if span.kind == "distilling"),
        "scheduler/quanta": sum(report.trained for report in reports), "scheduler/skipped_quanta": sum(report.skipped for report in reports),
        "scheduler/mergers": sum(report.mergers for report in reports), "scheduler/recall_seconds": max(report.recall_seconds for report in reports),
        "scheduler/added_seconds": max(report.added_seconds for report in reports) + timing.seconds["distill"],
        "scheduler/moved_rows": sum(report.moved_rows for report in reports)
    } | timeline.loan_metrics(timeline.with_idle(spans, slices, *window))


def step_spans(timing: Stopwatch, rollout: Sequence[Span], slices: int) -> list[Span]:
    """What each of all `slices` did from the start of the step until now."""
    parts = [(ALL_SLICES[name], part) for name, times in timing.parts.items() if name in ALL_SLICES for part in times]
    whole = [Span(number, kind, *part) for kind, part in parts for number in range(slices)]
    return timeline.with_idle([*rollout, *whole], slices, timing.started, time.monotonic())
