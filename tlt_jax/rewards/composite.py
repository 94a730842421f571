"""Composite rewards: a weighted sum of named components over the responses of one group, and the length-based components. Pure functions."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """DAPO's soft punishment in [−1, 0], lengths in tokens: 0 up to limit − buffer, falling linearly to −1 at `limit`, and never below −1."""
    if buffer <= 0 or buffer > limit:
        raise ValueError(f"overlong penalty: buffer {buffer} must be in 1..limit ({limit})")
    return -min(max(length - (limit - buffer), 0) / buffer, 1.0)


def speed(length: int, limit: int) -> float:
    """1 for an empty response, falling linearly to 0 at `limit` tokens."""
    if limit <= 0:
        raise ValueError(f"speed reward: limit {limit} must be at least 1 token")
    return max(0.0, 1.0 - length / limit)


def _ngrams(tokens: Sequence[Hashable], n: int) -> set[tuple[Hashable, ...]]:
    return {tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)}


def diversity(responses: Sequence[Sequence[Hashable]], n: int = 2) -> list[float]:
    """For each response (token ids or words) the share of its distinct n-grams that no other response of the group has, in [0, 1].

    The usual distinct-n is one number for the whole group and would cancel in group-relative advantages; this is each response's part in it.
    A response shorter than n tokens, or alone in its group, gets 0.
    """
    if n < 1:
        raise ValueError(f"diversity: n-grams of length {n}")
    grams = [_ngrams(response, n) for response in responses]
    holders = Counter(gram for own in grams for gram in own)
    if len(responses) < 2:
        return [0.0] * len(responses)
    return [sum(holders[gram] == 1 for gram in own) / len(own) if own else 0.0 for own in grams]


def distinct_n(responses: Sequence[Sequence[Hashable]], n: int = 2) -> float:
    """Distinct n-grams over all n-grams of the group (Li et al. 2016): 1 when nothing repeats, 0 when there are no n-grams."""
    total = sum(max(len(response) - n + 1, 0) for response in responses)
    return len(set().union(*(_ngrams(response, n) for response in responses))) / total if total else 0.0


def weighted_sum(components: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """The weighted sum of the components per response. None means that a component does not apply and is left out; None in all components stays None."""
    if set(components) != set(weights):
        raise ValueError(f"composite reward: components {sorted(components)} but weights {sorted(weights)}")
    rows = list(zip(*components.values(), strict=True))
    totals: list[float | None] = []
    for row in rows:
        terms = [weights[name] * value for name, value in zip(components, row, strict=True) if value is not None]
        totals.append(sum(terms) if terms else None)
    return totals
