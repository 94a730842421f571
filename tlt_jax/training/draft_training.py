"""The drafter of an RL run learns: in quanta on slices that the rollout's tail leaves idle, and where the config says so after the update, until it has had
what it is owed. What came out is measured on answers held back, with the features of the policy that it will draft for, and handed to the slices unless it
got worse. The policy's arrays are read only; the drafter changes no token, only how soon it comes.
"""

import dataclasses
import functools
import zlib
from collections.abc import Sequence

import jax
import numpy as np
from absl import logging

from tlt_jax.distillation import aggregation
from tlt_jax.distillation.acceptance import expected_accept_length
from tlt_jax.distillation.draft_losses import DraftLoss
from tlt_jax.drafters.feature_drafter import FeatureDrafter
from tlt_jax.objectives.policy_update import score_and_features, without_value_head
from tlt_jax.optimizers import OptimizerSettings, make_optimizer
from tlt_jax.runtime.draft_driver import ACCEPTANCE, BorrowedSlice, DraftLearner, Teacher
from tlt_jax.runtime.lending import Drafter, Lending, LendingSettings, Work, brought_together
from tlt_jax.runtime.policy_driver import place_batch
from tlt_jax.runtime.programs import frozen_program, new_drafter, score_features_program
from tlt_jax.scheduling import quotas
from tlt_jax.scheduling.quotas import Quota
from tlt_jax.scheduling.slices import LoanSettings
from tlt_jax.sharding import movement, processes
from tlt_jax.sharding.rules import batch_rows_multiple, replicated
from tlt_jax.strategies import Completion
from tlt_jax.training import build
from tlt_jax.training.draft_texts import DraftTexts, ReadyMade, one_batch
from tlt_jax.training.drafting import load_params
from tlt_jax.training.experience import Packed, Packing, Trajectory, packing_for
from tlt_jax.training.session import Session
from tlt_jax.training.settings import Config

WARMUP_SHARE = 0.05
WORSE = 0.005  # of 1 - TV, beyond which a trained drafter is not served
FINGERPRINT_VALUES = 2**14  # of a leaf
TEXTS, RESIDUALS = "drafter_texts", "drafter_residuals"  # of a checkpoint


@dataclasses.dataclass
class DraftCounts:
    """Plain values of a checkpoint, over the whole run."""

    version: int = 0  # of the drafter that is served; 0 = as it was made or read
    quanta: int = 0
    rolled_back: int = 0
    owed: int = 0
    untrained_steps: int = 0  # in a row
    lengths: list = dataclasses.field(default_factory=list)  # of the last step's answers, sorted: how long the next ones may take


class ScoringPass:
    """The pass for old log-probs as what makes the features of an RL step's answers, in the dtype that it computes in."""

    def __init__(self, session: Session, policy: dict, drafter: FeatureDrafter, ids: jax.Array | None):
        """`ids` of the draft tokens; of `policy` only the shapes."""
        run = build.training_pass(session.config, session.model.spec)
        self._mesh, self._freeze, self._ids = session.meshes.train, frozen_program(drafter), ids
        self._score = score_features_program(self._mesh, functools.partial(score_and_features, run, drafter.capture_layers))
        self.ready = ready_made(drafter, policy, ids, run.compute_dtype)

    def score(self, texts: DraftTexts, policy: dict, packed: Packed, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Log-probs [B, T] of each micro-batch of the step's answers, in order; features go into `texts`, one micro-batch at a time."""
        head, results = movement.to_host(self._freeze(without_value_head(policy), self._ids).head_DE), []
        for number, batch in enumerate(packed.batches):
            logprobs, features, final = movement.to_host(self._score(policy, place_batch(self._mesh, batch)))
            results.append(logprobs)
            for index, (there, row, column) in enumerate(packed.places):
                columns = slice(column, column + len(trajectories[index].tokens))
                if there == number:
                    texts.take(index, None if features is None else features[row, columns], final[row, columns])
        texts.end_features(head.astype(self.ready.head.dtype))
        return results


class DraftTraining:
    """The master of a run's drafter on the train mesh, its texts, its teacher, and the way to the slices and back."""

    def __init__(self, session: Session, policy: dict):
        """Every slice serves the drafter of this learner from now on. `policy`: its parameters on the train mesh."""
        config, mesh = session.config, session.meshes.train
        self.config, self.drivers = config, session.drivers
        drafter = self.drivers[0].programs.drafter
        params = load_params(config, session.model.spec, "float32") or new_drafter(drafter, without_value_head(policy), config.seed)
        self._freeze = frozen_program(drafter)
        optimizer = draft_optimizer(config, "constant", config.stages.rl.steps * config.drafter.quanta_per_step)
        self.learner = DraftLearner(mesh, drafter, draft_loss(config), optimizer, params, None)
        self.learner.max_skips = config.optimizer.max_skips
        self.teacher, self.packing, self.counts = Teacher(mesh, drafter, None), draft_packing(session), DraftCounts()
        self.scoring, ready = None, None
        if config.drafter.features == "old_logprobs":
            self.scoring = ScoringPass(session, policy, drafter, self.learner.ids)
            ready = self.scoring.ready
        elif config.drafter.features == "rollout":
            check_window(session)
            ready = ready_made(drafter, policy, self.learner.ids, build.resolve_dtype(config, "rollout"))
        self.texts, self.residuals, self.lending = DraftTexts(config, self.packing, ready), {}, None
        if build.lends_slices(config, len(self.drivers)):
            slices = [BorrowedSlice(local, drafter, draft_loss(config), optimizer, params) for local in session.meshes.slices]
            self.lending = Lending(lending_settings(config), slices)
        self._seen = {}
        self._slice_ids, self._slices = session.meshes.slice_ids, len(session.meshes.publish.devices)
        self.serve()

    def serve(self) -> None:
        """Hand the weights to the slices: the next phase starts with them, in programs that are compiled already."""
        self.master, ids = self.learner.host_state(), self.learner.ids
        params = self.master.params if ids is None else self.master.params | {"ids": movement.to_host(ids)}
        for driver in self.drivers:
            driver.drafter_params = params
        self._fingerprint = fingerprint(params)

    def start_phase(self, policies: Sequence[dict], step: int, answers: int) -> Lending | None:
        """The rollout of an RL step begins, of so many answers, with the policy's views on the slices; what lends them to the drafter, if anything does."""
        earlier = self.texts.held_back
        head = None
        if self.config.drafter.features == "rollout":
            head = movement.to_host(self._freeze(policies[0], movement.to_host(self.learner.ids)).head_DE)
            self._seen = {}  # one for all slices: a row may move
            for driver in self.drivers:
                driver.features = self._seen
        self.texts.start(step, answers, head)
        self._before, self._faults = self.learner.params, []
        self._brought, self._own_quanta = Drafter(self.master, {}), 0
        if any(fingerprint(driver.drafter_params) != self._fingerprint for driver in self.drivers):
            self._faults.append("what a slice serves is not the drafter that was handed to it: something else wrote to it")
        self.counts.owed = quotas.come_due(Quota(self.config.drafter.quanta_per_step, self.counts.owed)).owed
        if self.lending is None or step <= self.config.scheduler.warmup_steps:
            return None
        work = Work(policies, lambda: self.texts.next_lesson(1 + jax.process_index()), one_batch(earlier, self.packing), self.counts.lengths)
        own = {local: self.residuals[number] for local, number in enumerate(self._slice_ids) if number in self.residuals}
        self.lending.start(Drafter(self.master, own), work)
        if not self.lending.quantum_seconds:
            self.lending.prepare(self.texts.empty_lesson(), one_batch([], self.packing))
        return self.lending

    def add(self, completion: Completion) -> None:
        """An answer is finished: slices that are lent may learn from it at once, unless it is held back or has to wait for its features."""
        parts = self._seen.pop(completion.request.index, None)
        self.texts.add(completion, None if parts is None else np.concatenate(parts))

    def end_phase(self) -> None:
        """The rollout of this process is over: its slices come back."""
        if self.lending is not None and self.lending.work is not None:
            brought, self._own_quanta = self.lending.end(), self.lending.report.trained
            self._brought = brought._replace(residuals={self._slice_ids[local]: tree for local, tree in brought.residuals.items()})

    def meet(self, completions: Sequence[Completion]) -> None:
        """All answers of the step are there, those of other processes, too."""
        for completion in completions:
            if completion.request.index not in self.texts.lengths:
                self.add(completion)
        self.texts.end()
        self.counts.lengths = sorted(self.texts.lengths.values())

    def run(self, policy: dict) -> dict[str, float]:
        """Train what is still owed, measure with the features of `policy` (on the train mesh), publish or roll back; drafter/ metrics. Collective."""
        config, counts, learner = self.config, self.counts, self.learner
        idle_quanta, drafter = brought_together(self.master, self._brought, self._own_quanta)
        if idle_quanta:
            learner.load(drafter.master)
            self.residuals = dict(drafter.residuals)
        self.teacher.params = without_value_head(policy)
        learner.frozen = self._freeze(self.teacher.params, learner.ids)
        quota = quotas.repaid(Quota(config.drafter.quanta_per_step, counts.owed), idle_quanta)
        rest = 0 if config.drafter.freeze else quotas.left_for_the_end(quota, config.drafter.train_when)
        lessons = [lesson for lesson in (self.texts.next_lesson() for _ in range(rest)) if lesson is not None]
        for lesson in lessons:
            learner.learn(lesson, self.teacher)
        held_back = [self.teacher.fill(one_batch(self.texts.held_back, self.packing))]
        measured = learner.evaluate(held_back, self._before)
        quanta = idle_quanta + len(lessons)
        trained = learner.evaluate(held_back) if quanta else measured
        self.teacher.params = learner.frozen = None  # what the next update replaces is not kept alive
        counts.owed, counts.quanta = quotas.repaid(quota, len(lessons)).owed, counts.quanta + quanta
        counts.untrained_steps = 0 if quanta else counts.untrained_steps + 1
        if trained[ACCEPTANCE] < measured[ACCEPTANCE] - WORSE:
            learner.load(self.master)
            self.residuals, trained = {}, measured
            counts.rolled_back += 1
        elif quanta:
            old = self._fingerprint
            self.serve()
            counts.version += 1
            if len(set(processes.exchange(self._fingerprint))) > 1:
                self._faults.append("the processes serve different drafters")
            if self._fingerprint == old:
                self._faults.append(f"{quanta} updates changed nothing: look at distill.lr")
        if counts.untrained_steps >= config.drafter.alarm_after and not config.drafter.freeze:
            self._faults.append(f"nothing was trained for {counts.untrained_steps} steps: no slice was idle; drafter.train_when=always needs none")
        for fault in self._faults:
            logging.error("drafter: %s", fault)
        self._before = None
        return trained | {
            "drafter/expected_accept_length": expected_accept_length(trained),
            "drafter/gain": trained[ACCEPTANCE] - measured[ACCEPTANCE], "drafter/version": counts.version, "drafter/rolled_back": counts.rolled_back,
            "drafter/quanta": counts.quanta, "drafter/untrained_steps": counts.untrained_steps, "drafter/texts": len(self.texts.buffer),
            "drafter/faults": len(self._faults)}

    def arrays(self) -> dict:
        """The arrays of a checkpoint beside the learner's: texts, and residuals by slice."""
        whole = replicated(self.learner.programs.mesh)
        kept = {TEXTS: self.texts.state()[0], RESIDUALS: {str(number): tree for number, tree in self.residuals.items()}}
        return jax.tree.map(lambda array: movement.to_device(array, whole), kept)

    def state(self) -> dict:
        """The counts as plain values, and what describes the arrays of the texts."""
        return dataclasses.asdict(self.counts) | {"texts": self.texts.state()[1]}

    def restore(self, state: dict, arrays: dict) -> None:
        """Go on from a checkpoint whose arrays the learner holds already."""
        self.counts = DraftCounts(**{name: value for name, value in state.items() if name != "texts"})
        self.texts.restore(movement.to_host(arrays[TEXTS]), state["texts"])
        self.residuals = {int(number): tree for number, tree in movement.to_host(arrays[RESIDUALS]).items()}
        self.serve()
        if max(self.residuals, default=0) >= self._slices:  # other slices than then: what each kept goes into what all start from
            start = aggregation.start_of_loan(self.master.params, aggregation.folded(self.residuals))
            self.residuals = {}
            self.learner.load(self.master._replace(params=start))
            self.serve()


def ready_made(drafter: FeatureDrafter, policy: dict, ids: jax.Array | None, dtype: str) -> ReadyMade:
    """Shapes of features from a policy of these shapes."""
    head = jax.eval_shape(frozen_program(drafter), without_value_head(policy), ids).head_DE
    return ReadyMade(head.shape[0] * max(len(drafter.capture_layers), 1), jax.ShapeDtypeStruct(head.shape, dtype))


def check_window(session: Session) -> None:
    """Raises ValueError unless the ring of features holds every prompt, and what one dispatch adds to a row, and for several processes."""
    if jax.process_count() > 1:
        raise ValueError(
            f"drafter.features=rollout leaves the features with the process that rolled an answer out, and there are {jax.process_count()}: set "
            "drafter.features to old_logprobs or recompute")
    config, strategies = session.config, build.selector_settings(session.config).strategies
    longest = max(session.longest_prompt, config.rollout.rounds_per_dispatch * (1 + max(strategy.depth for strategy in strategies)))
    if longest > config.drafter.catchup_window:
        raise ValueError(
            f"drafter.catchup_window={config.drafter.catchup_window} is too short for drafter.features=rollout, which reads the features of a whole prompt and "
            f"of all tokens of a dispatch from it: raise it to {longest}, or set drafter.features=recompute")


def draft_loss(config: Config) -> DraftLoss:
    """The loss of the config at the rollout temperature."""
    return DraftLoss(config.rollout.temperature, config.distill.unroll, config.distill.decay, config.distill.feature_weight)


def draft_packing(session: Session) -> Packing:
    """The one shape of a quantum's rows, in which any answer of the run fits."""
    config, lengths = session.config, [len(prompt.prompt_ids) for prompt in session.task.prompts()]
    return packing_for(lengths, config.rollout.max_new_tokens, config.distill.tokens_per_update, batch_rows_multiple(session.meshes.train))


def fingerprint(tree) -> int:
    """A number that changes with any trained leaf: the start of every leaf's bytes."""
    code = 0
    for leaf in jax.tree.leaves(tree):
        code = zlib.crc32(np.ascontiguousarray(np.ravel(leaf)[:FINGERPRINT_VALUES]).tobytes(), code)
    return code


def lending_settings(config: Config) -> LendingSettings:
    """The config's rules of loans."""
    scheduler, drafter = config.scheduler, config.drafter
    loans = LoanSettings(scheduler.idle_utilization, scheduler.idle_seconds)
    return LendingSettings(loans, drafter.sync_every, drafter.aggregation == "residual", config.rollout.consolidate_tail)


def draft_optimizer(config: Config, schedule: str, updates: int):
    """AdamW at distill.lr, warmed up over the first of `updates`."""
    return make_optimizer(OptimizerSettings(lr=config.distill.lr, schedule=schedule, warmup=int(WARMUP_SHARE * updates), total=updates, b2=0.95))
