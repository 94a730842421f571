"""The parts that every stage of a run shares, opened once: model, data, meshes, slices, reward pool, reporter."""

import dataclasses

from ml_collections import ConfigDict

from tlt_jax.decoding.sampling import make_sampling
from tlt_jax.rewards.pool import RewardPool
from tlt_jax.runtime.event_loop import roll_out
from tlt_jax.runtime.policy_driver import Publisher
from tlt_jax.runtime.programs import compile_counter
from tlt_jax.runtime.rollout_driver import RolloutDriver
from tlt_jax.sharding.meshes import Meshes
from tlt_jax.sharding.rules import batch_rows_multiple
from tlt_jax.strategies import Request
from tlt_jax.tasks.prompts import Prompt, Task
from tlt_jax.training import build
from tlt_jax.training.experience import Packing, row_length
from tlt_jax.training.reporting import Reporter
from tlt_jax.training.scoring import StepScorer


@dataclasses.dataclass
class Session:
    """An opened run."""

    config: ConfigDict
    workdir: str
    model: build.Model
    task: Task
    held_out: Task | None
    meshes: Meshes
    drivers: list[RolloutDriver]
    pool: RewardPool
    reporter: Reporter
    publisher: Publisher | None = None

    def publish(self, params) -> list:
        """Weights to every slice under a new version."""
        if self.publisher is None:
            self.publisher = Publisher(self.meshes, params, build.resolve_dtype(self.config, "rollout"))
        return self.publisher.publish(params)

    def packing(self, longest: int) -> Packing:
        """Micro-batches for sequences of at most `longest` tokens."""
        return Packing(self.config.batch.tokens_per_microbatch, batch_rows_multiple(self.meshes.train), row_length(longest))

    def generate(self, views: list, prompts: list[Prompt], phase: "Phase") -> StepScorer:
        """Roll out `phase.generations` completions of every prompt on the published `views` and score them on the way."""
        rollout = self.config.rollout
        sampling = make_sampling(phase.temperature, rollout.top_k, rollout.top_p, rollout.min_p, vocabulary=self.model.tokenizer.size)
        longest = max(len(prompt.prompt_ids) for prompt in prompts) + rollout.max_new_tokens
        for driver, view in zip(self.drivers, views, strict=True):
            driver.start(view, self.publisher.version, sampling, self.model.stop_ids, longest)
        scorer = StepScorer(self.pool, self.model.tokenizer, prompts, phase.generations, phase.step)
        requests = [
            Request(
                prompt=prompt.key, sample=sample, draw=0, index=number * phase.generations + sample, prompt_ids=prompt.prompt_ids,
                max_new_tokens=rollout.max_new_tokens, seed=self.config.seed, step=phase.step)
            for number, prompt in enumerate(prompts) for sample in range(phase.generations)]

        def show() -> None:
            scorer.poll()
            done = sum(completion is not None for completion in scorer.completions)
            self.reporter.phase(phase.name, rows_active=sum(driver.active for driver in self.drivers), finished=done, of=len(requests))

        roll_out(self.drivers, requests, scorer.add, show)
        for driver in self.drivers:
            driver.release()
        return scorer


@dataclasses.dataclass(frozen=True)
class Phase:
    """One rollout phase: its name on the display, samples a prompt, temperature, and the step that keys the noise."""

    name: str
    generations: int
    temperature: float
    step: int


def compiles_since(before: int) -> int:
    """XLA compilations since the counter stood at `before`."""
    return compile_counter().count - before
