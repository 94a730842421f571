"""The order of prompts under a curriculum: one order for each part of a difficulty, drawn from as the curriculum says."""

import math
from collections.abc import Sequence

from tlt_jax.scheduling.curriculum import Curriculum, CurriculumSettings, split
from tlt_jax.tasks.prompts import Prompt, PromptOrder
from tlt_jax.tasks.text_files import DataError
from tlt_jax.training.scoring import Rollouts
from tlt_jax.training.settings import Config


def parts_of(config: Config, prompts: Sequence[Prompt]) -> list[int]:
    """The part of every prompt, from 0 = easiest. Raises DataError for prompts without a difficulty, and where none is harder than another."""
    without = [prompt for prompt in prompts if prompt.difficulty is None]
    if without:
        raise DataError(
            f"curriculum.advance={config.curriculum.advance}: {len(without)} of {len(prompts)} prompts have no difficulty, the first is {without[0].source}, "
            f"row {without[0].row}: give every row a number (or easy, medium, hard) in a column difficulty or level, or set curriculum.advance=off")
    try:
        return split([prompt.difficulty for prompt in prompts], config.curriculum.stages)
    except ValueError as error:
        raise DataError(f"curriculum.advance={config.curriculum.advance}: {error}; set curriculum.advance=off") from error


class CurriculumOrder:
    """Draws prompts like `PromptOrder`; `note` tells how they were answered."""

    def __init__(self, config: Config, prompts: Sequence[Prompt]):
        settings, self._parts = config.curriculum, parts_of(config, prompts)
        self._members = [[index for index, own in enumerate(self._parts) if own == part] for part in range(max(self._parts) + 1)]
        self._orders = [PromptOrder(len(members), config.seed, shuffle=config.data.shuffle) for members in self._members]
        self._part_of = {prompt.key: part for prompt, part in zip(prompts, self._parts, strict=True)}
        self._difficulties = [prompt.difficulty for prompt in prompts]
        self.curriculum = Curriculum(
            CurriculumSettings(settings.advance, settings.success_rate, settings.window, settings.steps_per_stage, settings.review),
            [len(members) for members in self._members])

    @property
    def epoch(self) -> int:
        """How often the part of the present stage has been gone through."""
        return self._orders[self.curriculum.stage].epoch

    def describe(self) -> str:
        """A line for the start of a run: the parts with their difficulties."""
        ranges = [sorted({self._difficulties[index] for index in members}) for members in self._members]
        parts = [f"{number} ({low:g} to {high:g}, {len(members)} prompts)" for number, (low, high, members) in enumerate(
            ((values[0], values[-1], members) for values, members in zip(ranges, self._members, strict=True)), start=1)]
        return f"curriculum: difficulties in {len(parts)} stages: {', '.join(parts)}"

    def draw(self, count: int) -> list[int]:
        """The next `count` indices, none twice, the hardest part first."""
        drawn = []
        for part, wanted in reversed(list(enumerate(self.curriculum.counts(count)))):
            drawn += [self._members[part][place] for place in self._orders[part].draw(wanted)]
        return drawn

    def note(self, rollouts: Rollouts) -> dict[str, float]:
        """What a step drew and how it went as metrics; then the next stage may begin."""
        parts = [self._part_of[prompt.key] for prompt in rollouts.prompts]
        stage, size = self.curriculum.stage, rollouts.generations
        verdicts = [score.judged for row, score in enumerate(rollouts.scores) if score.judged is not None and parts[row // size] == stage]
        judged = [verdict >= 1.0 for verdict in verdicts if not math.isnan(verdict)]
        shares = {f"data/difficulty_part_{part + 1}": parts.count(part) / len(parts) for part in range(len(self._members))}
        self.curriculum.note(sum(judged) / len(judged) if judged else None)
        difficulties = [prompt.difficulty for prompt in rollouts.prompts]
        # Of this step; the success is that of the stage that the next step draws from, so it starts again at 0 with a stage.
        return shares | {
            "data/curriculum_stage": stage + 1, "data/curriculum_success": self.curriculum.success,
            "data/difficulty_mean": sum(difficulties) / len(difficulties)}

    def state(self) -> dict:
        """What `restore` needs."""
        return {"curriculum": self.curriculum.state(), "parts": [order.state() for order in self._orders]}

    def restore(self, state: dict) -> None:
        """Continue where `state` was taken. Raises DataError when the run had no curriculum then, or other parts."""
        if "curriculum" not in state or len(state["parts"]) != len(self._orders):
            had = f"a curriculum of {len(state['parts'])} parts" if "curriculum" in state else "no curriculum"
            raise DataError(
                f"the prompt order was saved with {had} and there are {len(self._orders)} parts now: resume with the curriculum settings of that run, or use "
                "another --workdir")
        self.curriculum.restore(state["curriculum"])
        for order, own in zip(self._orders, state["parts"], strict=True):
            order.restore(own)
