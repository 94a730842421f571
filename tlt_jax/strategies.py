"""Jax-free values that decisions are made of: strategies, rollout requests and their results.

Arrays live in `records.py`.
"""

import dataclasses
import hashlib
import struct
from typing import NamedTuple

FINISH_RUNNING = 0  # the row still decodes, or its slot is empty
FINISH_STOP = 1  # a stop id was drawn; it is the last token
FINISH_LENGTH = 2  # the token limit was reached first
FINISH_REASONS = {FINISH_STOP: "stop", FINISH_LENGTH: "length"}


class Strategy(NamedTuple):
    """A draft tree: levels, candidates per level, nodes verified (root not counted). `OFF` drafts nothing."""

    depth: int
    branching: int
    budget: int


OFF = Strategy(0, 0, 0)


def strategy_name(strategy: Strategy) -> str:
    """As in speculative.strategies; plain for no drafting."""
    return "_".join(map(str, strategy)) if strategy.depth else "plain"


def parse_strategies(text: str) -> tuple[Strategy, ...]:
    """Comma-separated depth_branching_budget, as in "4_2_8,6_1_6". Raises ValueError for a tree that cannot be built."""
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _parse(part: str) -> Strategy:
    numbers = part.split("_")
    if len(numbers) != 3 or not all(number.isdigit() for number in numbers):
        raise ValueError(f"strategy {part!r}: expected depth_branching_budget, three whole numbers such as 4_2_8")
    strategy = Strategy(*map(int, numbers))
    depth, branching, budget = strategy
    if not (depth and branching and budget):
        raise ValueError(f"strategy {part!r}: depth, branching and budget are at least 1; plain decoding needs no entry")
    most = branching + (depth - 1) * branching**2
    if not depth <= budget <= most:
        raise ValueError(f"strategy {part!r}: {depth} levels of {branching} candidates have {depth} to {most} nodes to verify, not {budget}")
    return strategy


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion to roll out: a sample of a prompt, identified independently of batch, slice and order."""

    prompt: int  # stable 64-bit key of the prompt (see tasks/prompts.py)
    sample: int  # which completion of that prompt
    draw: int  # re-draw count of dynamic sampling
    index: int  # caller's handle, returned untouched
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    seed: int
    step: int  # RL step; 0 in generate

    def noise_words(self) -> tuple[int, int]:
        """The 64-bit noise key of (seed, step, prompt, sample, draw) as two unsigned 32-bit words."""
        fields = struct.pack("<qqQqq", self.seed, self.step, self.prompt, self.sample, self.draw)
        return struct.unpack("<II", hashlib.blake2b(fields, digest_size=8).digest())


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request. `token_ids` includes the stop id when that ended it; log-probs are per token."""

    request: Request
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    finish_reason: str  # "stop" or "length"
    policy_version: int
    forwards: int  # policy forwards that produced the tokens

    @property
    def accept_length(self) -> float:
        """Tokens per policy forward, bonus counted; 1.0 when decoding is plain."""
        return len(self.token_ids) / max(self.forwards, 1)
