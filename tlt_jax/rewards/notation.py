r"""From the text of an answer to its structure: cleaned notation, and a tree of sets, tuples, intervals, relations and scalars.

Text in, text out: leaves stay strings that `expressions` or `numerals` read. It does not compare and does not know sympy.
"""

import re
from dataclasses import dataclass

from tlt_jax.rewards import numerals

MAX_DEPTH = 12  # deeper nesting of sets, tuples and relations is read as one opaque scalar

_UNICODE = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "÷": "/",
        "·": r"\cdot ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "√": r"\sqrt ",
        "°": r"^\circ ",
        "²": "^2",
        "³": "^3",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "θ": r"\theta ",
        "ℝ": r"\mathbb{R}",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
        "‘": "'",
        "’": "'",
    }
)
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])\s*", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])", ""),
        (r"\\\$|\$|\\[()](?![a-zA-Z])", ""),
        (r"\\!\s*", ""),
        (r"\s*\{\s*,\s*\}\s*", ","),
        (r"(?<!\\)\\(?:[,;:> ]|quad|qquad|thinspace|enspace)(?![a-zA-Z])|~|\\hspace\{[^{}]*\}", " "),
        (r"\\(?:d|t|c)frac", r"\\frac"),
        (r"\\(?:mbox|textrm|textbf|textit|textnormal|textsf|mathrm|mathit|mathsf|operatorname)\s*\{", r"\\text{"),
        (r"\\text\s*\{\s*(and|or)\s*\}", r" \1 "),
        (r"\\text\s*\{\s*,?\s*(and|or)\s*,?\s*\}", r" \1 "),
        (r"\\text\s*\{\s*([-+]?\d[\d.,/]*\s*(?:\\?%)?|[ei])\s*\}", r"\1"),
        (r"^\s*\\text\s*\{([^{}]*\d[^{}]*)\}\s*$", r"\1"),
        (r"\\(?:lbrace|\{)", r"\\{"),
        (r"\\(?:rbrace|\})", r"\\}"),
        (r"\\(?:lbrack)(?![a-zA-Z])", "["),
        (r"\\(?:rbrack)(?![a-zA-Z])", "]"),
        (r"\\(?:leq|leqslant|le)(?![a-zA-Z])|<=|=<", r"\\le "),
        (r"\\(?:geq|geqslant|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:neq|ne)(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset "),
        (r"\\(?:langle)(?![a-zA-Z])", "("),
        (r"\\(?:rangle)(?![a-zA-Z])", ")"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
        (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z])|\\degrees(?![a-zA-Z])", r"^\\circ "),
        (r"\\(?:begin|end)\{(?:align|aligned|equation|gather|split)\*?\}", " "),
        (r"\s+", " "),
    )
)
_TEXT_TAIL = re.compile(r"\s*\\text\s*\{[^{}]*\}\s*(?:\^\s*(?:\d|\{\s*-?\d\s*\}))?\s*$")
_UNITS = (
    "mm|cm|km|dm|m|in|inch|inches|ft|foot|feet|yd|yard|yards|mi|mile|miles|mg|kg|g|gram|grams|lb|lbs|oz|l|ml|liter|liters|litre|litres|"
    "s|sec|second|seconds|min|minute|minutes|h|hr|hrs|hour|hours|day|days|week|weeks|month|months|year|years|cent|cents|dollar|dollars|usd|"
    "euro|euros|degree|degrees|mph|kmh|square|cubic|sq|cu|unit|units|meter|meters|metre|metres|centimeters|kilometers|radians|rad|am|pm"
)
# A unit stuck to its number must be a known one of two letters or more (2x and 5m are products); after a space one letter or any plain word will do.
_STUCK = rf"(?<=[\d}}])(?:(?!m\b|s\b|h\b|g\b|l\b)(?:{_UNITS})\b|(?:m|cm|km|ft|in|mm)(?=\s*\^))"
_SPACED = rf"\s+(?:(?:{_UNITS})\b|(?!and\b|or\b|to\b|pi\b|mod\b|times\b|over\b)[A-Za-z]{{3,}})"
_NUMBER_UNIT = re.compile(
    r"(?P<number>[-+]?[$€£¥₹]?\s*(?:\d[\d,. ]*(?:/\s*\d+)?|\\frac\{[^{}]*\}\{[^{}]*\})\s*(?:\\?%)?)"
    rf"(?:{_STUCK}|{_SPACED})(?:[\s./]+[A-Za-z]+|\s*\^\s*(?:\d|\{{\d\}}))*\.?",
    re.IGNORECASE,
)
_FUNCTIONS = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt)\b", re.IGNORECASE)
_WORD = re.compile(r"(?:\\text\s*\{([^{}]*[A-Za-z][^{}]*)\}|\(?([A-Za-z][A-Za-z' -]{3,})\)?)")
_CHOICE = re.compile(r"(?:\\text\s*\{\s*)?\(?\s*(?:\\text\s*\{\s*)?([A-J])\s*\}?\s*[).:]\s*\}?(?:[ \\].*)?|\\text\s*\{\s*([A-Z])\s*\}|([A-Z])")
_NAME = re.compile(r"\\?[A-Za-z][A-Za-z\\ ]*(?:_\s*(?:\w|\{[^{}]*\}))?'*\s*(?:\([^()]*\))?|\([A-Za-z](?:\s*,\s*[A-Za-z])+\)|\\text\s*\{[^{}]*\}")
_MATRIX = re.compile(r"\[?\s*\\begin\{([pbvBV]?matrix|array|smallmatrix)\}(?:\{[clr|]*\})?(.*?)\\end\{\1\}\s*\]?", re.DOTALL)
_RELATION = re.compile(r"\\le\b|\\ge\b|\\ne\b|<|>|(?<![\\:!<>])=")
_MEMBERSHIP = re.compile(r"[A-Za-z]\w*\s*\\in(?![a-zA-Z])\s*(.+)")
_BASED = re.compile(r"([0-9A-Za-z]+)\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(\d{1,2}|two|three|eight|ten)\s*\}?\}?")
_CLOCK = re.compile(r"\d+\s*:\s*\d+(?:\s*:\s*\d+)*")
_OPEN, _CLOSE = {"(": ")", "[": "]", "{": "}"}, {")": "(", "]": "[", "}": "{"}


@dataclass(frozen=True)
class Node:
    """kind: scalar | word | choice | clock | based | empty | set | list | tuple | interval | union | matrix | relation.

    `text` the cleaned source; `parts` the children; `marks` the brackets of a tuple, the operators of a relation, the base, or a matrix's number of columns;
    `name` the left side of an assignment that was taken off.
    """

    kind: str
    text: str
    parts: tuple["Node", ...] = ()
    marks: tuple[str, ...] = ()
    name: str | None = None


def clean(text: str) -> str:
    """One notation for the many ways of writing the same: spacing commands, delimiters, fraction and text variants, relation signs, sentence punctuation."""
    text = re.sub(r"\s+", " ", text.replace("**", "").replace("`", "").translate(_UNICODE)).strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip()
    while text and (text[-1] in ".,;:" and not text.endswith("..") or re.search(r"(?<!\\)\\$", text)):
        text = text[:-1].rstrip()
    return text


def strip_units(text: str) -> str:
    r"""The text without a trailing unit (`\text{ cm}^2`, `miles`, `^\circ`); unchanged when nothing would be left."""
    for _ in range(2):
        shorter = _TEXT_TAIL.sub("", text).strip()
        if not shorter:
            break
        text = shorter
    if text.endswith(r"^\circ") and not re.search(r"\\(?:sin|cos|tan)", text):
        text = text.removesuffix(r"^\circ").strip()
    found = _NUMBER_UNIT.fullmatch(text)
    if found and not _FUNCTIONS.search(text):
        text = found["number"].strip().rstrip(",").strip()
    return text


def split_top(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Pieces between the separators that stand outside every bracket, and those separators."""
    pieces, found, depth, start, position = [], [], 0, 0, 0
    while position < len(text):
        character = text[position]
        match = separator.match(text, position) if depth == 0 else None
        if match and match.end() > position:
            pieces.append(text[start:position])
            found.append(match[0].strip())
            start = position = match.end()
            continue
        if character == "\\" and position + 1 < len(text) and text[position + 1] in "{}":
            position += 1
            character = text[position]
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth = max(0, depth - 1)
        position += 1
    return [*pieces, text[start:]], found


def _enclosed(text: str) -> tuple[str, str, str] | None:
    r"""(opening bracket, inside, closing bracket) when one pair spans the whole text; brackets of half-open intervals may differ, `\{` counts as `{`."""
    opened = text[1] if text.startswith(r"\{") else text[:1]
    body = text.removeprefix("\\")
    if opened not in _OPEN or text[-1:] not in _CLOSE or len(body) < 2:
        return None
    depth = 0
    for position, character in enumerate(body):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0 and position < len(body) - 1:
            return None
    inside = body[1:-1].removesuffix("\\")
    if depth or (opened == "{") != (body[-1] == "}"):
        return None
    return opened, inside.strip(), body[-1]


_LIST = re.compile(r"\s*(?:,|;)\s*(?:(?:and|or)\b)?\s*|\s+(?:and|or)\s+|(?<=[\d}])(?:and|or)\s+")
_CUP = re.compile(r"\\cup(?![a-zA-Z])")
_APPROX = re.compile(r"\\approx(?![a-zA-Z])|\\simeq(?![a-zA-Z])")
_REALS = {r"\mathbb{R}", r"\text{all real numbers}", r"\mathbf{R}", "all real numbers", r"\text{all reals}"}


def read(text: str, depth: int = 0) -> Node:
    """The structure of cleaned text."""
    text = text.strip()
    if depth > MAX_DEPTH:
        return Node("scalar", text)
    if not text or text == r"\emptyset" or text in (r"\{\}", r"\{ \}"):
        return Node("empty", text)
    if text in _REALS:
        return read(r"(-\infty, \infty)", depth + 1)
    leaf = _leaf(text)
    if leaf:
        return leaf
    before, approximations = split_top(text, _APPROX)
    if approximations:
        left = before[0].strip()
        return read(before[-1] if _NAME.fullmatch(left) and "=" not in left else left, depth + 1)
    member = _MEMBERSHIP.fullmatch(text)
    if member:
        return read(member[1], depth + 1)
    matrix = _MATRIX.fullmatch(text)
    if matrix and matrix[2].count(r"\begin") == 0:
        return _matrix(text, matrix[2], depth)
    pieces, cups = split_top(text, _CUP)
    if cups:
        return Node("union", text, tuple(read(piece, depth + 1) for piece in pieces))
    if numerals.read_numeral(text):
        return Node("scalar", text)
    return _composite(text, depth)


def _leaf(text: str) -> Node | None:
    choice = _CHOICE.fullmatch(text)
    if choice:
        return Node("choice", choice[1] or choice[2] or choice[3])
    word = _WORD.fullmatch(text)
    if word:
        inner = (word[1] or word[2]).strip()
        if re.search(r"[A-Za-z]{2}", inner) and not re.search(r"\b(?:and|or)\b", inner) and not _FUNCTIONS.search(inner):
            return Node("word", inner)
    if _CLOCK.fullmatch(strip_units(text)):
        return Node("clock", re.sub(r"\s", "", strip_units(text)))
    based = _BASED.fullmatch(text)
    if based and any(character.isdigit() for character in based[1]):
        words = {"two": "2", "three": "3", "eight": "8", "ten": "10"}
        return Node("based", based[1].lower(), marks=(words.get(based[2], based[2]),))
    return None


def _matrix(text: str, body: str, depth: int) -> Node:
    rows = [row for row in re.split(r"\\\\|\\cr\b", body) if row.strip() and row.strip() != r"\hline"]
    cells = [row.split("&") for row in rows]
    if not cells or len({len(row) for row in cells}) != 1:
        return Node("scalar", text)
    return Node("matrix", text, tuple(read(cell.strip(), depth + 1) for row in cells for cell in row), (str(len(cells[0])),))


def _composite(text: str, depth: int) -> Node:
    pieces, commas = split_top(text, _LIST)
    if commas and all(piece.strip() for piece in pieces):
        return _list(text, [read(piece, depth + 1) for piece in pieces], commas)
    sides, operators = split_top(text, _RELATION)
    if operators and all(side.strip() for side in sides):
        return _relation(text, sides, operators, depth)
    enclosed = _enclosed(text)
    if enclosed:
        opened, inside, closed = enclosed
        parts, inner_commas = split_top(inside, _LIST)
        if opened == "{" and inside:
            children = [child for part in parts for child in _spread(read(part, depth + 1))]
            return Node("set", text, tuple(children))
        if inner_commas and all(part.strip() for part in parts):
            return Node("tuple", text, tuple(read(part, depth + 1) for part in parts), (opened, closed))
        if inside and opened == "(" and closed == ")":
            return read(inside, depth + 1)
    if re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        upper = re.sub(r"\\pm(?![a-zA-Z])", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
        lower = re.sub(r"\\pm(?![a-zA-Z])", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
        return Node("set", text, (Node("scalar", upper.removeprefix("+").strip()), Node("scalar", lower.strip())))
    return Node("scalar", text)


def _spread(node: Node) -> tuple[Node, ...]:
    """The elements that a list item stands for: `1 \\pm \\sqrt5` inside a list is two of them."""
    return node.parts if node.kind == "set" and not node.text.startswith(("{", r"\{")) else (node,)


def _list(text: str, nodes: list[Node], separators: list[str]) -> Node:
    relations = [node for node in nodes if node.kind in ("relation", "tuple") and re.search(r"[<>]|\\\\[lg]e\b", node.text)]
    if relations and len(relations) == len(nodes) and any("or" in separator.split() for separator in separators):
        return Node("union", text, tuple(nodes))
    names = tuple(node.name or "" for node in nodes)
    return Node("list", text, tuple(child for node in nodes for child in _spread(node)), names, name=names[0] or None)


def _relation(text: str, sides: list[str], operators: list[str], depth: int) -> Node:
    sides = [side.strip() for side in sides]
    if all(operator == "=" for operator in operators):
        if len(sides) == 2 and re.fullmatch(r"\\?[A-Za-z]+", sides[1]) and not _NAME.fullmatch(sides[0]):
            sides = sides[::-1]
        if _NAME.fullmatch(sides[0]):
            value = read(sides[-1], depth + 1)
            return Node(value.kind, value.text, value.parts, value.marks, name=re.sub(r"\s", "", sides[0]))
        sides = [sides[0], sides[-1]]
        operators = ["="]
    bounds = _bounds(sides, operators)
    if bounds:
        low, high, marks = bounds
        return Node("tuple", text, (read(low, depth + 1), read(high, depth + 1)), marks)
    return Node("relation", text, tuple(Node("scalar", side) for side in sides), tuple(operators))


def _bounds(sides: list[str], operators: list[str]) -> tuple[str, str, tuple[str, str]] | None:
    """An inequality about one bare variable as interval ends and brackets: `3 < x \\le 8` is ("3", "8", ("(", "]"))."""
    variable = [index for index, side in enumerate(sides) if re.fullmatch(r"\\?[A-Za-z]+", side)]
    rising = all(operator in ("<", r"\le") for operator in operators)
    falling = all(operator in (">", r"\ge") for operator in operators)
    if len(variable) != 1 or not (rising or falling) or len(sides) > 3 or (len(sides) == 3 and variable[0] != 1):
        return None
    if any(re.search(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", side) for index, side in enumerate(sides) if index != variable[0]):
        return None
    if falling:
        sides, operators = sides[::-1], [{">": "<", r"\ge": r"\le"}[operator] for operator in operators[::-1]]
        variable = [len(sides) - 1 - variable[0]]
    low, high, opened, closed = r"-\infty", r"\infty", "(", ")"
    if variable[0] > 0:
        low, opened = sides[variable[0] - 1], "[" if operators[variable[0] - 1] == r"\le" else "("
    if variable[0] < len(sides) - 1:
        high, closed = sides[variable[0] + 1], "]" if operators[variable[0]] == r"\le" else ")"
    return low, high, (opened, closed)
