"""Text to token ids and back with a model's own tokenizer and chat template (transformers, without torch).

Only token ids cross from here to the device; generated text is never encoded again. Building a tokenizer from GGUF metadata is not here.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from etils import epath

from tlt_jax.tasks import chat_spans

_SMALL_FILES = (".json", ".jinja", ".model", ".txt")
_MISTRAL_FAMILIES = ("mistral", "mistral3", "ministral", "pixtral", "voxtral")
_TEMPLATE_ADVICE = "set model.chat_template to a Jinja file (or use a model that brings a template)"
_PROBE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": chat_spans.SENTINEL})


class TokenizerError(ValueError):
    """A tokenizer or template cannot do what is asked; the message says which option mends it."""


def check_ids(ids: Sequence[int], embedding_rows: int) -> None:
    """Raise TokenizerError when an id has no embedding row. On the device such an id reads some other row and nothing tells."""
    worst = max(ids, default=-1)
    if worst >= embedding_rows or min(ids, default=0) < 0:
        wrong = worst if worst >= embedding_rows else min(ids)
        raise TokenizerError(f"token id {wrong} is outside the {embedding_rows} embedding rows: tokenizer and model do not belong together")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer. `size` = highest id + 1: embedding rows from there on are padding and must never be sampled.

    `stop_ids`: the end-of-text id and `turn_end_id`, which ends an assistant turn in the chat template; the caller adds those of the generation config.
    """

    backend: object
    size: int
    eos_id: int | None
    bos_id: int | None
    pad_id: int
    stop_ids: tuple[int, ...]
    embedding_rows: int | None = None
    refuses_unknown: bool = False
    turn_end_id: int | None = None

    @property
    def answer_end_id(self) -> int:
        """What a policy says at the end of an answer: the chat template's end of a turn, else the end of the text. Raises TokenizerError without either."""
        ends = [end for end in (self.turn_end_id, self.eos_id) if end is not None]
        if not ends:
            raise TokenizerError("the tokenizer has neither an end-of-text token nor a chat template that ends turns with a token: answers would have no end")
        return ends[0]

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self.backend.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. `add_special_tokens` adds what the tokenizer adds to a plain text (often the begin token, never twice)."""
        begin = self.backend.bos_token
        if add_special_tokens and begin and text.startswith(begin):
            text = text[len(begin) :] if _adds_begin(self) else text
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens)
        if self.embedding_rows is not None:
            check_ids(ids, self.embedding_rows)
        if self.refuses_unknown and self.backend.unk_token_id in ids:
            unknown = sorted(set(text) - set(self.backend.get_vocab()))
            raise TokenizerError(f"the character tokenizer has no token for {unknown}: add them to its alphabet (model.scratch.alphabet)")
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The exact text of `ids` (no clean-up of spaces)."""
        return self.backend.decode([int(token) for token in ids], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def render_chat(
        self, messages: Sequence[dict], *, add_generation_prompt: bool, enable_thinking: bool | None = None, tools: list[dict] | None = None
    ) -> str:
        """The conversation as the chat template prints it, begin token included where the template prints one: encode it *without* special tokens."""
        return self._rendered(None, messages, add_generation_prompt, enable_thinking, tools)

    def _rendered(self, template, messages, add_generation_prompt, enable_thinking, tools=None) -> str:
        import jinja2  # here: plain text needs no template engine

        if not self.has_chat_template:
            raise TokenizerError(f"the data are conversations and the tokenizer has no chat template: {_TEMPLATE_ADVICE}")
        mode = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            return self.backend.apply_chat_template(
                list(messages), tools=tools, chat_template=template, add_generation_prompt=add_generation_prompt, tokenize=False, **mode
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TokenizerError(f"the chat template cannot render this conversation: {error}") from error

    def generation_prompt(self, enable_thinking: bool | None = None) -> str:
        """What the template prints at the end to make the assistant speak ("" when it prints nothing)."""
        without, with_prompt = (self._rendered(None, _PROBE[:1], add, enable_thinking) for add in (False, True))
        if not with_prompt.startswith(without):
            raise TokenizerError("the generation prompt of the chat template is not at its end")
        return with_prompt[len(without) :]

    def encode_chat(self, messages: Sequence[dict], *, add_generation_prompt: bool, enable_thinking: bool | None = None) -> list[int]:
        """Token ids of `render_chat`."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking)
        return self.encode(text, add_special_tokens=False)

    def assistant_mask(self, messages: Sequence[dict], *, enable_thinking: bool | None = None) -> tuple[list[int], list[int]]:
        """Ids of the one full rendering and, for each, 1 where the assistant speaks. The ids under 1 decode to exactly the text that the
        template prints for the assistant's turns, end-of-turn token included. Raises TokenizerError where that cannot be had."""
        text = self.render_chat(messages, add_generation_prompt=False, enable_thinking=enable_thinking)
        try:
            spans = self._assistant_spans(messages, text, enable_thinking)
        except chat_spans.TemplateError as error:
            raise TokenizerError(str(error)) from error
        ids, mask = _masked_ids(self, text, spans)
        printed = "".join(text[start:end] for start, end in spans)
        decoded = self.decode([token for token, inside in zip(ids, mask, strict=True) if inside], skip_special_tokens=False)
        if decoded != printed:
            raise TokenizerError(f"the assistant's turns do not survive tokenization: printed {printed[:80]!r}, decoded {decoded[:80]!r}")
        return ids, mask

    def _assistant_spans(self, messages, text: str, enable_thinking) -> list[chat_spans.Span]:
        template = self.backend.get_chat_template()
        if chat_spans.has_generation_marks(template):
            marked = self._rendered(chat_spans.visibly_marked(template), messages, False, enable_thinking)
            return chat_spans.marked_spans(marked, text)

        def render(changed: Sequence[dict]) -> str:
            return self.render_chat(changed, add_generation_prompt=False, enable_thinking=enable_thinking)

        header = chat_spans.shared_header([self.generation_prompt(mode) for mode in (None, True, False)])
        return chat_spans.located_spans(messages, text, render, header, _end_of_turn(self))


def load_tokenizer(directory: str, *, chat_template: str | None = None, embedding_rows: int | None = None) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory (never from the network).

    `chat_template` replaces the template: a Jinja file, or the template itself. With `embedding_rows` every encoding is checked against the model.
    """
    place = epath.Path(directory).expanduser()
    if not place.is_dir():
        raise TokenizerError(f"{directory}: no such directory, so no tokenizer")
    with contextlib.ExitStack() as stack:
        local = _local_copy(place, stack) if "://" in str(directory) else str(place)
        backend = _load_backend(local)
    if chat_template:
        backend.chat_template = _template_text(chat_template)
    size = max(backend.get_vocab().values(), default=-1) + 1
    eos = backend.eos_token_id
    pad = backend.pad_token_id if backend.pad_token_id is not None else eos if eos is not None else 0
    loaded = Tokenizer(backend, size, eos, backend.bos_token_id, pad, (), embedding_rows, bool(backend.init_kwargs.get("refuses_unknown")))
    turn_end = _end_of_turn(loaded) if loaded.has_chat_template else ""
    turn_end_id = backend.convert_tokens_to_ids(turn_end) if turn_end else None
    return dataclasses.replace(loaded, stop_ids=tuple(sorted({eos, turn_end_id} - {None})), turn_end_id=turn_end_id)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No advice about torch and the like while transformers loads; errors still pass."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _load_backend(directory: str):
    with quietly():
        import transformers  # here: it takes a second, and token-id prompts do not need it

        try:
            return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, **_known_repairs(directory))
        except (OSError, ValueError, KeyError) as error:
            raise TokenizerError(f"{directory}: no tokenizer that can be loaded ({error})") from error


def _known_repairs(directory: str) -> dict[str, bool]:
    """Mistral's large vocabularies were published with a wrong split pattern, which transformers mends when it is told to."""
    config = pathlib.Path(directory, "config.json")
    family = json.loads(config.read_text()).get("model_type") if config.exists() else None
    return {"fix_mistral_regex": True} if family in _MISTRAL_FAMILIES else {}


def _local_copy(place, stack: contextlib.ExitStack) -> str:
    """The small files of a remote directory in a temporary one: the tokenizer libraries open local paths only."""
    local = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    for entry in place.iterdir():
        if entry.suffix in _SMALL_FILES:
            (local / entry.name).write_bytes(entry.read_bytes())
    return str(local)


def _template_text(template: str) -> str:
    if "{%" in template or "{{" in template:
        return template
    file = epath.Path(template).expanduser()
    if not file.exists():
        raise TokenizerError(f"model.chat_template={template}: no such file")
    return file.read_text()


def _adds_begin(tokenizer: Tokenizer) -> bool:
    return tokenizer.bos_id is not None and tokenizer.backend.encode("", add_special_tokens=True)[:1] == [tokenizer.bos_id]


def _end_of_turn(tokenizer: Tokenizer) -> str:
    """The special token that the template prints after the assistant's content ("" = none)."""
    try:
        parts = tokenizer.render_chat(_PROBE, add_generation_prompt=False).split(chat_spans.SENTINEL)
    except TokenizerError:
        return ""  # a template that refuses a plain two-turn chat names no end of turn; its own data will show the error
    tail = parts[-1].lstrip() if len(parts) == 2 else ""
    specials = (str(token) for token in tokenizer.backend.added_tokens_decoder.values() if token.special)
    return max((token for token in specials if tail.startswith(token)), key=len, default="")


def _masked_ids(tokenizer: Tokenizer, text: str, spans: Sequence[chat_spans.Span]) -> tuple[list[int], list[int]]:
    """Ids of `text` and the mask of `spans`. Where a token of the whole text straddles a span's edge, the text is encoded piece by piece,
    as in a rollout, where prompt and response never share a token."""
    encoding = tokenizer.backend(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoding["input_ids"]), encoding["offset_mapping"]
    if tokenizer.embedding_rows is not None:
        check_ids(ids, tokenizer.embedding_rows)
    inside = [any(first <= start and end <= last and end > start for first, last in spans) for start, end in offsets]
    covered = tokenizer.decode([token for token, kept in zip(ids, inside, strict=True) if kept], skip_special_tokens=False)
    if covered == "".join(text[first:last] for first, last in spans):
        return ids, [int(kept) for kept in inside]
    ids, mask, place = [], [], 0
    for first, last in [*spans, (len(text), len(text))]:
        for piece, kept in ((text[place:first], 0), (text[first:last], 1)):
            piece_ids = tokenizer.encode(piece, add_special_tokens=False) if piece else []
            ids += piece_ids
            mask += [kept] * len(piece_ids)
        place = last
    return ids, mask
