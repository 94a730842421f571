"""Reward functions from a user's file: found by path, called in the form that their parameters show.

Three forms: verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)`; TRL's plural names (`prompts, completions, completion_ids` and
columns, a list comes back); and any of our names for one response. Functions may be async. It does not run them in a separate process: the pool does.
"""

import asyncio
import importlib.util
import inspect
import math
import pathlib
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlt_jax.rewards.items import Outcome, RewardError, RewardGroup, RewardItem

PLURAL_NAMES = ("prompts", "completions", "completion_ids", "completions_ids", "responses", "answers")


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function. `grouped`: it takes a whole group at once (the plural form); `score` serves both."""

    name: str
    grouped: bool
    function: Callable[..., Any]
    accepted: frozenset[str]
    takes_everything: bool
    kwargs: Mapping[str, Any]

    def score(self, items: RewardGroup) -> list[Outcome]:
        """One outcome per item. Raises RewardError for missing columns and for results of a wrong type, length or value."""
        if not self.grouped:
            return [outcome_of(self._call(_single_names(item)), self.name, row) for row, item in enumerate(items)]
        returned = self._call(_plural_names(items))
        if isinstance(returned, str | bytes | Mapping) or not (isinstance(returned, Sequence) or type(returned).__name__ == "ndarray"):
            raise RewardError(f"{self.name} takes lists and must return a list of {len(items)} rewards, but returned {type(returned).__name__}")
        if len(returned) != len(items):
            raise RewardError(f"{self.name} returned {len(returned)} rewards for {len(items)} completions")
        return [outcome_of(reward, self.name, row) for row, reward in enumerate(returned)]

    def _call(self, available: Mapping[str, Any]) -> Any:
        served = available if self.takes_everything else {key: value for key, value in available.items() if key in self.accepted}
        arguments = {**served, **self.kwargs}
        try:
            inspect.signature(self.function).bind(**arguments)
        except TypeError as wrong:
            raise RewardError(f"{self.name}: {wrong}; this row has {', '.join(sorted(available))}") from wrong
        returned = self.function(**arguments)
        return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


def _single_names(item: RewardItem) -> dict[str, Any]:
    metadata = dict(item.metadata)
    return {
        **metadata,
        **dict.fromkeys(("response", "completion", "solution_str"), item.response),
        **dict.fromkeys(("answer", "ground_truth"), item.answer),
        "prompt": item.prompt,
        "data_source": item.data_source,
        "extra_info": metadata.get("extra_info", metadata),
        "metadata": metadata,
        "prompt_ids": list(item.prompt_ids),
        "response_ids": list(item.response_ids),
        "finish_reason": item.finish_reason,
        "step": item.step,
    }


def _plural_names(items: RewardGroup) -> dict[str, Any]:
    columns = {key: [item.metadata.get(key) for item in items] for key in sorted(set().union(*(item.metadata for item in items)))}
    answers, responses = [item.answer for item in items], [item.response for item in items]
    response_ids = [list(item.response_ids) for item in items]
    return {
        "solution": answers,  # the column that TRL's own rewards want; a column of that name in the data comes first
        **columns,
        **dict.fromkeys(("answer", "answers", "ground_truth"), answers),
        **dict.fromkeys(("completions", "responses"), responses),
        **dict.fromkeys(("completion_ids", "completions_ids"), response_ids),
        "prompts": [item.prompt for item in items],
        "prompt_ids": [list(item.prompt_ids) for item in items],
        "data_source": [item.data_source for item in items],
        "finish_reason": [item.finish_reason for item in items],
        "metadata": [dict(item.metadata) for item in items],
        "extra_info": [item.metadata.get("extra_info", dict(item.metadata)) for item in items],
        "step": items[0].step,
        "trainer_state": None,
    }


def _number(value: Any, where: str) -> float:
    if type(value).__module__ == "numpy" and value.ndim == 0:
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise RewardError(f"{where} is {type(value).__name__} ({str(value)[:80]!r}); return a number, a bool, None or a dict with `score`")
    if not math.isfinite(value):
        raise RewardError(f"{where} is {value}; return None for a response that cannot be scored")
    return float(value)


def outcome_of(returned: Any, name: str, row: int) -> Outcome:
    """A returned reward (number, bool, None, or a dict with `score`) as an Outcome; RewardError says function, type and row."""
    where = f"the reward of {name} for row {row}"
    if returned is None:
        return Outcome(None)
    if not isinstance(returned, Mapping):
        return Outcome(_number(returned, where))
    if "score" not in returned:
        raise RewardError(f"{where} is a dict without `score` (it has {', '.join(map(str, returned))})")
    numeric = {
        str(key): _number(value, f"{key!r} in {where}")
        for key, value in returned.items()
        if key not in ("score", "pred") and (isinstance(value, bool | int | float) or (type(value).__module__ == "numpy" and value.ndim == 0))
    }
    score = None if returned["score"] is None else _number(returned["score"], where)
    pred = returned.get("pred")
    return Outcome(score, numeric, None if pred is None else str(pred))


def load_reward(path: str | pathlib.Path, function: str = "", kwargs: Mapping[str, Any] | None = None, columns: Sequence[str] | None = None) -> RewardFunction:
    """The function of a Python file, given as (`rewards.py`, `score`) or `rewards.py:score`, with fixed keyword arguments.

    `columns` are the data columns when they are known. Raises RewardError when the file or function is missing or a required parameter cannot be served; with
    unknown columns the plural form, which takes columns by name, is checked at its first call instead.
    """
    text = str(path)
    if not function and ":" in text and not text.endswith(".py"):
        text, _, function = text.rpartition(":")
    file = pathlib.Path(text).expanduser().resolve()
    if not function:
        raise RewardError(f"reward.path={path} names no function: set reward.function, or write {path}:compute_score")
    if not file.is_file():
        raise RewardError(f"reward.path: there is no file {file}")
    module = _executed(file)
    found = module.get(function)
    if not callable(found):
        names = sorted(name for name, value in module.items() if callable(value) and not name.startswith("_") and inspect.isfunction(value))
        raise RewardError(f"{file} has no function {function!r}; it defines {', '.join(names) or 'none'}")
    return _described(found, f"{file.name}:{function}", dict(kwargs or {}), columns)


def _executed(file: pathlib.Path) -> dict[str, Any]:
    """The names that the file defines. `import sibling` and `from . import sibling` find the files beside it."""
    package = f"tlt_reward_{zlib.crc32(str(file.parent).encode()):x}"
    if package not in sys.modules:
        shell = importlib.util.spec_from_file_location(package, file.parent / "__init__.py", submodule_search_locations=[str(file.parent)])
        sys.modules[package] = importlib.util.module_from_spec(shell)
    spec = importlib.util.spec_from_file_location(f"{package}.{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look a class's module up here
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # at the end: a file called math.py beside it must not hide the standard one
    spec.loader.exec_module(module)
    return vars(module)


def _described(function: Callable[..., Any], name: str, kwargs: dict[str, Any], columns: Sequence[str] | None) -> RewardFunction:
    parameters = inspect.signature(function).parameters.values()
    positional_only = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_ONLY]
    if positional_only:
        raise RewardError(f"{name}: parameters {', '.join(positional_only)} are positional-only; rewards are called by name")
    named = {parameter.name: parameter for parameter in parameters if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)}
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    grouped = any(plural in named for plural in PLURAL_NAMES)
    unknown = sorted(set(kwargs) - set(named))
    if unknown and not everything:
        raise RewardError(f"{name} takes no {', '.join(unknown)} (reward.kwargs); it takes {', '.join(named) or 'nothing'}")
    described = RewardFunction(name, grouped, function, frozenset(named), everything, kwargs)
    missing, available = _missing_names(described, named, columns or ())
    if missing and not (grouped and columns is None):
        raise RewardError(f"{name} wants {', '.join(missing)}, which no row has; available are {', '.join(available)}")
    return described


def _missing_names(function: RewardFunction, parameters: Mapping[str, inspect.Parameter], columns: Sequence[str]) -> tuple[list[str], list[str]]:
    """(required parameters that neither the built-in names, the columns nor kwargs supply; every name that is available)."""
    example = RewardItem(prompt="", response="", metadata=dict.fromkeys(columns))
    available = _plural_names((example,)) if function.grouped else _single_names(example)
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    return [name for name in required if name not in available and name not in function.kwargs], sorted(available)
