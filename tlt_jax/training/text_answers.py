"""Answers to texts that end at stop strings, each text with settings of its own: what tasks of an evaluation harness ask for.

Decoding is plain and knows token ids only; stop strings are looked for on the host, once a dispatch, and the text is cut exactly afterwards.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tlt_jax.runtime.rollout_driver import Row
from tlt_jax.strategies import Completion
from tlt_jax.tasks.continuations import Generation, cut_at_stops, start_id, text_ids
from tlt_jax.tasks.prompts import Prompt
from tlt_jax.tasks.tokenizer import Tokenizer
from tlt_jax.training import build
from tlt_jax.training.generation import GENERATE_STEP, Display, open_engine
from tlt_jax.training.rollout_phase import Phase, longest_prompt
from tlt_jax.training.settings import Config
from tlt_jax.training.settings_rules import copy_with

# Tokens in which a stop string is looked for: those of the last dispatches, and what the longest stop string may take, four bytes a character and one a token.
TAIL, TOKENS_OF_A_CHARACTER = 256, 4


class Asked(NamedTuple):
    """A text to go on from, and how."""

    text: str
    how: Generation


def prompt_ids(tokenizer: Tokenizer, one: Asked, limit: int) -> tuple[int, ...]:
    """The text as tokens, without the earliest that leave no room for the answer. Raises ValueError for an answer as long as all that the model reads."""
    room = limit - one.how.max_new_tokens
    if room < 1:
        raise ValueError(f"the task generates up to {one.how.max_new_tokens} tokens, and the model reads {limit} in all: there is no room for a prompt")
    return text_ids(tokenizer, one.text)[-room:] or (start_id(tokenizer),)


def answer_text(tokenizer: Tokenizer, stop_ids: Sequence[int], completion: Completion, stops: Sequence[str]) -> str:
    """The answer before its stop token and its stop strings, without special tokens."""
    ids = completion.token_ids
    ids = ids[:-1] if ids and ids[-1] in stop_ids else ids
    return cut_at_stops(tokenizer.decode(ids, skip_special_tokens=True), stops)


def stop_finder(tokenizer: Tokenizer, stops: Sequence[Sequence[str]]) -> Callable[[Row], bool]:
    """Whether a row has written one of the stop strings of its request."""

    def ends(row: Row) -> bool:
        own = stops[row.request.index]
        tail = row.tokens[-(TAIL + TOKENS_OF_A_CHARACTER * max(map(len, own), default=0)) :] if own else []
        text = tokenizer.decode(tail, skip_special_tokens=True) if own else ""
        return any(stop in text for stop in own)

    return ends


def answers(config: Config, model: build.Model, asked: Sequence[Asked], limit: int) -> list[str]:
    """One answer a text, in their order; texts with the same settings share batches."""
    plain = copy_with(config, {"speculative.method": "off", "drafter.path": ""})
    prompts = [Prompt(number, "harness", number, one.text, prompt_ids(model.tokenizer, one, limit), "") for number, one in enumerate(asked)]
    engine, weights = open_engine(plain, model, prompts)
    texts = [""] * len(asked)
    groups = collections.defaultdict(list)
    for prompt, one in zip(prompts, asked, strict=True):
        groups[one.how._replace(stops=())].append(prompt)
    display = Display("generate", len(asked), engine)
    for how, own in groups.items():
        stops = [asked[prompt.key].how.stops for prompt in own]

        def finish(completion: Completion, own=own, stops=stops) -> None:
            display.add(completion)
            index = completion.request.index
            texts[own[index].key] = answer_text(model.tokenizer, model.stop_ids, completion, stops[index])

        sampling = {"rollout.max_new_tokens": how.max_new_tokens, "rollout.top_k": how.top_k, "rollout.top_p": how.top_p, "rollout.min_p": how.min_p}
        group = dataclasses.replace(engine, config=copy_with(plain, sampling), longest_prompt=longest_prompt(own))
        try:
            group.run(weights, own, Phase("generate", 1, how.temperature, GENERATE_STEP, ends=stop_finder(model.tokenizer, stops)), finish, display.turn)
        finally:
            display.stop()
    return texts
