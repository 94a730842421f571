"""Plain text for pretraining: files and rows as token ids, cut into pieces of at most one length."""

from collections.abc import Iterator, Mapping, Sequence

from etils import epath

from tlt_jax.tasks.columns import match_columns, value_of
from tlt_jax.tasks.text_files import SUFFIXES, DataError, decoded, read_rows
from tlt_jax.tasks.tokenizer import Tokenizer, TokenizerError

TEXT_SUFFIXES = (".txt", ".md")


def read_pieces(path: str, tokenizer: Tokenizer, length: int, overrides: Mapping[str, str | None] | None = None) -> list[list[int]]:
    """Pieces of 2 to `length` tokens of every text of `path`: a text file, rows with a text column (see `text_files.read_rows`), or a directory of either.

    A text is what the tokenizer makes of it, begin token included where it adds one, and the end-of-text token; an empty one gives nothing.
    Raises DataError with the place.
    """
    pieces = [piece for place, text in _texts(path, overrides or {}) if text for piece in cut(_ids(text, place, tokenizer), length)]
    if not pieces:
        raise DataError(f"{path}: no text of at least two tokens")
    return pieces


def cut(ids: Sequence[int], length: int) -> list[list[int]]:
    """Consecutive pieces of at most `length` ids. Each starts with the last id of the one before, so that every id but a text's first is predicted once."""
    return [list(ids[start : start + length]) for start in range(0, len(ids) - 1, length - 1)]


def _ids(text: str, place: str, tokenizer: Tokenizer) -> list[int]:
    try:
        ids = tokenizer.encode(text, add_special_tokens=True)
    except (TokenizerError, UnicodeEncodeError, TypeError) as error:
        raise DataError(f"{place}: the text cannot be encoded: {error}") from error
    # Some tokenizers add the end of a text themselves.
    return ids if tokenizer.eos_id is None or ids[-1:] == [tokenizer.eos_id] else [*ids, tokenizer.eos_id]


def _texts(path: str, overrides: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """(place, text) of every text."""
    source = epath.Path(path).expanduser()
    files = sorted((entry for entry in source.iterdir() if entry.suffix in TEXT_SUFFIXES), key=lambda entry: entry.name) if source.is_dir() else []
    if files and any(entry.suffix in SUFFIXES for entry in source.iterdir()):
        raise DataError(f"{path}: the directory holds text files ({', '.join(TEXT_SUFFIXES)}) and files of rows ({', '.join(SUFFIXES)}): give one kind of them")
    if files or (source.suffix in TEXT_SUFFIXES and source.exists()):
        for file in files or [source]:
            yield str(file), decoded(file.read_bytes(), str(file))
        return
    rows = read_rows(path)
    columns = match_columns(rows, overrides, required=("text",))
    for row in rows:
        text = value_of(row, columns.text)
        if not isinstance(text, str):
            raise DataError(f"{row.place}: column {columns.text} holds {type(text).__name__}; text is expected")
        yield row.place, text
