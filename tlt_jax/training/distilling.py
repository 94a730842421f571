"""Drafter warm-up: the policy answers prompts of the task, and the drafter learns to say what the policy says.

Answers are kept in WORKDIR/answers.jsonl and taken from there when they are all there; the drafter is written to WORKDIR/drafter in the published layout.
"""

import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from etils import epath

from tlt_jax.checkpoints.drafter_files import LoadedDrafter, save_drafter
from tlt_jax.checkpoints.pretrained import load_policy
from tlt_jax.distillation.pairs import DraftBatch
from tlt_jax.drafters.feature_drafter import FeatureDrafter, policy_head
from tlt_jax.runtime.draft_driver import DraftLearner, Teacher
from tlt_jax.runtime.programs import frozen_program, new_drafter
from tlt_jax.sharding.rules import batch_rows_multiple
from tlt_jax.training import build
from tlt_jax.training.answering import Answer, answers_to, chosen_prompts, held_out_batches, packed_answers
from tlt_jax.training.draft_training import draft_loss, draft_optimizer
from tlt_jax.training.drafting import files_of, load_params, make_drafter
from tlt_jax.training.json_lines import JsonLines
from tlt_jax.training.settings import Config

LINE_SECONDS = 15.0
ANSWERS = "answers.jsonl"


def distill(config: Config, workdir: str) -> None:
    """Answers, features, training, files. Raises ValueError for a config that names no drafter with weights."""
    check_method(config)
    directory = epath.Path(workdir)
    directory.mkdir(parents=True, exist_ok=True)
    model = build.open_checkpoint(config)
    drafter, given = make_drafter(config, model.spec), load_params(config, model.spec, "float32")
    answers = answers_to(config, model, chosen_prompts(config, model), directory / ANSWERS)
    meshes = build.make_meshes(config)
    policy = load_policy(config.model.path, dtype="float32", mesh=meshes.train).params
    params = given or new_drafter(drafter, policy, config.seed)
    if "ids" in params and given is None:
        params = _with_frequent_tokens(drafter, params, policy, answers)
    frozen = frozen_program(drafter)(policy, params.get("ids"))
    batches = packed_answers(config, answers, batch_rows_multiple(meshes.train))
    teacher = Teacher(meshes.train, drafter, policy)
    tokens = sum(len(response) for _, response in answers)
    print(f"{tokens:,} response tokens of {len(answers)} answers in {len(batches)} batches; computing features", flush=True)
    batches = _with_features(teacher, batches)
    held_out = held_out_batches(config, len(batches))
    learner = DraftLearner(
        meshes.train, drafter, draft_loss(config), draft_optimizer(config, "cosine", config.distill.epochs * (len(batches) - held_out)), params,
        frozen)
    _train(config, learner, batches[held_out:], batches[:held_out], JsonLines(directory / "metrics.jsonl"))
    save_drafter(directory / "drafter", model.spec, LoadedDrafter(files_of(config, drafter), learner.drafter_params))
    print(f"drafter written to {directory / 'drafter'}")
    print(f"next: python -m tlt_jax.generate --model={config.model.path} --drafter={directory / 'drafter'} --prompts=PROMPTS.jsonl --output=ANSWERS.jsonl")


def check_method(config: Config) -> None:
    """Raises ValueError for a config that names no drafter with weights."""
    if config.speculative.method not in ("eagle", "eagle3"):
        raise ValueError(f"speculative.method={config.speculative.method} has no weights to train: set it to eagle or eagle3")


def _with_frequent_tokens(drafter: FeatureDrafter, params: dict, policy: dict, answers: Sequence[Answer]) -> dict:
    """The draft tokens become those that stand most often in the answers, ties by id; an own head starts as their columns of the policy's."""
    counts = np.bincount(np.concatenate([np.array(response) for _, response in answers]), minlength=drafter.spec.vocab_size)
    ids = jnp.asarray(np.sort(np.argsort(-counts, kind="stable")[: len(params["ids"])]).astype(np.int32))
    head = {"head": {"kernel": policy_head(drafter.spec, policy, ids)}} if "head" in params else {}
    return params | head | {"ids": ids}


def _with_features(teacher: Teacher, batches: Sequence[DraftBatch]) -> list[DraftBatch]:
    filled, said = [], time.monotonic()
    for batch in batches:
        filled.append(teacher.fill(batch))
        if time.monotonic() - said > LINE_SECONDS:
            said = time.monotonic()
            print(f"features {len(filled)}/{len(batches)}", flush=True)
    return filled


def _train(config: Config, learner: DraftLearner, batches: Sequence[DraftBatch], held_out: Sequence[DraftBatch], lines: JsonLines) -> None:
    started = said = time.monotonic()
    before = learner.evaluate(held_out)
    print(f"before: {_described(before)}", flush=True)
    lines.write({"update": 0} | before)
    updates = 0
    for epoch in range(config.distill.epochs):
        for index in np.random.default_rng((config.seed, epoch)).permutation(len(batches)):
            stats = learner.update([batches[index]])
            updates += 1
            now = time.monotonic()
            if now - said > LINE_SECONDS:
                said = now
                print(f"update {updates}/{config.distill.epochs * len(batches)}: {_described(stats)}", flush=True)
            if config.distill.minutes and now - started > 60 * config.distill.minutes:
                print(f"stopped after distill.minutes={config.distill.minutes}", flush=True)
                break
        else:
            measured = learner.evaluate(held_out)
            print(f"epoch {epoch + 1}: held out {_described(measured)}", flush=True)
            lines.write({"update": updates, "seconds": now - started} | measured)
            continue
        break
    lines.write({"update": updates, "final": True} | learner.evaluate(held_out))
    lines.close()


def _described(stats: dict[str, float]) -> str:
    levels = [stats[name] for name in sorted(stats) if name.startswith("drafter/acceptance_")]
    return f"loss {stats['drafter/loss']:.3f}, acceptance by level {', '.join(f'{value:.3f}' for value in levels)}"
