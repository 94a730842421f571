"""One rollout phase on the slices: prompts × samples in, completions out. It knows no task, no reward, no report, and not where the weights came from."""

import dataclasses
from collections.abc import Callable, Container, Sequence

from tlt_jax.decoding.sampling import make_sampling
from tlt_jax.models.specs import PolicySpec
from tlt_jax.runtime.event_loop import roll_out
from tlt_jax.runtime.lending import Lending
from tlt_jax.runtime.rollout_driver import Lengths, RolloutDriver, Row
from tlt_jax.strategies import Completion, Request
from tlt_jax.tasks.prompts import Prompt
from tlt_jax.training.build import Model
from tlt_jax.training.settings import Config


@dataclasses.dataclass(frozen=True)
class Phase:
    """One rollout phase: its name on the display, samples a prompt, temperature, and the step that keys the noise."""

    name: str
    generations: int
    temperature: float
    step: int
    draw: int = 0  # how often the step has drawn prompts before: the same prompt gets other noise
    ends: Callable[[Row], bool] | None = None  # whether a running row has written enough, by what only the host can see


@dataclasses.dataclass(frozen=True)
class Weights:
    """One parameter tree per local slice, all of one version."""

    views: Sequence
    version: int


@dataclasses.dataclass(frozen=True)
class Engine:
    """What a rollout runs on. `longest_prompt` (tokens, over all phases to come) decides the compiled shapes."""

    config: Config
    model: Model
    drivers: Sequence[RolloutDriver]
    longest_prompt: int
    lending: Lending | None = None  # lends slices of the phase that have no rows left

    @property
    def active(self) -> int:
        """Rows that decode on all slices."""
        return sum(driver.active for driver in self.drivers)

    def run(self, weights: Weights, prompts: Sequence[Prompt], phase: Phase, on_completion: Callable[[Completion], None],
            on_turn: Callable[[], None] | None = None, there: Container[int] = ()) -> None:
        """Roll out `phase.generations` completions of every prompt: completion i belongs to prompt i // generations and comes when it is finished.

        Those of the indices `there` are left out; the others are what they would be with them.
        """
        rollout = self.config.rollout
        sampling = make_sampling(phase.temperature, rollout.top_k, rollout.top_p, rollout.min_p, vocabulary=self.model.vocabulary)
        lengths = Lengths(self.longest_prompt, self.longest_prompt + rollout.max_new_tokens)
        for driver, view in zip(self.drivers, weights.views, strict=True):
            driver.start(view, weights.version, sampling, self.model.stop_ids, lengths)
            driver.ends = phase.ends
        requests = [
            Request(
                prompt=prompt.key, sample=sample, draw=phase.draw, index=number * phase.generations + sample, prompt_ids=prompt.prompt_ids,
                max_new_tokens=rollout.max_new_tokens, seed=self.config.seed, step=phase.step)
            for number, prompt in enumerate(prompts) for sample in range(phase.generations) if number * phase.generations + sample not in there]
        roll_out(self.drivers, requests, on_completion, on_turn, self.lending)
        for driver in self.drivers:
            driver.release()


def longest_prompt(prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt."""
    return max(len(prompt.prompt_ids) for prompt in prompts)


def check_lengths(spec: PolicySpec, prompts: Sequence[Prompt], max_new_tokens: int, place: Callable[[Prompt], str]) -> None:
    """Raises ValueError naming `place` of the first prompt that with its completion would pass the positions that the model was made for."""
    limit = spec.max_position_embeddings
    over = [prompt for prompt in prompts if len(prompt.prompt_ids) + max_new_tokens > limit]
    if over:
        longest = max(over, key=lambda prompt: len(prompt.prompt_ids))
        length, more = len(longest.prompt_ids), f" ({len(over)} prompts are too long)" if len(over) > 1 else ""
        raise ValueError(
            f"{place(longest)}: {length} prompt tokens + rollout.max_new_tokens={max_new_tokens} = {length + max_new_tokens} tokens, more than the model's "
            f"max_position_embeddings={limit}{more}; lower rollout.max_new_tokens or shorten the prompt")
