"""Drafter warm-up: the policy answers prompts of the task, and the drafter learns to say what the policy says.

Answers are kept in WORKDIR/answers.jsonl and taken from there when they are all there; WORKDIR/checkpoints holds an unfinished training; the drafter is
written to WORKDIR/drafter in the published layout.
"""

import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from etils import epath

from tlt_jax.checkpoints.drafter_files import LoadedDrafter, save_drafter
from tlt_jax.checkpoints.export_directory import refuse_foreign
from tlt_jax.checkpoints.pretrained import load_policy
from tlt_jax.distillation.pairs import DraftBatch
from tlt_jax.drafters.feature_drafter import FeatureDrafter, policy_head
from tlt_jax.runtime.draft_driver import DraftLearner, Teacher
from tlt_jax.runtime.programs import frozen_program, new_drafter
from tlt_jax.sharding.rules import batch_rows_multiple
from tlt_jax.training import build
from tlt_jax.training.answering import Answer, answers_to, chosen_prompts, held_out_batches, packed_answers, read_rollouts
from tlt_jax.training.draft_training import draft_loss, draft_optimizer
from tlt_jax.training.drafter_epochs import LINE_SECONDS, DrafterEpochs, Lessons, digest_of
from tlt_jax.training.drafting import files_of, load_params, make_drafter
from tlt_jax.training.settings import Config

ANSWERS = "answers.jsonl"


def distill(config: Config, workdir: str, rollouts: str | None = None) -> None:
    """Answers (those of the file `rollouts`, if one is named), features, training, files.

    Raises ValueError for a config that names no drafter with weights, Preempted when the training was stopped.
    """
    check_method(config)
    directory = epath.Path(workdir)
    directory.mkdir(parents=True, exist_ok=True)
    model = build.open_checkpoint(config)
    drafter, given = make_drafter(config, model.spec), load_params(config, model.spec, "float32")
    refuse_foreign(directory / "drafter")
    epochs = DrafterEpochs(config, directory)
    answers = read_rollouts(rollouts, model.spec) if rollouts else answers_to(config, model, chosen_prompts(config, model), directory / ANSWERS)
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
    epochs.run(learner, Lessons(batches[held_out:], batches[:held_out], digest_of(answers)))
    save_drafter(directory / "drafter", model.spec, LoadedDrafter(files_of(config, drafter), learner.drafter_params))
    epochs.finish()
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
