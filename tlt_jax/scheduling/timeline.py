"""What every rollout slice did when: spans of a step, cut so that each moment of a slice belongs to exactly one. Pure; seconds are those of time.monotonic."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tlt_jax.scheduling.decode_report import Admission, Dispatch
from tlt_jax.strategies import OFF

KINDS = ("prefill", "rollout", "speculative", "distilling", "idle", "update", "publish", "compile")


class Span(NamedTuple):
    """One slice at one kind of work, from `start` to `end`."""

    slice: int
    kind: str  # one of KINDS
    start: float
    end: float


def of_phase(slice: int, admissions: Iterable[Admission], dispatches: Iterable[Dispatch]) -> list[Span]:
    """What a slice did in a rollout phase. What compiled a program is a compile as a whole: how long that took is not told apart."""
    kinds = [("prefill", one) for one in admissions] + [("rollout" if one.strategy == OFF else "speculative", one) for one in dispatches]
    return [Span(slice, "compile" if one.compiled else kind, one.started, one.started + one.seconds) for kind, one in kinds]


def with_idle(spans: Iterable[Span], slices: int, start: float, end: float) -> list[Span]:
    """Spans that fill slices 0 … `slices` - 1 from `start` to `end` without overlap, by slice and start; neighbours of one kind are one span.

    Where spans of a slice overlap, the one that started later wins, of two that started together the shorter one. Where there is none, the slice is idle.
    Raises ValueError for a span on another slice.
    """
    held = {number: [] for number in range(slices)}
    for span in sorted(spans, key=_precedence):
        if span.slice not in held:
            raise ValueError(f"a span of kind {span.kind} on slice {span.slice}: there are {slices} slices, counted from 0")
        held[span.slice].append(span)
    return [part for number, own in held.items() for part in _cut(Span(number, "idle", start, end), own)]


def _precedence(span: Span) -> tuple:
    return span.slice, span.start, -span.end, KINDS.index(span.kind)


def _cut(idle: Span, spans: Sequence[Span]) -> list[Span]:
    """The stretch of `idle` with `spans`, in their order, laid over it."""
    begun, now, parts = [idle], idle.start, []  # since the later span wins, the last one that has begun and not ended has the moment
    for span in (*spans, idle._replace(start=idle.end)):
        until = min(span.start, idle.end)
        while now < until:
            if begun[-1].end <= now:
                begun.pop()
                continue
            part = begun[-1]._replace(start=now, end=min(begun[-1].end, until))
            if parts and parts[-1].kind == part.kind:
                part = part._replace(start=parts.pop().start)
            parts.append(part)
            now = part.end
        begun.append(span)
    return parts


def loan_metrics(spans: Sequence[Span]) -> dict[str, float]:
    """scheduler/ metrics of a rollout window, from its spans `with_idle`."""
    idle, distilling = (math.fsum(span.end - span.start for span in spans if span.kind == kind) for kind in ("idle", "distilling"))
    total = math.fsum(span.end - span.start for span in spans)
    return {"scheduler/idle_share": idle / total, "scheduler/distilling_share": distilling / total} if total else {}
