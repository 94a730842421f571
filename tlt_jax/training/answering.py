"""The texts that a drafter learns from: the policy's answers to prompts of the task, sampled once and kept in a file; and their packing."""

import json
from collections.abc import Sequence

import numpy as np
from etils import epath

from tlt_jax.distillation.pairs import DraftBatch
from tlt_jax.strategies import Completion
from tlt_jax.tasks.prompts import Prompt, PromptOrder
from tlt_jax.training import build
from tlt_jax.training.draft_training import unfilled
from tlt_jax.training.experience import Packing, Trajectory, pack
from tlt_jax.training.generation import GENERATE_STEP, Display, open_engine
from tlt_jax.training.json_lines import JsonLines
from tlt_jax.training.rollout_phase import Phase, check_lengths
from tlt_jax.training.settings import Config
from tlt_jax.training.settings_rules import copy_with

Answer = tuple[tuple[int, ...], tuple[int, ...]]  # prompt ids, response ids


def chosen_prompts(config: Config, model: build.Model) -> list[Prompt]:
    """distill.prompts of the task in the order of the seed. Raises ValueError for one that with its answer passes the model's positions."""
    task, _ = build.make_tasks(config, model.tokenizer)
    prompts = task.prompts()
    count = min(config.distill.prompts or len(prompts), len(prompts))
    chosen = [prompts[index] for index in PromptOrder(len(prompts), config.seed).draw(count)]
    check_lengths(model.spec, chosen, config.rollout.max_new_tokens, lambda prompt: f"{prompt.source}, row {prompt.row}")
    return chosen


def kept_answers(path: epath.Path, wanted: int) -> list[Answer] | None:
    """The answers of the file when it holds as many as are asked for."""
    kept = JsonLines(path).read()
    return [(tuple(one["prompt_ids"]), tuple(one["token_ids"])) for one in kept] if len(kept) == wanted else None


def answers_to(config: Config, model: build.Model, prompts: Sequence[Prompt], path: epath.Path) -> list[Answer]:
    """The policy's answers, from the file when they are all there, else sampled and written to it."""
    wanted = len(prompts) * config.distill.num_generations
    kept = kept_answers(path, wanted)
    if kept is not None:
        print(f"{wanted} answers from {path}", flush=True)
        return kept
    answers = sample_answers(config, model, prompts, config.distill.num_generations)
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


def answer_packing(config: Config, longest: int, row_multiple: int) -> Packing:
    """Rows of whole longest answers, as wide as the budget of one update allows. Raises ValueError for a budget below one answer for each device."""
    budget = config.distill.tokens_per_update
    if longest * row_multiple > budget:
        raise ValueError(f"distill.tokens_per_update={budget} cannot hold one answer of {longest} tokens for each of {row_multiple} devices: raise it")
    share = budget // row_multiple
    return Packing(budget, row_multiple, share // longest * longest)


def packed_answers(config: Config, answers: Sequence[Answer], row_multiple: int) -> list[DraftBatch]:
    """Answers side by side in rows, the features still empty."""
    trajectories = [Trajectory(np.array([*prompt, *response], np.int32), len(prompt), np.zeros(len(response), np.float32)) for prompt, response in answers]
    packing = answer_packing(config, max(len(one.tokens) for one in trajectories), row_multiple)
    order = np.random.default_rng(config.seed).permutation(len(trajectories))
    return [unfilled(packed) for packed in pack([trajectories[index] for index in order], packing).batches]


def held_out_batches(config: Config, batches: int) -> int:
    """How many of the batches are only measured on. Raises ValueError where none would be left to train on."""
    held_out = max(1, round(config.distill.held_out * batches))
    if held_out >= batches:
        raise ValueError(f"{batches} batches are too few to hold one back: raise distill.prompts or lower distill.tokens_per_update")
    return held_out
