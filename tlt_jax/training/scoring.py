"""Scoring of finished responses in the reward pool, overlapped with the rollout, and the results in the order of the requests."""

import dataclasses
import math
from collections.abc import Callable, Sequence

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


class StepScorer:
    """Scores the completions of one rollout as groups complete: completion i belongs to prompt i // generations."""

    def __init__(self, pool: RewardPool, tokenizer: Tokenizer, prompts: Sequence[Prompt], generations: int, step: int):
        self.pool, self.tokenizer, self.prompts, self.generations, self.step = pool, tokenizer, prompts, generations, step
        self.completions: list[Completion | None] = [None] * (len(prompts) * generations)
        self.scores: list[Scored | None] = [None] * len(self.completions)
        self._missing = [generations] * len(prompts)
        self._first_of_ticket: dict[int, int] = {}

    def add(self, completion: Completion) -> None:
        """A finished completion; its group is submitted when it is whole."""
        group = completion.request.index // self.generations
        self.completions[completion.request.index] = completion
        self._missing[group] -= 1
        if self._missing[group] == 0:
            first = group * self.generations
            items = tuple(self._item(self.completions[index], self.prompts[group]) for index in range(first, first + self.generations))
            self._first_of_ticket[self.pool.submit(items)] = first

    def poll(self) -> None:
        """Take the scores that have arrived; called between dispatches."""
        self._place(self.pool.poll())

    def finish(self, timeout: float = math.inf) -> None:
        """Wait for every score (each has its own time limit in the pool), and take over what other processes rolled out and scored; collective."""
        self._place(self.pool.drain(min(timeout, 1e9)))
        own = [entry for entry in enumerate(zip(self.completions, self.scores, strict=True)) if entry[1][0] is not None]
        for index, (completion, score) in (entry for told in processes.exchange(own) for entry in told):
            self.completions[index], self.scores[index] = completion, score
        missing = sum(score is None for score in self.scores)
        if missing:
            raise TimeoutError(f"{missing} of {len(self.scores)} rewards of step {self.step} did not arrive; see reward.timeout_seconds")

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
