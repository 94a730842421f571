"""A curriculum: which difficulties are drawn in a step, and when harder ones begin. Plain numbers in and out; prompts are drawn elsewhere."""

import collections
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple


class CurriculumSettings(NamedTuple):
    """See the config group `curriculum`."""

    advance: Literal["success", "step"]
    success_rate: float = 0.7
    window: int = 5
    steps_per_stage: int = 20
    review: float = 0.2


def split(difficulties: Sequence[float], stages: int) -> list[int]:
    """The part, from 0 = easiest, of every difficulty: at most `stages` parts of about one size, equal difficulties together.

    With no more different difficulties than stages each is a part of its own. Raises ValueError when all are equal.
    """
    counts = sorted(collections.Counter(difficulties).items())
    if len(counts) < 2:
        raise ValueError(f"all {len(difficulties)} prompts have the difficulty {counts[0][0] if counts else 'none'}, so none is harder than another")
    if len(counts) <= stages:
        part_of = {value: part for part, (value, _) in enumerate(counts)}
    else:
        ends = itertools.accumulate(count for _, count in counts)
        # By where the middle of all prompts of a difficulty lies; parts that got nothing are closed up.
        wanted = [int(stages * (end - count / 2) / len(difficulties)) for end, (_, count) in zip(ends, counts, strict=True)]
        numbers = {part: number for number, part in enumerate(sorted(set(wanted)))}
        part_of = {value: numbers[part] for part, (value, _) in zip(wanted, counts, strict=True)}
    return [part_of[value] for value in difficulties]


class Curriculum:
    """The present stage (from 0) of parts of `sizes` prompts. In stage s prompts come from part s, and some from easier ones to keep what was learned."""

    def __init__(self, settings: CurriculumSettings, sizes: Sequence[int]):
        self.settings, self.sizes, self.stage, self._steps = settings, tuple(sizes), 0, 0
        self._rates: collections.deque[float] = collections.deque(maxlen=settings.window)

    def counts(self, wanted: int) -> list[int]:
        """How many prompts of each part a step of `wanted` prompts draws. Where a part holds too few, easier ones fill up, then harder ones.

        Raises ValueError when there are not so many prompts at all.
        """
        if wanted > sum(self.sizes):
            raise ValueError(f"{wanted} different prompts are asked for in one step and there are {sum(self.sizes)}")
        counts = [0] * len(self.sizes)
        review = int(self.settings.review * wanted) if self.stage else 0
        for number in range(review):
            counts[self.stage - 1 - number % self.stage] += 1
        counts[self.stage] = wanted - review
        counts = [min(count, size) for count, size in zip(counts, self.sizes, strict=True)]
        for part in [*range(self.stage, -1, -1), *range(self.stage + 1, len(self.sizes))]:
            counts[part] += min(self.sizes[part] - counts[part], wanted - sum(counts))
        return counts

    def note(self, rate: float | None) -> None:
        """A step is over, with this share of right answers to the prompts of the present stage (None: there were none). The next stage may begin."""
        self._steps += 1
        self._rates += [] if rate is None else [rate]
        if self.settings.advance == "step":
            done = self._steps >= self.settings.steps_per_stage
        else:
            done = len(self._rates) == self.settings.window and self.success >= self.settings.success_rate
        if done and self.stage + 1 < len(self.sizes):
            self.stage, self._steps = self.stage + 1, 0
            self._rates.clear()

    @property
    def success(self) -> float:
        """Mean share of right answers over the latest steps of the stage; 0 before the first."""
        return sum(self._rates) / len(self._rates) if self._rates else 0.0

    def state(self) -> dict:
        """What `restore` needs, as plain values."""
        return {"stage": self.stage, "steps": self._steps, "rates": list(self._rates)}

    def restore(self, state: dict) -> None:
        """Go on from a `state`; a stage beyond the last one, in fewer parts than before, is the last."""
        self.stage, self._steps = min(state["stage"], len(self.sizes) - 1), state["steps"]
        self._rates = collections.deque(state["rates"], maxlen=self.settings.window)
