"""What an admission hands to the device, as numpy arrays of fixed shapes: prompts in pieces, the slots that continue them, and texts to look into."""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tlt_jax.decoding.rollout import PREFILL_ROWS, Admission
from tlt_jax.decoding.shared_texts import NOTHING, Entering
from tlt_jax.scheduling.peer_texts import PeerTexts, Place
from tlt_jax.strategies import Request


class Entry(NamedTuple):
    """A request and its slot."""

    request: Request
    slot: int


def by_prompt(requests: Sequence[Request], free: Sequence[int]) -> list[list[Entry]]:
    """The requests of each prompt with slots for them, the longest prompt first."""
    groups = collections.defaultdict(list)
    for request in requests:
        groups[request.prompt_ids].append(request)
    slots = iter(free)
    return [[Entry(request, next(slots)) for request in groups[prompt]] for prompt in sorted(groups, key=len, reverse=True)]


def prompt_places(capacity: int) -> tuple[int, int]:
    """The numbers of prompts that an admission into `capacity` slots has room for: one prompt, or one for every slot."""
    return 1, -(-capacity // PREFILL_ROWS) * PREFILL_ROWS


def nothing(capacity: int, places: int, pieces: tuple[int, int], texts: Entering | None) -> Admission:
    """No prompt in `places`, cut into `pieces` = (I, T), for a state of `capacity` slots."""
    return Admission(
        np.zeros((places, *pieces), np.int32), np.zeros((places,), np.int32), np.full((capacity,), capacity, np.int32), np.zeros((capacity,), np.int32),
        np.zeros((capacity, 2), np.uint32), np.ones((capacity,), np.int32), texts)


def admission(groups: Sequence[Sequence[Entry]], capacity: int, pieces: tuple[int, int], texts: Entering | None) -> Admission:
    """For a state of `capacity` slots, prompts cut into `pieces` = (I, T)."""
    new = nothing(capacity, prompt_places(capacity)[len(groups) > 1], pieces, texts)
    number = 0
    for index, group in enumerate(groups):
        prompt = group[0].request.prompt_ids
        new.tokens_PIT[index].reshape(-1)[: len(prompt)], new.lengths_P[index] = prompt, len(prompt)
        for request, slot in group:
            new.slots_A[number], new.source_A[number] = slot, index
            new.key_A2[number], new.remaining_A[number] = request.noise_words(), request.max_new_tokens
            number += 1
    return new


def entering(texts: PeerTexts, requests: Sequence[Request], capacity: int, length: int) -> tuple[list[Place], Entering]:
    """(place of each request, arrays): where they and at most `capacity` earlier answers, cut to `length` tokens, go."""
    places, earlier = texts.enter(requests, capacity)
    segments, groups = np.full((2, capacity), texts.segments, np.int32), np.zeros((2, capacity), np.int32)
    answers = np.full((capacity, length), NOTHING, np.int32)
    for index, place in enumerate(places):
        segments[0, index], groups[0, index] = place
    for index, (place, text) in enumerate(earlier):
        segments[1, index], groups[1, index] = place
        answers[index, : len(text)] = text[:length]
    return places, Entering(segments[0], groups[0], answers, segments[1], groups[1])
