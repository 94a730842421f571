"""reasoning-gym data sets by name, scored by their own rule in any process."""

import concurrent.futures
import multiprocessing
import pickle

import pytest

from tlt_jax.tasks.prompts import PromptSettings
from tlt_jax.tasks.reasoning_gym_tasks import ReasoningGymTask
from tlt_jax.tasks.text_files import DataError


@pytest.fixture(scope="module")
def sums(byte_tokenizer):
    return ReasoningGymTask("chain_sum", byte_tokenizer(), size=8, seed=3)


def test_prompts_are_the_data_sets_questions_with_its_answers(sums):
    prompts = sums.prompts()
    assert len(prompts) == len({prompt.key for prompt in prompts}) == 8
    for prompt in prompts:
        assert prompt.text.startswith(prompt.columns["question"]) and "<answer>" in prompt.text
        assert eval(prompt.columns["metadata"]["expression"]) == int(prompt.answer)


def test_the_data_sets_own_rule_decides(sums):
    for prompt in sums.prompts():
        right = (sums.worked_solution(prompt), f"<answer>7</answer> no, <answer> {prompt.answer} </answer>")
        wrong = ("<answer>x</answer>", prompt.answer, "")
        verdicts = [sums.scorer(prompt.text, response, prompt.answer, prompt.columns) for response in right + wrong]
        assert verdicts == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_question_with_several_right_answers_is_scored_by_its_rule(byte_tokenizer):
    task = ReasoningGymTask("countdown", byte_tokenizer(), size=2, seed=0)
    prompt = task.prompts()[0]
    expression = prompt.columns["metadata"]["expression"]
    assert task.scorer(prompt.text, f"<answer>({expression})</answer>", prompt.answer, prompt.columns) == 1.0
    assert task.scorer(prompt.text, f"<answer>{expression}+1</answer>", prompt.answer, prompt.columns) < 1.0


def test_scoring_is_the_same_in_a_spawned_process(sums):
    prompt = sums.prompts()[5]
    arguments = (prompt.text, sums.worked_solution(prompt), prompt.answer, prompt.columns)
    assert len(pickle.dumps(sums.scorer)) < 1000
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(sums.scorer, *arguments).result(60) == 1.0


def test_an_entry_that_comes_out_different_is_an_error_and_no_verdict(sums):
    prompt = sums.prompts()[0]
    with pytest.raises(DataError, match="entry 0"):
        sums.scorer(prompt.text, "<answer>1</answer>", prompt.answer, prompt.columns | {"question": "other"})


def test_the_same_seed_gives_the_same_problems_and_another_seed_others(sums, byte_tokenizer):
    def texts(seed):
        return [prompt.text for prompt in ReasoningGymTask("chain_sum", byte_tokenizer(), size=8, seed=seed).prompts()]

    assert texts(3) == [prompt.text for prompt in sums.prompts()] != texts(4)


def test_arguments_reach_the_data_set_and_wrong_ones_are_named(byte_tokenizer):
    def task(**arguments):
        return ReasoningGymTask("chain_sum", byte_tokenizer(), size=3, arguments=arguments, prompt_settings=PromptSettings())

    assert {prompt.columns["metadata"]["num_terms"] for prompt in task(min_terms=9, max_terms=9).prompts()} == {9}
    for wrong in ({"no_such": 1}, {"min_terms": 5, "max_terms": 2}):
        with pytest.raises(DataError, match="chain_sum does not take"):
            task(**wrong).prompts()


def test_an_unknown_name_is_an_error_with_the_nearest(byte_tokenizer):
    with pytest.raises(DataError, match="nearest: chain_sum"):
        ReasoningGymTask("chain_sums", byte_tokenizer()).prompts()


def test_it_makes_no_wrong_answers_and_says_where_pairs_come_from(sums):
    with pytest.raises(DataError, match=r"reasoning_gym/chain_sum: .*no wrong answers.*stages\.reward_model\.path"):
        sums.wrong_solution(sums.prompts()[0])
