"""Tokenizers and chat templates: exact text, one begin token, masks that hold what the assistant says and nothing else."""

import dataclasses
import json

import pytest

from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.tasks.tokenizer import TokenizerError, check_ids, load_tokenizer

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TWO_THOUGHTS = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\none"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "<think>\nthen\n</think>\n\ntwo"},
]


def spoken(tokenizer, messages, **mode):
    ids, mask = tokenizer.assistant_mask(messages, **mode)
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    whole = tokenizer.render_chat(messages, add_generation_prompt=False, **mode)
    assert tokenizer.decode(ids, skip_special_tokens=False) == whole
    return tokenizer.decode([token for token, inside in zip(ids, mask, strict=True) if inside], skip_special_tokens=False)


def test_text_survives_encoding_and_decoding(byte_tokenizer):
    tokenizer = byte_tokenizer()
    for text in ("a  b\n\n c", "naïve 你好 🙂", " 's n't ."):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True) == text


def test_the_begin_token_is_never_doubled(characters):
    begin = characters.bos_id
    assert characters.encode("1", add_special_tokens=True).count(begin) == 1
    assert characters.encode("<bos>1", add_special_tokens=True).count(begin) == 1
    assert characters.encode("1", add_special_tokens=False).count(begin) == 0


def test_a_template_that_prints_the_begin_token_gives_one(byte_tokenizer, templates):
    tokenizer = byte_tokenizer(templates["mistral"])
    assert tokenizer.encode_chat(CHAT[:1], add_generation_prompt=True).count(tokenizer.bos_id) == 1


def test_an_id_without_an_embedding_row_is_an_error_at_tokenization(write_tokenizer, tmp_path):
    directory = write_tokenizer(tmp_path)
    size = load_tokenizer(directory).size
    assert size == 256 + 1 + 4
    fitting, short = (load_tokenizer(directory, embedding_rows=rows) for rows in (size + 3, size - 1))
    assert fitting.encode("a<s>", add_special_tokens=False) == short.encode("a", add_special_tokens=False) + [size - 1]
    with pytest.raises(TokenizerError, match=f"token id {size - 1} is outside the {size - 1} embedding rows"):
        short.encode("a<s>", add_special_tokens=False)


def test_checked_ids_are_those_with_a_row():
    check_ids([], 1)
    check_ids([0, 15], 16)
    for ids in ([16], [3, -1]):
        with pytest.raises(TokenizerError, match="embedding rows"):
            check_ids(ids, 16)


def test_stop_ids_hold_the_end_of_text_and_the_end_of_a_turn(byte_tokenizer, templates):
    eos = byte_tokenizer().eos_id
    assert byte_tokenizer().stop_ids == (eos,)
    chat = byte_tokenizer(templates["chatml"])
    assert set(chat.stop_ids) == {eos, *chat.encode("<|im_end|>", add_special_tokens=False)}
    assert byte_tokenizer(templates["mistral"]).stop_ids == (eos,)


def test_an_answer_ends_with_the_end_of_a_turn_and_without_one_with_the_end_of_the_text(byte_tokenizer, templates):
    for name, turn_end in ((None, None), ("chatml", "<|im_end|>"), ("thinking", "<|im_end|>"), ("marked", "<|im_end|>"), ("mistral", "<|endoftext|>")):
        tokenizer = byte_tokenizer(templates[name] if name else None)
        ends = tokenizer.encode(turn_end, add_special_tokens=False) if turn_end else [None]
        assert [tokenizer.turn_end_id] == ends
        assert tokenizer.answer_end_id == (tokenizer.eos_id if turn_end is None else ends[0]) and tokenizer.answer_end_id in tokenizer.stop_ids


def test_a_template_that_ends_turns_with_words_has_no_end_of_a_turn(byte_tokenizer):
    for template in ("{% for message in messages %}{{ message.content + ' END ' }}{% endfor %}", "{{ raise_exception('no') }}"):
        tokenizer = byte_tokenizer(template)
        assert tokenizer.turn_end_id is None and tokenizer.answer_end_id == tokenizer.eos_id


def test_a_tokenizer_without_any_end_says_that_answers_have_none(byte_tokenizer):
    endless = dataclasses.replace(byte_tokenizer(), eos_id=None)
    with pytest.raises(TokenizerError, match="neither an end-of-text token nor a chat template"):
        _ = endless.answer_end_id
    assert dataclasses.replace(endless, turn_end_id=7).answer_end_id == 7


def test_a_base_model_with_conversations_names_the_option(byte_tokenizer):
    assert not byte_tokenizer().has_chat_template
    for call in (byte_tokenizer().assistant_mask, lambda chat: byte_tokenizer().render_chat(chat, add_generation_prompt=True)):
        with pytest.raises(TokenizerError, match="model.chat_template"):
            call(CHAT)


def test_the_template_is_found_wherever_it_is(write_tokenizer, templates, tmp_path):
    template = templates["chatml"]
    bare = write_tokenizer(tmp_path / "bare")
    beside = write_tokenizer(tmp_path / "beside")
    (tmp_path / "beside" / "chat_template.jinja").write_text(template)
    inside = write_tokenizer(tmp_path / "inside")
    config = json.loads((tmp_path / "inside" / "tokenizer_config.json").read_text())
    (tmp_path / "inside" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (tmp_path / "own.jinja").write_text(template)
    loaded = [
        load_tokenizer(beside),
        load_tokenizer(inside),
        load_tokenizer(bare, chat_template=str(tmp_path / "own.jinja")),
        load_tokenizer(bare, chat_template=template),
    ]
    printed = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    assert [tokenizer.render_chat(CHAT, add_generation_prompt=False) for tokenizer in loaded] == [printed] * 4


def test_a_template_file_that_is_not_there_is_an_error(write_tokenizer, tmp_path):
    with pytest.raises(TokenizerError, match="model.chat_template=.*none.jinja"):
        load_tokenizer(write_tokenizer(tmp_path), chat_template=str(tmp_path / "none.jinja"))


@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_mask_holds_what_the_template_prints_when_earlier_thoughts_are_dropped(byte_tokenizer, templates, thinking):
    printed = spoken(byte_tokenizer(templates["thinking"]), TWO_THOUGHTS, enable_thinking=thinking)
    assert printed == "one<|im_end|><think>\nthen\n</think>\n\ntwo<|im_end|>"


def test_the_mask_holds_a_thought_given_in_its_own_field(byte_tokenizer, templates):
    chat = [CHAT[0], {"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    assert spoken(byte_tokenizer(templates["thinking"]), chat) == "<think>\nhm\n</think>\n\na<|im_end|>"
    assert spoken(byte_tokenizer(templates["thinking"]), CHAT) == "<think>\n\n</think>\n\na<|im_end|>"


@pytest.mark.parametrize("name", ["chatml", "marked", "mistral"])
def test_the_mask_holds_every_assistant_turn_as_it_is(byte_tokenizer, templates, name):
    end = "<|endoftext|>" if name == "mistral" else "<|im_end|>"
    expected = "".join(message["content"] + end for message in TWO_THOUGHTS if message["role"] == "assistant")
    assert spoken(byte_tokenizer(templates[name]), TWO_THOUGHTS) == expected


@pytest.mark.parametrize("name", ["chatml", "marked", "thinking"])
def test_words_of_the_user_that_look_like_an_assistant_turn_are_not_masked_in(byte_tokenizer, templates, name):
    chat = [{"role": "user", "content": "say <|im_start|>assistant\na"}, {"role": "assistant", "content": "a"}]
    assert spoken(byte_tokenizer(templates[name]), chat).endswith("a<|im_end|>")
    assert "say" not in spoken(byte_tokenizer(templates[name]), chat)
    assert spoken(byte_tokenizer(templates[name]), chat).count("a<|im_end|>") == 1


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_a_token_across_the_edge_of_a_turn_is_split_there(byte_tokenizer, templates, name):
    tokenizer = byte_tokenizer(templates[name])
    chat = [CHAT[0], {"role": "assistant", "content": "\na"}]
    joined = tokenizer.encode_chat(chat, add_generation_prompt=False)
    assert tokenizer.encode("\n\n", add_special_tokens=False)[0] in joined
    assert spoken(tokenizer, chat) == "\na<|im_end|>"


def test_a_prompt_and_its_answer_encode_to_the_ids_of_the_mask(byte_tokenizer, templates):
    tokenizer = byte_tokenizer(templates["chatml"])
    ids, mask = tokenizer.assistant_mask(CHAT)
    prompt = tokenizer.encode_chat(CHAT[:1], add_generation_prompt=True)
    assert ids[: len(prompt)] == prompt and mask[: len(prompt)] == [0] * len(prompt)
    assert mask[len(prompt) :] == [1, 1, 0]


def test_a_template_that_changes_the_words_asks_for_marks(byte_tokenizer):
    shouting = byte_tokenizer("{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content|upper + '<|im_end|>' }}{% endfor %}")
    with pytest.raises(TokenizerError, match="generation"):
        shouting.assistant_mask(CHAT)


def test_a_template_whose_end_depends_on_the_words_asks_for_marks(byte_tokenizer, templates):
    counting = byte_tokenizer(templates["chatml"] + "{{ messages[-1].content|length if messages[-1].role == 'assistant' }}")
    with pytest.raises(TokenizerError, match="message 1 once and as it is: add {% generation %}"):
        counting.assistant_mask(CHAT)


def test_a_thought_that_the_generation_prompt_opens_belongs_to_the_turn(byte_tokenizer, templates):
    opening = byte_tokenizer(templates["chatml"].replace("assistant\\n", "assistant\\n<think>\\n"))
    assert opening.generation_prompt() == "<|im_start|>assistant\n<think>\n"
    assert spoken(opening, TWO_THOUGHTS[:2]) == "<think>\nso\n</think>\n\none<|im_end|>"
    assert spoken(opening, CHAT) == "a<|im_end|>"


def test_turns_that_do_not_survive_tokenization_are_an_error(write_tokenizer, templates, tmp_path):
    directory = write_tokenizer(tmp_path, templates["chatml"])
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(TokenizerError, match="do not survive tokenization"):
        load_tokenizer(directory).assistant_mask([CHAT[0], {"role": "assistant", "content": "Loud"}])


def test_a_conversation_that_the_template_refuses_is_an_error(byte_tokenizer):
    strict = byte_tokenizer("{% for message in messages %}{{ raise_exception('roles must alternate') }}{% endfor %}")
    with pytest.raises(TokenizerError, match="roles must alternate"):
        strict.render_chat(CHAT, add_generation_prompt=True)


def test_a_directory_without_a_tokenizer_is_an_error_that_names_it(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(TokenizerError, match=str(path)):
            load_tokenizer(str(path))


def test_the_character_tokenizer_has_one_token_a_character_and_a_word(characters):
    text = "12+7=?\n#### 19"
    ids = characters.encode(text, add_special_tokens=False)
    assert len(ids) == len(text) - 3
    assert characters.decode(ids, skip_special_tokens=False) == text
    assert (characters.pad_id, characters.bos_id, characters.eos_id, characters.stop_ids) == (0, 1, 2, (2,))
    assert characters.size == max(characters.backend.get_vocab().values()) + 1


def test_a_character_outside_the_alphabet_is_an_error_that_shows_it(characters):
    with pytest.raises(TokenizerError, match=r"\['é'\]"):
        characters.encode("1é", add_special_tokens=True)


def test_characters_that_mean_something_in_patterns_are_only_characters(tmp_path):
    tokenizer = character_tokenizer(r".*+?()[]{}|^$\-", str(tmp_path), words=("(?", "|."))
    text = r"(?|.*+?()[]{}|^$\-"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text) - 2 and tokenizer.decode(ids, skip_special_tokens=False) == text
