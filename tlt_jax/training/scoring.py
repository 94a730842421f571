"""Scoring of finished responses in the reward pool, overlapped with the rollout, and the results in the order of the requests."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax

from tlt_jax.rewards.items import RewardError, RewardItem, Scored
from tlt_jax.rewards.pool import RewardPool
from tlt_jax.sharding import processes
from tlt_jax.strategies import Completion
from tlt_jax.tasks.prompts import Prompt
from tlt_jax.tasks.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TaskScorer:
    """A task's own score(prompt, response, answer, metadata) as the pool's function of an item; picklable when the score is."""

    score: Callable[..., float]

    def __call__(self, item: RewardItem):
        return self.score(item.prompt, item.response, item.answer, dict(item.metadata))


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Scored groups: completion i is one of the `generations` of prompt i // generations."""

    generations: int
    prompts: tuple[Prompt, ...] = ()
    completions: tuple[Completion, ...] = ()
    scores: tuple[Scored, ...] = ()

    def groups(self, chosen: Sequence[int]) -> "Rollouts":
        """Those groups, in that order."""
        rows = [group * self.generations + sample for group in chosen for sample in range(self.generations)]
        return Rollouts(
            self.generations, tuple(self.prompts[group] for group in chosen), tuple(self.completions[row] for row in rows),
            tuple(self.scores[row] for row in rows))

    def joined(self, other: "Rollouts") -> "Rollouts":
        """The groups of both."""
        return Rollouts(self.generations, self.prompts + other.prompts, self.completions + other.completions, self.scores + other.scores)


class StepScorer:
    """Scores the completions of one rollout as groups complete: completion i belongs to prompt i // generations.

    `at_once`: the reward sees the answers of all prompts together, after the last one.
    """

    def __init__(self, pool: RewardPool, tokenizer: Tokenizer, prompts: Sequence[Prompt], generations: int, step: int, *, at_once: bool = False):
        self.pool, self.tokenizer, self.prompts, self.generations, self.step = pool, tokenizer, prompts, generations, step
        self.completions: list[Completion | None] = [None] * (len(prompts) * generations)
        self.scores: list[Scored | None] = [None] * len(self.completions)
        self._missing, self._at_once = [generations] * len(prompts), at_once
        self._first_of_ticket: dict[int, int] = {}

    def add(self, completion: Completion) -> None:
        """A finished completion; its group is submitted when it is whole."""
        group = completion.request.index // self.generations
        self.completions[completion.request.index] = completion
        self._missing[group] -= 1
        if self._missing[group] == 0 and not self._at_once:
            self._submit(group, group + 1)

    def poll(self) -> None:
        """Take the scores that have arrived; called between dispatches."""
        self._place(self.pool.poll())

    def finish(self, timeout: float = math.inf) -> Rollouts:
        """Wait for every score (each has its own time limit in the pool), and take over what other processes rolled out and scored; collective."""
        if self._at_once:
            self._take_over([(index, (completion, None)) for index, completion in enumerate(self.completions) if completion is not None])
            if jax.process_index() == 0:
                self._submit(0, len(self.prompts))
        self._place(self.pool.drain(min(timeout, 1e9)))
        own = enumerate(zip(self.completions, self.scores, strict=True))
        self._take_over([(index, both) for index, both in own if both[0] is not None and (both[1] is not None or not self._at_once)])
        missing = sum(score is None for score in self.scores)
        if missing:
            raise TimeoutError(f"{missing} of {len(self.scores)} rewards of step {self.step} did not arrive; see reward.timeout_seconds")
        return Rollouts(self.generations, tuple(self.prompts), tuple(self.completions), tuple(self.scores))

    def _take_over(self, own: list) -> None:
        for index, (completion, score) in (entry for told in processes.exchange(own) for entry in told):
            self.completions[index], self.scores[index] = completion, score

    def _submit(self, start: int, end: int) -> None:
        rows = range(start * self.generations, end * self.generations)
        items = tuple(self._item(self.completions[row], self.prompts[row // self.generations]) for row in rows)
        self._first_of_ticket[self.pool.submit(items)] = rows.start

    def _place(self, results: Sequence[Scored]) -> None:
        for result in results:
            self.scores[self._first_of_ticket[result.ticket] + result.index] = result

    def _item(self, completion: Completion, prompt: Prompt) -> RewardItem:
        return RewardItem(
            prompt=prompt.text, response=response_text(self.tokenizer, completion), answer=prompt.answer, data_source=prompt.source, metadata=prompt.columns,
            prompt_ids=completion.request.prompt_ids, response_ids=completion.token_ids, finish_reason=completion.finish_reason, step=self.step)


def check_reward(pool: RewardPool, prompt: Prompt) -> str:
    """What a user's reward gives to the reference answer and to nothing, before any rollout. Raises RewardError when it fails on either."""
    check = pool.self_check(RewardItem(
        prompt=prompt.text, response="", answer=prompt.answer, data_source=prompt.source, metadata=prompt.columns, prompt_ids=prompt.prompt_ids))
    for scored in (check.right, check.empty):
        if scored.error is not None:
            raise RewardError(f"the reward function failed on the first prompt ({prompt.source}, row {prompt.row}):\n{scored.error}")
    return (
        f"reward check on {prompt.source}, row {prompt.row}: its answer in a box scores {check.right.score}, an empty response {check.empty.score} "
        f"({check.right.seconds:.2f} s)")


def response_text(tokenizer: Tokenizer, completion: Completion) -> str:
    """The response as text: up to and without the stop id that ended it."""
    ids = completion.token_ids[:-1] if completion.finish_reason == "stop" else completion.token_ids
    return tokenizer.decode(ids, skip_special_tokens=False)
