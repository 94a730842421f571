"""Which texts the rows of a slice may look into for drafts: running and finished samples of the same prompt, and answers of earlier steps to it.

A slice keeps texts in numbered segments on its device; here is decided which segment holds what. A row writes to its own segment while it decodes, and the
text stays readable until the segment is needed again, oldest first. Answers outlive a step on the host, the latest ones of each prompt.
"""

import collections
from typing import NamedTuple

from tlt_jax.strategies import Request

MOST_TOKENS = 2**24  # of all answers kept on a host; the prompts that were answered longest ago are forgotten first


class AnswerHistory:
    """The latest `per_prompt` answers to each prompt, over the steps of a run. Not saved: after a resume it fills again, and only speed depends on it."""

    def __init__(self, per_prompt: int, most_tokens: int = MOST_TOKENS):
        self._answers: dict[int, collections.deque[tuple[int, ...]]] = {}
        self._per_prompt, self._most, self._held = per_prompt, most_tokens, 0

    def add(self, prompt: int, text: tuple[int, ...]) -> None:
        """A finished text (prompt and answer) of a prompt."""
        if not self._per_prompt:
            return
        kept = self._answers.pop(prompt, collections.deque())
        self._answers[prompt] = kept  # last in the order of the dictionary
        kept.append(text)
        self._held += len(text)
        while len(kept) > self._per_prompt:
            self._held -= len(kept.popleft())
        while self._held > self._most and len(self._answers) > 1:
            self._held -= sum(map(len, self._answers.pop(next(iter(self._answers)))))

    def of(self, prompt: int) -> list[tuple[int, ...]]:
        """The answers kept of a prompt, the latest first."""
        return list(reversed(self._answers.get(prompt, ())))


class Place(NamedTuple):
    """Where a text goes and which group it belongs to."""

    segment: int
    group: int


class PeerTexts:
    """The segments of one slice during one rollout phase."""

    def __init__(self, segments: int, history: AnswerHistory):
        self.segments = segments
        self._free = collections.deque(range(segments))
        self._groups: dict[int, int] = {}
        self._history = history

    def enter(self, requests: list[Request], room: int) -> tuple[list[Place], list[tuple[Place, tuple[int, ...]]]]:
        """Places for new rows, and at most `room` earlier answers to prompts that had no row yet, with theirs."""
        fresh = [request.prompt for request in requests if request.prompt not in self._groups]
        for request in requests:
            self._groups.setdefault(request.prompt, len(self._groups))
        places = [Place(self._free.popleft(), self._groups[request.prompt]) for request in requests]
        answers = [(prompt, text) for prompt in dict.fromkeys(fresh) for text in self._history.of(prompt)]
        earlier = []
        for prompt, text in answers[: min(room, len(self._free))]:
            self._free.rotate(-1)  # it may be taken again, as the last of all
            earlier.append((Place(self._free[-1], self._groups[prompt]), text))
        return places, earlier

    def move_away(self, place: Place) -> None:
        """A row goes on in another slice, and takes its text with it."""
        self._free.append(place.segment)

    def leave(self, request: Request, place: Place, tokens: tuple[int, ...]) -> None:
        """A row has finished."""
        self._free.append(place.segment)
        self._history.add(request.prompt, (*request.prompt_ids, *tokens))
