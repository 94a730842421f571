"""What the supervised stages learn from: plain text (pretrain), worked answers (sft), pairs of answers (reward_model), from a file or made by the task.

Files are read and encoded at the start of a run, so that a bad row is told before any device work; what a task makes is encoded when it is drawn.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tlt_jax.records import PackedBatch, PairBatch
from tlt_jax.tasks.demonstrations import Demonstration, read_demonstrations, read_preferences
from tlt_jax.tasks.plain_texts import read_pieces
from tlt_jax.tasks.prompts import Prompt, Task
from tlt_jax.tasks.text_files import DataError
from tlt_jax.tasks.tokenizer import Tokenizer
from tlt_jax.training import build
from tlt_jax.training.experience import Packing, Trajectory, pack, pack_pairs, packing_for
from tlt_jax.training.settings import Config

SUPERVISED = ("pretrain", "sft", "reward_model")
Pair = tuple[Sequence[int], Sequence[int]]  # token ids of the better and of the worse answer, prompts included


@dataclasses.dataclass(frozen=True)
class Lessons:
    """The examples of one stage. `lengths` are tokens of examples, or an upper bound of all; `batches` packs some of them."""

    count: int
    make: Callable[[int], Trajectory | Pair]
    lengths: Sequence[int]
    pack: Callable[[list, Packing], list[PackedBatch] | list[PairBatch]]

    def packing(self, config: Config, row_multiple: int) -> Packing:
        """The one shape of rows. Raises ValueError where a micro-batch cannot hold them."""
        budget, longest = config.batch.tokens_per_microbatch, max(self.lengths)
        if row_multiple * longest > budget:
            raise ValueError(
                f"batch.tokens_per_microbatch={budget} cannot hold an example of {longest} tokens for each of the {row_multiple} devices that share the batch: "
                f"raise it to at least {row_multiple * longest}")
        return packing_for(self.lengths, 0, budget, row_multiple)

    def batches(self, indices: Sequence[int], packing: Packing) -> list[PackedBatch] | list[PairBatch]:
        """The examples as micro-batches of numpy arrays."""
        return self.pack([self.make(index) for index in indices], packing)

    def split(self, config: Config, stage: str) -> tuple[list[int], list[int]]:
        """(what is trained on, what is only measured on), the same in every run with this seed."""
        count = max(1, round(config.stages[stage].held_out * self.count)) if config.stages[stage].held_out else 0
        away = set(np.random.default_rng((config.seed, self.count)).permutation(self.count)[:count].tolist())
        return [index for index in range(self.count) if index not in away], sorted(away)


def read_lessons(config: Config, tokenizer: Tokenizer, task: Task) -> dict[str, Lessons]:
    """Those of every supervised stage of the run. Raises DataError for rows that cannot be used, ValueError where a batch asks for more than there are."""
    readers = {"pretrain": _pretraining, "sft": _answers, "reward_model": _pairs}
    lessons = {stage: readers[stage](config, tokenizer, task) for stage in SUPERVISED if stage in config.stages.order}
    for stage, one in lessons.items():
        trained, batch = len(one.split(config, stage)[0]), config.stages[stage].batch
        if batch > trained:
            raise ValueError(
                f"stages.{stage}.batch={batch} different examples are drawn for an update and there are {trained} to train on ({one.count} in all): lower it, "
                "or add rows")
    return lessons


def describe(config: Config, stage: str, lessons: Lessons) -> str:
    """A line for the start of a run."""
    trained, held_out = lessons.split(config, stage)
    source, steps, batch = config.stages[stage].path or "made by the task", config.stages[stage].steps, config.stages[stage].batch
    return (
        f"{stage}: {len(trained)} examples, {len(held_out)} held out ({source}); {steps} updates of {batch} = {steps * batch / len(trained):.1f} epochs")


def _texts(make: Callable[[int], Trajectory], count: int, lengths: Sequence[int]) -> Lessons:
    return Lessons(count, make, lengths, lambda examples, packing: pack(examples, packing).batches)


def _pretraining(config: Config, tokenizer: Tokenizer, task: Task) -> Lessons:
    stage = config.stages.pretrain
    if stage.path:
        pieces = read_pieces(stage.path, tokenizer, stage.length, _columns(config))
        return _texts(lambda index: _counted(pieces[index], [0] + [1] * (len(pieces[index]) - 1)), len(pieces), [len(piece) for piece in pieces])
    prompts = task.prompts()
    _check_worked(task)
    bounds = _bounds(config, prompts)
    room = max(bounds)

    def whole(index: int) -> Trajectory:
        ids = _ended(tokenizer, prompts[index], task.worked_solution(prompts[index]))
        _check_room(prompts[index], len(ids), room)
        return _counted(ids, [0] + [1] * (len(ids) - 1))

    return _texts(whole, len(prompts), bounds)


def _answers(config: Config, tokenizer: Tokenizer, task: Task) -> Lessons:
    if config.stages.sft.path:
        rows = read_demonstrations(config.stages.sft.path, tokenizer, build.prompt_settings(config, limited=False), _columns(config))
        return _texts(lambda index: _demonstrated(rows[index]), len(rows), [len(row.ids) for row in rows])
    prompts = task.prompts()
    _check_worked(task)
    bounds = _bounds(config, prompts)
    room = max(bounds)

    def answered(index: int) -> Trajectory:
        prompt = prompts[index]
        ids = _ended(tokenizer, prompt, task.worked_solution(prompt))
        _check_room(prompt, len(ids), room)
        return _counted(ids, [0] * len(prompt.prompt_ids) + [1] * (len(ids) - len(prompt.prompt_ids)))

    return _texts(answered, len(prompts), bounds)


def _pairs(config: Config, tokenizer: Tokenizer, task: Task) -> Lessons:
    path = config.stages.reward_model.path
    if path:
        rows = read_preferences(path, tokenizer, build.prompt_settings(config, limited=False), _columns(config))
        pairs = [(row.better.ids, row.worse.ids) for row in rows]
        return Lessons(len(pairs), pairs.__getitem__, [len(better) + len(worse) for better, worse in pairs], pack_pairs)
    prompts = task.prompts()
    for prompt in prompts:
        task.worked_solution(prompt), task.wrong_solution(prompt)
    bounds = _bounds(config, prompts)
    room = max(bounds)

    def pair(index: int) -> Pair:
        prompt = prompts[index]
        both = [_ended(tokenizer, prompt, text) for text in (task.worked_solution(prompt), task.wrong_solution(prompt))]
        _check_room(prompt, max(map(len, both)), room)
        return both[0], both[1]

    return Lessons(len(prompts), pair, [2 * bound for bound in bounds], pack_pairs)


def _columns(config: Config) -> dict[str, str]:
    return {name: value for name, value in config.data.columns.to_dict().items() if value}


def _check_worked(task: Task) -> None:
    for prompt in task.prompts():
        task.worked_solution(prompt)


def _bounds(config: Config, prompts: Sequence[Prompt]) -> list[int]:
    return [len(prompt.prompt_ids) + config.rollout.max_new_tokens for prompt in prompts]


def _check_room(prompt: Prompt, length: int, room: int) -> None:
    if length > room:
        raise DataError(
            f"{prompt.source}, row {prompt.row}: prompt and worked answer have {length} tokens, more than the {room} of the longest prompt with "
            "rollout.max_new_tokens: raise rollout.max_new_tokens")


def _ended(tokenizer: Tokenizer, prompt: Prompt, answer: str) -> list[int]:
    """The ids of a prompt with an answer and what a policy says at an answer's end."""
    return [*prompt.prompt_ids, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.answer_end_id]


def _demonstrated(row: Demonstration) -> Trajectory:
    return _counted(row.ids, row.mask)


def _counted(ids: Sequence[int], mask: Sequence[int]) -> Trajectory:
    """A sequence whose response begins with the first id that counts."""
    first = list(mask).index(1)
    return Trajectory(np.array(ids, np.int32), first, np.zeros(len(ids) - first, np.float32), counts=np.array(mask[first:], np.float32))
