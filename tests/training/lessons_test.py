"""What supervised stages learn from: the same split for a seed, masks that count what is learned, and one row shape that holds every example."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.settings_test import changed
from tlt_jax.tasks.arithmetic import ALPHABET, ArithmeticTask
from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.tasks.file_task import FileTask
from tlt_jax.tasks.prompts import PromptSettings
from tlt_jax.tasks.text_files import DataError
from tlt_jax.training.lessons import Lessons, read_lessons

CHAT = (
    "{% for message in messages %}{{ message.role + ':' + message.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}")
STAGES = ("pretrain", "sft", "reward_model")


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    return character_tokenizer(ALPHABET, str(tmp_path_factory.mktemp("characters")))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    letters = "".join(map(chr, range(10, 127)))
    return character_tokenizer(letters, str(tmp_path_factory.mktemp("chat")), chat_template=CHAT)


@pytest.fixture(scope="module")
def task(characters):
    return ArithmeticTask(characters, 40, seed=3)


def config_of(stage, *, new_tokens=64, **values):
    """The stage alone, with small batches; `values` are of the stage."""
    keys = {f"stages__{stage}__{name}": value for name, value in {"batch": 4, **values}.items()}
    return changed(stages__order=(stage,), rollout__max_new_tokens=new_tokens, **keys)


def lessons_of(stage, tokenizer, task, **values):
    config = config_of(stage, **values)
    return config, read_lessons(config, tokenizer, task)[stage]


def of_rows(directory, stage, tokenizer, records, **values):
    path = directory / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return lessons_of(stage, tokenizer, None, path=str(path), **values)


def learned(batches):
    """The ids of all tokens that count."""
    return sorted(int(token) for batch in batches for token in batch.tokens_BT[batch.mask_BT > 0])


@given(st.integers(1, 200), st.integers(0, 5), st.floats(0, 0.99))
def test_what_is_held_out_has_its_share_is_the_same_for_a_seed_and_is_never_trained_on(count, seed, share):
    config = changed(seed=seed, stages__sft__held_out=share)
    lessons = Lessons(count, None, [1] * count, None)
    trained, held_out = lessons.split(config, "sft")
    assert sorted(trained + held_out) == list(range(count)) and lessons.split(config, "sft") == (trained, held_out)
    assert len(held_out) == (max(1, round(share * count)) if share else 0)


def test_another_seed_holds_out_others():
    lessons = Lessons(100, None, [1] * 100, None)
    splits = [lessons.split(changed(seed=seed, stages__sft__held_out=0.1), "sft") for seed in (0, 1)]
    assert splits[0] != splits[1]


def test_only_the_stages_of_the_run_are_read(characters, task):
    config = changed(stages__order=("sft", "rl"), stages__sft__batch=4, stages__pretrain__path="none.jsonl")
    assert list(read_lessons(config, characters, task)) == ["sft"]
    assert read_lessons(changed(stages__order=("rl",)), characters, task) == {}


@pytest.mark.parametrize(("stage", "first"), [("pretrain", 1), ("sft", None)])
def test_a_worked_answer_of_the_task_counts_with_its_end_and_in_pretraining_the_prompt_too(characters, task, stage, first):
    config, lessons = lessons_of(stage, characters, task)
    assert lessons.count == 40
    for index in (0, 17):
        prompt, one = task.prompts()[index], lessons.make(index)
        answer = characters.encode(task.worked_solution(prompt), add_special_tokens=False)
        assert one.tokens.tolist() == [*prompt.prompt_ids, *answer, characters.eos_id]
        assert one.prompt_length == (first or len(prompt.prompt_ids)) and one.counts.tolist() == [1.0] * one.response_length
    batches = lessons.batches([0, 17], lessons.packing(config, 1))
    expected = [token for index in (0, 17) for token in lessons.make(index).tokens[lessons.make(index).prompt_length :].tolist()]
    assert learned(batches) == sorted(expected)


def test_pairs_of_the_task_are_a_right_and_a_wrong_answer_to_one_prompt_and_both_end(characters, task):
    config, lessons = lessons_of("reward_model", characters, task)
    for index, prompt in enumerate(task.prompts()[:10]):
        pair = lessons.make(index)
        for ids, text in zip(pair, (task.worked_solution(prompt), task.wrong_solution(prompt)), strict=True):
            assert ids == [*prompt.prompt_ids, *characters.encode(text, add_special_tokens=False), characters.answer_end_id]
    batches = lessons.batches(range(10), lessons.packing(config, 2))
    length = batches[0].tokens_BT.shape[1]
    assert sum((batch.better_BY < length).sum() for batch in batches) == 10


@pytest.mark.parametrize("stage", STAGES)
def test_no_example_is_longer_than_its_bound_so_every_one_fits_the_one_row_shape(characters, task, stage):
    config, lessons = lessons_of(stage, characters, task)
    packing = lessons.packing(config, 2)
    sizes = [sum(map(len, lessons.make(index))) if stage == "reward_model" else len(lessons.make(index).tokens) for index in range(lessons.count)]
    assert max(sizes) <= max(lessons.lengths) <= packing.row_length
    shapes = {batch.tokens_BT.shape[1] for indices in (range(40), [0]) for batch in lessons.batches(indices, packing)}
    assert shapes == {packing.row_length}


def test_pieces_of_a_text_file_count_every_token_but_the_first(characters, tmp_path):
    config, lessons = of_rows(tmp_path, "pretrain", characters, [{"text": "1+2=3\n" * 9}] * 3, length=16, batch=2)
    assert max(lessons.lengths) == 16 and lessons.count == len(lessons.lengths) == 3 * 4
    counted = 0
    for index in range(lessons.count):
        one = lessons.make(index)
        assert (len(one.tokens), one.prompt_length) == (lessons.lengths[index], 1) and one.counts.tolist() == [1.0] * (len(one.tokens) - 1)
        counted += one.response_length
    assert counted == 3 * (6 * 9 + 1)
    batches = lessons.batches(range(lessons.count), lessons.packing(config, 1))
    assert sum(batch.mask_BT.sum() for batch in batches) == counted


def test_a_conversation_counts_only_the_assistants_tokens_and_none_of_the_users_between_them(chat, tmp_path):
    messages = [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "ab"), ("user", "r"), ("assistant", "c"))]
    config, lessons = of_rows(tmp_path, "sft", chat, [{"messages": messages}] * 4)
    one = lessons.make(0)
    said = one.tokens[one.prompt_length :][one.counts > 0]
    assert chat.decode(said, skip_special_tokens=False) == "ab<eos>c<eos>"
    assert lessons.lengths == [len(one.tokens)] * 4 and one.counts[0] == one.counts[-1] == 1
    batches = lessons.batches([0, 3], lessons.packing(config, 1))
    assert learned(batches) == sorted([*said.tolist()] * 2)


def test_pairs_of_a_file_are_those_of_its_rows(chat, tmp_path):
    records = [{"prompt": "q", "chosen": "good", "rejected": "no"}] * 6
    config, lessons = of_rows(tmp_path, "reward_model", chat, records)
    better, worse = (chat.decode(ids, skip_special_tokens=False) for ids in lessons.make(5))
    assert (better, worse) == ("user:q<eos>assistant:good<eos>", "user:q<eos>assistant:no<eos>")
    assert lessons.lengths == [sum(map(len, lessons.make(0)))] * 6
    (batch,) = lessons.batches([1, 2], lessons.packing(config, 1))
    assert (batch.better_BY < batch.tokens_BT.shape[1]).sum() == 2


@pytest.mark.parametrize("stage", STAGES)
def test_an_answer_that_has_no_room_is_named_with_the_key_to_raise(characters, task, stage):
    longest = max(task.prompts(), key=lambda prompt: len(prompt.prompt_ids) + len(task.worked_solution(prompt)))
    room = max(len(prompt.prompt_ids) for prompt in task.prompts()) + 5
    _, lessons = lessons_of(stage, characters, task, new_tokens=5)
    with pytest.raises(DataError, match=rf"arithmetic, row {longest.row}: .* more than the {room} .*: raise rollout\.max_new_tokens"):
        lessons.make(longest.row)


@pytest.mark.parametrize(("stage", "example"), [("sft", 70), ("reward_model", 140)])
def test_a_micro_batch_that_holds_no_example_for_each_device_says_how_much_it_needs(characters, task, stage, example):
    prompts = max(len(prompt.prompt_ids) for prompt in task.prompts())
    config, lessons = lessons_of(stage, characters, task, new_tokens=70 - prompts)
    config.batch.tokens_per_microbatch = 4 * example
    assert lessons.packing(config, 4).row_length == example
    with pytest.raises(ValueError, match=rf"microbatch={4 * example} cannot hold an example of {example} tokens .* 5 devices.*at least {5 * example}"):
        lessons.packing(config, 5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_of_more_than_what_is_trained_on_is_refused(characters, task, stage):
    lessons_of(stage, characters, task, batch=36, held_out=0.1)
    with pytest.raises(ValueError, match=rf"stages\.{stage}\.batch=37 .* there are 36 to train on \(40 in all\)"):
        lessons_of(stage, characters, task, batch=37, held_out=0.1)


def test_a_task_without_worked_or_wrong_answers_is_told_before_any_update(chat, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "q", "ground_truth": "1"}) + "\n" for _ in range(4)))
    without = FileTask(str(tmp_path / "rows.jsonl"), chat, PromptSettings())
    for stage in STAGES:
        with pytest.raises(DataError, match="no worked answer to learn from"):
            lessons_of(stage, chat, without)
    (tmp_path / "worked.jsonl").write_text("".join(json.dumps({"prompt": "q", "answer": "1"}) + "\n" for _ in range(4)))
    worked = FileTask(str(tmp_path / "worked.jsonl"), chat, PromptSettings())
    assert lessons_of("sft", chat, worked)[1].count == 4
    with pytest.raises(DataError, match=r"stages\.reward_model\.path"):
        lessons_of("reward_model", chat, worked)


@pytest.mark.parametrize(
    ("stage", "record"), [("pretrain", {"text": 5}), ("sft", {"prompt": "q"}), ("reward_model", {"prompt": "q", "chosen": "a", "rejected": "a"})])
def test_a_row_of_a_file_that_cannot_be_used_is_named_before_any_update(chat, tmp_path, stage, record):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: "):
        of_rows(tmp_path, stage, chat, [record])


def test_the_columns_and_the_instruction_of_the_config_hold_for_a_stages_file(chat, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"mine": "q", "prompt": "other", "answer": "a"}) + "\n" for _ in range(4)))
    config = config_of("sft", path=str(path))
    config.data.columns.prompt, config.data.instruction, config.data.system_prompt = "mine", "<{question}>", "s"
    one = read_lessons(config, chat, None)["sft"].make(0)
    assert chat.decode(one.tokens, skip_special_tokens=False) == "system:s<eos>user:<q><eos>assistant:a<eos>"


def test_lessons_are_numpy_so_that_reading_them_touches_no_device(characters, task):
    config, lessons = lessons_of("sft", characters, task)
    (batch,) = lessons.batches([0], lessons.packing(config, 1))
    assert all(isinstance(leaf, np.ndarray | np.float32) for leaf in vars(batch).values())
