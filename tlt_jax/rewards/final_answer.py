r"""Where the final answer of a response stands, as text.

In this order: the last `\boxed{}`; the last `####` marker; the last "answer is" / "Answer:" phrase; the last bold value; the last formula or number.
Text after a stop token does not exist; a closed <answer> tag, or what follows </think>, comes before the rest. It does not judge whether the answer is right.
"""

import re

from tlt_jax.rewards.formats import until_stop

MAX_RESPONSE = 60_000  # characters, from the end: the answer stands there, and every scan below is linear in this
MAX_ANSWER = 2_000  # a longer "answer" is none
_SENTENCE = 300

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BARE_BOX = re.compile(r"\\frac\s*\{[^{}\n]{1,80}\}\s*\{[^{}\n]{1,80}\}|\\\w+|-?\d[\d,.]*\d|[^\s$\\{}]+")
_BETWEEN_BOXES = re.compile(r"(?:[ \t$,;]|\\[()\[\], ;]|\\text\s*\{[ ,]*(?:and|or)?[ ,]*\}|\\q?quad|and|or)*")
_PERCENT_AFTER = re.compile(r"\s*\$?\s*(?:\\?%|(?:percent|percentage|pct)\b)")
_MARKER = re.compile(r"^[ \t]*####[ \t]*(\S[^\n]*)", re.MULTILINE)
_VALUE_START = re.compile(r"\*{0,2}[-+−$€£¥₹\\(\[{.]*\s*\d|[\\$(\[{]")
_HEADING = re.compile(r"\d+[.)]\s+[A-Za-z]")
_ONE_CHOICE = re.compile(r"\s*\(?([A-J])\)?[.:]?\s*")
_PHRASE = re.compile(r"(?:answer|option|choice)\b[^\n.:=]{0,80}?(?:\bis\b|\bare\b|\bequals\b|:|=)(?:\s*:)?\**:?|final answer\**:?(?=\s*\n)", re.IGNORECASE)
_BOLD = re.compile(r"\*\*([^*\n]{1,120})\*\*")
_DISPLAY = re.compile(r"\$\$([^$]{1,600})\$\$|\\\[((?:[^\\]|\\(?![\[\]])){1,600})\\\]|\\\(((?:[^\\\n]|\\(?![()])){1,600})\\\)")
_INLINE = re.compile(r"(?<![\\$])\$((?:\\.|[^$\n\\]){1,1000}?)\$(?!\d)")
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+[A-Za-z]{2,}(?![A-Za-z])")
_VERB = re.compile(r"\b(?:is|are|equals|was|be)\b:?\s*(?=\S)(?:equal to\s*|therefore,?\s*|approximately\s*|about\s*)?")
_INTEGER = r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|[1-9]\d{0,2}(?: \d{3})+(?!\d)|\d+)"
_NUMBER = (
    rf"(?:[-+−]\s?)?[$€£¥₹]?\s?(?:{_INTEGER}\s+\d+/\d+|{_INTEGER}/{_INTEGER}|\d+:\d\d|\d+(?:\.\d+)?[eE][-+]?\d+|{_INTEGER}?\.\d+|{_INTEGER}(?:,\d+)?)"
    r"(?:\s*(?:\\?%|percent\b|percentage\b|pct\b))?"
)
_LAST_NUMBER = re.compile(rf"(?<![\w.\\])(?<!\d,)(?:{_NUMBER})")
_LISTED = re.compile(rf"{_NUMBER}(?:,\s+{_NUMBER})*,?\s+(?:and|or)\s+{_NUMBER}|{_NUMBER}(?:,\s+{_NUMBER})+(?=\s*$)")
_BRACKETED = re.compile(r"(?:[A-Za-z]\w?\s*=\s*)?[(\[{][^()\[\]{}\n]{1,120},[^()\[\]{}\n]{1,120}[)\]}]")
_ALGEBRA = re.compile(r"[-+−(\[{|]*(?:[\dA-Za-z_.\s,!|+\-−*/^()=<>≤≥√π{}\[\]]|\\[A-Za-z]+)+")
_FUNCTION_WORDS = frozenset(("sin", "cos", "tan", "log", "ln", "exp", "sqrt", "pi", "sec", "csc", "cot"))
_SENTENCE_END = re.compile(r"\.(?:\s|$)|\n|[!?](?:\s|$)")


def final_answer(response: str) -> str | None:
    """The text of the final answer, or None when there is none (an empty or unterminated last box counts as none)."""
    text = until_stop(response)[-MAX_RESPONSE:]
    before_close, closed, _ = text.rpartition("</answer>")
    _, opened, tagged = before_close.rpartition("<answer>")
    if closed and opened and tagged.strip():
        return _limited(_located(tagged) or tagged)
    _, thought, after_thinking = text.rpartition("</think>")
    if thought and after_thinking.strip():
        found = _located(after_thinking)
        if found or _BOX.search(after_thinking):
            return _limited(found)
    return _limited(_located(text))


def _limited(answer: str | None) -> str | None:
    answer = answer.strip() if answer else ""
    return answer if 0 < len(answer) <= MAX_ANSWER else None


def _located(text: str) -> str | None:
    boxes = _boxes(text)
    if boxes:
        return _last_boxes(text, boxes)
    choice = _ONE_CHOICE.fullmatch(text)
    return choice[1] if choice else _marked(text) or _phrased(text) or _bold(text) or _last_value(text)


def _closing_braces(text: str) -> dict[int, int]:
    closing: dict[int, int] = {}
    open_positions: list[int] = []
    position = 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        if character == "{":
            open_positions.append(position)
        elif character == "}" and open_positions:
            closing[open_positions.pop()] = position
        position += 1
    return closing


def _boxes(text: str) -> list[tuple[int, int, str | None]]:
    """(start, end, content) of every outermost box in order; content None when its brace never closes."""
    found, position = [], 0
    if "\\boxed" not in text and "\\fbox" not in text:
        return []
    closing = _closing_braces(text)
    while match := _BOX.search(text, position):
        start, position = match.start(), match.end()
        if text[position : position + 1] == "{":
            end = closing.get(position)
            found.append((start, len(text), None) if end is None else (start, end + 1, text[position + 1 : end]))
            position = position + 1 if end is None else end + 1
        elif bare := _BARE_BOX.match(text, position):
            found.append((start, bare.end(), bare[0]))
            position = bare.end()
        else:
            found.append((start, position, None))
    return found


def _unboxed(content: str) -> str:
    r"""The content of a box without boxes inside it: `\boxed{6} + 1` is `{6} + 1`."""
    return _BOX.sub("", content).strip() if "\\boxed" in content or "\\fbox" in content else content.strip()


def _last_boxes(text: str, boxes: list[tuple[int, int, str | None]]) -> str | None:
    """The last box; boxes that stand side by side in one line, with nothing but separators between them, are one set."""
    start, end, content = boxes[-1]
    if content is None or not content.strip():
        return None
    contents = [_unboxed(content)]
    for earlier_start, earlier_end, earlier in reversed(boxes[:-1]):
        between = text[earlier_end:start]
        if not earlier or len(between) > 40 or not _BETWEEN_BOXES.fullmatch(between):
            break
        if _unboxed(earlier) not in contents:
            contents.insert(0, _unboxed(earlier))
        start = earlier_start
    if len(contents) > 1:
        return r"\{" + ", ".join(contents) + r"\}"
    single = contents[0]
    prose = re.fullmatch(r"\\text\s*\{([^{}]*\banswer\b[^{}]*)\}", single)
    if prose:
        return _phrased(prose[1])
    return single.strip("{}") + r"\%" if _PERCENT_AFTER.match(text, end) and "%" not in single else single


def _marked(text: str) -> str | None:
    for match in reversed(list(_MARKER.finditer(text))):
        content = match[1].strip()
        last_line = not text[match.end() :].strip()
        if last_line or (_VALUE_START.match(content) and not _HEADING.match(content)):
            return _from_sentence(content) if _VALUE_START.match(content) else content
    return None


def _phrased(text: str) -> str | None:
    for match in reversed(list(_PHRASE.finditer(text))):
        rest = text[match.end() : match.end() + _SENTENCE].lstrip(" \t:*")
        rest = rest if rest.startswith("\n") is False else rest.lstrip()
        bold = text[match.end() : match.end() + _SENTENCE].lstrip(" \t\n:")
        found = _from_sentence(bold if bold.startswith("**") else rest)
        if found:
            return found
    return None


def _bold(text: str) -> str | None:
    for match in reversed(list(_BOLD.finditer(text))):
        content = match[1].strip()
        if _VALUE_START.match(content) and not _HEADING.match(content) and not content.endswith(":"):
            return _from_sentence(content)
    return None


def _formulas(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of the formulas. A dollar sign before a number with prose up to the next dollar sign is money."""
    spans = [(match.start(), match.end(), next(group for group in match.groups() if group is not None)) for match in _DISPLAY.finditer(text)]
    position = 0
    while match := _INLINE.search(text, position):
        prose = _PROSE.search(re.sub(r"\\\w+\s*\{[^{}]*\}", "", match[1]))
        position = match.start() + 1 if prose else match.end()
        if not prose:
            spans.append((match.start(), match.end(), match[1]))
    return sorted(spans)


def _joined_formulas(text: str, spans: list[tuple[int, int, str]], first: int) -> str:
    """The formula at `first` and those joined to it by a comma, "and" or "or"."""
    contents, end = [spans[first][2]], spans[first][1]
    for start, stop, content in spans[first + 1 :]:
        if not re.fullmatch(r"\s*(?:,?\s*(?:and|or)|,)\s*", text[end:start]):
            break
        contents.append(content)
        end = stop
    joined = ", ".join(contents)
    return joined + r"\%" if len(contents) == 1 and _PERCENT_AFTER.match(text, end) and "%" not in joined else joined


def _last_value(text: str) -> str | None:
    """The last formula with a digit or a single letter in it, or else the last number."""
    spans = [span for span in _formulas(text[-4 * MAX_ANSWER :]) if re.search(r"\d|^\s*\w\s*$", span[2])]
    if spans:
        tail = text[-4 * MAX_ANSWER :]
        first = len(spans) - 1
        while first and re.fullmatch(r"\s*(?:,?\s*(?:and|or)|,)\s*", tail[spans[first - 1][1] : spans[first][0]]):
            first -= 1
        after = [match[0] for match in _LAST_NUMBER.finditer(tail[spans[-1][1] :])]
        return after[-1] if after and not re.search(r"\d", spans[-1][2]) else _joined_formulas(tail, spans, first)
    numbers = [match[0] for match in _LAST_NUMBER.finditer(text)]
    return numbers[-1].strip() if numbers else None


def _first_sentence(snippet: str) -> str:
    """Up to the first full stop or line feed outside a formula."""
    spans = _formulas(snippet)
    for end in _SENTENCE_END.finditer(snippet):
        if not any(start <= end.start() < stop for start, stop, _ in spans):
            return snippet[: end.start()]
    return snippet


def _from_sentence(snippet: str) -> str | None:
    """The value stated after "the answer is": bold text, a formula, an algebraic expression, a bracketed group, a list, a number, or a few words."""
    snippet = snippet.strip()[:_SENTENCE]
    bold = re.match(r"\*\*([^*\n]{1,120})\*\*", snippet)
    sentence = (bold[1] if bold else _first_sentence(snippet)).strip().strip('*"“”').strip()
    if not _VALUE_START.match(sentence):
        verbs = list(_VERB.finditer(sentence))
        sentence = sentence[verbs[-1].end() :] if verbs else sentence
    formula = _stated_formula(sentence)
    if formula:
        return formula
    words = re.findall(r"(?<!\\)\b[A-Za-z]{2,}", sentence)
    if (
        len(sentence) <= 120
        and all(word.lower() in _FUNCTION_WORDS for word in words)
        and ("\\" in sentence or (_ALGEBRA.fullmatch(sentence) and re.search(r"[A-Za-z^*=+/()<>]", sentence)))
    ):
        return sentence.rpartition("=")[2].strip() if re.fullmatch(r"[\d\s.,+\-*/^()]+=[^=]+", sentence) else sentence
    return _stated_number(sentence) or (sentence if sentence and len(sentence.split()) <= 6 else None)


def _stated_formula(sentence: str) -> str | None:
    spans = _formulas(sentence)
    if not spans:
        return None
    outside = sentence
    for start, stop, _ in spans:
        outside = outside[:start] + " " * (stop - start) + outside[stop:]
    with_digits = [index for index, span in enumerate(spans) if re.search(r"\d", span[2])]
    if spans[0][0] == 0 or not re.search(r"\d", outside):
        return _joined_formulas(sentence, spans, with_digits[0] if with_digits and spans[0][0] > 0 else 0)
    return None


def _stated_number(sentence: str) -> str | None:
    equal = re.search(rf"^[^=]*=\s*({_NUMBER})[^=]*$", sentence) if not re.match(rf"\(?\s*{_NUMBER}(?!\s*[-+*/×=])", sentence) else None
    if equal:
        return equal[1].strip()
    found = _BRACKETED.match(sentence) or _LISTED.search(sentence) or _LAST_NUMBER.search(sentence)
    return found[0].strip() if found else None
