"""Supervised warm-up on worked answers: the model first learns the form of an answer, then RL makes it right."""

import functools
import time

import jax
import numpy as np

from tlt_jax.objectives.policy_update import Pass, language_objective
from tlt_jax.optimizers import OptimizerSettings, make_optimizer
from tlt_jax.runtime.policy_driver import Learner
from tlt_jax.runtime.programs import LearnerPrograms
from tlt_jax.tasks.prompts import PromptOrder
from tlt_jax.training import build
from tlt_jax.training.experience import Trajectory, pack
from tlt_jax.training.session import Session

WARMUP_SHARE = 0.05


def make_learner(session: Session, params) -> Learner:
    """The policy as a language model: log-likelihood of worked answers at temperature 1, cosine decay after 5 % warm-up."""
    config = session.config
    run = Pass(session.model.spec, compute_dtype=build.resolve_dtype(config, "compute"), remat=config.precision.remat)
    stage = config.stages.sft
    optimizer = make_optimizer(OptimizerSettings(
        lr=stage.lr, schedule="cosine", warmup=int(WARMUP_SHARE * stage.steps), total=stage.steps, b1=config.optimizer.b1,
        b2=config.optimizer.b2, grad_clip=config.optimizer.grad_clip))
    programs = LearnerPrograms(session.meshes.train, functools.partial(language_objective, run), optimizer, params)
    return Learner(programs, params, max_skips=config.optimizer.max_skips)


def step(session: Session, learner: Learner, order: PromptOrder) -> dict[str, float]:
    """One supervised update on the next prompts; metrics."""
    started = time.monotonic()
    prompts = session.task.prompts()
    chosen = [_worked(session, prompts[index]) for index in order.draw(session.config.stages.sft.batch)]
    packed = pack(chosen, session.packing)
    stats = learner.update(packed.batches)
    seconds = time.monotonic() - started
    tokens = sum(len(one.tokens) for one in chosen)
    return {
        "policy/loss": stats["policy/loss"], "policy/grad_norm": stats["grad_norm"], "policy/skipped_updates": stats["skipped"],
        "timing/step_seconds": seconds, "perf/tokens_per_second": tokens / seconds, "data/epoch": order.epoch}


def _worked(session: Session, prompt) -> Trajectory:
    tokenizer = session.model.tokenizer
    answer = tokenizer.encode(session.task.worked_solution(prompt), add_special_tokens=False) + [tokenizer.eos_id]
    length, room = len(prompt.prompt_ids) + len(answer), session.packing.row_length
    if length > room:
        raise ValueError(
            f"{prompt.source}, row {prompt.row}: prompt and worked answer have {length} tokens, more than the {room} of a packed row (longest prompt + "
            f"rollout.max_new_tokens): raise rollout.max_new_tokens")
    return Trajectory(np.array([*prompt.prompt_ids, *answer], np.int32), len(prompt.prompt_ids), np.zeros(len(answer), np.float32))


def run(session: Session, learner: Learner, order: PromptOrder, first_step: int, on_step) -> None:
    """Steps first_step … stages.sft.steps; `on_step(step, metrics)` records, saves and may raise to stop."""
    for number in range(first_step, session.config.stages.sft.steps + 1):
        on_step(number, step(session, learner, order))
    jax.block_until_ready(learner.params)
