"""Verdicts on mathematical answers: does the final answer of a response mean the same as the reference answer?

`verify` never raises and is bounded in time and memory, in any thread and any process; the pool's process kill is the hard stop behind it.
Plain numbers take a fast path without sympy. Finding the answer is in `final_answer`, notation in `notation`, formulas in `expressions`.
"""

import re
from dataclasses import dataclass

from tlt_jax.rewards import expressions, numerals
from tlt_jax.rewards.final_answer import MAX_ANSWER, final_answer
from tlt_jax.rewards.notation import Node, clean, read, strip_units

_MAX_PARTS = 40  # matching unordered parts tries pairs
_DECIMAL_COMMA = re.compile(r"([-+]?\d+),(\d+)")


@dataclass(frozen=True)
class Verdict:
    """ok; the extracted answer (None: there is none); why, in words. A reason that starts with `error:` is a fault of the checker, not of the answer."""

    ok: bool
    parsed: str | None
    reason: str


def verify(response: str, answer: str) -> bool:
    """Whether the final answer of `response` equals the reference `answer`. An empty reference never does."""
    return explain(response, answer).ok


def extract(response: str) -> str | None:
    """The final answer in one notation (numbers as `3/8`, `-7`), for majority votes and sample tables; None when there is none."""
    found = final_answer(response)
    if found is None:
        return None
    text = clean(found)
    numeral = numerals.read_numeral(strip_units(text)) or numerals.read_numeral(text)
    return str(numeral.value) if numeral else text or None


def explain(response: str, answer: str) -> Verdict:
    """The verdict with what was extracted and why."""
    try:
        parsed = extract(response)
        found = final_answer(response)
    except Exception as error:  # listed in the architecture test: `verify` never raises, and the pool counts `error:` verdicts as failures, not as 0
        return Verdict(False, None, f"error: {type(error).__name__}: {error}")
    reference = _reference(answer)
    if not reference:
        return Verdict(False, parsed, "the reference answer is empty")
    if found is None or parsed is None:
        return Verdict(False, None, "no final answer in the response")
    try:
        equal = _settled(reference, clean(found))
    except expressions.TooComplex as bound:
        return Verdict(False, parsed, f"not compared: {bound}")
    except expressions.OutOfBudget:
        return Verdict(False, parsed, "not compared: it takes too many steps")
    except expressions.UNREADABLE as odd:
        return Verdict(False, parsed, f"not comparable: {type(odd).__name__}")
    except Exception as error:  # listed in the architecture test, as above
        return Verdict(False, parsed, f"error: {type(error).__name__}: {error}")
    return Verdict(equal, parsed, "equal" if equal else "different")


def _reference(answer: str) -> str:
    """The cleaned reference: a whole solution (GSM8K's `#### 18`, a boxed MATH solution) is cut to its answer."""
    answer = str(answer)[-20 * MAX_ANSWER :]
    if "\\boxed" in answer or "\\fbox" in answer or "####" in answer or "<answer>" in answer:
        return clean(final_answer(answer) or "")
    return clean(answer) if len(answer) <= 4 * MAX_ANSWER else answer.strip()


def _settled(reference: str, answer: str) -> bool:
    """Equal text and plain numbers at once; everything else within the time limit."""
    if _squeezed(reference) == _squeezed(answer):
        return True
    quick = _numbers(reference, answer)
    if quick is not None:
        return quick
    return expressions.within_limits(lambda: _same(read(reference), read(answer)))


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def _numbers(reference: str, answer: str) -> bool | None:
    """The verdict when both are numbers (units aside); None when one is not."""
    numbers = [numerals.read_numeral(text) or numerals.read_numeral(strip_units(text)) for text in (reference, answer)]
    if numbers[0] and numbers[1]:
        return numerals.same_number(numbers[0], numbers[1])
    for text, other in ((reference, numbers[1]), (answer, numbers[0])):
        comma = _DECIMAL_COMMA.fullmatch(strip_units(text))
        if comma and other and other.decimals is not None:
            return other.value == numerals.read_numeral(f"{comma[1]}.{comma[2]}").value
    if any(numerals.improper_mixed(text) for text in (reference, answer)):
        return False
    return None


def _same(reference: Node, answer: Node) -> bool:
    if not _names_agree(reference, answer):
        return False
    if "relation" in (reference.kind, answer.kind):
        return _same_relation(reference, answer)
    if reference.name and answer.name and _is_curve(reference) and _is_curve(answer):
        return _same_text(reference, answer) or expressions.ratio((reference.name, reference.text), (answer.name, answer.text)) is not None
    kinds = (reference.kind, answer.kind)
    if kinds[0] == kinds[1]:
        return _SAME_KIND[kinds[0]](reference, answer)
    return _across(reference, answer)


def _names_agree(reference: Node, answer: Node) -> bool:
    """x = 1 is not y = 1; but longer names, functions and one missing name say nothing. Curves such as y = 2x and x = y/2 are compared as equations."""
    if not (reference.name and answer.name) or reference.kind == "list" or _is_curve(reference) or _is_curve(answer):
        return True
    single = len(reference.name) == 1 and len(answer.name) == 1
    return not single or reference.name.lower() == answer.name.lower()


def _is_curve(node: Node) -> bool:
    return node.kind == "scalar" and node.name is not None and re.search(r"(?<![A-Za-z\\])[a-df-hj-z](?![a-z])", node.text) is not None


def _same_text(reference: Node, answer: Node) -> bool:
    """Two scalars: same text, same number, or same value as formulas; a percent sign may be missing on one side."""
    texts = (reference.text, answer.text)
    if _squeezed(texts[0]) == _squeezed(texts[1]):
        return True
    quick = _numbers(*texts)
    if quick is not None:
        return quick
    texts = (strip_units(texts[0]), strip_units(texts[1]))
    (left, left_percent), (right, right_percent) = (numerals.split_percent(text) for text in texts)
    degrees = [re.sub(r"\^\\circ\s*", r"\\cdot\\frac{\\pi}{180}", text) for text in (left, right)]
    if expressions.same_value(*degrees):
        return True
    if left_percent == right_percent:
        return False
    hundredth = [rf"\frac{{{text}}}{{100}}" if percent else text for text, percent in zip(degrees, (left_percent, right_percent), strict=True)]
    return expressions.same_value(*hundredth)


def _same_relation(reference: Node, answer: Node) -> bool:
    if reference.kind != "relation":
        if answer.marks == ("=",):
            if _is_curve(reference):
                return expressions.ratio((reference.name, reference.text), (answer.parts[0].text, answer.parts[1].text)) is not None
            return reference.name is None and _same(reference, read(answer.parts[1].text))
        return expressions.math_verify_agrees(reference.text, answer.text)
    if answer.kind != "relation":
        if reference.marks == ("=",):
            return _is_curve(answer) and expressions.ratio((reference.parts[0].text, reference.parts[1].text), (answer.name, answer.text)) is not None
        return expressions.math_verify_agrees(reference.text, answer.text)
    sides = [[part.text for part in node.parts] for node in (reference, answer)]
    if sides[0] == sides[1] and reference.marks == answer.marks:
        return True
    if len(reference.marks) != len(answer.marks):
        return False
    forward = all(_same_link(*links) for links in zip(_links(reference), _links(answer), strict=True))
    return forward or all(_same_link(*links) for links in zip(_links(reference), _links(answer)[::-1], strict=True))


def _links(node: Node) -> list[tuple[str, str, str]]:
    return [(node.parts[index].text, mark, node.parts[index + 1].text) for index, mark in enumerate(node.marks)]


_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}


def _same_link(reference: tuple[str, str, str], answer: tuple[str, str, str]) -> bool:
    """One relation each: the difference of the sides is the same up to a factor, whose sign must fit the direction."""
    if reference == answer or reference == (answer[2], _FLIPPED[answer[1]], answer[0]):
        return True
    sign = expressions.ratio((reference[0], reference[2]), (answer[0], answer[2]))
    if sign is None:
        return False
    if reference[1] in ("=", r"\ne"):
        return reference[1] == answer[1]
    return answer[1] == (reference[1] if sign > 0 else _FLIPPED[reference[1]])


def _in_order(reference: tuple[Node, ...], answer: tuple[Node, ...]) -> bool:
    return len(reference) == len(answer) and all(_same(left, right) for left, right in zip(reference, answer, strict=True))


def _unordered(reference: tuple[Node, ...], answer: tuple[Node, ...]) -> bool:
    """The same parts in any order. Repeated parts count once."""
    if max(len(reference), len(answer)) > _MAX_PARTS:
        raise expressions.TooComplex(f"more than {_MAX_PARTS} parts")
    found = {left: [right for right in range(len(answer)) if _same(reference[left], answer[right])] for left in range(len(reference))}
    return all(found.values()) and {right for matches in found.values() for right in matches} == set(range(len(answer)))


def _same_tuple(reference: Node, answer: Node) -> bool:
    # With two entries the brackets may be those of an interval, where they matter; longer groups are vectors in either bracket.
    return (reference.marks == answer.marks or len(reference.parts) > 2) and _in_order(reference.parts, answer.parts)


def _same_list(reference: Node, answer: Node) -> bool:
    if all(reference.marks) and all(answer.marks) and len(set(reference.marks)) > 1:
        return _unordered(reference.parts, answer.parts) and set(reference.marks) == set(answer.marks)
    return _unordered(reference.parts, answer.parts)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _based_value(node: Node) -> int | None:
    base = int(node.marks[0])
    digits = [int(character, 36) for character in node.text]
    if not 2 <= base <= 36 or any(digit >= base for digit in digits) or len(digits) > numerals.MAX_DIGITS:
        return None
    return int(node.text, base)


def _same_based(reference: Node, answer: Node) -> bool:
    left, right = _based_value(reference), _based_value(answer)
    return left == right if left is not None and right is not None else (reference.text, reference.marks) == (answer.text, answer.marks)


_SAME_KIND = {
    "scalar": _same_text,
    "word": lambda reference, answer: _letters(reference.text) == _letters(answer.text),
    "choice": lambda reference, answer: reference.text == answer.text,
    "clock": lambda reference, answer: reference.text == answer.text,
    "based": _same_based,
    "empty": lambda reference, answer: True,
    "set": lambda reference, answer: _unordered(reference.parts, answer.parts),
    "list": _same_list,
    "union": lambda reference, answer: _unordered(reference.parts, answer.parts) or expressions.math_verify_agrees(reference.text, answer.text),
    "tuple": _same_tuple,
    "matrix": lambda reference, answer: reference.marks == answer.marks and _in_order(reference.parts, answer.parts),
}


def _across(reference: Node, answer: Node) -> bool:
    """Different structures that can mean the same: a bare list and a set or tuple, a set of one and its element, a word and the same letters as a formula, …"""
    kinds = {reference.kind, answer.kind}
    if kinds == {"list", "set"}:
        return _unordered(reference.parts, answer.parts)
    if kinds == {"list", "tuple"}:
        return _in_order(reference.parts, answer.parts)
    if kinds == {"matrix", "tuple"}:
        matrix = reference if reference.kind == "matrix" else answer
        return 1 in (int(matrix.marks[0]), len(matrix.parts) // int(matrix.marks[0])) and _in_order(reference.parts, answer.parts)
    if kinds == {"set", "scalar"} or kinds == {"set", "choice"}:
        many, one = (reference, answer) if reference.kind == "set" else (answer, reference)
        return len(many.parts) == 1 and _same(many.parts[0], one)
    if "based" in kinds:
        # A number without its base is read in base ten: 43 for 1121_3 is not in the asked notation, the other way round is the same number.
        value = _based_value(answer) if answer.kind == "based" else None
        return value is not None and reference.kind == "scalar" and _numbers(reference.text, str(value)) is True
    if "word" in kinds:
        # Not as formulas: there the letters of a name would be factors that commute.
        return kinds <= {"scalar", "choice", "word"} and _letters(reference.text) == _letters(answer.text)
    if kinds == {"scalar", "choice"}:
        return _squeezed(reference.text) == _squeezed(answer.text)
    if kinds == {"list", "union"}:
        return _unordered(reference.parts, answer.parts)
    if kinds == {"matrix", "scalar"}:
        return expressions.math_verify_agrees(reference.text, answer.text)
    if kinds & {"union", "tuple", "set"} and not kinds & {"choice", "clock"} and kinds != {"set", "tuple"}:
        return expressions.math_verify_agrees(reference.text, answer.text)
    return False
