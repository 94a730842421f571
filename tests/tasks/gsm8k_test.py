"""GSM8K rows: the answer is cut from the worked solution, and the policy is asked for a form that the verifier takes."""

import json
import re

import pytest

from tlt_jax.tasks.gsm8k import gsm8k_task
from tlt_jax.tasks.prompts import PromptSettings
from tlt_jax.tasks.text_files import DataError

ROW = {"question": "Half of 96?", "answer": "It is 96/2 = <<96/2=48>>48.\n#### 1,048"}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW))
    return str(tmp_path / "train.jsonl")


def test_a_chat_model_is_asked_for_a_box_and_a_base_model_for_the_marker(path, byte_tokenizer, templates):
    chat = gsm8k_task(path, byte_tokenizer(templates["chatml"]), PromptSettings()).prompts()[0]
    plain = gsm8k_task(path, byte_tokenizer(), PromptSettings()).prompts()[0]
    assert r"\boxed{}" in chat.text and chat.text.startswith("<|im_start|>user\nHalf of 96?")
    assert "####" in plain.text and "im_start" not in plain.text
    assert chat.answer == plain.answer == "1048" and chat.key == plain.key


def test_an_instruction_of_the_user_wins(path, byte_tokenizer):
    assert gsm8k_task(path, byte_tokenizer(), PromptSettings(instruction="Q {question} A")).prompts()[0].text == "Q Half of 96? A"


def test_worked_solutions_lose_the_calculator_notes(path, byte_tokenizer):
    task = gsm8k_task(path, byte_tokenizer(), PromptSettings())
    assert task.worked_solution(task.prompts()[0]) == "It is 96/2 = 48.\n#### 1,048"
    assert (task.name, task.reward_kind, task.scorer) == ("gsm8k", "math", None)


def test_a_row_without_an_answer_is_named(path, byte_tokenizer):
    with open(path, "a") as file:
        file.write('\n{"question": "q", "answer": null}')
    with pytest.raises(DataError, match=r"train\.jsonl:2: the answer is null"):
        gsm8k_task(path, byte_tokenizer(), PromptSettings()).prompts()


def test_every_row_of_the_real_files_has_an_integer_answer(shared, byte_tokenizer, templates):
    for name, count in (("gsm8k_train.jsonl", 2000), ("gsm8k_test.jsonl", 200)):
        prompts = gsm8k_task(str(shared / "data" / name), byte_tokenizer(templates["chatml"]), PromptSettings()).prompts()
        assert len(prompts) == len({prompt.key for prompt in prompts}) == count
        assert all(re.fullmatch(r"-?\d+", prompt.answer) for prompt in prompts)
