"""Exact numbers written in plain text or simple LaTeX: the fast path of the math reward, without sympy.

Reads integers, thousands groups, decimals, repeating decimals, fractions, mixed numbers, powers of ten and percentages. It does not evaluate expressions.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 300  # longer numerals are compared as text only: no answer to a question needs more, and Python's own conversion refuses 4,300
_DECIMALS_THAT_SETTLE = 6  # a rounded decimal stands for an exact value only from this many decimals and significant digits on

_INTEGER = r"(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+|\d+)"
_DECIMAL = re.compile(rf"({_INTEGER})?(?:\.(\d*))?(?:\\overline\{{(\d+)\}}|\\bar\{{(\d+)\}}|\((\d+)\))?")
_FRACTION = re.compile(rf"(?:({_INTEGER})\s*/\s*({_INTEGER})|\\frac\s*\{{([-+]?)\s*({_INTEGER})\s*\}}\s*\{{([-+]?)\s*({_INTEGER})\s*\}})")
_MIXED = re.compile(rf"({_INTEGER})(?:[ ]+(\d+)/(\d+)|\s*\\frac\s*\{{(\d+)\}}\s*\{{(\d+)\}})")
_SCIENTIFIC = re.compile(r"(.+?)\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|(\d))|(\d+\.?\d*)[eE]([-+]?\d{1,3})")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|percentage|pct|\\?%)\s*\}|percentage|percent|pct)$", re.IGNORECASE)
_CURRENCY = "$€£¥₹₽₩₫฿"


@dataclass(frozen=True)
class Numeral:
    """A number as written. `value` already counts the percent sign; `decimals` is None when the notation is exact."""

    value: Fraction
    percent: bool = False
    decimals: int | None = None
    significant: int = 0


def split_percent(text: str) -> tuple[str, bool]:
    """The text without its trailing percent sign or word, and whether there was one."""
    found = _PERCENT.search(text)
    return (text[: found.start()], True) if found else (text, False)


def improper_mixed(text: str) -> bool:
    """True for mixed numbers that are none, such as `11 7/6` or `4 1/0`: neither a sum nor a product may be read into them."""
    found = _MIXED.fullmatch(text.strip().lstrip("+-").strip())
    if not found:
        return False
    numerator, denominator = (int(part[:MAX_DIGITS]) for part in (found[2] or found[4], found[3] or found[5]))
    return numerator >= denominator


def read_numeral(text: str) -> Numeral | None:
    """The number that the whole text denotes, or None. Expects cleaned notation (`notation.clean`)."""
    if len(text) > MAX_DIGITS:
        return None
    body, percent = split_percent(text.strip().strip(_CURRENCY).strip())
    body = body.strip().strip(_CURRENCY).strip()
    sign = 1
    while body[:1] in ("-", "+") and sign:
        sign = -sign if body[0] == "-" else sign
        body = body[1:].strip().strip(_CURRENCY).strip()
        if body[:1] in ("-", "+"):
            return None
    if not body or not any(character.isdigit() for character in body):
        return None
    numeral = _decimal(body) or _fraction(body) or _mixed(body) or _scientific(body)
    if numeral is None:
        return None
    value = sign * numeral.value / (100 if percent else 1)
    return Numeral(value, percent, numeral.decimals, numeral.significant)


def _whole(text: str) -> int:
    return int(text.replace(",", "").replace(" ", ""))


def _decimal(body: str) -> Numeral | None:
    found = _DECIMAL.fullmatch(body)
    if not found or not (found[1] or found[2] or found[3] or found[4] or found[5]):
        return None
    whole, shown = found[1] or "0", found[2] or ""
    repeating = found[3] or found[4] or found[5]
    value = Fraction(_whole(whole)) + (Fraction(int(shown), 10 ** len(shown)) if shown else 0)
    if repeating:
        if found[2] is None:
            return None
        return Numeral(value + Fraction(int(repeating), (10 ** len(repeating) - 1) * 10 ** len(shown)))
    if not shown:
        return Numeral(value)
    digits = (whole.replace(",", "").replace(" ", "") + shown).lstrip("0")
    return Numeral(value, decimals=len(shown), significant=len(digits))


def _fraction(body: str) -> Numeral | None:
    found = _FRACTION.fullmatch(body)
    if not found:
        return None
    numerator, denominator = _whole(found[1] or found[4]), _whole(found[2] or found[6])
    negative = (found[3] == "-") != (found[5] == "-")
    return Numeral(Fraction(-numerator if negative else numerator, denominator)) if denominator else None


def _mixed(body: str) -> Numeral | None:
    found = _MIXED.fullmatch(body)
    if not found or improper_mixed(body):
        return None
    return Numeral(_whole(found[1]) + Fraction(int(found[2] or found[4]), int(found[3] or found[5])))


def _scientific(body: str) -> Numeral | None:
    found = _SCIENTIFIC.fullmatch(body)
    if not found:
        return None
    mantissa = _decimal(found[1] or found[4])
    if mantissa is None:
        return None
    return Numeral(mantissa.value * Fraction(10) ** int(found[2] or found[3] or found[5]))


def rounded_equal(exact: Fraction, decimal: Numeral) -> bool:
    """Whether a decimal with at least six decimals and six significant digits is `exact` to six decimals (1/3 and 0.333333; not 7/3 and 2.33)."""
    if decimal.decimals is None or min(decimal.decimals, decimal.significant) < _DECIMALS_THAT_SETTLE:
        return False
    scale = 10**_DECIMALS_THAT_SETTLE
    return round(exact * scale) == round(decimal.value * scale)


def same_number(reference: Numeral, answer: Numeral) -> bool:
    """Equality of two numerals: exact, or to six decimals where one is a long decimal; a percent sign may be missing on one side when |number| ≥ 1."""
    if reference.value == answer.value or rounded_equal(reference.value, answer) or rounded_equal(answer.value, reference):
        return True
    # 28 % against 28: the sign is often left out. 0.35 % against 0.35 stays different, because 0.35 may well mean 35 %.
    bare = [numeral.value * 100 if numeral.percent else numeral.value for numeral in (reference, answer)]
    return bare[0] == bare[1] and abs(bare[0]) >= 1
