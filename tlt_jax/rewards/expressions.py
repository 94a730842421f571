"""Equality of two formulas by math-verify's LaTeX parser and numeric probing, with bounds on text, nesting, magnitude and time before and while sympy works.

It reads scalars and sides of relations. Sets, tuples, intervals and finding the answer in a response are not its business.
"""

import functools
import itertools
import logging
import math
import random
import re
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from types import FrameType
from typing import TypeVar

import math_verify
import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify.grader import should_treat_as_complex
from sympy.core.function import AppliedUndef

from tlt_jax.rewards import numerals

MAX_CHARACTERS = 600
MAX_NESTING = 25
MAX_NODES = 500
MAX_BITS = 100_000.0
MAX_CALLS = 1_500_000
SECONDS = 4.5
_PROBES = 9
_DIGITS = 30
_TOLERANCE = sympy.Rational(1, 10**18)
# What sympy and the parser raise on odd input; anything else is a fault and reaches the caller.
UNREADABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, RecursionError, TypeError, ValueError)
_UNEVALUATED = (sympy.Integral, sympy.Derivative, sympy.Limit, sympy.MatrixBase, sympy.MatrixExpr)
_MAX_TERMS = 5_000  # of a sum or product with given ends
_BIG_BINOMIAL = re.compile(r"\\d?t?binom.*\d{5}|\d{5}.*\\d?t?binom|\\choose", re.DOTALL)
_T = TypeVar("_T")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns once that its alarm is off; `within_limits` replaces that alarm
_NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False)
_CONVERSION = ConversionConfig(lowercase_symbols=False)  # math_verify.parse makes R and r one symbol, and R^2 - r^2 zero


class TooComplex(Exception):
    """The text or its value is beyond the bounds of this module."""


class OutOfBudget(BaseException):
    """Too many steps. A BaseException, because sympy and math-verify catch Exception in many places and would go on."""


def within_limits(work: Callable[[], _T], *, calls: int = MAX_CALLS, seconds: float = SECONDS) -> _T:
    """work(), ended by `OutOfBudget` after a number of Python calls (so that the verdict does not depend on the machine's load) or, behind that, of seconds.

    Works in every thread, without signals. A single long C call is not ended: the size guards of this module keep those short.
    """
    limit, left = time.monotonic() + seconds, calls

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        left -= 1
        if left < 0 or (left % 256 == 0 and time.monotonic() > limit):
            raise OutOfBudget

    outer = sys.gettrace()
    sys.settrace(watch)
    try:
        return work()
    finally:
        sys.settrace(outer)


def check_text(text: str) -> None:
    """Raises TooComplex for text that the parser should not see: too long, too deep, huge numerals."""
    if len(text) > MAX_CHARACTERS:
        raise TooComplex(f"longer than {MAX_CHARACTERS} characters")
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise TooComplex(f"nested more than {MAX_NESTING} deep")
    if re.search(rf"\d{{{numerals.MAX_DIGITS}}}", text) or _BIG_BINOMIAL.search(text):
        raise TooComplex("a number is too large")


@functools.lru_cache(maxsize=512)
def parse(text: str) -> sympy.Basic | None:
    """The sympy tree of one LaTeX formula, not evaluated; None when it cannot be read. Raises TooComplex."""
    check_text(text)
    try:
        tree = latex2sympy(text, is_real=not should_treat_as_complex(text), normalization_config=_NORMALIZATION, conversion_config=_CONVERSION)
    except Exception:  # listed in the architecture test: the parser itself raises plain Exception on text that is no formula
        return None
    return tree if isinstance(tree, sympy.Basic | sympy.MatrixBase) else None


def _bits(expression: sympy.Basic) -> float:
    """Upper bound of |log2 |value|| (both huge and tiny count), with variables taken as a few bits. Looks at the tree only, evaluates nothing."""
    if isinstance(expression, sympy.Rational):
        return float(max(abs(int(expression.p)).bit_length(), int(expression.q).bit_length()))
    if isinstance(expression, sympy.Float):
        return abs(float(sympy.log(abs(expression), 2))) if expression else 1.0
    if not expression.args:
        return 6.0
    sizes = [_bits(argument) for argument in expression.args]
    if isinstance(expression, sympy.Pow):
        return sizes[0] * _count(sizes[1], expression.args[1])
    if isinstance(expression, sympy.exp):
        return 1.5 * _count(sizes[0], expression.args[0])
    if isinstance(expression, sympy.factorial | sympy.gamma):
        return _count(sizes[0], expression.args[0]) * sizes[0]
    if isinstance(expression, sympy.Add | sympy.Mul):
        return sum(sizes)
    if isinstance(expression, sympy.Sum | sympy.Product):
        return sizes[0] * _terms(expression)
    return max(sizes) + 2.0


def _count(bits: float, expression: sympy.Basic) -> float:
    """The largest value that `bits` bits can hold, as a float; small for reciprocals such as roots."""
    if isinstance(expression, sympy.Rational):
        return max(1.0, abs(float(expression))) if bits < 900 else math.inf
    return 2.0**bits if bits < 900 else math.inf


def _terms(series: sympy.Sum | sympy.Product) -> float:
    """How many terms would be evaluated: infinite beyond the bound, 10 for symbolic or infinite ends (those have a closed form or stay as they are)."""
    count = 1.0
    for _, first, last in series.limits:
        count *= float(last - first + 1) if first.is_Integer and last.is_Integer else 10.0
    return max(count, 1.0) if count <= _MAX_TERMS else math.inf


def _check_tree(expression: sympy.Basic) -> None:
    nodes = sum(1 for _ in itertools.islice(sympy.preorder_traversal(expression), MAX_NODES + 1))
    if nodes > MAX_NODES:
        raise TooComplex(f"more than {MAX_NODES} terms")
    for node in sympy.preorder_traversal(expression):
        # With a variable in it a power is evaluated at a rational probe: keep that small too.
        if isinstance(node, sympy.Expr) and not node.is_Matrix and _bits(node) > MAX_BITS:
            raise TooComplex("its value is too large")


@functools.lru_cache(maxsize=512)
def prepare(text: str) -> sympy.Basic | None:
    """The tree of `text` with exact decimals, e and i as constants and plain symbols, evaluated; None when it cannot be."""
    tree = parse(text)
    if tree is None or isinstance(tree, sympy.MatrixBase) or not isinstance(tree, sympy.Expr) or tree.has(*_UNEVALUATED):
        return None
    _check_tree(tree)
    tree = tree.replace(lambda node: isinstance(node, AppliedUndef), lambda node: sympy.Symbol(str(node)))
    meaning: dict[sympy.Basic, sympy.Basic] = {number: sympy.Rational(str(number)) for number in tree.atoms(sympy.Float)}
    for symbol in tree.free_symbols:
        meaning[symbol] = {"e": sympy.E, "i": sympy.I}.get(symbol.name, sympy.Symbol(symbol.name))
    tree = tree.xreplace(meaning).replace(sympy.UnevaluatedExpr, lambda inner: inner)
    return _rebuilt(tree) if _indexed(tree) else tree.doit()


def _indexed(tree: sympy.Basic) -> bool:
    """A sum over F_k: the parser makes F_k one symbol, which evaluation would take for a constant."""
    indices = {str(limits[0]) for series in tree.atoms(sympy.Sum, sympy.Product) for limits in series.limits}
    return any("_" in symbol.name and indices & set(re.findall(r"[a-z]", symbol.name.partition("_")[2])) for symbol in tree.free_symbols)


def _rebuilt(tree: sympy.Basic) -> sympy.Basic:
    """The tree with sums and products of its nodes in sympy's order, but nothing else evaluated."""
    return tree.func(*(_rebuilt(argument) for argument in tree.args)) if tree.args else tree


def _points(symbols: list[sympy.Symbol]) -> list[dict[sympy.Symbol, sympy.Rational]]:
    """Rational probes: positive ones first, then mixed signs, the same for both sides and in every process."""
    source = random.Random(20)
    points = []
    for index in range(_PROBES):
        point = {}
        for symbol in symbols:
            magnitude = sympy.Rational(source.randrange(31, 290), 101)
            point[symbol] = -magnitude if index >= 5 and source.random() < 0.7 else magnitude
        points.append(point)
    return points


def _value(expression: sympy.Basic, point: dict[sympy.Symbol, sympy.Rational]) -> sympy.Basic | None:
    value = expression.xreplace(point).evalf(_DIGITS)
    if (
        not value.is_number
        or value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo)
        or not all(part.is_Float or part.is_Rational for part in value.as_real_imag())
    ):
        return None
    return value


def _vanishes(value: sympy.Basic) -> bool:
    """True for a value of which evalf could not find a single correct digit: zero by cancellation. exp(-100) is not zero."""
    return all(part == 0 or (part.is_Float and part._prec == 1) for part in value.as_real_imag())


def _close(left: sympy.Basic, right: sympy.Basic) -> bool:
    difference, size = abs(left - right), max(abs(left), abs(right))
    if size == 0:
        return True
    if left == 0 or right == 0:
        return _vanishes(left if right == 0 else right)
    return bool(difference <= _TOLERANCE * size)


def same_everywhere(left: sympy.Basic, right: sympy.Basic) -> bool | None:
    """Whether two prepared expressions agree wherever both are real (everywhere when the imaginary unit is written); None when no probe could tell.

    Positive probes make sqrt(1/n) equal 1/sqrt(n); negative ones tell |x| from x.
    """
    if left == right:
        return True
    if (left.is_Rational and right.is_Rational) or _indexed(left) or _indexed(right):
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    complex_meant = left.has(sympy.I) or right.has(sympy.I)
    agreed = 0
    for point in _points(symbols) if symbols else [{}]:
        values = _value(left, point), _value(right, point)
        if values[0] is None or values[1] is None:
            continue
        if not complex_meant and symbols and any(value.as_real_imag()[1] != 0 for value in values):
            continue
        if not _close(*values):
            return False
        agreed += 1
    return True if agreed >= (3 if symbols else 1) else _same_at_integers(left, right, symbols)


def _same_at_integers(left: sympy.Basic, right: sympy.Basic, symbols: list[sympy.Symbol]) -> bool | None:
    """For what is not real between the integers, such as (-1)^n."""
    pairs = [[_value(side, dict.fromkeys(symbols, sympy.Integer(number))) for side in (left, right)] for number in range(1, 6)]
    if len(symbols) != 1 or any(value is None for pair in pairs for value in pair):
        return None
    return all(_close(*pair) for pair in pairs)


def _one_case(left: sympy.Basic, right: sympy.Basic) -> tuple[sympy.Basic, sympy.Basic]:
    """Both in lower case when that confuses no two variables of one side: 2N + 1 is 2n + 1, but R and r of one formula stay two."""
    names = [[symbol.name for symbol in side.free_symbols] for side in (left, right)]
    if any(len({name.lower() for name in side}) < len(side) for side in names):
        return left, right
    left, right = (side.xreplace({symbol: sympy.Symbol(symbol.name.lower()) for symbol in side.free_symbols}) for side in (left, right))
    return left, right


def same_value(reference: str, answer: str) -> bool:
    """Whether two formulas denote the same value or function. Raises TooComplex, OutOfBudget and what `UNREADABLE` names."""
    left, right = prepare(reference), prepare(answer)
    if left is None or right is None:
        trees = parse(reference), parse(answer)
        if trees[0] is None or trees[1] is None:
            return False
        for tree in trees:
            _check_tree(tree)
        return bool(math_verify.verify(trees[0], trees[1], timeout_seconds=None))
    left, right = _one_case(left, right)
    known = same_everywhere(left, right)
    if known is None:
        return bool(math_verify.verify(left, right, timeout_seconds=None))
    return known or _rounds_to(reference, right) or _rounds_to(answer, left)


def _rounds_to(decimal_text: str, exact: sympy.Basic) -> bool:
    decimal = numerals.read_numeral(decimal_text)
    if decimal is None or decimal.decimals is None or exact.free_symbols or not exact.is_real:
        return False
    return numerals.rounded_equal(Fraction(str(exact.evalf(_DIGITS))), decimal)


def ratio(reference: tuple[str, str], answer: tuple[str, str]) -> int | None:
    """The sign of the constant k ≠ 0 with (left − right of answer) = k · (left − right of reference) everywhere; None when there is none."""
    first, second = (prepare(f"({left})-({right})") for left, right in (reference, answer))
    if first is None or second is None or first.has(sympy.Sum, sympy.Product) or second.has(sympy.Sum, sympy.Product):
        return None
    # x/y = 2 and x = 2y: the numerators decide.
    first, second = (sympy.fraction(sympy.together(side))[0] for side in (first, second))
    first, second = _one_case(first, second)
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    if not symbols or first.free_symbols != second.free_symbols:
        return None
    seen: list[sympy.Basic] = []
    for point in _points(symbols):
        values = _value(first, point), _value(second, point)
        if values[0] is None or values[1] is None or any(value == 0 or value.as_real_imag()[1] != 0 for value in values):
            continue
        seen.append(values[1] / values[0])
    if len(seen) < 3 or not all(_close(seen[0], other) for other in seen[1:]):
        return None
    return 1 if seen[0] > 0 else -1


def math_verify_agrees(reference: str, answer: str) -> bool:
    """math-verify's own verdict on two formulas of different structure (an inequality against a union of intervals, say)."""
    trees = parse(reference), parse(answer)
    if trees[0] is None or trees[1] is None:
        return False
    for tree in trees:
        _check_tree(tree)
    return bool(math_verify.verify(trees[0], trees[1], timeout_seconds=None, allow_set_relation_comp=True))
