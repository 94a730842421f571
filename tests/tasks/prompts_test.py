"""Prompts: the rendered ids are what is counted and what is cut, keys are stable, and the order survives epoch ends and restarts."""

import dataclasses
import json
import subprocess
import sys

import hypothesis
import pyarrow
import pytest
from hypothesis import strategies as st
from pyarrow import parquet

from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.tasks.columns import match_columns
from tlt_jax.tasks.file_task import FileTask
from tlt_jax.tasks.prompts import PromptOrder, PromptSettings, prompt_key, render_prompts
from tlt_jax.tasks.text_files import DataError, Row, read_rows

CHAT_ROW = {"messages": [{"role": "user", "content": "2+2"}], "answer": "4"}


def rows_of(*records):
    return [Row(number + 1, record, "d/rows.jsonl", number) for number, record in enumerate(records)]


def rendered(tokenizer, *records, overrides=None, **settings):
    rows = rows_of(*records)
    return render_prompts(rows, match_columns(rows, overrides), tokenizer, PromptSettings(**settings))


def questions_of(tokenizer, *lengths):
    """Rows whose prompts have these numbers of rendered ids."""
    own = len(rendered(tokenizer, {"question": ""}, chat=True)[0][0].prompt_ids)
    return [{"question": "x" * (length - own)} for length in lengths]


@pytest.fixture(scope="module")
def chat(byte_tokenizer, templates):
    return byte_tokenizer(templates["chatml"])


def test_a_question_becomes_a_chat_turn_where_there_is_a_template(chat, byte_tokenizer):
    row = {"question": "2+2", "answer": 4}
    assert rendered(chat, row)[0][0].text == "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(chat, row, chat=False)[0][0].text == rendered(byte_tokenizer(), row)[0][0].text == "2+2"


def test_prompt_ids_are_those_of_the_rendered_text(chat):
    prompt = rendered(chat, CHAT_ROW)[0][0]
    assert list(prompt.prompt_ids) == chat.encode(prompt.text, add_special_tokens=False)
    assert (prompt.answer, prompt.columns, prompt.source) == ("4", CHAT_ROW, "rows.jsonl")


def test_plain_text_gets_the_begin_token_and_chat_text_only_what_the_template_prints(characters, byte_tokenizer, templates):
    assert rendered(characters, {"question": "1+1"})[0][0].prompt_ids[0] == characters.bos_id
    mistral = byte_tokenizer(templates["mistral"])
    assert rendered(mistral, {"question": "1+1"})[0][0].prompt_ids.count(mistral.bos_id) == 1


def test_a_template_without_begin_token_gets_none_from_a_tokenizer_that_adds_one(tmp_path, templates):
    tokenizer = character_tokenizer("".join(map(chr, range(10, 127))), str(tmp_path), chat_template=templates["chatml"])
    assert tokenizer.bos_id in rendered(tokenizer, {"question": "q"}, chat=False)[0][0].prompt_ids
    assert tokenizer.bos_id not in rendered(tokenizer, {"question": "q"})[0][0].prompt_ids


def test_instruction_and_system_prompt_are_put_around_the_question(chat):
    instruction = "Q: {question}\nUse \\boxed{{}}."
    for row in ({"question": "2{x}2"}, {"messages": [{"role": "user", "content": "2{x}2"}]}):
        text = rendered(chat, row, instruction=instruction, system_prompt="Be kind.")[0][0].text
        assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nQ: 2{x}2\nUse \\boxed{}.<|im_end|>")
    assert "2+2\nUse \\boxed{}.<" in rendered(chat, {"question": "2+2"}, instruction="Use \\boxed{}.")[0][0].text


def test_the_systems_own_message_of_a_row_stays(chat):
    row = {"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "q"}]}
    text = rendered(chat, row, system_prompt="other")[0][0].text
    assert "own" in text and "other" not in text


def test_rendering_leaves_the_row_as_it_was(chat):
    before = json.dumps(CHAT_ROW)
    rendered(chat, CHAT_ROW, instruction="more", system_prompt="s")
    assert json.dumps(CHAT_ROW) == before


@pytest.mark.parametrize("instruction", ["{question} \\boxed{}", "{question} {answer}", "{question} {"])
def test_a_wrong_instruction_is_an_error_before_any_row(instruction):
    with pytest.raises(ValueError, match="only {question}"):
        PromptSettings(instruction=instruction)


def test_thinking_follows_the_setting_and_else_the_row(byte_tokenizer, templates):
    tokenizer = byte_tokenizer(templates["thinking"])
    off, on = ({"question": "q", "enable_thinking": thinking} for thinking in (False, True))
    closed = "<think>\n\n</think>\n\n"
    assert [closed in rendered(tokenizer, row)[0][0].text for row in (off, on)] == [True, False]
    assert [closed in rendered(tokenizer, row, enable_thinking=False)[0][0].text for row in (off, on)] == [True, True]
    with pytest.raises(DataError, match="rows.jsonl:1: enable_thinking"):
        rendered(tokenizer, {"question": "q", "enable_thinking": "no"})


def test_conversations_without_a_template_name_the_option(byte_tokenizer, chat):
    with pytest.raises(DataError, match=r"rows\.jsonl:1.*model\.chat_template"):
        rendered(byte_tokenizer(), CHAT_ROW)
    with pytest.raises(DataError, match=r"model\.chat_template"):
        rendered(chat, CHAT_ROW, chat=False)
    with pytest.raises(DataError, match=r"model\.chat_template"):
        rendered(byte_tokenizer(), {"question": "q"}, system_prompt="s")


def test_a_conversation_that_ends_with_the_assistant_brings_its_own_answer(chat):
    messages = [*CHAT_ROW["messages"], {"role": "assistant", "content": "So\n#### 4"}]
    prompt = rendered(chat, {"messages": messages})[0][0]
    assert (prompt.text, prompt.answer) == (rendered(chat, CHAT_ROW)[0][0].text, "4")
    assert rendered(chat, {"messages": messages, "answer": "5"})[0][0].answer == "5"


def test_parquet_and_jsonl_give_the_same_ids(byte_tokenizer, tmp_path):
    listing = "{% if tools %}{% for tool in tools %}{{ tool.function.name }},{% endfor %}{% endif %}{% if enable_thinking %}T{% endif %}"
    tokenizer = byte_tokenizer(listing + "{% for message in messages %}{{ message.role + ':' + message.content }}{% endfor %}")
    records = [CHAT_ROW | {"tools": ["calculator", '{"type": "function", "function": {"name": "search"}}'], "enable_thinking": True},
               CHAT_ROW | {"tools": [], "enable_thinking": False}]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, records)))
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "rows.parquet")
    outcomes = []
    for name in ("rows.jsonl", "rows.parquet"):
        rows = read_rows(str(tmp_path / name))
        prompts, report = render_prompts(rows, match_columns(rows), tokenizer, PromptSettings())
        outcomes.append([prompt.prompt_ids for prompt in prompts])
        assert [prompt.text for prompt in prompts] == ["calculator,search,Tuser:2+2", "user:2+2"]
        assert "1 rows offer tools" in report.describe()
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(("length", "fits"), [(39, True), (40, True), (41, False), (500, False)])
def test_the_limit_counts_rendered_ids_with_the_generation_prompt(chat, length, fits):
    (row,) = questions_of(chat, length)
    if fits:
        assert len(rendered(chat, row, max_prompt_tokens=40)[0][0].prompt_ids) == length
    else:
        with pytest.raises(DataError, match=rf"1 of 1 .*max_prompt_tokens=40.*rows\.jsonl:1 \({length}\).*over_long"):
            rendered(chat, row, max_prompt_tokens=40)


def test_dropped_rows_are_counted_and_the_others_keep_their_keys(chat):
    rows = questions_of(chat, 39, 500, 40, 41)
    prompts, report = rendered(chat, *rows, max_prompt_tokens=40, over_long="drop")
    assert [prompt.row for prompt in prompts] == [0, 2]
    assert (report.rows, report.kept, report.dropped, report.truncated, report.longest) == (4, 2, 2, 0, 500)
    everything = rendered(chat, *rows)[0]
    assert [prompt.key for prompt in prompts] == [everything[0].key, everything[2].key]
    assert "2 of 4 rows" in report.describe() and "2 dropped" in report.describe()


def test_a_file_of_which_nothing_would_be_left_is_an_error(chat):
    with pytest.raises(DataError, match="3 of 3 prompts are longer"):
        rendered(chat, *questions_of(chat, 41, 41, 41), max_prompt_tokens=40, over_long="drop")


def test_a_prompt_is_cut_on_the_left_once_and_keeps_the_generation_prompt(chat):
    (row,) = questions_of(chat, 60)
    whole = rendered(chat, row)[0][0]
    (cut,), report = rendered(chat, row, max_prompt_tokens=20, over_long="truncate_left")
    assert cut.prompt_ids == whole.prompt_ids[-20:] and report.truncated == 1
    assert cut.text == whole.text[-len(cut.text) :] and cut.text.endswith("<|im_start|>assistant\n")
    assert cut.key == whole.key


def test_a_limit_below_the_generation_prompt_is_an_error(chat):
    opening = len(chat.encode("<|im_start|>assistant\n", add_special_tokens=False))
    rendered(chat, {"question": "q" * 50}, max_prompt_tokens=opening + 1, over_long="truncate_left")
    with pytest.raises(DataError, match="generation prompt"):
        rendered(chat, {"question": "q" * 50}, max_prompt_tokens=opening, over_long="truncate_left")


def test_equal_texts_in_two_rows_stay_two_prompts(chat):
    first, second = rendered(chat, CHAT_ROW, CHAT_ROW)[0]
    assert first.text == second.text and first.key != second.key


def test_two_rows_of_one_id_are_an_error_that_names_both(chat):
    rows = [CHAT_ROW | {"id": name} for name in ("a", "b", "a")]
    with pytest.raises(DataError, match=r"rows\.jsonl:1 and d/rows\.jsonl:3 .*'a'.*row_index"):
        rendered(chat, *rows)
    assert len(rendered(chat, *rows, overrides={"id": "row_index"})[0]) == 3
    assert len(rendered(chat, *[row | {"data_source": str(number)} for number, row in enumerate(rows)])[0]) == 3


@pytest.mark.parametrize("bad", [None, 1.5, ["a"]])
def test_an_id_that_is_no_name_is_an_error(chat, bad):
    with pytest.raises(DataError, match="rows.jsonl:2: the id"):
        rendered(chat, CHAT_ROW | {"id": 1}, CHAT_ROW | {"id": bad})


def test_keys_depend_on_source_and_id_and_nothing_else(chat, byte_tokenizer, tmp_path):
    one, two = rendered(chat, CHAT_ROW | {"id": 7}, {"messages": CHAT_ROW["messages"], "id": "8", "answer": "5"})[0]
    (moved,) = rendered(chat, {"messages": [{"role": "user", "content": "other"}], "id": "7"}, instruction="more")[0]
    assert moved.key == one.key == prompt_key("rows.jsonl", "7") and two.key == prompt_key("rows.jsonl", "8")
    (tmp_path / "rows.jsonl").write_text("\n\n".join(json.dumps({"question": str(number)}) for number in range(4)))
    rows = read_rows(f"{tmp_path}/rows.jsonl@[2:]")
    sliced = render_prompts(rows, match_columns(rows), byte_tokenizer(), PromptSettings())[0]
    assert [prompt.key for prompt in sliced] == [prompt_key("rows.jsonl", 2), prompt_key("rows.jsonl", 3)]


def test_keys_are_the_same_in_every_process_and_version():
    assert prompt_key("gsm8k", 0) == 0xC0CBD6A084BBE96E
    assert prompt_key("gsm8k", "0") == 0xDAB9DCA83B8949D9


def test_a_prompt_is_not_confused_by_a_text_id_that_looks_like_an_index():
    assert prompt_key("s", 1) != prompt_key("s", "1")


def test_bad_rows_are_named(chat):
    for bad in ({"question": None, "answer": "1"}, {"question": "q", "answer": None}, {"question": 3, "answer": "1"}, {"answer": "1"}):
        with pytest.raises(DataError, match=r"rows\.jsonl:2"):
            rendered(chat, {"question": "q", "answer": "1"}, bad)


def test_an_empty_prompt_is_an_error(byte_tokenizer):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the prompt is empty"):
        rendered(byte_tokenizer(), {"question": ""})


def test_a_verified_task_without_answers_is_refused_before_training(chat, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "q"}))
    with pytest.raises(DataError, match="no column for the answer"):
        FileTask(str(path), chat, PromptSettings()).prompts()
    assert FileTask(str(path), chat, PromptSettings(), reward_kind="user").prompts()[0].answer == ""


def test_a_file_task_reads_once_and_describes_itself(chat, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": "because\n#### 4"}))
    task = FileTask(str(path), chat, PromptSettings())
    (prompt,) = task.prompts()
    path.unlink()
    assert task.prompts()[0] is prompt and prompt.answer == "4" and task.worked_solution(prompt) == "because\n#### 4"
    assert "prompt <- prompt" in task.describe() and "1 of 1 rows" in task.describe()


def test_a_file_makes_no_wrong_answers_and_says_where_pairs_come_from(chat, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "1"}))
    task = FileTask(str(path), chat, PromptSettings())
    with pytest.raises(DataError, match=r"prompts: .*no wrong answers.*stages\.reward_model\.path"):
        task.wrong_solution(task.prompts()[0])


def test_the_host_side_of_data_imports_no_jax():
    names = (
        "arithmetic", "character_tokenizer", "columns", "demonstrations", "file_task", "gsm8k", "plain_texts", "prompts", "reasoning_gym_tasks", "text_files",
        "tokenizer")
    code = "import sys\n" + "\n".join(f"import tlt_jax.tasks.{name}" for name in names) + "\nassert 'jax' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# The order of prompts.

orders = st.tuples(st.integers(1, 30), st.integers(0, 5))
steps = st.lists(st.integers(1, 30), max_size=12)


@hypothesis.given(orders, steps)
def test_every_epoch_gives_each_index_once_however_it_is_drawn(order, sizes):
    count, seed = order
    drawing, drawn = PromptOrder(count, seed), []
    for size in sizes:
        batch = drawing.draw(min(size, count))
        assert len(set(batch)) == len(batch) == min(size, count)
        drawn += batch
    waiting = drawing.state()["waiting"]
    owed = sorted(drawn + waiting)
    position = drawing.state()["position"] + drawing.epoch * count
    assert len(owed) == position
    assert all(owed.count(index) - position // count in (0, 1) for index in range(count))


@hypothesis.given(orders, steps, st.integers(0, 12))
def test_a_restored_order_continues_as_if_never_stopped(order, sizes, stop):
    count, seed = order
    sizes = [min(size, count) for size in sizes]
    straight, first, second = (PromptOrder(count, seed) for _ in range(3))
    expected = [straight.draw(size) for size in sizes]
    before = [first.draw(size) for size in sizes[:stop]]
    second.restore(json.loads(json.dumps(first.state())))
    assert before + [second.draw(size) for size in sizes[stop:]] == expected
    assert second.state() == straight.state()


@pytest.mark.parametrize("stop", [59, 60, 61])
def test_a_stop_at_an_epochs_end_loses_no_step_and_the_second_epoch_has_its_own_order(stop):
    first, second = PromptOrder(60, 3), PromptOrder(60, 3)
    seen = [first.draw(1)[0] for _ in range(stop)]
    second.restore(first.state())
    seen += [second.draw(1)[0] for _ in range(120 - stop)]
    assert sorted(seen[:60]) == sorted(seen[60:]) == list(range(60))
    assert seen[:60] != seen[60:] and second.epoch == 1


def test_seeds_give_different_orders_and_no_shuffling_gives_the_order_of_the_data():
    assert PromptOrder(50, 1).draw(50) != PromptOrder(50, 2).draw(50)
    assert PromptOrder(5, 1, shuffle=False).draw(5) == [0, 1, 2, 3, 4]


@hypothesis.given(st.integers(2, 12), st.integers(0, 3), st.lists(st.booleans(), max_size=10))
def test_prompts_that_are_put_back_are_trained_once_across_restarts(count, seed, restarts):
    order, trained = PromptOrder(count, seed), []
    for restart in restarts:
        drawn = order.draw(min(4, count))
        trained += drawn[:2]
        order.put_back(drawn[2:])
        if restart:
            state = json.loads(json.dumps(order.state()))
            order = PromptOrder(count, seed)
            order.restore(state)
    trained += order.draw(count) if len(trained) < count else []
    assert sorted(trained[:count]) == list(range(count))


def test_a_refill_of_the_same_step_avoids_what_the_step_has():
    order = PromptOrder(5, 0)
    first = order.draw(4)
    second = order.draw(1, avoid=first)
    assert sorted(first + second) == list(range(5))
    with pytest.raises(ValueError, match="batch.prompts_per_step"):
        order.draw(1, avoid=range(5))


def test_more_prompts_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="6 different prompts .* there are 5"):
        PromptOrder(5, 0).draw(6)


@pytest.mark.parametrize(("now", "word"), [(PromptOrder(6, 0), "count=5"), (PromptOrder(5, 1), "seed=0"), (PromptOrder(5, 0, shuffle=False), "shuffle=True")])
def test_an_order_of_other_data_is_not_continued(now, word):
    with pytest.raises(DataError, match=word):
        now.restore(PromptOrder(5, 0).state())


def test_a_prompt_can_be_neither_changed_nor_lose_its_columns(chat):
    prompt = rendered(chat, CHAT_ROW | {"level": "Level 3", "extra": [1]})[0][0]
    assert (prompt.difficulty, prompt.columns["extra"]) == (3.0, [1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        prompt.key = 0
