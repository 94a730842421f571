"""Which groups a step trains on: all that it rolls out, or, with dynamic sampling (DAPO), as many with different rewards as the step has prompts.

Groups of equal rewards have advantage 0. Surplus groups wait for the next step, also in checkpoints; their old log-probs are those of their sampler.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tlt_jax.rewards.items import Scored
from tlt_jax.strategies import Completion, Request
from tlt_jax.tasks.prompts import Prompt, PromptOrder
from tlt_jax.training.scoring import Rollouts
from tlt_jax.training.settings import Config

SURPLUS = "surplus"  # item of a checkpoint
ARRAYS = ("token_ids", "logprobs", "sampling_logprobs")  # of a completion


class Sampled(NamedTuple):
    """What a step trains on."""

    chosen: Rollouts
    stale: int  # the first completions of `chosen`, which earlier steps sampled
    drawn: Rollouts  # all of this step
    metrics: dict[str, float]


class GroupSampler:
    """Draws the prompts of every step. `surplus` holds informative groups that no step has trained on."""

    def __init__(self, config: Config, prompts: Sequence[Prompt], order: PromptOrder):
        self.config, self._prompts, self._order = config, prompts, order
        self.surplus = Rollouts(config.algorithm.num_generations)

    def sample(self, roll_out: Callable[[list[Prompt], int], Rollouts]) -> Sampled:
        """`roll_out` samples and scores prompts; its second argument counts the draws of the step."""
        config, algorithm = self.config, self.config.algorithm
        wanted = config.batch.prompts_per_step
        if not algorithm.dynamic_sampling:
            drawn = roll_out(self._draw(wanted), 0)
            return Sampled(drawn, 0, drawn, {})
        kept, drawn, draws = self.surplus, Rollouts(algorithm.num_generations), 0
        waited = len(kept.prompts)
        while len(kept.prompts) < wanted and draws < algorithm.max_draws:
            latest = roll_out(self._draw(wanted), draws)
            drawn, kept, draws = drawn.joined(latest), kept.joined(latest.groups(informative(latest))), draws + 1
        self.surplus = kept.groups(range(wanted, len(kept.prompts)))
        # A step without any informative group goes through the motions: its advantages are 0.
        chosen = kept.groups(range(min(wanted, len(kept.prompts)))) if kept.prompts else drawn
        shares = {
            "data/draws": draws, "data/informative_share": (len(kept.prompts) - waited) / len(drawn.prompts), "data/surplus_groups": len(self.surplus.prompts),
            "data/stale_share": waited / len(chosen.prompts)}
        return Sampled(chosen, waited * algorithm.num_generations, drawn, shares)

    def arrays(self) -> dict[str, np.ndarray]:
        """Tokens and log-probs of the surplus, flat; {} without any."""
        some = self.surplus.completions
        dtypes = {"token_ids": np.int32, "logprobs": np.float32, "sampling_logprobs": np.float32}
        return {name: np.concatenate([np.asarray(vars(one)[name], dtypes[name]) for one in some]) for name in ARRAYS} if some else {}

    def state(self) -> list:
        """The rest of the surplus as plain values."""
        return [
            [completion.request.prompt, completion.request.sample, completion.request.draw, completion.request.step, len(completion.token_ids),
             completion.finish_reason, completion.policy_version, completion.forwards, score.score, dict(score.components), score.pred, score.verdict]
            for completion, score in zip(self.surplus.completions, self.surplus.scores, strict=True)]

    def restore(self, state: list, arrays: dict[str, np.ndarray]) -> None:
        """The surplus of a `state`; groups of prompts that the data do not hold any more are left out."""
        known, start, completions, scores = {prompt.key: prompt for prompt in self._prompts}, 0, [], []
        for key, sample, draw, step, length, reason, version, forwards, *score in state:
            own = {name: tuple(arrays[name][start : start + length].tolist()) for name in ARRAYS}
            start += length
            if key in known:
                request = Request(key, sample, draw, len(completions), known[key].prompt_ids, self.config.rollout.max_new_tokens, self.config.seed, step)
                completions.append(Completion(request=request, finish_reason=reason, policy_version=version, forwards=forwards, **own))
                value, components, pred, verdict = score
                scores.append(Scored(0, sample, value, components, pred, None, 0.0, verdict))
        prompts = [known[completion.request.prompt] for completion in completions[:: self.surplus.generations]]
        self.surplus = dataclasses.replace(self.surplus, prompts=tuple(prompts), completions=tuple(completions), scores=tuple(scores))

    def _draw(self, count: int) -> list[Prompt]:
        return [self._prompts[index] for index in self._order.draw(count)]


def informative(rollouts: Rollouts) -> list[int]:
    """Groups whose rewards differ; those without a score count for nothing."""
    found, size = [], rollouts.generations
    for group in range(len(rollouts.prompts)):
        rewards = [score.score for score in rollouts.scores[group * size : (group + 1) * size] if score.score is not None]
        if rewards and max(rewards) != min(rewards):
            found.append(group)
    return found
