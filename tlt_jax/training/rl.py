"""One RL step, top to bottom: draw prompts, publish weights, roll out and score, old and reference log-probs and values, advantages, updates.

Losses and advantages are in `objectives/`, the way from scores to advantages in `credit.py`, device programs in `runtime/`; here they are put in order.
"""

import collections
import dataclasses
import functools

import jax

from tlt_jax.objectives import policy_update
from tlt_jax.objectives.kl_controller import adapted
from tlt_jax.objectives.policy_update import VALUE_HEAD, PolicyObjective
from tlt_jax.optimizers import learning_rate, make_optimizer
from tlt_jax.runtime import hardware_counters, policy_driver
from tlt_jax.runtime.lending import LoanReport
from tlt_jax.runtime.policy_driver import Learner
from tlt_jax.runtime.programs import LearnerPrograms, compile_counter, score_program
from tlt_jax.scheduling.timeline import Span
from tlt_jax.sharding import movement, processes
from tlt_jax.sharding.rules import replicated
from tlt_jax.tasks.prompts import Prompt, PromptOrder
from tlt_jax.training import build, credit, rl_metrics
from tlt_jax.training.algorithm_rules import has_critic, kl_in_reward, needs_old_logprobs, shares_trunk, updates_per_step
from tlt_jax.training.curriculum_order import CurriculumOrder
from tlt_jax.training.draft_training import DraftTraining
from tlt_jax.training.dynamic_sampling import SURPLUS, GroupSampler, Sampled
from tlt_jax.training.evaluation import samples_of
from tlt_jax.training.experience import Packing, Trajectory, of_completion, pack, unpack
from tlt_jax.training.reward_model import judged
from tlt_jax.training.scoring import Rollouts
from tlt_jax.training.session import Phase, Session


@dataclasses.dataclass
class Trainer:
    """The networks of an RL stage and the passes that score with them. `critic` is None for GRPO and for a shared trunk."""

    policy: Learner
    critic: Learner | None
    reference: dict | None
    score_policy: object
    score_values: object | None
    order: PromptOrder | CurriculumOrder
    sampler: GroupSampler
    beta: float  # weight of the KL to the reference
    draft: DraftTraining | None = None  # None: the drafter, if there is one, learns nothing

    def arrays(self) -> dict:
        """The arrays of a checkpoint beside those of the networks."""
        whole, surplus = replicated(self.policy.programs.mesh), self.sampler.arrays()
        return {SURPLUS: jax.tree.map(lambda array: movement.to_device(array, whole), surplus)} if surplus else {}

    def state(self) -> dict:
        """What of it changes beside the networks, as plain values."""
        return {"beta": self.beta, "surplus": self.sampler.state()}

    def restore(self, state: dict, arrays: dict, *, steered: bool) -> None:
        """Go on from a `state` with the sampler's arrays; `steered`: beta is not the configured one."""
        self.beta = state["beta"] if steered else self.beta
        self.sampler.restore(state["surplus"], movement.to_host(arrays))


def make_trainer(session: Session, params, order: PromptOrder | CurriculumOrder) -> Trainer:
    """Learners for the configured algorithm from the policy's parameters, which stay as the reference when beta > 0."""
    config, spec, mesh = session.config, session.model.spec, session.meshes.train
    run, settings = build.training_pass(config, spec), build.loss_settings(config)
    updates = config.stages.rl.steps * updates_per_step(config)
    reference = params if config.algorithm.beta > 0 else None
    shared = shares_trunk(config)
    if shared and VALUE_HEAD not in params:
        params = params | {VALUE_HEAD: build.zero_value_head(spec)}
    objective = PolicyObjective(run, settings, on_policy=not needs_old_logprobs(config), shared_critic=shared, with_entropy=True)
    optimizer = make_optimizer(build.optimizer_settings(config, config.optimizer.lr, updates))
    programs = LearnerPrograms(mesh, functools.partial(policy_update.policy_objective, objective), optimizer, params)
    policy = Learner(programs, params, max_skips=config.optimizer.max_skips)
    critic, score_values = None, None
    if shared:
        score_values = score_program(mesh, functools.partial(policy_update.score_values, run, head=VALUE_HEAD))
    elif has_critic(config):
        critic_run = dataclasses.replace(run, spec=dataclasses.replace(spec, head="value"))
        start = {name: params[name] for name in ("embed", "layers", "final_norm")} | {"head": build.zero_value_head(spec)}
        critic_optimizer = make_optimizer(build.optimizer_settings(config, config.optimizer.critic_lr, updates))
        value_objective = functools.partial(policy_update.value_objective, critic_run, settings)
        critic = Learner(LearnerPrograms(mesh, value_objective, critic_optimizer, start), start, max_skips=config.optimizer.max_skips)
        score_values = score_program(mesh, functools.partial(policy_update.score_values, critic_run, head="head"))
    score_policy = score_program(mesh, functools.partial(policy_update.score_logprobs, run))
    draft = DraftTraining(session, params) if config.drafter.quanta_per_step else None
    sampler = GroupSampler(config, session.task.prompts(), order)
    return Trainer(policy, critic, reference, score_policy, score_values, order, sampler, config.algorithm.beta, draft)


def run_step(session: Session, trainer: Trainer, step: int) -> dict[str, float]:
    """One RL step; its metrics."""
    config, timing, compiles = session.config, rl_metrics.Stopwatch(), (compile_counter().count, compile_counter().seconds)
    verdicts = collections.Counter(session.pool.counts)
    sampled, decoding = _sample(session, trainer, step, timing)
    trajectories = [of_completion(completion) for completion in sampled.chosen.completions]
    packing = session.packing
    with timing.of("score"):
        session.phase("scoring")
        _score(session, trainer, trajectories, packing)
    for trajectory in trajectories[: sampled.stale]:
        trajectory.old_logprobs = trajectory.rollout_logprobs
    sequence_advantages = credit.set_advantages(config, sampled.chosen.scores, trajectories, trainer.beta)
    with timing.of("update"):
        session.phase("update")
        stats = _update(config, trainer, trajectories, packing, step)
    distilled = {}
    if trainer.draft is not None:
        with timing.of("distill"):
            session.phase("distilling")
            distilled = trainer.draft.run(trainer.policy.params)
    session.reporter.record_samples(step, samples_of(session, sampled.chosen, sequence_advantages))
    slices = len(session.meshes.publish.devices)
    session.reporter.record_timeline(step, rl_metrics.step_spans(timing, decoding.spans, slices))
    faults = rl_metrics.of_pool(processes.exchange(collections.Counter(session.pool.counts) - verdicts))
    metrics = rl_metrics.of_rollout(sampled.drawn, timing) | decoding.metrics | rl_metrics.of_updates(stats) | faults | sampled.metrics
    metrics |= rl_metrics.of_shaping(config, sampled.drawn)
    if config.curriculum.advance != "off":
        metrics |= trainer.order.note(sampled.drawn)
    metrics |= _kl(config, trainer, trajectories, metrics) | distilled | rl_metrics.of_loans(decoding.loans, decoding.spans, slices, timing)
    metrics |= hardware_counters.metrics([sample for told in processes.exchange(session.counters.taken()) for sample in told])
    metrics |= {"perf/compiles": compile_counter().count - compiles[0], "perf/compile_seconds": compile_counter().seconds - compiles[1]}
    return metrics | {"policy/lr": _policy_lr(config, trainer), "data/epoch": trainer.order.epoch}


@dataclasses.dataclass
class Decoding:
    """How the rollouts of a step went: metrics and loans of its first draw, spans of all."""

    metrics: dict[str, float] | None = None
    loans: list[LoanReport] = dataclasses.field(default_factory=list)
    spans: list[Span] = dataclasses.field(default_factory=list)


def _sample(session: Session, trainer: Trainer, step: int, timing: rl_metrics.Stopwatch) -> tuple[Sampled, Decoding]:
    """Publish, roll out and score as often as the sampler of groups asks; a drafter learns from the first draw."""
    algorithm, decoding = session.config.algorithm, Decoding()
    with timing.of("publish"):
        views = session.publish(trainer.policy.params)

    def roll_out(prompts: list[Prompt], draw: int) -> Rollouts:
        draft = None if draw else trainer.draft
        with timing.of("rollout"):
            phase = Phase("rollout", algorithm.num_generations, session.config.rollout.temperature, step, draw)
            scorer = session.generate(views, prompts, phase, draft)
        metrics, (spans, loans) = session.decode_report(), session.rollout_report()
        decoding.spans += spans
        if not draw:
            decoding.metrics, decoding.loans = metrics, loans
        with timing.of("reward"):
            rollouts = judged(session.reward_model, scorer.finish())
        if draft is not None:
            draft.meet(rollouts.completions)
        return rollouts

    return trainer.sampler.sample(roll_out), decoding


def _policy_lr(config, trainer: Trainer) -> float:
    """Learning rate of the step's last policy update."""
    settings = build.optimizer_settings(config, config.optimizer.lr, config.stages.rl.steps * updates_per_step(config))
    return float(learning_rate(settings)(max(trainer.policy.updates - 1, 0)))


def _kl(config, trainer: Trainer, trajectories: list[Trajectory], metrics: dict[str, float]) -> dict[str, float]:
    """policy/kl as a mean over tokens, where the update does not report it, and the weight it had in this step; that of the next step is steered by it."""
    algorithm = config.algorithm
    kl = metrics.get("policy/kl")  # none without a reference, and while only the critic is trained
    if kl_in_reward(config):
        kl = float(credit.kl_of_tokens(config, trajectories).sum() / sum(trajectory.response_length for trajectory in trajectories))
    if kl is None:
        return {}
    reported = {"policy/kl": kl, "policy/kl_weight": trainer.beta}
    if algorithm.kl_target:
        trainer.beta = adapted(trainer.beta, kl, algorithm.kl_target, len(trajectories), algorithm.kl_horizon)
    return reported


def _score(session: Session, trainer: Trainer, trajectories: list[Trajectory], packing: Packing) -> None:
    """Old and reference log-probs and values, each only where the algorithm needs it."""
    mesh = session.meshes.train
    passes = []
    if needs_old_logprobs(session.config):
        passes.append(("old_logprobs", trainer.score_policy, trainer.policy.params))
    if trainer.reference is not None:
        passes.append(("reference_logprobs", trainer.score_policy, trainer.reference))
    if trainer.score_values is not None:
        passes.append(("old_values", trainer.score_values, (trainer.critic or trainer.policy).params))
    if not passes:
        return
    packed = pack(trajectories, packing)
    for field, program, params in passes:
        if field == "old_logprobs" and trainer.draft is not None and trainer.draft.scoring is not None:
            scored = trainer.draft.scoring.score(trainer.draft.texts, params, packed, trajectories)
        else:
            scored = policy_driver.score(program, mesh, params, packed.batches)
        results = unpack(packed, scored, trajectories)
        trajectories[:] = [dataclasses.replace(trajectory, **{field: values}) for trajectory, values in zip(trajectories, results, strict=True)]


def _update(config, trainer: Trainer, trajectories: list[Trajectory], packing: Packing, step: int) -> list[dict[str, float]]:
    """All optimizer updates of the step; their statistics in order."""
    size = config.batch.sequences_per_minibatch or len(trajectories)
    stats = []
    for _ in range(config.algorithm.num_iterations):
        for first in range(0, len(trajectories), size):
            batches = pack(trajectories[first : first + size], packing, trainer.beta).batches
            numbers = {}
            if trainer.critic is not None:
                critic = trainer.critic.update(batches)
                numbers |= {name: value for name, value in critic.items() if name.startswith("value/")}
                numbers |= {"value/grad_norm": critic["grad_norm"], "value/skipped_updates": critic["skipped"]}
            if trainer.critic is None or step > config.algorithm.critic_warmup_steps:
                numbers |= trainer.policy.update(batches)
            stats.append(numbers)
    return stats
