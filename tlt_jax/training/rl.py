"""One RL step, top to bottom: draw prompts, publish weights, roll out and score, old and reference log-probs and values, advantages, updates.

GRPO (group-relative, no critic) and PPO (GAE with a critic of its own or on the policy's trunk). Losses and advantages are in `objectives/`, device
programs in `runtime/`; here they are put in order.
"""

import collections
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from tlt_jax.objectives import advantages as estimators
from tlt_jax.objectives import losses, policy_update
from tlt_jax.objectives.policy_update import VALUE_HEAD, PolicyObjective
from tlt_jax.optimizers import learning_rate, make_optimizer
from tlt_jax.runtime import hardware_counters, policy_driver
from tlt_jax.runtime.policy_driver import Learner
from tlt_jax.runtime.programs import LearnerPrograms, compile_counter, score_program
from tlt_jax.scheduling.batching import power_bucket
from tlt_jax.sharding import processes
from tlt_jax.tasks.prompts import PromptOrder
from tlt_jax.training import build, rl_metrics
from tlt_jax.training.draft_training import DraftTraining
from tlt_jax.training.evaluation import samples_of
from tlt_jax.training.experience import Packing, Trajectory, pack, unpack
from tlt_jax.training.scoring import StepScorer
from tlt_jax.training.session import Phase, Session
from tlt_jax.training.settings_rules import kl_in_reward, needs_old_logprobs, updates_per_step


@dataclasses.dataclass
class Trainer:
    """The networks of an RL stage and the passes that score with them. `critic` is None for GRPO and for a shared trunk."""

    policy: Learner
    critic: Learner | None
    reference: dict | None
    score_policy: object
    score_values: object | None
    order: PromptOrder
    draft: DraftTraining | None = None  # None: the drafter, if there is one, learns nothing


def make_trainer(session: Session, params, order: PromptOrder) -> Trainer:
    """Learners for the configured algorithm from the policy's parameters, which stay as the reference when beta > 0."""
    config, spec, mesh = session.config, session.model.spec, session.meshes.train
    run, settings = build.training_pass(config, spec), build.loss_settings(config)
    updates = config.stages.rl.steps * updates_per_step(config)
    reference = params if config.algorithm.beta > 0 else None
    shared = config.algorithm.name == "ppo" and config.algorithm.critic == "shared"
    if shared and VALUE_HEAD not in params:
        params = params | {VALUE_HEAD: build.zero_value_head(spec)}
    objective = PolicyObjective(run, settings, on_policy=not needs_old_logprobs(config), shared_critic=shared, with_entropy=True)
    optimizer = make_optimizer(build.optimizer_settings(config, config.optimizer.lr, updates))
    programs = LearnerPrograms(mesh, functools.partial(policy_update.policy_objective, objective), optimizer, params)
    policy = Learner(programs, params, max_skips=config.optimizer.max_skips)
    critic, score_values = None, None
    if shared:
        score_values = score_program(mesh, functools.partial(policy_update.score_values, run, head=VALUE_HEAD))
    elif config.algorithm.name == "ppo":
        critic_run = dataclasses.replace(run, spec=dataclasses.replace(spec, head="value"))
        start = {name: params[name] for name in ("embed", "layers", "final_norm")} | {"head": build.zero_value_head(spec)}
        critic_optimizer = make_optimizer(build.optimizer_settings(config, config.optimizer.critic_lr, updates))
        value_objective = functools.partial(policy_update.value_objective, critic_run, settings)
        critic = Learner(LearnerPrograms(mesh, value_objective, critic_optimizer, start), start, max_skips=config.optimizer.max_skips)
        score_values = score_program(mesh, functools.partial(policy_update.score_values, critic_run, head="head"))
    score_policy = score_program(mesh, functools.partial(policy_update.score_logprobs, run))
    draft = DraftTraining(session, params) if config.drafter.quanta_per_step else None
    return Trainer(policy, critic, reference, score_policy, score_values, order, draft)


def run_step(session: Session, trainer: Trainer, step: int) -> dict[str, float]:
    """One RL step; its metrics."""
    config, timing, compiles = session.config, rl_metrics.Stopwatch(), (compile_counter().count, compile_counter().seconds)
    verdicts = collections.Counter(session.pool.counts)
    prompts = [session.task.prompts()[index] for index in trainer.order.draw(config.batch.prompts_per_step)]
    with timing.of("publish"):
        views = session.publish(trainer.policy.params)
    with timing.of("rollout"):
        phase = Phase("rollout", config.algorithm.num_generations, config.rollout.temperature, step)
        scorer = session.generate(views, prompts, phase, trainer.draft)
    del views
    decoding, (spans, loans) = session.decode_report(), session.rollout_report()
    slices = len(session.meshes.publish.devices)
    with timing.of("reward"):
        scorer.finish()
    if trainer.draft is not None:
        trainer.draft.meet(scorer.completions)
    trajectories = [_trajectory(completion) for completion in scorer.completions]
    packing = session.packing
    with timing.of("score"):
        session.phase("scoring")
        _score(session, trainer, trajectories, packing)
    sequence_advantages = _set_advantages(config, trainer, scorer, trajectories)
    with timing.of("update"):
        session.phase("update")
        stats = _update(config, trainer, trajectories, packing, step)
    distilled = {}
    if trainer.draft is not None:
        with timing.of("distill"):
            session.phase("distilling")
            distilled = trainer.draft.run(trainer.policy.params)
    session.reporter.record_samples(step, samples_of(session, scorer, sequence_advantages))
    session.reporter.record_timeline(step, rl_metrics.step_spans(timing, spans, slices))
    faults = rl_metrics.of_pool(processes.exchange(collections.Counter(session.pool.counts) - verdicts))
    metrics = rl_metrics.of_rollout(scorer, timing) | decoding | rl_metrics.of_updates(stats) | faults
    metrics |= _reward_kl(config, trajectories) | distilled | rl_metrics.of_loans(loans, spans, slices, timing)
    metrics |= hardware_counters.metrics([sample for told in processes.exchange(session.counters.taken()) for sample in told])
    metrics |= {"perf/compiles": compile_counter().count - compiles[0], "perf/compile_seconds": compile_counter().seconds - compiles[1]}
    return metrics | {"policy/lr": _policy_lr(config, trainer), "data/epoch": trainer.order.epoch}


def _policy_lr(config, trainer: Trainer) -> float:
    """Learning rate of the step's last policy update."""
    settings = build.optimizer_settings(config, config.optimizer.lr, config.stages.rl.steps * updates_per_step(config))
    return float(learning_rate(settings)(max(trainer.policy.updates - 1, 0)))


def _trajectory(completion) -> Trajectory:
    tokens = np.array([*completion.request.prompt_ids, *completion.token_ids], np.int32)
    return Trajectory(tokens, len(completion.request.prompt_ids), np.array(completion.logprobs, np.float32))


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


def _set_advantages(config, trainer: Trainer, scorer: StepScorer, trajectories: list[Trajectory]) -> np.ndarray:
    """Advantages (and returns) on every trajectory; the per-sequence mean for the sample table."""
    rewards = np.array([0.0 if score.score is None else score.score for score in scorer.scores], np.float32)
    valid = np.array([score.score is not None for score in scorer.scores])
    for trajectory, ok in zip(trajectories, valid, strict=True):
        trajectory.trained = bool(ok)
    if trainer.score_values is None:
        groups = np.arange(len(rewards)) // config.algorithm.num_generations
        penalised = rewards - _kl_penalties(config, trajectories).sum(1)
        values = np.asarray(estimators.group_relative(penalised, groups, scale_by_std=config.algorithm.scale_rewards, valid_B=valid))
        for trajectory, value in zip(trajectories, values, strict=True):
            trajectory.advantages = np.full(trajectory.response_length, value, np.float32)
        return values
    _set_gae(config, rewards, valid, trajectories)
    return np.array([trajectory.advantages.mean() for trajectory in trajectories])


def _padded(arrays: list[np.ndarray]) -> np.ndarray:
    """Numbers of responses as rows [B, T] with 0 beyond each end; T comes from few lengths, so that few programs are compiled."""
    rows = np.zeros((len(arrays), power_bucket(max(map(len, arrays)), 64)), np.float32)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return rows


def _kl_penalties(config, trajectories: list[Trajectory]) -> np.ndarray:
    """beta · KL of every response token [B, T] when the KL sits in the reward, else zeros."""
    algorithm = config.algorithm
    if not kl_in_reward(config):
        return _padded([np.zeros(trajectory.response_length) for trajectory in trajectories])
    old = _padded([trajectory.old_logprobs for trajectory in trajectories])
    reference = _padded([trajectory.reference_logprobs for trajectory in trajectories])
    return algorithm.beta * np.asarray(losses.kl_estimate(old, reference, algorithm.kl_kind))


def _reward_kl(config, trajectories: list[Trajectory]) -> dict[str, float]:
    """policy/kl as a mean over tokens when the KL sits in the reward; when it sits in the loss, the update reports it."""
    if not kl_in_reward(config):
        return {}
    tokens = sum(trajectory.response_length for trajectory in trajectories)
    return {"policy/kl": float(_kl_penalties(config, trajectories).sum() / config.algorithm.beta / tokens)}


def _set_gae(config, rewards: np.ndarray, valid: np.ndarray, trajectories: list[Trajectory]) -> None:
    """GAE on padded rows [B, T]: the policy's lambda for advantages, the critic's for returns."""
    algorithm = config.algorithm
    mask = _padded([np.ones(trajectory.response_length) for trajectory in trajectories])
    values = _padded([trajectory.old_values for trajectory in trajectories])
    token_rewards = estimators.token_rewards(rewards, mask) - jnp.asarray(_kl_penalties(config, trajectories))
    advantages, _ = estimators.generalized_advantage_estimation(token_rewards, values, mask, gamma=algorithm.gamma, lam=algorithm.gae_lambda)
    _, returns = estimators.generalized_advantage_estimation(token_rewards, values, mask, gamma=algorithm.gamma, lam=algorithm.value_lambda)
    if algorithm.whiten_advantages:
        advantages = estimators.masked_whiten(advantages, mask * valid[:, None].astype(np.float32))
    advantages, returns = np.asarray(advantages), np.asarray(returns)
    for row, trajectory in enumerate(trajectories):
        trajectory.advantages, trajectory.returns = advantages[row, : trajectory.response_length], returns[row, : trajectory.response_length]


def _update(config, trainer: Trainer, trajectories: list[Trajectory], packing: Packing, step: int) -> list[dict[str, float]]:
    """All optimizer updates of the step; their statistics in order."""
    size = config.batch.sequences_per_minibatch or len(trajectories)
    stats = []
    for _ in range(config.algorithm.num_iterations):
        for first in range(0, len(trajectories), size):
            batches = pack(trajectories[first : first + size], packing).batches
            numbers = {}
            if trainer.critic is not None:
                critic = trainer.critic.update(batches)
                numbers |= {name: value for name, value in critic.items() if name.startswith("value/")}
                numbers |= {"value/grad_norm": critic["grad_norm"], "value/skipped_updates": critic["skipped"]}
            if trainer.critic is None or step > config.algorithm.critic_warmup_steps:
                numbers |= trainer.policy.update(batches)
            stats.append(numbers)
    return stats
