"""A tokenizer directory from GGUF metadata, for files whose vocabulary is byte-level BPE.

transformers' own GGUF reader needs torch; this uses the `tokenizers` package alone. It knows the metadata as a dict and opens no GGUF. SentencePiece
vocabularies (tokenizer.ggml.model "llama") are refused by name.
"""

import json
import pathlib
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

FORMAT_VERSION = 1  # part of the cache key of written tokenizers: raise it when the files written here change

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # GGUF token types

# The split patterns of the published Llama 3 and Qwen 2 tokenizers; they differ in how many digits go together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(first: pre_tokenizers.PreTokenizer | None, *, gpt2_words: bool) -> pre_tokenizers.PreTokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_words)
    return last if first is None else pre_tokenizers.Sequence([first, last])


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    splits = {
        "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True), gpt2_words=True),
        "llama-bpe": lambda: _byte_level(pre_tokenizers.Split(Regex(_WORDS.format(digits="{1,3}")), "isolated"), gpt2_words=False),
        "qwen2": lambda: _byte_level(pre_tokenizers.Split(Regex(_WORDS.format(digits="")), "isolated"), gpt2_words=False),
        "gpt-2": lambda: _byte_level(None, gpt2_words=True),
        "default": lambda: _byte_level(None, gpt2_words=True),
    }
    if pre not in splits:
        raise ValueError(f"tokenizer.ggml.pre = {pre!r} is not supported. Supported: {', '.join(splits)}. Use a Hugging Face directory of the model.")
    return splits[pre]()


def write_tokenizer(fields: dict[str, Any], directory: pathlib.Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, when the metadata has one, chat_template.jinja into an existing `directory`.

    `fields` is the file's metadata ("tokenizer.ggml.tokens", …) as Python values. AutoTokenizer.from_pretrained reads the result. Raises ValueError
    naming the field for a vocabulary kind or a splitting rule that is not supported, and for metadata that contradicts itself.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"tokenizer.ggml.model = {kind!r} is not supported (only 'gpt2', byte-level BPE). Use a Hugging Face directory of the model.")
    pre = fields.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(_bpe(fields, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    special = _special_tokens(fields)
    tokenizer.add_tokens(_added_tokens(fields))
    tokenizer.post_processor = _post_processor(fields, pre, special)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = special | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if length := fields.get(f"{fields.get('general.architecture')}.context_length"):
        settings["model_max_length"] = length
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    if template := fields.get("tokenizer.chat_template"):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _token_rows(fields: dict[str, Any]) -> list[tuple[str, int]]:
    """(text, type) of every token, without the unused rows that only pad the matrix at its end (those must not be drawable words)."""
    tokens = fields.get("tokenizer.ggml.tokens") or []
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not tokens or len(tokens) != len(types):
        raise ValueError(f"tokenizer.ggml.tokens has {len(tokens)} entries, tokenizer.ggml.token_type {len(types)}.")
    rows = list(zip(tokens, types, strict=True))
    while rows[-1][1] == _UNUSED:
        rows.pop()
    return rows


def _bpe(fields: dict[str, Any], *, ignore_merges: bool) -> models.BPE:
    rows = _token_rows(fields)
    vocabulary = {text: index for index, (text, _) in enumerate(rows)}
    if len(vocabulary) != len(rows):
        raise ValueError(f"tokenizer.ggml.tokens repeats {len(rows) - len(vocabulary)} tokens.")
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges") or []]
    if broken := [merge for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys()]:
        raise ValueError(f"tokenizer.ggml.merges holds {len(broken)} entries that join no two tokens into a third, first {' '.join(broken[0])!r}.")
    return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges)


def _added_tokens(fields: dict[str, Any]) -> list[AddedToken]:
    rows = _token_rows(fields)
    return [AddedToken(text, special=kind == _CONTROL, normalized=False) for text, kind in rows if kind in (_CONTROL, _USER_DEFINED)]


def _special_tokens(fields: dict[str, Any]) -> dict[str, str]:
    rows = _token_rows(fields)
    special = {}
    for role, name in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = fields.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is None:
            continue
        if token_id >= len(rows):
            raise ValueError(f"tokenizer.ggml.{name}_token_id = {token_id} is past the last of {len(rows)} tokens.")
        special[role] = rows[token_id][0]
    return special


def _post_processor(fields: dict[str, Any], pre: str, special: dict[str, str]) -> processors.PostProcessor:
    """Byte-level offsets, and the begin and end tokens that the metadata asks for (absent: llama.cpp adds a begin token for Llama 3 alone)."""
    byte_level = processors.ByteLevel(trim_offsets=False)
    first = fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token"
    last = fields.get("tokenizer.ggml.add_eos_token", False) and "eos_token"
    if absent := [role for role in (first, last) if role and role not in special]:
        raise ValueError(f"GGUF metadata asks to add {absent[0]}, but names no such token.")
    around = [special[role] if role else "" for role in (first, last)]
    if not any(around):
        return byte_level
    ids = [(special[role], fields[f"tokenizer.ggml.{role.removesuffix('_token')}_token_id"]) for role in (first, last) if role]
    pieces = [around[0], "$A", around[1]], [around[0], "$A", around[1], around[0], "$B:1", around[1]]
    single, pair = ([piece for piece in part if piece] for part in pieces)
    return processors.Sequence([byte_level, processors.TemplateProcessing(single=single, pair=pair, special_tokens=sorted(set(ids)))])
