"""The parts that every stage of a run shares, opened once: model, data, meshes, slices, reward pool, reporter."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax

from tlt_jax.objectives.policy_update import without_value_head
from tlt_jax.rewards.pool import RewardPool
from tlt_jax.runtime.hardware_counters import HardwareCounters
from tlt_jax.runtime.lending import Lending, LoanReport
from tlt_jax.runtime.policy_driver import Publisher
from tlt_jax.runtime.rollout_driver import RolloutDriver
from tlt_jax.runtime.watchdog import Watchdog
from tlt_jax.scheduling import decode_report, timeline
from tlt_jax.scheduling.strategy_selector import SelectorState
from tlt_jax.sharding import processes
from tlt_jax.sharding.meshes import Meshes
from tlt_jax.sharding.rules import batch_rows_multiple
from tlt_jax.strategies import Completion
from tlt_jax.tasks.prompts import Prompt, Task
from tlt_jax.training import build
from tlt_jax.training.experience import Packing, packing_for
from tlt_jax.training.lessons import Lessons
from tlt_jax.training.reporting import Reporter
from tlt_jax.training.reward_model import RewardModel
from tlt_jax.training.rollout_phase import Engine, Phase, Weights, longest_prompt
from tlt_jax.training.scoring import StepScorer
from tlt_jax.training.settings import Config


class PhaseLearner(Protocol):
    """What learns from a rollout phase while it runs."""

    def start_phase(self, policies: Sequence[dict], step: int, answers: int) -> Lending | None:
        """Before the first row; what lends the phase's idle slices, if anything does."""

    def add(self, completion: Completion) -> None:
        """A completion is finished."""

    def end_phase(self) -> None:
        """After the last row."""


@dataclasses.dataclass
class Session:
    """An opened run."""

    config: Config
    workdir: str
    model: build.Model
    task: Task
    held_out: Task | None
    meshes: Meshes
    drivers: list[RolloutDriver]
    pool: RewardPool
    reporter: Reporter
    watchdog: Watchdog = dataclasses.field(default_factory=Watchdog.asleep)
    counters: HardwareCounters = dataclasses.field(default_factory=lambda: HardwareCounters(None))
    publisher: Publisher | None = None
    published: int = 0  # versions of the policy that were published before this process
    lessons: Mapping[str, Lessons] = dataclasses.field(default_factory=dict)  # of the supervised stages
    reward_model: RewardModel | None = None  # scores the answers of RL, where the config says so
    loans: LoanReport | None = None  # of the latest rollout phase; None: nothing could be lent

    def phase(self, name: str, **numbers: int) -> None:
        """What is being done now, to the display and to the watchdog."""
        self.reporter.phase(name, **numbers)
        self.watchdog.hear(name)

    def publish(self, params) -> list:
        """The policy's weights to every slice under a new version; a value head on its trunk stays where it is."""
        params = without_value_head(params)
        if self.publisher is None:
            self.publisher = Publisher(self.meshes, params, build.resolve_dtype(self.config, "rollout"))
            self.publisher.version = self.published
        return self.publisher.publish(params)

    @property
    def policy_version(self) -> int:
        """The version published last, counted over all processes of the run."""
        return self.published if self.publisher is None else self.publisher.version

    @functools.cached_property
    def packing(self) -> Packing:
        """The one shape of packed rows of the run."""
        lengths = [len(prompt.prompt_ids) for prompt in self.task.prompts()]
        return packing_for(lengths, self.config.rollout.max_new_tokens, self.config.batch.tokens_per_microbatch, batch_rows_multiple(self.meshes.train))

    @functools.cached_property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, training or held out: rollouts of the run have one shape."""
        return longest_prompt([*self.task.prompts(), *(self.held_out.prompts() if self.held_out is not None else ())])

    def generate(self, views: list, prompts: list[Prompt], phase: Phase, learner: PhaseLearner | None = None) -> StepScorer:
        """Roll out `phase.generations` completions of every prompt on the published `views` and score them on the way; `learner` reads along.

        Of several processes each takes the prompts in turn; what the others rolled out is there when the scorer has finished.
        """
        scorer = StepScorer(self.pool, self.model.tokenizer, prompts, phase.generations, phase.step, at_once=self.config.reward.scope == "step")
        lending = None if learner is None else learner.start_phase(views, phase.step, len(prompts) * phase.generations)
        self.loans = None if lending is None else lending.report
        engine = Engine(self.config, self.model, self.drivers, self.longest_prompt, lending)

        def finish(completion: Completion) -> None:
            scorer.add(completion)
            if learner is not None:
                learner.add(completion)

        done = 0

        def show() -> None:
            nonlocal done
            scorer.poll()
            before, own = done, len(scorer.completions) - len(others)
            done = sum(completion is not None for completion in scorer.completions)
            if before < own:  # a process that waits for the others' rows does not get on, whatever it trains meanwhile
                self.phase(phase.name, rows_active=engine.active, finished=done, of=own)

        here = range(len(scorer.completions))
        others = frozenset(index for index in here if index // phase.generations % jax.process_count() != jax.process_index())
        engine.run(Weights(views, self.publisher.version), prompts, phase, finish, show, others)
        if learner is not None:
            learner.end_phase()
        return scorer

    def decode_report(self) -> dict[str, float]:
        """Speed metrics of the latest rollout phase, over the slices of all processes; collective."""
        dispatches = decode_report.from_the_start([driver.choice.dispatches for driver in self.drivers])
        own = [(some, driver.choice.plain_rates()) for some, driver in zip(dispatches, self.drivers, strict=True)]
        return decode_report.report([one for told in processes.exchange(own) for one in told])

    def rollout_report(self) -> tuple[list[timeline.Span], list[LoanReport]]:
        """What the slices of all processes did in the latest rollout phase, by their numbers in the run, and the loans of each process; collective.

        Spans may overlap. Their times are those of this process, as far as the clocks of the hosts agree.
        """
        choices = enumerate(driver.choice for driver in self.drivers)
        own = [span for number, choice in choices for span in timeline.of_phase(number, choice.admissions, choice.dispatches)]
        own += [] if self.loans is None else self.loans.spans
        spans = [span._replace(slice=self.meshes.slice_ids[span.slice]) for span in own]
        told = processes.exchange((time.time() - time.monotonic(), spans, None if self.loans is None else dataclasses.replace(self.loans, spans=[])))
        here, *_ = told[jax.process_index()]
        moved = [span._replace(start=span.start + there - here, end=span.end + there - here) for there, spans, _ in told for span in spans]
        return moved, [loans for *_, loans in told if loans is not None]

    def selector_states(self) -> list[dict]:
        """What every slice of the run has learned about its strategies, as plain values; collective."""
        return [state for told in processes.exchange([driver.choice.state.to_json() for driver in self.drivers]) for state in told]

    def restore_selectors(self, states: list[dict]) -> None:
        """The inverse; with another number of slices as many as there are go on from a state."""
        for number, driver in zip(self.meshes.slice_ids, self.drivers, strict=True):
            if number < len(states):
                driver.choice.state = SelectorState.from_json(states[number])
