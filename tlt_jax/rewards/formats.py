"""Format rewards over the text of one response: 1.0 when the response has the asked form, else 0.0.

They see only the response, cut at its first stop token. They never see the prompt and never judge whether the answer is right.
"""

import re
from collections.abc import Callable

STOP_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|end|>",
    "<|return|>",
    "<|eom_id|>",
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)
_STOP = re.compile("|".join(re.escape(token) for token in STOP_TOKENS))
_THINK_ANSWER = re.compile(r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>|</?think>).)+</answer>\s*", re.DOTALL)
_ANSWER = re.compile(r"<answer>(?:(?!</?answer>).)+</answer>", re.DOTALL)
_MARKER = re.compile(r"^#### *\S", re.MULTILINE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def until_stop(text: str) -> str:
    """The text before the first stop token of any of the supported model families (all of it when there is none)."""
    found = _STOP.search(text)
    return text[: found.start()] if found else text


def think_answer(response: str) -> float:
    """1.0 when the response is exactly one <think>…</think> followed by one non-empty <answer>…</answer> (line feeds anywhere)."""
    return float(_THINK_ANSWER.fullmatch(until_stop(response)) is not None)


def thought_then_answer(response: str) -> float:
    """As `think_answer`, for chat templates whose prompt already ends with the opening <think> tag."""
    return think_answer("<think>" + response)


def answer_tag(response: str) -> float:
    """1.0 when the response has exactly one non-empty <answer>…</answer>."""
    return float(len(_ANSWER.findall(until_stop(response))) == 1)


def boxed(response: str) -> float:
    r"""1.0 when the last \boxed{ of the response has something in it and is closed."""
    text = until_stop(response)
    starts = [found.end() for found in _BOX.finditer(text)]
    if not starts:
        return 0.0
    depth, position = 1, starts[-1]
    while position < len(text) and depth:
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        position += 2 if text[position] == "\\" else 1
    return float(depth == 0 and bool(text[starts[-1] : position - 1].strip()))


def marker(response: str) -> float:
    """1.0 when a line starts with GSM8K's `#### ` and an answer."""
    return float(_MARKER.search(until_stop(response)) is not None)


FORMATS: dict[str, Callable[[str], float]] = {
    "think_answer": think_answer,
    "thought_then_answer": thought_then_answer,
    "answer_tag": answer_tag,
    "boxed": boxed,
    "marker": marker,
}
