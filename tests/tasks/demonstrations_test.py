"""Worked answers and pairs from files: what the assistant says is learned, its end included, nothing else is, and a row that cannot be used is named."""

import dataclasses
import json

import pyarrow
import pytest
from pyarrow import parquet

from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.tasks.columns import match_columns
from tlt_jax.tasks.demonstrations import read_demonstrations, read_preferences
from tlt_jax.tasks.prompts import PromptSettings, render_prompts
from tlt_jax.tasks.text_files import DataError, read_rows
from tlt_jax.tasks.tokenizer import load_tokenizer

ONE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TWO = [*ONE, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]
THOUGHTS = [
    {"role": "user", "content": "first"}, {"role": "assistant", "content": "<think>\nso\n</think>\n\none"}, {"role": "user", "content": "second"},
    {"role": "assistant", "content": "<think>\nthen\n</think>\n\ntwo"}]
NAMES = ("chatml", "marked", "mistral", "thinking")


@pytest.fixture
def read(tmp_path):
    """Reads records as demonstrations: (tokenizer, *records, settings)."""

    def made(tokenizer, *records, reader=read_demonstrations, overrides=None, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return reader(str(path), tokenizer, PromptSettings(**settings), overrides)

    return made


@pytest.fixture
def pairs(read):
    """Reads records as pairs."""
    return lambda tokenizer, *records, **options: read(tokenizer, *records, reader=read_preferences, **options)


@pytest.fixture(scope="session")
def beginning(tmp_path_factory):
    """Makes tokenizers that put a begin token before a plain text, with a chat template or none."""
    return lambda template: character_tokenizer("".join(map(chr, range(10, 127))), str(tmp_path_factory.mktemp("beginning")), chat_template=template)


def said(tokenizer, one):
    """The text that is learned from."""
    assert len(one.ids) == len(one.mask) and set(one.mask) == {0, 1}
    return tokenizer.decode([token for token, counts in zip(one.ids, one.mask, strict=True) if counts], skip_special_tokens=False)


def printed(tokenizer, one):
    return tokenizer.decode(one.ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", NAMES)
def test_only_what_the_assistant_says_is_learned_in_every_turn(byte_tokenizer, templates, read, name):
    tokenizer = byte_tokenizer(templates[name])
    end = "<|endoftext|>" if name == "mistral" else "<|im_end|>"
    thought = "<think>\n\n</think>\n\n" if name == "thinking" else ""
    one, two = read(tokenizer, {"messages": ONE}, {"messages": TWO})
    assert said(tokenizer, one) == f"{thought}a{end}"
    assert said(tokenizer, two) == f"a{end}{thought}b{end}"


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_one_whole_rendering_up_to_the_assistants_last_token(byte_tokenizer, templates, read, name):
    tokenizer = byte_tokenizer(templates[name])
    for one, messages in zip(read(tokenizer, {"messages": ONE}, {"messages": TWO}), (ONE, TWO), strict=True):
        assert one.mask[-1] == 1
        rest = tokenizer.render_chat(messages, add_generation_prompt=False).removeprefix(printed(tokenizer, one))
        assert rest.strip() == "" and printed(tokenizer, one) + rest == tokenizer.render_chat(messages, add_generation_prompt=False)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_mask_holds_what_the_template_prints_of_thoughts(byte_tokenizer, templates, read, thinking):
    tokenizer = byte_tokenizer(templates["thinking"])
    (of_setting,) = read(tokenizer, {"messages": THOUGHTS}, enable_thinking=thinking)
    assert said(tokenizer, of_setting) == "one<|im_end|><think>\nthen\n</think>\n\ntwo<|im_end|>"
    (of_row,) = read(tokenizer, {"messages": THOUGHTS, "enable_thinking": thinking})
    assert of_row == of_setting


def test_the_rows_own_thinking_reaches_the_template_unless_the_setting_says_otherwise(byte_tokenizer, templates, read):
    tokenizer = byte_tokenizer("{% if enable_thinking %}T{% endif %}" + templates["chatml"])
    rows = [{"messages": ONE, "enable_thinking": thinking} for thinking in (True, False)]
    assert [printed(tokenizer, one)[0] for one in read(tokenizer, *rows)] == ["T", "<"]
    assert [printed(tokenizer, one)[0] for one in read(tokenizer, *rows, enable_thinking=False)] == ["<", "<"]


def test_a_thought_in_a_field_of_its_own_is_learned_wherever_the_message_stands(byte_tokenizer, templates, read):
    tokenizer = byte_tokenizer(templates["thinking"])
    answer = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    for record in ({"messages": [ONE[0], answer]}, {"prompt": ONE[:1], "completion": [answer]}, {"prompt": "q", "completion": [answer]}):
        assert said(tokenizer, read(tokenizer, record)[0]) == "<think>\nhm\n</think>\n\na<|im_end|>"


def test_the_end_is_learned_where_padding_is_the_end_token_too(byte_tokenizer, templates, read):
    for name in (None, "mistral"):
        tokenizer = byte_tokenizer(templates[name] if name else None)
        assert tokenizer.pad_id == tokenizer.eos_id
        (one,) = read(tokenizer, {"prompt": "q", "completion": "a"})
        assert one.ids[-1] == tokenizer.eos_id and one.mask[-1] == 1 and one.ids.count(tokenizer.eos_id) == 1
    same = dataclasses.replace(tokenizer, pad_id=0)
    assert read(same, {"prompt": "q", "completion": "a"}) == [one]


def test_the_end_is_learned_under_a_template_that_ends_no_turn_with_a_token(byte_tokenizer, read):
    tokenizer = byte_tokenizer("{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}")
    assert tokenizer.turn_end_id is None
    (one,) = read(tokenizer, {"messages": TWO})
    assert printed(tokenizer, one) == "user: q\nassistant: a\nuser: r\nassistant: b<|endoftext|>"
    assert one.mask[-1] == 1 and said(tokenizer, one).endswith("b<|endoftext|>")


def test_without_a_template_an_answer_follows_its_prompt_and_ends_the_text(byte_tokenizer, beginning, read):
    for tokenizer in (byte_tokenizer(), beginning(None)):
        (one,) = read(tokenizer, {"question": "1+1=", "answer": "2", "other": "x"})
        prompt = tokenizer.encode("1+1=", add_special_tokens=True)
        assert list(one.ids) == [*prompt, *tokenizer.encode("2", add_special_tokens=False), tokenizer.eos_id]
        assert one.mask == (0,) * len(prompt) + (1, 1)


def test_a_tokenizer_that_ends_every_text_does_not_end_the_prompt(write_tokenizer, read, tmp_path):
    directory = write_tokenizer(tmp_path / "ending")
    content = json.loads((tmp_path / "ending" / "tokenizer.json").read_text())
    end = {"id": "<|endoftext|>", "ids": [load_tokenizer(directory).eos_id], "tokens": ["<|endoftext|>"]}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end["id"], "type_id": 0}}]
    content["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {end["id"]: end}}
    (tmp_path / "ending" / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("q", add_special_tokens=True)[-1] == tokenizer.eos_id
    (one,) = read(tokenizer, {"prompt": "q", "completion": "a"})
    assert printed(tokenizer, one) == "qa<|endoftext|>" and said(tokenizer, one) == "a<|endoftext|>"


@pytest.mark.parametrize("name", [None, "chatml", "mistral"])
def test_a_text_begins_once_or_as_its_template_says(beginning, templates, read, name):
    tokenizer = beginning(templates[name] if name else None)
    (one, other) = read(tokenizer, {"prompt": "q", "completion": "a"}, {"prompt": "<bos>q" if name is None else "q", "completion": "<bos>"})
    begins = 0 if name == "chatml" else 1
    assert one.ids.count(tokenizer.bos_id) == begins and (one.ids[0] == tokenizer.bos_id) == bool(begins)
    assert other.ids[: other.mask.index(1)].count(tokenizer.bos_id) == begins


@pytest.mark.parametrize("name", [None, *NAMES])
def test_a_prompt_has_the_ids_that_a_rollout_starts_from(byte_tokenizer, templates, read, tmp_path, name):
    tokenizer = byte_tokenizer(templates[name] if name else None)
    record, settings = {"prompt": "q", "completion": "a"}, {"instruction": "Q: {question}!"} | ({"system_prompt": "s"} if name not in (None, "mistral") else {})
    (one,) = read(tokenizer, record, **settings)
    rows = read_rows(str(tmp_path / "rows.jsonl"))
    ((prompt,), _) = render_prompts(rows, match_columns(rows), tokenizer, PromptSettings(**settings))
    if name != "marked":  # which prints no generation prompt
        assert one.ids[: one.mask.index(1)] == prompt.prompt_ids
    assert "Q: q!" in printed(tokenizer, one)


def test_an_instruction_has_its_input_and_system_prompt(byte_tokenizer, templates, read):
    chat = byte_tokenizer(templates["chatml"])
    record = {"instruction": "add", "input": "1 2", "output": "3"}
    (one,) = read(chat, record, system_prompt="s", instruction="now")
    expected = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nadd\n\n1 2\nnow<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    assert printed(chat, one) == expected
    assert printed(byte_tokenizer(), read(byte_tokenizer(), record)[0]) == "add\n\n1 23<|endoftext|>"


@pytest.mark.parametrize("record", [
    {"messages": TWO}, {"prompt": TWO[:3], "completion": "b"}, {"prompt": TWO[:3], "completion": TWO[3:]}, {"prompt": TWO[:1], "completion": TWO[1:]},
    {"prompt": "q", "completion": TWO[1:]}, {"prompt": "q", "completion": TWO}, {"conversations": [
        {"from": "human" if message["role"] == "user" else "gpt", "value": message["content"]} for message in TWO]}])
def test_every_layout_of_a_conversation_gives_the_same_ids_and_mask(byte_tokenizer, templates, read, record):
    tokenizer = byte_tokenizer(templates["chatml"])
    (expected,) = read(tokenizer, {"messages": TWO})
    assert said(tokenizer, expected) == "a<|im_end|>b<|im_end|>"
    assert read(tokenizer, record) == [expected]


def test_parquet_gives_the_ids_of_jsonl(byte_tokenizer, templates, read, tmp_path):
    tokenizer = byte_tokenizer(templates["thinking"])
    records = [{"messages": THOUGHTS, "enable_thinking": True}, {"messages": ONE, "enable_thinking": False}]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "rows.parquet")
    of_parquet = read_demonstrations(str(tmp_path / "rows.parquet"), tokenizer, PromptSettings())
    assert [(one.ids, one.mask) for one in of_parquet] == [(one.ids, one.mask) for one in read(tokenizer, *records)]


@pytest.mark.parametrize(("template", "record", "message"), [
    ("chatml", {"messages": ONE[:1]}, "neither a completion column nor a conversation that ends with the assistant"),
    ("chatml", {"prompt": "q"}, "neither a completion column"),
    ("chatml", {"prompt": "q", "completion": 5}, "column completion holds int"),
    ("chatml", {"prompt": "q", "completion": None}, "column completion holds NoneType"),
    ("chatml", {"prompt": 5, "completion": "a"}, "the prompt in column prompt is int"),
    ("chatml", {"prompt": "q", "completion": TWO[:3]}, "the messages in column completion do not end with the assistant"),
    ("chatml", {"prompt": "q\ud800", "completion": "a"}, "cannot be encoded"),
    ("chatml", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant"}]}, "message 1: the content must be text"),
    ("mistral", {"prompt": [], "completion": "a"}, "must be a non-empty list"),
    (None, {"prompt": "q\ud800", "completion": "a"}, "cannot be encoded"),
    (None, {"prompt": "", "completion": "a"}, "nothing stands before the assistant's first word"),
    (None, {"messages": ONE}, "model.chat_template"),
])
def test_a_row_that_nothing_can_be_learned_from_is_named(byte_tokenizer, templates, read, template, record, message):
    tokenizer = byte_tokenizer(templates[template] if template else None)
    with pytest.raises(DataError, match=rf"rows\.jsonl:1.*{message}"):
        read(tokenizer, record)


def test_a_bad_row_among_good_ones_is_the_one_that_is_named(byte_tokenizer, templates, read):
    tokenizer = byte_tokenizer(templates["chatml"])
    for bad, message in (({"messages": ONE[:1]}, "neither a completion"), ({"other": "x"}, "no column messages"), ({"messages": [ONE[1], ONE[0]]}, "neither")):
        with pytest.raises(DataError, match=rf"rows\.jsonl:3: .*{message}"):
            read(tokenizer, {"messages": ONE}, {"messages": TWO}, bad)


def test_a_system_prompt_without_a_template_names_the_option(byte_tokenizer, read):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*model\.chat_template"):
        read(byte_tokenizer(), {"prompt": "q", "completion": "a"}, system_prompt="s")


def test_reading_names_each_row_and_its_file(byte_tokenizer, read):
    assert [one.place.rsplit("/")[-1] for one in read(byte_tokenizer(), *[{"prompt": "q", "completion": "a"}] * 2)] == ["rows.jsonl:1", "rows.jsonl:2"]


@pytest.mark.parametrize("record", [
    {"prompt": "q", "chosen": "good", "rejected": "bad"}, {"prompt": ONE[:1], "chosen": "good", "rejected": "bad"},
    {"question": "q", "chosen": [{"role": "assistant", "content": "good"}], "rejected": [{"role": "assistant", "content": "bad"}]},
    {"prompt": "q", "chosen": [ONE[0], {"role": "assistant", "content": "good"}], "rejected": [ONE[0], {"role": "assistant", "content": "bad"}]},
    {"chosen": [ONE[0], {"role": "assistant", "content": "good"}], "rejected": [ONE[0], {"role": "assistant", "content": "bad"}]}])
def test_every_layout_of_a_pair_gives_the_same_two_answers(byte_tokenizer, templates, pairs, record):
    tokenizer = byte_tokenizer(templates["chatml"])
    (pair,) = pairs(tokenizer, record)
    start = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert [printed(tokenizer, one) for one in (pair.better, pair.worse)] == [f"{start}good<|im_end|>", f"{start}bad<|im_end|>"]
    assert [said(tokenizer, one) for one in (pair.better, pair.worse)] == ["good<|im_end|>", "bad<|im_end|>"]


def test_earlier_turns_and_the_systems_message_of_a_pair_stay(byte_tokenizer, templates, pairs):
    tokenizer = byte_tokenizer(templates["chatml"])
    system = {"role": "system", "content": "own"}
    both = [[system, *TWO[:3], {"role": "assistant", "content": answer}] for answer in ("good", "bad")]
    (with_prompt, without) = (pairs(tokenizer, {"chosen": both[0], "rejected": both[1]} | more)[0] for more in ({"prompt": "q"}, {}))
    assert with_prompt == without
    assert said(tokenizer, without.better) == "a<|im_end|>good<|im_end|>" and printed(tokenizer, without.worse).startswith("<|im_start|>system\nown<|im_end|>")


def test_a_pair_without_a_template_ends_both_texts(byte_tokenizer, pairs):
    tokenizer = byte_tokenizer()
    (pair,) = pairs(tokenizer, {"prompt": "q", "chosen": "good", "rejected": [ONE[0], {"role": "assistant", "content": "bad"}]})
    assert [printed(tokenizer, one) for one in (pair.better, pair.worse)] == ["qgood<|endoftext|>", "qbad<|endoftext|>"]


@pytest.mark.parametrize(("record", "message"), [
    ({"prompt": "q", "chosen": "same", "rejected": "same"}, "chosen and rejected are the same text, so neither is better"),
    ({"prompt": "q", "chosen": "a", "rejected": [ONE[1]]}, "the same text"),
    ({"prompt": "q", "chosen": "a", "rejected": None}, "column rejected holds NoneType"),
    ({"prompt": "q", "chosen": ONE[:1], "rejected": "b"}, "the messages in column chosen do not end with the assistant"),
    ({"prompt": 5, "chosen": "a", "rejected": "b"}, "the prompt in column prompt is int"),
    ({"chosen": "a", "rejected": "b"}, "data.columns.prompt"),
    ({"chosen": ONE, "rejected": ONE[:1]}, "does not end with the assistant"),
    ({"prompt": "q", "chosen": "a\ud800", "rejected": "b"}, "cannot be encoded"),
])
def test_a_pair_that_says_nothing_is_named(byte_tokenizer, templates, pairs, record, message):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"} if "prompt" in record else {"chosen": ONE, "rejected": [ONE[0], ONE[1] | {"content": "b"}]}
    with pytest.raises(DataError, match=rf"rows\.jsonl:2.*{message}"):
        pairs(byte_tokenizer(templates["chatml"]), good, record)


@pytest.mark.parametrize("missing", ["chosen", "rejected"])
def test_a_file_without_one_of_the_answers_says_which_columns_there_are(byte_tokenizer, pairs, missing):
    record = {"prompt": "q", "chosen": "a", "rejected": "b"}
    del record[missing]
    with pytest.raises(DataError, match=f"no column for the {missing}; columns found: prompt"):
        pairs(byte_tokenizer(), record)
    assert pairs(byte_tokenizer(), record | {"other": "c"}, overrides={missing: "other"})
