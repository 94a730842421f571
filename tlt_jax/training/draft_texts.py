"""What the drafter of an RL run reads: the answers of its steps, drawn for quanta and packed, and those that are held back to measure it.

`drafter.features` says where features come from. With `recompute` the ring holds texts alone, a quantum makes the features of what it draws, and a text can be
learned from as soon as it is finished. With `old_logprobs` the pass for old log-probs makes them, the ring holds them beside the texts, and a quantum needs no
forward of the policy; a text is in the ring after the pass of its step, so what quanta read is of an older policy, one step or a few. With `rollout` the rounds
that decode an answer have made them, and they come with it: as with `old_logprobs`, but at once.
"""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from tlt_jax.distillation.pairs import DraftBatch, Lesson
from tlt_jax.records import PackedBatch
from tlt_jax.strategies import Completion
from tlt_jax.training.experience import Packing, Trajectory, pack
from tlt_jax.training.settings import Config
from tlt_jax.training.text_buffer import Text, TextBuffer

# Policies whose features are kept. Each needs its head beside them, which can be larger than all of a step's features, and what an old policy's features
# were says less and less about those that the drafter reads.
POLICIES = 4


@dataclasses.dataclass(frozen=True)
class ReadyMade:
    """Shapes of features that come with the texts."""

    read: int  # F, what the drafter reads of a position
    head: jax.ShapeDtypeStruct  # [D, E]

    @property
    def final(self) -> int:
        """D, the feature before the head."""
        return self.head.shape[0]


class DraftTexts:
    """The ring, the texts that are held back, and for ready-made features the heads of the policies that made them."""

    def __init__(self, config: Config, packing: Packing, ready: ReadyMade | None):
        """`ready`: texts come with features. Raises ValueError where the heads leave no room for texts."""
        self.config, self.packing, self.ready = config, packing, ready
        heads = POLICIES * ready.head.size * ready.head.dtype.itemsize if ready else 0
        if heads >= config.drafter.buffer_bytes:
            raise ValueError(
                f"drafter.buffer_bytes={config.drafter.buffer_bytes} is all taken by the heads of the {POLICIES} policies whose features are kept "
                f"({heads} bytes): raise it to several times that, set drafter.draft_vocab_size lower, or drafter.features=recompute")
        self.buffer, self.heads = TextBuffer(config.drafter.buffer_bytes - heads, config.drafter.long_share), {}
        self.held_back: list[Text] = []

    def start(self, step: int, answers: int, head: np.ndarray | None = None) -> None:
        """The rollout of an RL step begins, of so many answers; they come with the features of a policy with this head [D, E], where one is given."""
        self.held_back, self._waiting = [], {}
        self.lengths: dict[int, int] = {}  # of the answers that are there, by their places
        self._held, self._step, self._drawn = held_back_of(self.config, step, answers), step, collections.Counter()
        if head is not None:
            self.heads = _newest(self.heads, step) | {step: head}

    def add(self, completion: Completion, seen: np.ndarray | None = None) -> None:
        """An answer is finished, with what the ring held [n - 1, F] or [n - 1, F + D] of all its positions but the last, if that comes with it."""
        request = completion.request
        self.lengths[request.index] = len(completion.token_ids)
        text = Text(np.array([*request.prompt_ids, *completion.token_ids], np.int32), len(request.prompt_ids), self._step, request.index)
        if request.index in self._held:
            self.held_back.append(text)
        elif self.ready is None:
            self.buffer.add(text)
        else:
            self._waiting[request.index] = text
            if seen is not None:  # nothing follows the last position, so nothing is read of it
                read, whole = self.ready.read, np.concatenate([seen, np.zeros_like(seen[:1])])
                self.take(request.index, *((None, whole) if whole.shape[1] == read else (whole[:, :read], whole[:, read:])))

    def end(self) -> None:
        """The rollout is over."""
        self.held_back.sort(key=lambda text: text.index)
        if not self.ready:
            self.buffer.end_step()
        elif self._step in self.heads:
            self.end_features()

    def take(self, index: int, features: np.ndarray | None, final: np.ndarray) -> None:
        """What the policy saw in an answer: `features` [n, F] where the drafter reads others than `final` [n, D]."""
        if index in self._waiting:
            text = self._waiting.pop(index)
            self.buffer.add(dataclasses.replace(text, features=None if features is None else features.copy(), final=final.copy()))

    def end_features(self, head: np.ndarray | None = None) -> None:
        """All answers of the step have their features, from a policy with this head [D, E] where it was not known at the start."""
        if head is not None:
            self.heads = _newest(self.heads, self._step) | {self._step: head}
        self.buffer.end_step(oldest=self._step - POLICIES + 1)

    def next_lesson(self, trainer: int = 0) -> Lesson | None:
        """What a quantum reads; None while there are no texts.

        It depends on the seed, the step, who learns (0: all processes together, 1 + process: its idle slices), how many it has drawn, and the texts.

        Ready-made features are of one step, since all of a lesson share a head.
        """
        self._drawn[trainer] += 1
        key, tokens = (self.config.seed, self._step, trainer, self._drawn[trainer]), rows_of(self.packing) * self.packing.row_length
        texts = self.buffer.draw(key, tokens, self.heads.keys() if self.ready else None)
        if not texts:
            return None
        if not self.ready:
            return Lesson(one_batch(texts, self.packing))
        return Lesson(with_features(texts, self.packing, self.ready), self.heads[texts[0].step].astype(np.float32))

    def empty_lesson(self) -> Lesson:
        """One of the shapes of all others, in which no token counts."""
        if not self.ready:
            return Lesson(one_batch([], self.packing))
        return Lesson(with_features([], self.packing, self.ready), np.zeros(self.ready.head.shape, np.float32))

    def state(self) -> tuple[dict, dict]:
        """The ring with the heads as arrays, and what describes it as plain values."""
        arrays, described = self.buffer.state()
        return arrays | ({"heads": {str(step): head for step, head in self.heads.items()}} if self.heads else {}), described

    def restore(self, arrays: dict, described: dict) -> None:
        """The inverse. Texts of another source are kept; those without features are not drawn where features come with the texts."""
        self.heads = {int(step): head for step, head in arrays.get("heads", {}).items()}
        self.buffer.restore(arrays, described)


def _newest(heads: dict[int, np.ndarray], step: int) -> dict[int, np.ndarray]:
    return {made: head for made, head in heads.items() if made > step - POLICIES}


def held_back_of(config: Config, step: int, answers: int) -> frozenset[int]:
    """The places of the answers of a step that are only measured on, before any is written: distill.held_out of them, but never all."""
    count = min(max(1, round(config.distill.held_out * answers)), answers - 1)
    return frozenset(np.random.default_rng((config.seed, step)).permutation(answers)[:count].tolist())


def whole_batches(trajectories: list[Trajectory], packing: Packing) -> list[DraftBatch]:
    """The texts packed in rows, features still empty; every batch has all the rows that the budget holds, so that one shape is compiled."""
    return [_whole(packed, packing) for packed in pack(trajectories, packing).batches]


def _whole(packed: PackedBatch, packing: Packing) -> DraftBatch:
    missing = rows_of(packing) - len(packed.tokens_BT)
    return jax.tree.map(lambda array: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)), unfilled(packed))


def rows_of(packing: Packing) -> int:
    """Rows of a whole batch."""
    return packing.tokens_per_microbatch // packing.row_length // packing.row_multiple * packing.row_multiple


def one_batch(texts: Sequence[Text], packing: Packing) -> DraftBatch:
    """As many of the texts as fit in one whole batch, features still empty; without texts one in which no token counts."""
    return whole_batches(_trajectories(texts), packing)[0]


def with_features(texts: Sequence[Text], packing: Packing, ready: ReadyMade) -> DraftBatch:
    """The batch of `one_batch` with the features of the texts, in float32."""
    packed = pack(_trajectories(texts), packing)
    batch = _whole(packed.batches[0], packing)
    features_BTF, final_BTD = (np.zeros((*batch.tokens_BT.shape, width), np.float32) for width in (ready.read, ready.final))
    for text, (number, row, column) in zip(texts, packed.places, strict=False):  # without texts there is still a place, of what stands in for them
        if number == 0:
            columns = slice(column, column + len(text.tokens))
            final_BTD[row, columns] = text.final
            features_BTF[row, columns] = text.final if text.features is None else text.features
    return batch.replace(features_BTF=features_BTF, final_BTD=final_BTD)


def _trajectories(texts: Sequence[Text]) -> list[Trajectory]:
    nothing = Trajectory(np.zeros(2, np.int32), 1, np.zeros(1, np.float32), trained=False)
    return [Trajectory(text.tokens, text.prompt_length, np.zeros(len(text.tokens) - text.prompt_length, np.float32)) for text in texts] or [nothing]


def unfilled(packed: PackedBatch) -> DraftBatch:
    """Packed texts whose features are still empty."""
    empty = np.zeros((*packed.tokens_BT.shape, 0), np.float32)
    return DraftBatch(packed.tokens_BT, packed.positions_BT, packed.segments_BT, packed.mask_BT, empty, empty)
