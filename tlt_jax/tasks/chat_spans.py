r"""Where the assistant's words stand in one full chat rendering (character spans).

Rendering message by message gives wrong spans: templates of the Qwen3 kind print an earlier turn differently from the last one. So the
whole conversation is rendered once, and the spans are found in that text:

* the template marks them with `{% generation %}`: its own marks are printed as private characters, then removed;
* otherwise the content of one message after the other is replaced by a sentinel. What the rendering prints *after* the sentinel is what it
  prints after the message, so the end of each message is known; an assistant turn starts after the header that follows the message before.

A span holds everything printed for the turn after its header (a kept `<think>` block too), with the end-of-turn token, which the policy
must learn, and without line feeds behind it. This module knows text only; ids and masks are in `tokenizer`.
"""

import os.path
import re
from collections.abc import Callable, Sequence

Span = tuple[int, int]
Render = Callable[[Sequence[dict]], str]

SENTINEL = "zqSENTINELqz"
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class TemplateError(ValueError):
    """The chat template hides where the assistant's turns are."""


def has_generation_marks(template: str) -> bool:
    """Whether the template says itself what the assistant generates."""
    return _GENERATION.search(template) is not None


def visibly_marked(template: str) -> str:
    """The template with its generation marks printed. An `if` block keeps the white-space rules that block tags have."""

    def printed(mark: re.Match) -> str:
        left, end, right = mark[1], mark[2], mark[3]
        return f"{{%{left} if true %}}{_CLOSE if end else _OPEN}{{% endif {right}%}}"

    return _GENERATION.sub(printed, template)


def marked_spans(marked_text: str, text: str) -> list[Span]:
    """Spans in `text` from `marked_text`, the same rendering with printed marks."""
    if marked_text.replace(_OPEN, "").replace(_CLOSE, "") != text:
        raise TemplateError("the chat template prints something else when its generation marks are printed")
    spans, start = [], 0
    for removed, mark in enumerate(re.finditer(f"[{_OPEN}{_CLOSE}]", marked_text)):
        place = mark.start() - removed
        if mark.group() == _OPEN:
            start = place
        elif place > start:
            spans.append((start, place))
    return spans


def located_spans(messages: Sequence[dict], text: str, render: Render, header: str, end_of_turn: str) -> list[Span]:
    """Spans of the assistant turns in `text` = render(messages), for templates without generation marks.

    `header` is what starts an assistant turn (longest text that all generation prompts share), `end_of_turn` the token that ends one ("" = none).
    """
    spans, previous_end = [], 0
    for number, message in enumerate(messages):
        ends = _content_end(messages, number, text, render)
        if message["role"] == "assistant":
            if ends is None:
                raise TemplateError(f"the chat template does not print message {number} once and as it is: add {{% generation %}} marks to it")
            start = _after_header(text, previous_end, ends, header) if header else _after_prompt(messages[:number], text, render)
            rest = text[ends:]
            spaces = len(rest) - len(rest.lstrip())
            closed = bool(end_of_turn) and rest.startswith(end_of_turn, spaces)
            spans.append((start, ends + spaces + len(end_of_turn) if closed else ends))
        previous_end = spans[-1][1] if message["role"] == "assistant" else previous_end if ends is None else ends
    return spans


def _content_end(messages: Sequence[dict], number: int, text: str, render: Render) -> int | None:
    """Where the content of one message ends in `text`; None when the template does not print it exactly once."""
    replaced = [message | {"content": SENTINEL} if place == number else message for place, message in enumerate(messages)]
    parts = render(replaced).split(SENTINEL)
    if len(parts) != 2 or not text.endswith(parts[1]):
        return None
    return len(text) - len(parts[1])


def _after_header(text: str, first: int, last: int, header: str) -> int:
    """End of the assistant's header in text[first:last]."""
    found = text.find(header, first, last)
    if found < 0:
        raise TemplateError(f"the chat template prints an assistant turn without its header {header!r}: add {{% generation %}} marks to it")
    return found + len(header)


def _after_prompt(before: Sequence[dict], text: str, render: Render) -> int:
    """End of what is printed before an assistant turn, for templates whose turns have no header (Mistral): the prompt alone must be a start of `text`."""
    prompt = render(before) if before else ""
    if not text.startswith(prompt):
        raise TemplateError("the chat template prints earlier turns differently and has no assistant header: add {% generation %} marks to it")
    return len(prompt)


def shared_header(generation_prompts: Sequence[str]) -> str:
    """The longest start that all generation prompts (thinking on, off, unset) share; what differs is a mode, not the role's header."""
    shared = os.path.commonprefix(list(generation_prompts))
    return re.sub(r"<think>\s*$", "", shared)
