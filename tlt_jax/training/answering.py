"""The texts that a drafter learns from: the policy's answers to prompts of the task, sampled once and kept in a file, or saved rollouts; and their packing."""

import json
from collections.abc import Callable, Sequence

import numpy as np
from etils import epath

from tlt_jax.distillation.pairs import DraftBatch
from tlt_jax.models.specs import PolicySpec
from tlt_jax.strategies import Completion
from tlt_jax.tasks.prompts import Prompt, PromptOrder
from tlt_jax.tasks.request_rows import read_ids
from tlt_jax.tasks.text_files import DataError, Row, read_rows
from tlt_jax.training import build
from tlt_jax.training.draft_texts import unfilled
from tlt_jax.training.experience import Packing, Trajectory, pack
from tlt_jax.training.generation import GENERATE_STEP, Display, open_engine
from tlt_jax.training.json_lines import JsonLines
from tlt_jax.training.rollout_phase import Phase, check_lengths
from tlt_jax.training.settings import Config, read_key
from tlt_jax.training.settings_rules import copy_with

SAMPLED_WITH = (
    "seed", "model.path", "precision.rollout", "distill.num_generations", "rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.min_p",
    "rollout.max_new_tokens")
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
    """The policy's answers, from the file when they are all there, else sampled; each is kept in `path`.partial as soon as it is finished.

    An interrupted sampling goes on with the answers that are missing. Raises ValueError where it was begun with other settings or prompts.
    """
    each = config.distill.num_generations
    wanted, partial = len(prompts) * each, path.parent / f"{path.name}.partial"
    answers = kept_answers(path, wanted)
    if answers is not None:
        print(f"{wanted} answers from {path}", flush=True)
        return answers
    done, lines = _begun(config, prompts, partial), JsonLines(partial)
    try:
        if len(done) < wanted:
            sample_answers(config, model, prompts, each, done, lambda index: lines.write(_row(done[index]) | {"index": index}))
    finally:
        lines.close()
    answers = [done[index] for index in range(wanted)]
    new = path.parent / f"{path.name}.new"
    new.write_text("".join(json.dumps(_row(answer)) + "\n" for answer in answers))
    new.replace(path)
    partial.unlink()
    return answers


def read_rollouts(path: str, spec: PolicySpec) -> list[Answer]:
    """Every row of a file with prompt_ids and token_ids (answers.jsonl of distill, the output of generate), in order; other fields are not read.

    Raises DataError naming file, row and field for a row without ids, with ids outside the model's vocabulary, or longer than its positions.
    """
    answers = []
    for row in read_rows(path):
        prompt, answer = (_ids(row, field, spec.vocab_size) for field in ("prompt_ids", "token_ids"))
        if len(prompt) + len(answer) > spec.max_position_embeddings:
            raise DataError(
                f"{row.place}: prompt_ids and token_ids together are {len(prompt) + len(answer)} tokens, more than the model's max_position_embeddings="
                f"{spec.max_position_embeddings}; take the row out")
        answers.append((prompt, answer))
    return answers


def _ids(row: Row, field: str, vocabulary: int) -> tuple[int, ...]:
    if row.columns.get(field) is None:
        texts = "; samples.jsonl of a run holds texts, which are not the exact tokens" if "response" in row.columns else ""
        raise DataError(f"{row.place} has no {field}: rollouts are rows with prompt_ids and token_ids, as distill and generate write them{texts}")
    return read_ids(row, field, vocabulary)


def _row(answer: Answer) -> dict:
    return {"prompt_ids": answer[0], "token_ids": answer[1]}


def _begun(config: Config, prompts: Sequence[Prompt], partial: epath.Path) -> dict[int, Answer]:
    """The answers by index that an interrupted sampling has left; its first row is what they were sampled with."""
    lines, settings = JsonLines(partial), {name: read_key(config, name) for name in SAMPLED_WITH}
    lines.keep(lambda record: True)  # cuts off a row that was being written
    records = lines.read()
    if not records:
        lines.write(settings)
        lines.close()
        return {}
    changed = [f"{name}={records[0].get(name)}, now {value}" for name, value in settings.items() if records[0].get(name) != value]
    if changed:
        raise ValueError(f"{partial} was begun with {'; '.join(changed)}: go on with the old values, or remove the file to sample anew")
    wanted, each = len(prompts) * config.distill.num_generations, config.distill.num_generations
    done = {one["index"]: (tuple(one["prompt_ids"]), tuple(one["token_ids"])) for one in records[1:] if one["index"] < wanted}
    other = [index for index, (prompt, _) in done.items() if prompt != prompts[index // each].prompt_ids]
    if other:
        raise ValueError(f"{partial} was begun on other prompts ({len(other)} of {len(done)} differ): give the old data, or remove the file to sample anew")
    print(f"{len(done)} of {wanted} answers are in {partial}", flush=True)
    return done


def sample_answers(config: Config, model: build.Model, prompts: Sequence[Prompt], generations: int, done: dict[int, Answer] | None = None,
                   on_answer: Callable[[int], None] = lambda index: None) -> list[Answer]:
    """The policy's answers at rollout.temperature, decoded plainly, in the order of the prompts.

    Answer i is to prompt i // generations. Those in `done` are there already; `on_answer` is called with i when an answer has come into it.
    """
    done = {} if done is None else done
    plain = copy_with(config, {"speculative.method": "off", "drafter.path": ""})
    engine, weights = open_engine(plain, model, prompts)
    display, there = Display("answers", len(prompts) * generations - len(done), engine), frozenset(done)

    def finish(completion: Completion) -> None:
        display.add(completion)
        done[completion.request.index] = (tuple(completion.request.prompt_ids), tuple(completion.token_ids))
        on_answer(completion.request.index)

    try:
        engine.run(weights, prompts, Phase("answers", generations, config.rollout.temperature, GENERATE_STEP), finish, display.turn, there)
    finally:
        display.stop()
    print(f"{display.finished} answers: {display.rate()}", flush=True)
    return [done[index] for index in sorted(done)]


def answer_packing(config: Config, longest: int, row_multiple: int) -> Packing:
    """Rows of whole longest answers, as wide as the budget of one update allows. Raises ValueError for a budget below one answer for each device."""
    budget = config.distill.tokens_per_update
    if longest * row_multiple > budget:
        raise ValueError(f"distill.tokens_per_update={budget} cannot hold one answer of {longest} tokens for each of {row_multiple} devices: raise it")
    share = budget // row_multiple
    return Packing(budget, row_multiple, share // longest * longest)


def texts_of(answers: Sequence[Answer]) -> list[Trajectory]:
    """Answers behind their prompts, to be packed for a drafter."""
    return [Trajectory(np.array([*prompt, *response], np.int32), len(prompt), np.zeros(len(response), np.float32)) for prompt, response in answers]


def packed_answers(config: Config, answers: Sequence[Answer], row_multiple: int) -> list[DraftBatch]:
    """Answers side by side in rows, the features still empty."""
    trajectories = texts_of(answers)
    packing = answer_packing(config, max(len(one.tokens) for one in trajectories), row_multiple)
    order = np.random.default_rng(config.seed).permutation(len(trajectories))
    return [unfilled(packed) for packed in pack([trajectories[index] for index in order], packing).batches]


def held_out_batches(config: Config, batches: int) -> int:
    """How many of the batches are only measured on. Raises ValueError where none would be left to train on."""
    held_out = max(1, round(config.distill.held_out * batches))
    if held_out >= batches:
        raise ValueError(f"{batches} batches are too few to hold one back: raise distill.prompts or lower distill.tokens_per_update")
    return held_out
