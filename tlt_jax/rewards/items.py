"""The values that cross the border of the reward pool: what is scored, how, and what comes back. Plain frozen data, picklable; no scoring here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class RewardError(Exception):
    """A reward that could not be computed: a fault of the reward function or the data, never a score of 0."""


class RewardFailureError(RewardError):
    """Too many rewards failed, or one failed under `on_error="raise"`. The message carries the first tracebacks."""


@dataclass(frozen=True)
class RewardItem:
    """One response to score. `metadata` holds the other columns of the data row; ids are tuples of token ids without padding; `step` is the RL step."""

    prompt: str
    response: str
    answer: str = ""
    data_source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    step: int = 0


RewardGroup = tuple[RewardItem, ...]


@dataclass(frozen=True)
class Outcome:
    """What a scorer says about one item. score None: it does not apply (left out of the group's statistics); `pred`: the extracted answer.

    `verdict`: what says whether the answer is right, where the score holds more than that.
    """

    score: float | None
    components: Mapping[str, float] = field(default_factory=dict)
    pred: str | None = None
    verdict: float | None = None


@dataclass(frozen=True)
class Scored:
    """One result of the pool: the ticket of `submit`, the item's index in its group, and either a score or why there is none (`error`). Time in seconds."""

    ticket: int
    index: int
    score: float | None
    components: Mapping[str, float]
    pred: str | None
    error: str | None
    seconds: float
    verdict: float | None = None

    @property
    def judged(self) -> float | None:
        """What says whether the answer is right: at least 1 is."""
        return self.score if self.verdict is None else self.verdict


@dataclass(frozen=True)
class Scorer:
    """Which scorer to build inside a worker, by kind and parameters (see `scorers.build_scorer`).

    math, exact: none. format: name. overlong: limit, buffer. speed: limit. diversity: n. user: path, function, kwargs, columns.
    callable: function (top-level, item → reward). composite: components.
    """

    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    components: tuple["Component", ...] = ()


@dataclass(frozen=True)
class Component:
    """One weighted term of a composite reward; logged under `name`."""

    name: str
    weight: float
    scorer: Scorer


@dataclass(frozen=True)
class PoolSettings:
    """workers 0 scores in this process: for tests and laptops, without protection from hangs and crashes.

    time_limit: seconds per item (per group for functions that take whole groups). memory_limit_mb: address space of a worker, 0 = no limit;
    recycle_mb: a worker above this resident size is replaced after its item, 0 = never. on_error: exclude | zero | raise.
    The run stops when more than `failing_share` of at least `failing_after` rewards failed.
    """

    workers: int = 2
    time_limit: float = 20.0
    start_limit: float = 120.0
    memory_limit_mb: int = 0
    recycle_mb: int = 2048
    on_error: str = "exclude"
    failing_share: float = 0.05
    failing_after: int = 20

    def __post_init__(self) -> None:
        if self.on_error not in ("exclude", "zero", "raise"):
            raise ValueError(f'reward.on_error is {self.on_error!r}: use "exclude", "zero" or "raise"')
        if self.workers < 0 or self.time_limit <= 0 or self.start_limit <= 0:
            raise ValueError("reward pool: workers must be ≥ 0 and the time limits > 0 seconds")
