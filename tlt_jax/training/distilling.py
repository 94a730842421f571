"""Drafter warm-up: the policy answers prompts of the task, and the drafter learns to say what the policy says.

Answers are kept in WORKDIR/answers.jsonl and taken from there when they are all there; the drafter is written to WORKDIR/drafter in the published layout.
"""

import json
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
from tlt_jax.strategies import Completion
from tlt_jax.tasks.prompts import Prompt, PromptOrder
from tlt_jax.training import build
from tlt_jax.training.draft_training import draft_loss, draft_optimizer, unfilled
from tlt_jax.training.drafting import files_of, load_params, make_drafter
from tlt_jax.training.experience import Packing, Trajectory, pack
from tlt_jax.training.generation import GENERATE_STEP, Display, open_engine
from tlt_jax.training.json_lines import JsonLines
from tlt_jax.training.rollout_phase import Phase, check_lengths
from tlt_jax.training.settings import Config
from tlt_jax.training.settings_rules import copy_with

LINE_SECONDS = 15.0
Answer = tuple[tuple[int, ...], tuple[int, ...]]  # prompt ids, response ids


def distill(config: Config, workdir: str) -> None:
    """Answers, features, training, files. Raises ValueError for a config that names no drafter with weights."""
    if config.speculative.method not in ("eagle", "eagle3"):
        raise ValueError(f"speculative.method={config.speculative.method} has no weights to train: set it to eagle or eagle3")
    directory = epath.Path(workdir)
    directory.mkdir(parents=True, exist_ok=True)
    model = build.open_checkpoint(config)
    drafter, given = make_drafter(config, model.spec), load_params(config, model.spec, "float32")
    answers = _answers(config, model, directory / "answers.jsonl")
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
    held_out = max(1, round(config.distill.held_out * len(batches)))
    if held_out >= len(batches):
        raise ValueError(f"{len(batches)} batches are too few to hold one back: raise distill.prompts or lower distill.tokens_per_update")
    learner = DraftLearner(
        meshes.train, drafter, draft_loss(config), draft_optimizer(config, "cosine", config.distill.epochs * (len(batches) - held_out)), params,
        frozen)
    _train(config, learner, batches[held_out:], batches[:held_out], JsonLines(directory / "metrics.jsonl"))
    save_drafter(directory / "drafter", model.spec, LoadedDrafter(files_of(config, drafter), learner.drafter_params))
    print(f"drafter written to {directory / 'drafter'}")
    print(f"next: python -m tlt_jax.generate --model={config.model.path} --drafter={directory / 'drafter'} --prompts=PROMPTS.jsonl --output=ANSWERS.jsonl")


def _answers(config: Config, model: build.Model, path: epath.Path) -> list[Answer]:
    """The policy's answers, from the file when it holds as many as are asked for."""
    task, _ = build.make_tasks(config, model.tokenizer)
    prompts = task.prompts()
    count = min(config.distill.prompts or len(prompts), len(prompts))
    chosen = [prompts[index] for index in PromptOrder(len(prompts), config.seed).draw(count)]
    check_lengths(model.spec, chosen, config.rollout.max_new_tokens, lambda prompt: f"{prompt.source}, row {prompt.row}")
    wanted = count * config.distill.num_generations
    kept = JsonLines(path).read()
    if len(kept) == wanted:
        print(f"{wanted} answers from {path}", flush=True)
        return [(tuple(one["prompt_ids"]), tuple(one["token_ids"])) for one in kept]
    answers = sample_answers(config, model, chosen, config.distill.num_generations)
    path.write_text("".join(json.dumps({"prompt_ids": prompt, "token_ids": response}) + "\n" for prompt, response in answers))
    return answers


def sample_answers(config: Config, model: build.Model, prompts: Sequence[Prompt], generations: int) -> list[Answer]:
    """The policy's answers at rollout.temperature, decoded plainly, in the order of the prompts."""
    plain = copy_with(config, {"speculative.method": "off", "drafter.path": ""})
    engine, weights = open_engine(plain, model, prompts)
    display, done = Display("answers", len(prompts) * generations, engine), {}

    def finish(completion: Completion) -> None:
        display.add(completion)
        done[completion.request.index] = completion

    try:
        engine.run(weights, prompts, Phase("answers", generations, config.rollout.temperature, GENERATE_STEP), finish, display.turn)
    finally:
        display.stop()
    print(f"{len(done)} answers: {display.rate()}", flush=True)
    return [(done[index].request.prompt_ids, done[index].token_ids) for index in sorted(done)]


def _with_frequent_tokens(drafter: FeatureDrafter, params: dict, policy: dict, answers: Sequence[Answer]) -> dict:
    """The draft tokens become those that stand most often in the answers, ties by id; an own head starts as their columns of the policy's."""
    counts = np.bincount(np.concatenate([np.array(response) for _, response in answers]), minlength=drafter.spec.vocab_size)
    ids = jnp.asarray(np.sort(np.argsort(-counts, kind="stable")[: len(params["ids"])]).astype(np.int32))
    head = {"head": {"kernel": policy_head(drafter.spec, policy, ids)}} if "head" in params else {}
    return params | head | {"ids": ids}


def packed_answers(config: Config, answers: Sequence[Answer], row_multiple: int) -> list[DraftBatch]:
    """Answers side by side in rows, the features still empty."""
    trajectories = [Trajectory(np.array([*prompt, *response], np.int32), len(prompt), np.zeros(len(response), np.float32)) for prompt, response in answers]
    longest, budget = max(len(one.tokens) for one in trajectories), config.distill.tokens_per_update
    if longest * row_multiple > budget:
        raise ValueError(f"distill.tokens_per_update={budget} cannot hold one answer of {longest} tokens for each of {row_multiple} devices: raise it")
    order = np.random.default_rng(config.seed).permutation(len(trajectories))
    size, batches = max(budget // row_multiple // longest, 1), []
    width = min(budget // row_multiple, size * longest)
    for packed in pack([trajectories[index] for index in order], Packing(budget, row_multiple, width)).batches:
        batches.append(unfilled(packed))
    return batches


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
