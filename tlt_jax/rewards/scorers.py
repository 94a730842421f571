"""From a picklable `Scorer` to the function that scores items. Built inside the worker, so that user files never run in the training process."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlt_jax.rewards import composite, formats, math
from tlt_jax.rewards.items import Component, Outcome, RewardError, RewardGroup, RewardItem, Scorer
from tlt_jax.rewards.user_function import load_reward, outcome_of


@dataclass(frozen=True)
class BuiltScorer:
    """`score` maps items to outcomes in order. `grouped`: it must see a whole group at once."""

    grouped: bool
    score: Callable[[RewardGroup], list[Outcome]]


def build_scorer(spec: Scorer) -> BuiltScorer:
    """The scorer of a spec. Raises RewardError for an unknown kind, unknown or missing parameters, and user files that cannot serve."""
    if spec.kind not in _BUILDERS:
        raise RewardError(f"unknown reward kind {spec.kind!r}: use one of {', '.join(_BUILDERS)}")
    builder = _BUILDERS[spec.kind]
    arguments = {"components": spec.components} if spec.kind == "composite" else dict(spec.parameters)
    try:
        inspect.signature(builder).bind(**arguments)
    except TypeError as wrong:
        raise RewardError(f"reward kind {spec.kind!r}: {wrong}; its parameters are {', '.join(inspect.signature(builder).parameters) or 'none'}") from wrong
    return builder(**arguments)


def _each(score: Callable[[RewardItem], Outcome]) -> BuiltScorer:
    return BuiltScorer(False, lambda items: [score(item) for item in items])


def _math() -> BuiltScorer:
    def score(item: RewardItem) -> Outcome:
        """The verdict; a fault of the checker is raised."""
        verdict = math.explain(item.response, item.answer)
        if verdict.reason.startswith("error:"):
            raise RewardError(f"the math verdict failed ({verdict.reason[6:].strip()}) for the reference {item.answer[:200]!r}")
        return Outcome(float(verdict.ok), {}, verdict.parsed)

    return _each(score)


def _exact() -> BuiltScorer:
    def score(item: RewardItem) -> Outcome:
        response = formats.until_stop(item.response).strip()
        return Outcome(float(bool(item.answer.strip()) and response == item.answer.strip()), {}, response)

    return _each(score)


def _format(name: str) -> BuiltScorer:
    if name not in formats.FORMATS:
        raise RewardError(f"unknown format reward {name!r}: use one of {', '.join(formats.FORMATS)}")
    return _each(lambda item: Outcome(formats.FORMATS[name](item.response)))


def _overlong(limit: int, buffer: int) -> BuiltScorer:
    composite.overlong_penalty(0, limit, buffer)
    return _each(lambda item: Outcome(composite.overlong_penalty(len(item.response_ids), limit, buffer)))


def _speed(limit: int) -> BuiltScorer:
    composite.speed(0, limit)
    return _each(lambda item: Outcome(composite.speed(len(item.response_ids), limit)))


def _diversity(n: int = 2) -> BuiltScorer:
    def score(items: RewardGroup) -> list[Outcome]:
        tokens: list[Sequence[Any]] = [item.response_ids or formats.until_stop(item.response).split() for item in items]
        return [Outcome(value) for value in composite.diversity(tokens, n)]

    return BuiltScorer(True, score)


def _user(path: str, function: str = "", kwargs: Mapping[str, Any] | None = None, columns: Sequence[str] | None = None) -> BuiltScorer:
    loaded = load_reward(path, function, kwargs, columns)
    return BuiltScorer(loaded.grouped, loaded.score)


def _callable(function: Callable[[RewardItem], Any]) -> BuiltScorer:
    return _each(lambda item: outcome_of(function(item), repr(function), 0))


def _composite(components: tuple[Component, ...]) -> BuiltScorer:
    names = [component.name for component in components]
    if not components or len(set(names)) != len(names):
        raise RewardError(f"a composite reward needs components with different names, not {names}")
    built = {component.name: build_scorer(component.scorer) for component in components}
    weights = {component.name: component.weight for component in components}

    def score(items: RewardGroup) -> list[Outcome]:
        outcomes = {name: scorer.score(items) for name, scorer in built.items()}
        totals = composite.weighted_sum({name: [outcome.score for outcome in column] for name, column in outcomes.items()}, weights)
        return [_combined(total, {name: column[row] for name, column in outcomes.items()}) for row, total in enumerate(totals)]

    return BuiltScorer(any(scorer.grouped for scorer in built.values()), score)


def _combined(total: float | None, outcomes: Mapping[str, Outcome]) -> Outcome:
    """Every component under its name (its own numbers as name/number), and the first extracted answer. The first component is the verdict."""
    parts = {name: outcome.score for name, outcome in outcomes.items() if outcome.score is not None}
    parts |= {f"{name}/{key}": value for name, outcome in outcomes.items() for key, value in outcome.components.items()}
    pred = next((outcome.pred for outcome in outcomes.values() if outcome.pred is not None), None)
    return Outcome(total, parts, pred, next(iter(outcomes.values())).score)


_BUILDERS: dict[str, Callable[..., BuiltScorer]] = {
    "math": _math,
    "exact": _exact,
    "format": _format,
    "overlong": _overlong,
    "speed": _speed,
    "diversity": _diversity,
    "user": _user,
    "callable": _callable,
    "composite": _composite,
}
