"""Generated arithmetic: the same problem for the same (seed, index), right worked solutions, a real tail, held-out texts never trained on."""

import collections
import pickle

import pytest

from tlt_jax.tasks.arithmetic import ALPHABET, HELD_OUT_FIRST, ArithmeticSettings, ArithmeticTask, problem, score, solve, worked_solution
from tlt_jax.tasks.text_files import DataError

SETTINGS = ArithmeticSettings()


@pytest.fixture(scope="module")
def train(characters):
    return ArithmeticTask(characters, 600, seed=1)


@pytest.fixture(scope="module")
def long_chains(characters):
    return ArithmeticTask(characters, 200, seed=2, settings=ArithmeticSettings(max_steps=30, tail_exponent=0.0, multiply_share=0.5))


def test_a_worked_solution_goes_from_the_left_line_by_line():
    assert solve("12+7-3+5=?") == "12+7=19\n19-3=16\n16+5=21\n#### 21"


@pytest.mark.parametrize("text", ["", "1=?", "1+=?", "1+1", "1/2=?", "-1+2=?", "1+1=?x"])
def test_another_text_is_no_question(text):
    with pytest.raises(DataError, match="not a question"):
        solve(text)


def test_the_answer_is_what_python_says_and_no_value_leaves_0_to_99(train):
    for prompt in train.prompts():
        expression = prompt.columns["question"].removesuffix("=?")
        assert int(prompt.answer) == eval(expression)
        values = [int(line.split("=")[1]) for line in worked_solution(prompt).split("\n")[:-1]]
        assert all(0 <= value <= 99 for value in values) and len(values) == prompt.difficulty


def test_long_chains_stay_below_100():
    long = ArithmeticSettings(max_steps=80, tail_exponent=0.0)
    values = [int(line.split("=")[1]) for index in range(200) for line in solve(problem(long, 0, index)).split("\n")[:-1]]
    assert max(values) <= 99 and min(values) >= 0 and max(values) > 80


def test_the_task_solves_itself_and_only_the_exact_last_line_scores(train):
    for prompt in train.prompts()[:50]:
        right = train.worked_solution(prompt)
        assert right == prompt.columns["solution"]
        assert train.scorer(prompt.text, right, prompt.answer, prompt.columns) == 1.0
        for wrong in (right + "0", right + " ", right.replace("####", "###"), f"#### {int(prompt.answer) + 1}", "", right + "\nso"):
            assert score(prompt.text, wrong, prompt.answer, {}) == 0.0


def test_a_wrong_solution_is_always_judged_wrong_and_ends_in_a_number_or_nowhere(train, long_chains):
    for task in (train, long_chains):
        for prompt in task.prompts():
            wrong = task.wrong_solution(prompt)
            assert wrong and score(prompt.text, wrong, prompt.answer, {}) == 0.0
            assert set(wrong) <= set(ALPHABET) and "" not in wrong.split("\n")
            last = wrong.rsplit("\n", 1)[-1]
            assert not last.startswith("#### ") or int(last.removeprefix("#### ")) != int(prompt.answer)


def test_a_wrong_solution_is_the_same_for_a_prompt_every_time_and_others_have_their_own(characters, train):
    again = ArithmeticTask(characters, 600, seed=1)
    assert [again.wrong_solution(prompt) for prompt in reversed(again.prompts())] == [train.wrong_solution(prompt) for prompt in reversed(train.prompts())]
    ((question, count),) = collections.Counter(prompt.columns["question"] for prompt in train.prompts()).most_common(1)
    wrong = {train.wrong_solution(prompt) for prompt in train.prompts() if prompt.columns["question"] == question}
    assert count > 3 and len(wrong) > 1


def test_wrong_solutions_are_wrong_in_every_way_that_policies_are(train):
    kinds = collections.Counter(kind_of_mistake(train, prompt) for prompt in train.prompts() if prompt.difficulty > 2)
    assert set(kinds) == {"a step", "the last line", "no last line", "only a number"}
    assert min(kinds.values()) >= 0.03 * sum(kinds.values())


def kind_of_mistake(task, prompt):
    """What is wrong, by comparison with the worked solution; after a wrong step all the others must follow from it."""
    wrong, right = task.wrong_solution(prompt).split("\n"), prompt.columns["solution"].split("\n")
    if len(wrong) == 1 and wrong[0].startswith("####"):
        return "only a number"
    if wrong == right[: len(wrong)]:
        return "no last line"
    if wrong[:-1] == right[:-1]:
        return "the last line"
    steps = [line.split("=") for line in wrong[:-1]]
    results = [int(result) for _, result in steps]
    signed = [result - eval(left) for (left, _), result in zip(steps, results, strict=True)]
    assert len(wrong) == len(right) and sum(slip != 0 for slip in signed) == 1 and wrong[-1] == f"#### {results[-1]}"
    assert all(left.startswith(str(before)) for (left, _), before in zip(steps[1:], results, strict=False))
    return "a step"


def test_the_scorer_travels_to_other_processes(train):
    assert pickle.loads(pickle.dumps(train.scorer)) is score


def test_a_problem_depends_on_seed_and_index_alone(characters, train):
    longer = ArithmeticTask(characters, 610, seed=1)
    assert longer.prompts()[:600] == train.prompts()
    assert [problem(SETTINGS, 1, index) for index in (5, 3)] == [train.prompts()[index].columns["question"] for index in (5, 3)]
    assert ArithmeticTask(characters, 600, seed=2).prompts()[0].key != train.prompts()[0].key
    assert [problem(SETTINGS, 2, index) for index in range(20)] != [problem(SETTINGS, 1, index) for index in range(20)]


def test_problems_do_not_change_between_versions():
    assert [problem(SETTINGS, 0, index) for index in (0, 1, 2, HELD_OUT_FIRST)] == ["8+2=?", "7+5=?", "5+7=?", "1+5+4=?"]


def test_held_out_problems_are_in_no_training_set(characters):
    held_out = ArithmeticTask(characters, 300, seed=1, split="held_out").prompts()
    trained = [problem(SETTINGS, seed, index) for seed in (0, 1, 2) for index in range(2000)]
    assert not {prompt.columns["question"] for prompt in held_out} & set(trained)
    assert min(prompt.row for prompt in held_out) == HELD_OUT_FIRST
    assert len({prompt.key for prompt in held_out}) == 300


def test_the_number_of_steps_has_a_heavy_tail(train):
    steps = collections.Counter(int(prompt.difficulty) for prompt in train.prompts())
    assert set(steps) == set(range(1, 7))
    assert steps[1] > steps[2] > steps[4] > steps[6] * 0.9 and steps[1] < 0.65 * 600
    flat = ArithmeticSettings(tail_exponent=0.0)
    flat_steps = collections.Counter(solve(problem(flat, 0, index)).count("\n") for index in range(600))
    assert min(flat_steps.values()) > 60


def test_every_character_is_a_token_and_prompts_begin_once(characters, train):
    for prompt in train.prompts()[:50]:
        assert set(prompt.text) | set(prompt.columns["solution"]) <= set(ALPHABET)
        assert len(prompt.prompt_ids) == len(prompt.text) + 1 and prompt.prompt_ids[0] == characters.bos_id


@pytest.mark.parametrize("wrong", [{"max_steps": 0}, {"operand_max": 10}, {"operand_max": 0}, {"tail_exponent": -1.0}, {"multiply_share": 1.5}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ArithmeticSettings(**wrong)


def test_an_unknown_split_is_refused(characters):
    with pytest.raises(ValueError, match="held_out"):
        ArithmeticTask(characters, 10, split="test")
