"""Prompts of the generate command: rows that hold a text, a conversation or token ids, each row on its own terms.

A text is rendered as in training (the chat template where the tokenizer has one); `prompt_ids` are taken as they are and need no tokenizer.
"""

from tlt_jax.tasks.columns import Columns
from tlt_jax.tasks.prompts import Prompt, PromptSettings, prompt_key, render_prompts
from tlt_jax.tasks.text_files import DataError, Row, read_rows
from tlt_jax.tasks.tokenizer import Tokenizer, TokenizerError, check_ids

FIELDS = ("prompt", "messages", "prompt_ids")


def read_prompt_rows(path: str, tokenizer: Tokenizer | None, settings: PromptSettings, *, embedding_rows: int) -> list[tuple[Row, Prompt]]:
    """Every row of `path` (see `read_rows`) with its prompt, in order. A row's key comes from the file's name and its `id`, else its index.

    Where a row has `prompt_ids`, they count and its text does not. Raises DataError naming file and line: a row without one of `FIELDS` or with both
    texts, a text without tokenizer, a conversation without chat template, an id that has no embedding row, two rows of one id.
    """
    found: list[tuple[Row, Prompt]] = []
    seen: dict[int, Row] = {}
    for row in read_rows(path):
        prompt = _given_ids(row, tokenizer, embedding_rows) if row.columns.get("prompt_ids") is not None else _given_text(row, tokenizer, settings)
        first = seen.setdefault(prompt.key, row)
        if first is not row:
            raise DataError(f"{first.place} and {row.place} have the same id {row.columns['id']!r}: they would get the same noise; make the ids unique")
        found.append((row, prompt))
    return found


def read_ids(row: Row, field: str, embedding_rows: int) -> tuple[int, ...]:
    """The token ids of a field that the row has. Raises DataError naming row and field for what is no list of ids with an embedding row."""
    ids = row.columns[field]
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise DataError(f"{row.place}: {field} must be a list of whole numbers and not empty, not {ids!r:.80}")
    try:
        check_ids(ids, embedding_rows)
    except TokenizerError as error:
        raise DataError(f"{row.place}: {field}: {error}") from error
    return tuple(ids)


def _given_ids(row: Row, tokenizer: Tokenizer | None, embedding_rows: int) -> Prompt:
    ids = read_ids(row, "prompt_ids", embedding_rows)
    identity = row.index if _id(row) is None else str(_id(row))
    text = "" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
    return Prompt(prompt_key(row.file_name, identity), row.file_name, row.index, text, ids, "", columns=row.columns)


def _given_text(row: Row, tokenizer: Tokenizer | None, settings: PromptSettings) -> Prompt:
    given = [name for name in ("prompt", "messages") if row.columns.get(name) is not None]
    if len(given) != 1:
        held = f"holds {', '.join(row.columns) or 'nothing'}" if not given else "holds both prompt and messages: keep one"
        raise DataError(f"{row.place}: a row needs one of {', '.join(FIELDS)}; this one {held}")
    if tokenizer is None:
        raise DataError(f"{row.place}: the model has no tokenizer files, so rows need prompt_ids (token ids) and not {given[0]}")
    columns = Columns(prompt=given[0], id=None if _id(row) is None else "id")
    return render_prompts([row], columns, tokenizer, settings)[0][0]


def _id(row: Row) -> str | int | None:
    identity = row.columns.get("id")
    if identity is not None and not isinstance(identity, (str, int)):
        raise DataError(f"{row.place}: the id is {identity!r:.80}; a text or a whole number is expected")
    return identity
