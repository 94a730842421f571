"""Finished texts that a drafter learns from: those of the running step as they finish, and those of earlier steps in a ring that is bounded in bytes.

What the ring holds after a step depends on the texts alone, never on the order in which they finished.
"""

import bisect
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

ARRAYS = ("tokens", "features", "final")


@dataclass(frozen=True, eq=False)
class Text:
    """A prompt with its answer. It owns its arrays: a view of a larger array would keep more memory than is counted here."""

    tokens: np.ndarray  # int32 [n]
    prompt_length: int
    step: int  # the RL step that sampled it
    index: int  # its place in that step
    features: np.ndarray | None = None  # [n, F], what the drafter reads, where that is not `final`
    final: np.ndarray | None = None  # [n, D], the feature behind the head of the policy that sampled it; None: features are made when they are needed

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in (self.tokens, self.features, self.final) if array is not None)


class TextBuffer:
    """At most `capacity_bytes` of texts. The oldest go first, but the newest long ones are guarded, with up to `long_share` (below 1) of the capacity.

    Long for eviction is what has more tokens than the median text of the ring had when the step began; in the first step nothing can be told apart.
    `left_out` counts texts that are larger than what the guarded ones leave, `(1 - long_share) · capacity_bytes`: they are not taken.
    """

    def __init__(self, capacity_bytes: int, long_share: float):
        self._capacity, self._share, self._guard = capacity_bytes, long_share, int(long_share * capacity_bytes)
        self.left_out = 0
        self._guarded, self._open = _Newest(), _Newest()
        self.end_step()

    def _place(self, text: Text) -> None:
        """Among the guarded ones, whose oldest then may have to leave them, or among the others."""
        if len(text.tokens) > self._median and text.nbytes <= self._guard:
            self._long_bytes += text.nbytes
            self._guarded.add(text)
        else:
            self._open.add(text)
        for older in self._guarded.shrink(self._guard):
            self._open.add(older)

    def add(self, text: Text) -> None:
        """A text of the running step, at once usable."""
        if text.nbytes > self._capacity - self._guard:
            self.left_out += 1
            return
        self._running.add(text)
        self._place(text)
        # Room for guarded texts is given by all the long ones that came, held or not: that only grows in a step, so no order of coming saves another text.
        self._running.difference_update(self._open.shrink(self._capacity - min(self._guard, self._long_bytes)))

    def end_step(self, oldest: int = 0) -> None:
        """The texts of the running step become part of the ring, in the order of (step, index); those of steps before `oldest` leave."""
        ring = [text for text in self._texts() if text.step >= oldest]
        self._running: set[Text] = set()
        self._median = np.median([len(text.tokens) for text in ring]) if ring else 0
        self._guarded, self._open, self._long_bytes = _Newest(), _Newest(), 0
        for text in ring:
            self._place(text)
        self._open.shrink(self._capacity - self._guarded.bytes)  # only a ring that was restored can be too large

    def draw(self, key: tuple[int, ...], tokens: int, steps: Collection[int] | None = None) -> list[Text]:
        """Different texts of at most `tokens` tokens together, the same for the same `key` (integers from 0) and content; [] when nothing is held.

        With `steps` they are all of one of these, and one of many texts comes oftener; the rest holds for the texts of that step.

        All texts are shuffled and cut into batches, each as long as the next text fits; one batch is taken, every one with the same chance. So each text
        has the same chance, whatever its length. Then long texts (more tokens than the median of all held) go before short ones: those of the batch, further
        ones in the shuffled order until they hold `long_share` of `tokens`, and the short ones of the batch in what is left. So long texts hold
        `long_share` of the drawn tokens or more, unless no other long one fits beside them. A text of more than `tokens` comes alone.
        """
        texts = [text for text in self._texts() if steps is None or text.step in steps]
        if not texts:
            return []
        chance = np.random.default_rng(key)
        if steps is not None:
            step = texts[chance.integers(len(texts))].step
            texts = [text for text in texts if text.step == step]
        lengths = np.array([len(text.tokens) for text in texts])
        is_long = lengths > np.median(lengths)
        order = chance.permutation(len(texts))
        ends = np.concatenate([[0], np.cumsum(lengths[order])])
        cuts = [0]
        while cuts[-1] < len(texts):
            fitting = int(np.searchsorted(ends, ends[cuts[-1]] + tokens, side="right")) - 1
            cuts.append(max(fitting, cuts[-1] + 1))
        batch = int(chance.integers(len(cuts) - 1))
        inside, outside = order[cuts[batch] : cuts[batch + 1]], np.concatenate([order[cuts[batch + 1] :], order[: cuts[batch]]])
        drawn, held, room = [], 0, max(tokens, lengths[inside].sum())
        parts = ((inside[is_long[inside]], room), (outside[is_long[outside]], self._share * tokens), (inside[~is_long[inside]], room))
        for places, enough in parts:
            for place in places:
                if held < enough and held + lengths[place] <= room:
                    drawn.append(texts[place])
                    held += lengths[place]
        return drawn

    def state(self) -> tuple[dict[str, np.ndarray], dict]:
        """The ring as flat arrays (those that are not empty: tokens, features, final) and plain JSON values."""
        ring = [text for text in self._texts() if text not in self._running]
        given = {name: [getattr(text, name) for text in ring] for name in ARRAYS}
        arrays = {name: np.concatenate([array for array in some if array is not None]) for name, some in given.items() if any(a is not None for a in some)}
        texts = [[len(text.tokens), text.prompt_length, text.step, text.index, text.features is not None, text.final is not None] for text in ring]
        return arrays, {"texts": texts, "left_out": self.left_out}

    def restore(self, arrays: dict[str, np.ndarray], host: dict) -> None:
        """The ring of a `state`; what was held is forgotten."""
        self._guarded, self._open, start = _Newest(), _Newest(), dict.fromkeys(ARRAYS, 0)
        for length, prompt_length, step, index, *there in host["texts"]:
            own = {}
            for name in (name for name, given in zip(ARRAYS, (True, *there), strict=True) if given):
                own[name] = arrays[name][start[name] : start[name] + length].copy()  # a view would keep all of them in memory
                start[name] += length
            self._open.add(Text(prompt_length=prompt_length, step=step, index=index, **own))
        self.left_out = host["left_out"]
        self.end_step()

    def _texts(self) -> list[Text]:
        """All that is held, the oldest first."""
        return sorted(self._guarded.texts + self._open.texts, key=_age)

    def __len__(self) -> int:
        return len(self._guarded.texts) + len(self._open.texts)

    @property
    def bytes(self) -> int:
        """Bytes of all that is held."""
        return self._guarded.bytes + self._open.bytes


class _Newest:
    """Texts, the oldest first. What is older than a text that had to leave leaves, too: the newest of all that came stay, in whatever order they came."""

    def __init__(self):
        self.texts: list[Text] = []
        self.bytes, self._left = 0, (-1, -1)

    def add(self, text: Text) -> None:
        """To its place; it may have to leave at the next `shrink`."""
        bisect.insort(self.texts, text, key=_age)
        self.bytes += text.nbytes

    def shrink(self, most: int) -> list[Text]:
        """The texts that leave so that the rest has at most `most` bytes."""
        leaving = []
        while self.texts and (self.bytes > most or _age(self.texts[0]) < self._left):
            oldest = self.texts.pop(0)
            self.bytes -= oldest.nbytes
            self._left = max(self._left, _age(oldest))
            leaving.append(oldest)
        return leaving


def _age(text: Text) -> tuple[int, int]:
    return text.step, text.index
