"""A supervised stage: plain text, worked answers or pairs of answers in, an update out; its own measure on examples that stay out."""

import dataclasses
import functools
import time
from collections.abc import Callable

import numpy as np

from tlt_jax.objectives import policy_update, preference
from tlt_jax.objectives.policy_update import Pass, language_objective
from tlt_jax.optimizers import OptimizerSettings, make_optimizer
from tlt_jax.records import PackedBatch, PairBatch
from tlt_jax.runtime import policy_driver
from tlt_jax.runtime.policy_driver import Learner
from tlt_jax.runtime.programs import LearnerPrograms, score_program
from tlt_jax.sharding.rules import batch_rows_multiple
from tlt_jax.tasks.prompts import PromptOrder
from tlt_jax.training import build
from tlt_jax.training.experience import Packing
from tlt_jax.training.lessons import Lessons
from tlt_jax.training.session import Session

WARMUP_SHARE = 0.05


@dataclasses.dataclass
class Supervised:
    """The moving parts of one stage. `prefix` starts the names of its update's metrics."""

    name: str
    learner: Learner
    lessons: Lessons
    packing: Packing
    train: list[int]
    held_out: list[int]
    measure: Callable[[dict, list], dict[str, float]]  # (parameters, micro-batches) → metrics
    prefix: str

    def order(self, config) -> PromptOrder:
        """A new order of the examples that are trained on."""
        return PromptOrder(len(self.train), config.seed, shuffle=config.data.shuffle)

    def step(self, order: PromptOrder, batch: int) -> dict[str, float]:
        """One update on the next `batch` examples; its metrics."""
        started = time.monotonic()
        batches = self.lessons.batches([self.train[index] for index in order.draw(batch)], self.packing)
        stats = self.learner.update(batches)
        seconds = time.monotonic() - started
        tokens = sum(int((one.segments_BT > 0).sum()) for one in batches)
        of_update = {f"{self.prefix}grad_norm": stats["grad_norm"], f"{self.prefix}skipped_updates": stats["skipped"]}
        named = {name: value for name, value in stats.items() if "/" in name}
        return named | of_update | {"timing/step_seconds": seconds, "perf/tokens_per_second": tokens / seconds, "data/epoch": order.epoch}

    def measured(self) -> dict[str, float]:
        """Metrics on what is held out; {} without any."""
        return self.measure(self.learner.params, self.lessons.batches(self.held_out, self.packing)) if self.held_out else {}


def open_stage(session: Session, name: str, params: dict) -> Supervised:
    """A stage that starts from the policy's `params`; a reward model gets a new head that scores everything 0."""
    config, lessons, mesh = session.config, session.lessons[name], session.meshes.train
    spec = session.model.spec
    if name == "reward_model":
        spec = build.reward_spec(spec)
        params = {part: params[part] for part in ("embed", "layers", "final_norm")} | {"head": build.zero_value_head(spec, config.precision.params)}
    run = Pass(spec, compute_dtype=build.resolve_dtype(config, "compute"), remat=config.precision.remat)
    if name == "reward_model":
        objective = functools.partial(preference.preference_objective, run, config.stages.reward_model.margin)
        measure = functools.partial(_pairs_measured, mesh, score_program(mesh, functools.partial(preference.score_pairs, run)))
    else:
        objective = functools.partial(language_objective, run)
        measure = functools.partial(_text_measured, mesh, score_program(mesh, functools.partial(policy_update.score_logprobs, run)))
    programs = LearnerPrograms(mesh, objective, make_optimizer(_optimizer_settings(config, name)), params)
    train, held_out = lessons.split(config, name)
    return Supervised(
        name, Learner(programs, params, max_skips=config.optimizer.max_skips), lessons, lessons.packing(config, batch_rows_multiple(mesh)), train, held_out,
        measure, "reward/model_" if name == "reward_model" else "policy/")


def _optimizer_settings(config, name: str) -> OptimizerSettings:
    stage, optimizer = config.stages[name], config.optimizer
    return OptimizerSettings(
        lr=stage.lr, schedule="cosine", warmup=int(WARMUP_SHARE * stage.steps), total=stage.steps, b1=optimizer.b1, b2=optimizer.b2,
        grad_clip=optimizer.grad_clip)


def _text_measured(mesh, program, params: dict, batches: list[PackedBatch]) -> dict[str, float]:
    scored = policy_driver.score(program, mesh, params, batches)
    total = -sum(float((logprobs_BT * batch.mask_BT).sum()) for logprobs_BT, batch in zip(scored, batches, strict=True))
    return {"policy/heldout_loss": total / sum(float(batch.mask_BT.sum()) for batch in batches)}


def _pairs_measured(mesh, program, params: dict, batches: list[PairBatch]) -> dict[str, float]:
    scored = policy_driver.score(program, mesh, params, batches)
    gaps = np.concatenate([gaps_BY[batch.better_BY < batch.tokens_BT.shape[1]] for gaps_BY, batch in zip(scored, batches, strict=True)])
    return {"reward/model_heldout_accuracy": float((gaps > 0).mean()), "reward/model_heldout_gap": float(gaps.mean())}
