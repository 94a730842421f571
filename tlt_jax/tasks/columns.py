r"""Which column holds what: the column names of other trainers' data, and reference answers in one form.

Names are those that users of verl, OpenRLHF, TRL, NeMo-RL, slime and AReaL bring. Reading files is `text_files`; rendering is `prompts`.

Reference answers become strings. Numbers: 18, 18.0 and "18" are "18". A list of one is its element; a list of several means that *all* are
asked for and becomes "a, b" (to accept any of several answers, write a reward function). Null, NaN, infinity, booleans, dicts and
empty text are errors with the row. A GSM8K solution is cut to what follows its last `####`, a worked solution with exactly one
\boxed{…} to the content of the box.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence

from tlt_jax.tasks.text_files import DataError, Row

# A dot reaches into a nested column. Earlier names win; the verified gold of verl's layout stands before worked answers.
ALIASES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "messages", "question", "problem", "instruction", "input", "query", "conversations"),
    "answer": (
        "reward_model.ground_truth",
        "ground_truth",
        "expected_answer",
        "final_answer",
        "answer",
        "label",
        "target",
        "solution",
        "output",
        "completion",
        "response",
    ),
    "source": ("data_source", "datasource", "task_name", "source", "dataset"),
    "id": ("id", "extra_info.index", "uuid", "unique_id", "problem_id", "question_id", "index"),
    "difficulty": ("difficulty", "level", "extra_info.difficulty"),
    "completion": ("completion", "response", "output", "solution", "answer"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "text": ("text", "content"),
}
ROW_INDEX = "row_index"
_WORDED_DIFFICULTY = {"easy": 1.0, "medium": 2.0, "hard": 3.0}
_NUMBER_WITH_COMMAS = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant", "system": "system", "tool": "tool"}


@dataclasses.dataclass(frozen=True)
class Columns:
    """Name of the column (dotted when nested) for each meaning; None = there is none. `id` None = rows are known by their index."""

    prompt: str | None = None
    answer: str | None = None
    source: str | None = None
    id: str | None = None
    difficulty: str | None = None
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    text: str | None = None

    def describe(self) -> str:
        """One line for the start of a run: which column was taken for what."""
        matched = dataclasses.asdict(self)
        first = [f"{meaning} <- {matched[meaning] or fallback}" for meaning, fallback in _FALLBACKS.items()]
        more = [f"{meaning} <- {name}" for meaning, name in matched.items() if name and meaning in ("difficulty", "chosen", "rejected", "text")]
        return "columns: " + ", ".join(first + more)


_FALLBACKS = {"prompt": "none", "answer": "none", "source": "file name", "id": "row index"}


def match_columns(rows: Sequence[Row], overrides: Mapping[str, str | None] | None = None, *, required: Sequence[str] = ("prompt",)) -> Columns:
    """Find the column of each meaning by `ALIASES` in all of `rows`; a non-empty entry of `overrides` names it instead.

    `overrides={"id": "row_index"}` ignores an id column. Raises DataError when a meaning of `required` has no column (lists the columns found
    and the names accepted), when an override names no column or no meaning.
    """
    found = _column_names(rows)
    chosen: dict[str, str | None] = {meaning: next((name for name in names if name in found), None) for meaning, names in ALIASES.items()}
    for meaning, name in (overrides or {}).items():
        if meaning not in ALIASES:
            raise DataError(f"columns.{meaning}: no such meaning; one of {', '.join(ALIASES)}")
        if meaning == "id" and name == ROW_INDEX:
            chosen["id"] = None
        elif name:
            if name not in found:
                near = difflib.get_close_matches(name, found, 1)
                raise DataError(f"columns.{meaning}={name}: no such column{f', did you mean {near[0]}?' if near else ''} (found: {', '.join(found)})")
            chosen[meaning] = name
    for meaning in required:
        if chosen[meaning] is None:
            raise DataError(
                f"{rows[0].file if rows else 'data'}: no column for the {meaning}; columns found: {', '.join(found) or 'none'}; "
                f"accepted names: {', '.join(ALIASES[meaning])}; or set data.columns.{meaning}"
            )
    if chosen["prompt"] is not None and chosen["answer"] == chosen["prompt"]:
        raise DataError(f"column {chosen['prompt']} is given as both prompt and answer: set data.columns.answer")
    return Columns(**chosen)


def _column_names(rows: Sequence[Row]) -> list[str]:
    """Every column of any row, in order of appearance; the entries of dict columns follow as `outer.inner`."""
    names: dict[str, None] = {}
    for row in rows:
        for name, value in row.columns.items():
            names[name] = None
            if isinstance(value, dict):
                names.update(dict.fromkeys(f"{name}.{inner}" for inner in value))
    return list(names)


def value_of(row: Row, name: str) -> object:
    """The value of column `name` (`outer.inner` reaches into a dict). Raises DataError when the row does not have it."""
    if name in row.columns:
        return row.columns[name]
    outer, _, inner = name.partition(".")
    nested = row.columns.get(outer)
    if inner and isinstance(nested, dict) and inner in nested:
        return nested[inner]
    raise DataError(f"{row.place}: the row has no column {name} (its columns: {', '.join(row.columns)})")


def normalized_answer(value: object, place: str) -> str:
    """The reference answer as a string by the rules at the top of this module; `place` is named in the error."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise DataError(f"{place}: the answer is an empty list")
        return ", ".join(normalized_answer(element, place) for element in value)
    if value is None or isinstance(value, (bool, dict)):
        kind = "null" if value is None else f"{value!r} ({type(value).__name__})"
        raise DataError(f"{place}: the answer is {kind}; a string, a number or a list of them is expected")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"{place}: the answer is {value}, not a finite number")
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    text = _final_part(str(value)).strip()
    if not text:
        raise DataError(f"{place}: the answer is empty")
    return text


def _final_part(text: str) -> str:
    """The answer at the end of a worked solution: after the last `####`, or inside the only box."""
    if "####" in text:
        tail = text.rsplit("####", 1)[1].strip()
        return tail.replace(",", "") if _NUMBER_WITH_COMMAS.fullmatch(tail) else tail
    boxes = list(_BOX.finditer(text))
    if len(boxes) != 1:
        return text
    depth, start = 1, boxes[0].end()
    for position in range(start, len(text)):
        escaped = text[position - 1] == "\\"
        depth += 0 if escaped else {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return text


def difficulty_value(value: object) -> float | None:
    """A number for the curriculum from a number, "Level 3" (MATH) or easy/medium/hard; None when the text says neither."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    if not isinstance(value, str):
        return None
    number = re.search(r"-?\d+(\.\d+)?", value)
    return float(number.group()) if number else _WORDED_DIFFICULTY.get(value.strip().lower())


def conversation(value: object, place: str) -> list[dict]:
    """Messages `[{"role", "content", …}]` from a message list or a ShareGPT list (`from`, `value`). Raises DataError on other shapes."""
    if not isinstance(value, list) or not value:
        raise DataError(f"{place}: a conversation must be a non-empty list of messages, not {type(value).__name__}")
    return [_message(entry, f"{place}, message {number}") for number, entry in enumerate(value)]


def _message(entry: object, place: str) -> dict:
    if isinstance(entry, dict) and "from" in entry and "value" in entry:
        if entry["from"] not in _SPEAKERS:
            raise DataError(f"{place}: unknown speaker {entry['from']!r} (known: {', '.join(_SPEAKERS)})")
        entry = {"role": _SPEAKERS[entry["from"]], "content": entry["value"]}
    if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
        raise DataError(f"{place}: a message needs a text `role` and a `content`")
    if isinstance(entry.get("content"), list):
        entry = entry | {"content": _text_of_parts(entry["content"], place)}
    if not isinstance(entry.get("content"), str):
        raise DataError(f"{place}: the content must be text, not {type(entry.get('content')).__name__}")
    if entry.get("tool_calls"):
        raise DataError(f"{place}: tool calls are not built")
    return {key: inner for key, inner in entry.items() if inner is not None}


def _text_of_parts(parts: list, place: str) -> str:
    """The text of `[{"type": "text", "text": …}]`; images and the like are refused, not skipped."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{place}: only text content is built, not {part!r:.80}")
    return "".join(part["text"] for part in parts)
