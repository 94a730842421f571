"""Texts of an evaluation as token ids: a continuation behind its context, the windows of a long text, and how and until when to generate.

The rules are those of lm-evaluation-harness for Hugging Face models, so that numbers compare with published ones; its package is not needed here.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tlt_jax.tasks.tokenizer import Tokenizer

DEFAULT_NEW_TOKENS = 256  # where a task names no limit
_LIMIT_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first that is given counts
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0}  # what changes nothing is taken, any other value refused
_KNOWN = (*_LIMIT_NAMES, *_NEUTRAL, "until", "do_sample", "temperature", "top_k", "top_p", "min_p")


class Span(NamedTuple):
    """Token ids to score, and those before them that are only read."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Generation(NamedTuple):
    """How one answer is generated. The text ends before the first stop string."""

    max_new_tokens: int
    stops: tuple[str, ...] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def start_id(tokenizer: Tokenizer) -> int:
    """What stands before a text without context: the begin token, else the end-of-text token. ValueError for a tokenizer without both."""
    for token in (tokenizer.bos_id, tokenizer.eos_id):
        if token is not None:
            return token
    raise ValueError("the tokenizer names neither a begin token nor an end-of-text token: a text without context has nothing to be scored behind")


def text_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Token ids with what the tokenizer adds to a text; nothing is added to one that brings its begin token, as chat templates print it."""
    begin = tokenizer.decode([start_id(tokenizer)], skip_special_tokens=False)
    return tuple(tokenizer.encode(text, add_special_tokens=not (begin and text.startswith(begin))))


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Span:
    """Context and continuation as they are tokenized together, so that a token that reaches over their border is no other token than in running text.

    Spaces at the end of the context count to the continuation: most vocabularies hold words with the space before them. With "the capital is " + "Rome" the
    scored tokens are those that " Rome" adds. Raises ValueError for a continuation that adds no token.
    """
    start = start_id(tokenizer)
    if not context:
        ids = tuple(tokenizer.encode(continuation, add_special_tokens=False))
        span = Span(ids[:1], ids[1:]) if ids[:1] == (start,) else Span((start,), ids)
    else:
        kept = context.rstrip()
        whole = text_ids(tokenizer, context + continuation)
        before = text_ids(tokenizer, kept)
        span = Span(before, whole[len(before) :]) if before else Span((start,), whole)
    if not span.continuation:
        raise ValueError(f"the continuation {continuation!r} adds no token to its context, which ends in {context[-40:]!r}: there is nothing to score")
    return span


def rolling_windows(ids: Sequence[int], start: int, limit: int) -> list[Span]:
    """Spans of at most `limit` + 1 tokens that score every token of a text once, each behind as much of the text as fits.

    With ids 0…9 and limit 4: start → 0 1 2 3, then 3 → 4 5 6 7, then 5 6 7 → 8 9.
    """
    ids = tuple(ids)
    spans = [Span((start,), ids[:limit])] if ids else []
    for begin in range(limit, len(ids), limit):
        end = min(begin + limit, len(ids))
        spans.append(Span(ids[end - limit - 1 : begin], ids[begin:end]))
    return spans


def fitted(span: Span, limit: int) -> Span:
    """The span without the earliest context tokens that a model of `limit` positions cannot read; the last token is predicted and never read.

    Raises ValueError for a continuation that does not fit by itself.
    """
    read = len(span.context) + len(span.continuation) - 1
    if read <= limit:
        return span
    if len(span.continuation) > limit:
        raise ValueError(f"a continuation has {len(span.continuation)} tokens, more than the {limit} that the model reads at once")
    return Span(span.context[read - limit :], span.continuation)


def generation(options: Mapping) -> Generation:
    """The generation options of a task. Raises ValueError for options that are not built."""
    others = [f"{name}={value}" for name, value in options.items() if name not in _KNOWN or (name in _NEUTRAL and value != _NEUTRAL[name])]
    if others:
        raise ValueError(f"the task generates with {', '.join(others)}, which is not built; there are {', '.join(_KNOWN)}")
    until = options.get("until") or ()
    temperature = options.get("temperature")
    sampled = bool(temperature) if options.get("do_sample") is None else options["do_sample"]
    limits = [options[name] for name in _LIMIT_NAMES if options.get(name) is not None]
    return Generation(
        int(limits[0]) if limits else DEFAULT_NEW_TOKENS, (until,) if isinstance(until, str) else tuple(stop for stop in until if stop),
        (1.0 if temperature is None else float(temperature)) if sampled else 0.0, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0),
        float(options.get("min_p") or 0.0))


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """The text before the stop strings: cut at the first stop, what is left at the second, and so on."""
    for stop in stops:
        text = text.split(stop)[0]
    return text
