"""What an admission hands to the device, as numpy arrays of fixed shapes: prompts in pieces, the slots that continue them, and texts to look into."""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from tlt_jax.decoding.rollout import PREFILL_ROWS, Admission
from tlt_jax.decoding.shared_texts import NOTHING, Entering
from tlt_jax.records import SamplingParams
from tlt_jax.runtime.programs import SlicePrograms
from tlt_jax.scheduling.peer_texts import PeerTexts, Place
from tlt_jax.sharding import movement
from tlt_jax.sharding.rules import replicated
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


class Entrance(NamedTuple):
    """How prompts get into the slots of a slice in one phase: cut into `pieces` = (I, T), with the texts that its drafter looks into, if it does."""

    programs: SlicePrograms
    pieces: tuple[int, int]
    texts: PeerTexts | None
    sampling: SamplingParams
    stop_ids: jax.Array

    def places(self, requests: Sequence[Request], capacity: int, state) -> tuple[list[Place | None], Entering | None]:
        """(place of each request's text, texts that enter with them), for at most `capacity` requests."""
        if self.texts is None:
            return [None] * len(requests), None
        return entering(self.texts, requests, capacity, state.cache.slots)

    def admit(self, params, state, new: Admission):
        """(state, sampled, finish_A); the given state is donated."""
        whole = replicated(self.programs.mesh)
        new = movement.to_device(new, jax.tree.map(lambda _: whole, new))
        return self.programs.admit(params, state, new, self.sampling, self.stop_ids)

    def join(self, state, source, requests: Sequence[Request], slots: Sequence[int]):
        """The first rows of `source`, which were another slice's, go on in `slots`: (place of each one's text, state); the given state is donated."""
        rows, capacity = state.active_B.shape[0], source.active_B.shape[0]
        slots_A = np.full((capacity,), rows, np.int32)
        slots_A[: len(slots)] = slots
        places, texts = self.places(requests, capacity, state)
        whole = replicated(self.programs.mesh)
        slots_A, texts = movement.to_device((slots_A, texts), jax.tree.map(lambda _: whole, (slots_A, texts)))
        return places, self.programs.put_rows(state, source, slots_A, texts)

    def compile_ahead(self, params, state):
        """Let nothing enter once in each form of an admission, since how many prompts enter together depends on the answers; the state afterwards."""
        capacity = state.active_B.shape[0]
        for prompts in prompt_places(capacity):
            state, _, _ = self.admit(params, state, nothing(capacity, prompts, self.pieces, self.places([], capacity, state)[1]))
        return state
