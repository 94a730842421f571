"""The components of a composite reward as text: KIND=WEIGHT. Pure Python."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from tlt_jax.rewards.formats import FORMATS

PLAIN = ("task", "math", "exact", "speed", "diversity")


class NamedReward(NamedTuple):
    """One component: its name in the metrics, its weight, what it is, and what it takes (a format's name, or a user's file and function)."""

    name: str
    weight: float
    kind: str
    argument: str = ""


def parse_components(texts: Sequence[str]) -> list[NamedReward]:
    """`task=1`, `math=1`, `exact=1`, `speed=0.1`, `diversity=0.1`, `format:NAME=0.1` and `FILE.py:FUNCTION=0.5` as components.

    Raises ValueError naming the text that is none of these.
    """
    components = [_component(text) for text in texts]
    names = [component.name for component in components]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} stands there twice: add the weights, or give the functions different names")
    return components


def _component(text: str) -> NamedReward:
    what, equals, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not equals or not math.isfinite(weight):
        raise ValueError(f"{text!r} is not KIND=WEIGHT with a number as its weight, like math=1.0")
    kind, _, argument = what.partition(":")
    if what in PLAIN:
        return NamedReward(what, weight, what)
    if kind == "format" and argument in FORMATS:
        return NamedReward(argument, weight, "format", argument)
    if kind.endswith(".py") and argument:
        return NamedReward(argument, weight, "user", what)
    raise ValueError(f"{what!r} is no reward: use one of {', '.join(PLAIN)}, format:NAME (NAME of {', '.join(FORMATS)}) or FILE.py:FUNCTION")
