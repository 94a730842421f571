"""Users' reward files: the three forms, what may come back, and errors that say function, type and row."""

import pytest

from tlt_jax.rewards.items import Outcome, RewardError, RewardItem
from tlt_jax.rewards.user_function import load_reward

ITEM = RewardItem("2+2?", "4", "4", "sums", {"level": 3}, (1, 2), (7, 8), "stop", 5)
OTHER = RewardItem("2+3?", "6", "5", "sums", {"level": 1}, (1, 3), (9,), "length", 5)


@pytest.fixture
def load(tmp_path):
    def write(code, function="score", kwargs=None, columns=None):
        (tmp_path / "rewards.py").write_text(code)
        return load_reward(tmp_path / "rewards.py", function, kwargs, columns)

    return write


def test_verls_compute_score_works_unchanged(load):
    code = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'acc': True, 'level': extra_info['level'], 'pred': solution_str, 'note': data_source}"
    )
    function = load(code, "compute_score")
    assert not function.grouped
    assert function.score((ITEM, OTHER)) == [Outcome(1.0, {"acc": 1.0, "level": 3.0}, "4"), Outcome(0.0, {"acc": 1.0, "level": 1.0}, "6")]


def test_trls_plural_form_gets_the_group_with_its_columns(load):
    code = (
        "def score(completions, level, prompts=None, completion_ids=None, **kwargs):\n"
        "    assert prompts[0] == '2+2?' and completion_ids == [[7, 8], [9]] and kwargs['answer'] == ['4', '5']\n"
        "    return [None if a == 1 else len(c) + a for c, a in zip(completions, level)]"
    )
    function = load(code, columns=("level",))
    assert function.grouped
    assert function.score((ITEM, OTHER)) == [Outcome(4.0), Outcome(None)]


@pytest.mark.parametrize(
    ("parameters", "result"),
    [
        ("prompt, response, answer, metadata", "response == answer and metadata['level'] == 3"),
        ("response", "response == '4'"),
        ("ground_truth, response_ids", "ground_truth == '4' and response_ids == [7, 8]"),
        ("finish_reason, step, prompt_ids", "finish_reason == 'stop' and step == 5 and prompt_ids == [1, 2]"),
        ("extra_info, data_source", "extra_info['level'] == 3 and data_source == 'sums'"),
        ("response, **everything", "everything['level'] == 3 and everything['prompt'] == '2+2?'"),
    ],
)
def test_any_of_our_names_are_served(load, parameters, result):
    assert load(f"def score({parameters}):\n    return {result}").score((ITEM,)) == [Outcome(1.0)]


def test_async_functions_fixed_arguments_and_siblings_work(load, tmp_path):
    (tmp_path / "weights.py").write_text("SCALE = 2")
    code = "from . import weights\nimport weights as plain\nasync def score(response, bonus):\n    return int(response) * weights.SCALE + bonus + plain.SCALE"
    assert load(code, kwargs={"bonus": 10}).score((ITEM,)) == [Outcome(20.0)]
    assert load_reward(f"{tmp_path / 'rewards.py'}:score", kwargs={"bonus": 0}).score((ITEM,)) == [Outcome(10.0)]


def test_numpy_numbers_are_numbers(load):
    assert load("import numpy\ndef score(response):\n    return numpy.float32(0.5)").score((ITEM,)) == [Outcome(0.5)]
    assert load("import numpy\ndef score(completions):\n    return numpy.array([0.5, 1.0])").score((ITEM, OTHER)) == [Outcome(0.5), Outcome(1.0)]


@pytest.mark.parametrize(
    ("parameters", "returned", "words"),
    [
        ("response", "float('nan')", r"rewards.py:score for row 0 is nan"),
        ("response", "float('inf')", r"is inf"),
        ("response", "'1.0'", r"row 0 is str"),
        ("response", "[1.0]", r"row 0 is list"),
        ("response", "{'reward': 1.0}", r"without `score`.*reward"),
        ("response", "{'score': 1.0, 'acc': float('nan')}", r"'acc'"),
        ("completions", "[1.0]", r"returned 1 rewards for 2"),
        ("completions", "1.0", r"must return a list of 2 rewards, but returned float"),
        ("completions", "[1.0, 'x']", r"row 1 is str"),
        ("completions, missing", "[1.0, 1.0]", r"missing"),
    ],
)
def test_wrong_results_are_errors_that_say_where(load, parameters, returned, words):
    with pytest.raises(RewardError, match=words):
        load(f"def score({parameters}):\n    return {returned}").score((ITEM, OTHER))


@pytest.mark.parametrize(
    ("code", "keywords", "words"),
    [
        ("def other(response): ...", {}, r"no function 'score'; it defines other"),
        ("def score(resp): ...", {}, r"wants resp, which no row has; available are .*answer.*response"),
        ("def score(completions, level): ...", {"columns": ("difficulty",)}, r"wants level.*difficulty"),
        ("def score(response): ...", {"kwargs": {"bonus": 1}}, r"takes no bonus"),
        ("def score(response, /): ...", {}, r"positional-only"),
    ],
)
def test_functions_that_cannot_be_served_are_errors_at_load(load, code, keywords, words):
    with pytest.raises(RewardError, match=words):
        load(code, **keywords)


def test_missing_files_and_functions_are_named(tmp_path):
    with pytest.raises(RewardError, match="no file .*nowhere.py"):
        load_reward(tmp_path / "nowhere.py", "score")
    with pytest.raises(RewardError, match="names no function"):
        load_reward("rewards.py")
