"""Tokenizers rebuilt from GGUF metadata: splitting rules, special tokens, begin tokens, and refusal by name."""

import logging

import pytest

from tlt_jax.tasks.gguf_tokenizer import write_tokenizer

logging.getLogger("transformers").setLevel(logging.ERROR)

BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))] + [chr(256 + extra) for extra in range(68)]  # GPT-2's alphabet
MERGES = ["1 2", "12 3", "a b", "Ġ ab", "Ġ 1", "' s", "Ġ Ġ"]
WORDS = [merge.replace(" ", "") for merge in MERGES]


def metadata(pre, **changes):
    tokens = ["<|begin|>", "<|end|>", *BYTES, *WORDS, "<tool>"]
    fields = {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 3) + [4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    fields |= {f"tokenizer.{name}": value for name, value in changes.items()}
    return {name: value for name, value in fields.items() if value is not None}


@pytest.fixture
def load(tmp_path):
    from transformers import AutoTokenizer

    def build(fields):
        write_tokenizer(fields, tmp_path)
        return AutoTokenizer.from_pretrained(tmp_path)

    return build


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["Ġ", "1", "2", "3", "Ġab"]),  # digits one by one, cut off before the space rule
        ("qwen2", ["Ġ", "1", "2", "3", "Ġab"]),
        ("llama-bpe", ["Ġ", "123", "Ġab"]),  # up to three digits together, never with the space
        ("gpt-2", ["Ġ", "123", "Ġab"]),
    ],
)
def test_the_pre_field_decides_how_digits_are_split(load, pre, pieces):
    tokenizer = load(metadata(pre, **{"ggml.add_bos_token": False}))
    assert tokenizer.convert_ids_to_tokens(tokenizer(" 123 ab")["input_ids"]) == pieces


def test_gpt2_joins_a_space_with_a_number_where_llama_does_not(load):
    assert load(metadata("gpt-2")).tokenize(" 1") == ["Ġ1"]
    assert load(metadata("llama-bpe")).tokenize(" 1") == ["Ġ", "1"]


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
@pytest.mark.parametrize("text", ["It's 12 ab\n\n  ünïcode 😀\t1234", "<|begin|>ab<|end|>", " ab <tool>12"])
def test_decoding_gives_the_text_back(load, pre, text):
    tokenizer = load(metadata(pre, **{"ggml.add_bos_token": False}))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_control_tokens_are_special_and_user_tokens_are_whole_but_plain(load):
    tokenizer = load(metadata("smollm"))
    ids = tokenizer("<|begin|>ab<tool><|end|>")["input_ids"]
    last = len(tokenizer) - 1
    assert ids == [0, tokenizer.convert_tokens_to_ids("ab"), last, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<tool>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (0, 1, 128)


def test_unused_rows_at_the_end_are_no_tokens(load):
    fields = metadata("qwen2")
    size = len(fields["tokenizer.ggml.tokens"])
    fields["tokenizer.ggml.tokens"] += ["[PAD1]", "[PAD2]"]
    fields["tokenizer.ggml.token_type"] += [5, 5]
    assert len(load(fields)) == size


@pytest.mark.parametrize(("pre", "asked", "expected"), [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False), ("qwen2", True, True)])
def test_a_begin_token_is_added_when_the_metadata_or_llama3_says_so(load, pre, asked, expected):
    tokenizer = load(metadata(pre, **{"ggml.add_bos_token": asked}))
    assert (tokenizer("ab")["input_ids"][0] == 0) == expected
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [tokenizer.convert_tokens_to_ids("ab")]


def test_an_end_token_is_added_on_request(load):
    assert load(metadata("qwen2", **{"ggml.add_eos_token": True}))("ab")["input_ids"][-1] == 1


def test_the_chat_template_is_kept(load):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert load(metadata("qwen2", chat_template=template)).chat_template == template


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ggml.pre": "tekken"}, "tokenizer.ggml.pre = 'tekken'"),
        ({"ggml.model": "llama"}, "tokenizer.ggml.model = 'llama'"),
        ({"ggml.token_type": [1, 1]}, "token_type 2"),
        ({"ggml.merges": ["a b", "q z"]}, "join no two tokens into a third, first 'q z'"),
        ({"ggml.eos_token_id": 100_000}, "eos_token_id = 100000"),
        ({"ggml.add_bos_token": True, "ggml.bos_token_id": None}, "bos_token"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        write_tokenizer(metadata("qwen2", **changes), tmp_path)


def test_repeated_tokens_are_an_error(tmp_path):
    fields = metadata("qwen2")
    fields["tokenizer.ggml.tokens"][5] = fields["tokenizer.ggml.tokens"][6]
    with pytest.raises(ValueError, match="repeats 1"):
        write_tokenizer(fields, tmp_path)
