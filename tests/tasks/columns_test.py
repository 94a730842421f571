"""Matching columns by the names that other trainers use, and reference answers in one form."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from tlt_jax.tasks.columns import conversation, difficulty_value, match_columns, normalized_answer, value_of
from tlt_jax.tasks.text_files import DataError, Row, read_rows

LAYOUTS = {
    "verl": (
        {"prompt": [], "data_source": "d", "reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {"index": 4}},
        {"prompt": "prompt", "answer": "reward_model.ground_truth", "source": "data_source", "id": "extra_info.index"},
    ),
    "openrlhf": ({"input": "q", "label": "1", "datasource": "d"}, {"prompt": "input", "answer": "label", "source": "datasource", "id": None}),
    "trl": ({"prompt": "q", "solution": "1"}, {"prompt": "prompt", "answer": "solution", "source": None}),
    "nemo": ({"messages": [], "task_name": "d"}, {"prompt": "messages", "answer": None, "source": "task_name"}),
    "areal": ({"messages": [], "answer": "1"}, {"prompt": "messages", "answer": "answer"}),
    "gsm8k": ({"question": "q", "answer": "#### 1"}, {"prompt": "question", "answer": "answer"}),
    "math": ({"problem": "q", "solution": "s", "level": "Level 5", "type": "Algebra"}, {"prompt": "problem", "answer": "solution", "difficulty": "level"}),
    "sharegpt": ({"conversations": []}, {"prompt": "conversations"}),
    "completion": ({"prompt": "q", "completion": "c"}, {"prompt": "prompt", "completion": "completion"}),
    "preference": ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"chosen": "chosen", "rejected": "rejected"}),
    "plain input and output": ({"input": "q", "output": "o"}, {"prompt": "input", "answer": "output"}),
}


def rows_of(*records):
    return [Row(number + 1, record, "d/rows.jsonl", number) for number, record in enumerate(records)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_columns_of_other_trainers_are_found(name):
    record, expected = LAYOUTS[name]
    matched = match_columns(rows_of(record))
    assert {meaning: getattr(matched, meaning) for meaning in expected} == expected


def test_the_description_names_what_was_matched_in_one_line():
    line = match_columns(rows_of(LAYOUTS["verl"][0])).describe()
    assert "\n" not in line
    for part in ("prompt <- prompt", "answer <- reward_model.ground_truth", "source <- data_source", "id <- extra_info.index"):
        assert part in line
    assert "id <- row index" in match_columns(rows_of({"prompt": "q"})).describe()


def test_a_missing_column_lists_those_found_and_those_accepted():
    with pytest.raises(DataError) as error:
        match_columns(rows_of({"text_in": "q", "meta": {"deep": 1}}))
    for part in ("text_in", "meta.deep", "question", "conversations", "data.columns.prompt"):
        assert part in str(error.value)


def test_an_override_wins_and_a_wrong_one_names_the_nearest():
    rows = rows_of({"prompt": "q", "my_answer": "1", "answer": "2", "id": 7})
    matched = match_columns(rows, {"answer": "my_answer", "prompt": "", "id": "row_index"})
    assert (matched.prompt, matched.answer, matched.id) == ("prompt", "my_answer", None)
    with pytest.raises(DataError, match="did you mean my_answer"):
        match_columns(rows, {"answer": "my_anwser"})
    with pytest.raises(DataError, match="no such meaning"):
        match_columns(rows, {"answers": "my_answer"})


def test_one_column_cannot_be_prompt_and_answer():
    with pytest.raises(DataError, match="both prompt and answer"):
        match_columns(rows_of({"answer": "q"}), {"prompt": "answer"})


def test_a_row_without_the_column_is_named():
    first, second = rows_of({"prompt": "q", "extra": {"a": 1}}, {"question": "q", "extra": None})
    assert value_of(first, "extra.a") == 1
    for name in ("prompt", "extra.a"):
        with pytest.raises(DataError, match=r"rows\.jsonl:2: .*question"):
            value_of(second, name)


@pytest.mark.parametrize("gold", [18, 18.0, "18", " 18\n", ["18"], [18.0]])
def test_one_gold_in_many_forms_is_one_answer(gold, tmp_path):
    assert normalized_answer(gold, "row") == "18"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"answer": gold}))
    parquet.write_table(pyarrow.table({"answer": [gold]}), tmp_path / "rows.parquet")
    for file in ("rows.jsonl", "rows.parquet"):
        assert normalized_answer(read_rows(str(tmp_path / file))[0].columns["answer"], "row") == "18"


ANSWERS = [
    (0.1, "0.1"),
    (-3.0, "-3"),
    (2.5e20, "2.5e+20"),
    ([2, "x"], "2, x"),
    ("So.\n#### 1,080", "1080"),
    ("#### 41\nno\n#### 42", "42"),
    ("#### -7", "-7"),
    (r"Thus $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
    (r"\boxed{1} or \boxed{2}", r"\boxed{1} or \boxed{2}"),
    (r"\boxed{1", r"\boxed{1"),
    ("(1,080)", "(1,080)"),
]


@pytest.mark.parametrize(("value", "expected"), ANSWERS)
def test_answers_become_text_by_the_written_rules(value, expected):
    assert normalized_answer(value, "row") == expected


@pytest.mark.parametrize("value", [None, True, False, float("nan"), float("inf"), [], [None], [True], {"a": 1}, "", "  ", "####  "])
def test_what_is_no_answer_is_refused_with_its_row(value):
    with pytest.raises(DataError, match="rows.jsonl:3"):
        normalized_answer(value, "rows.jsonl:3")


@pytest.mark.parametrize(("value", "expected"), [("Level 5", 5.0), (2, 2.0), (0.25, 0.25), ("hard", 3.0), ("Level ?", None), (True, None), (None, None)])
def test_difficulty_is_a_number_or_unknown(value, expected):
    assert difficulty_value(value) == expected


def test_share_gpt_turns_become_messages():
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert conversation(turns, "row") == [
        {"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"},
    ]  # fmt: skip


def test_text_parts_are_joined_and_other_parts_refused():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation([{"role": "user", "content": parts}], "row") == [{"role": "user", "content": "ab"}]
    with pytest.raises(DataError, match="row, message 0: only text"):
        conversation([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "row")


@pytest.mark.parametrize("value", [[], "q", [{"content": "q"}], [{"role": "user"}], [{"from": "alien", "value": "q"}], ["q"],
                                   [{"role": "assistant", "content": "", "tool_calls": [{}]}]])  # fmt: skip
def test_a_malformed_conversation_is_refused_with_its_row(value):
    with pytest.raises(DataError, match="rows.jsonl:3"):
        conversation(value, "rows.jsonl:3")
