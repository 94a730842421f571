"""Plain text for pretraining: every token of every text is predicted once, whatever it is read from, and what cannot be read is named with its place."""

import json

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from tlt_jax.tasks.plain_texts import cut, read_pieces
from tlt_jax.tasks.text_files import DataError

TEXTS = ["1+2=?", "#### 3\n", "12345678901234567890"]


def joined(pieces):
    """The texts' ids again: pieces of one text share the id at which they were cut."""
    return [token for number, piece in enumerate(pieces) for token in (piece if number == 0 else piece[1:])]


def jsonl(path, records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def whole(tokenizer, text):
    """The ids of a text with what stands at its ends, once each."""
    begin = [tokenizer.bos_id] if tokenizer.encode("", add_special_tokens=True) else []
    return [*begin, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_id]


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(2, 20))
def test_every_id_but_the_first_is_predicted_once_and_in_order(ids, length):
    pieces = cut(ids, length)
    assert joined(pieces) == (ids if len(ids) > 1 else [])
    assert all(2 <= len(piece) <= length for piece in pieces)
    assert [piece[0] for piece in pieces[1:]] == [piece[-1] for piece in pieces[:-1]]
    assert all(len(piece) == length for piece in pieces[:-1])


@given(st.lists(st.text("0123456789+-\n #", max_size=30), min_size=1, max_size=6), st.integers(2, 12))
def test_no_token_of_a_file_of_rows_is_lost_or_doubled(characters, tmp_path_factory, texts, length):
    path = jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", [{"text": text} for text in [*texts, "1"]])
    pieces, expected = read_pieces(path, characters, length), [whole(characters, text) for text in [*texts, "1"] if text]
    assert [piece for ids in expected for piece in cut(ids, length)] == pieces
    assert sum(len(piece) - 1 for piece in pieces) == sum(len(ids) - 1 for ids in expected)


def test_text_files_lines_and_parquet_hold_the_same_texts(characters, tmp_path):
    expected = [whole(characters, text) for text in TEXTS]
    (tmp_path / "files").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "files" / f"{number}.{'md' if number else 'txt'}").write_text(text)
    parquet.write_table(pyarrow.table({"content": TEXTS}), tmp_path / "rows.parquet")
    rows = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    for path in (tmp_path / "files", tmp_path / "rows.parquet", rows):
        assert read_pieces(str(path), characters, 100) == expected
    assert read_pieces(str(tmp_path / "files" / "0.txt"), characters, 100) == expected[:1]


def test_a_text_begins_and_ends_once_whatever_it_holds_itself(characters, byte_tokenizer, tmp_path):
    rows = jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in ("1", "<bos>1", "1<eos>", "<bos>1<eos>")])
    assert read_pieces(rows, characters, 10) == [whole(characters, "1")] * 4
    plain = jsonl(tmp_path / "plain.jsonl", [{"text": "ab"}, {"text": "ab<|endoftext|>"}])
    assert read_pieces(plain, byte_tokenizer(), 10) == [whole(byte_tokenizer(), "ab")] * 2
    assert whole(byte_tokenizer(), "ab")[0] != byte_tokenizer().bos_id


def test_a_long_text_begins_and_ends_in_its_first_and_last_piece_only(characters, tmp_path):
    pieces = read_pieces(jsonl(tmp_path / "rows.jsonl", [{"text": "1" * 50}]), characters, 8)
    assert len(pieces) > 3 and joined(pieces) == whole(characters, "1" * 50)
    assert [piece.count(characters.bos_id) for piece in pieces] == [1] + [0] * (len(pieces) - 1)
    assert [piece.count(characters.eos_id) for piece in pieces] == [0] * (len(pieces) - 1) + [1]


def test_an_empty_text_gives_no_piece_with_any_tokenizer(characters, byte_tokenizer, tmp_path):
    rows = jsonl(tmp_path / "rows.jsonl", [{"text": ""}, {"text": "12"}, {"text": ""}])
    for tokenizer in (characters, byte_tokenizer()):
        assert read_pieces(rows, tokenizer, 10) == [whole(tokenizer, "12")]


@pytest.mark.parametrize(("name", "message"), [("empty.txt", "no text of at least two tokens"), ("empty.jsonl", "no rows")])
def test_an_empty_file_is_an_error_that_names_it(characters, byte_tokenizer, tmp_path, name, message):
    (tmp_path / name).write_text("")
    for tokenizer in (characters, byte_tokenizer()):
        with pytest.raises(DataError, match=f"{name}: {message}"):
            read_pieces(str(tmp_path / name), tokenizer, 10)


def test_rows_without_a_text_column_say_which_columns_there_are(characters, tmp_path):
    rows = jsonl(tmp_path / "rows.jsonl", [{"words": "1"}])
    with pytest.raises(DataError, match=r"rows\.jsonl: no column for the text; columns found: words"):
        read_pieces(rows, characters, 10)
    assert read_pieces(rows, characters, 10, {"text": "words"}) == [whole(characters, "1")]


@pytest.mark.parametrize(("second", "message"), [({"text": None}, "NoneType; text"), ({"text": 5}, "int; text"), ({"more": "1"}, "no column text")])
def test_a_row_without_a_text_is_named(characters, tmp_path, second, message):
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{message}"):
        read_pieces(jsonl(tmp_path / "rows.jsonl", [{"text": "1"}, second]), characters, 10)


@pytest.mark.parametrize("name", ["latin.txt", "latin.jsonl"])
def test_a_byte_that_is_not_utf8_is_named_with_its_line(characters, tmp_path, name):
    (tmp_path / name).write_bytes(b'{"text": "1"}\n{"text": "\xe9"}\n')
    with pytest.raises(DataError, match=rf"{name}:2: byte 0xe9 is not UTF-8"):
        read_pieces(str(tmp_path / name), characters, 10)


@pytest.mark.parametrize("text", ["1\ud800", "é"])
def test_a_row_that_the_tokenizer_cannot_encode_is_named(characters, tmp_path, text):
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the text cannot be encoded"):
        read_pieces(jsonl(tmp_path / "rows.jsonl", [{"text": "1"}, {"text": text}]), characters, 10)


def test_a_directory_of_texts_and_rows_is_refused(characters, tmp_path):
    (tmp_path / "a.txt").write_text("1")
    jsonl(tmp_path / "b.jsonl", [{"text": "2"}])
    with pytest.raises(DataError, match="text files .* and files of rows"):
        read_pieces(str(tmp_path), characters, 10)


def test_a_missing_text_file_is_named(characters, tmp_path):
    with pytest.raises(DataError, match="none.txt: no such file"):
        read_pieces(str(tmp_path / "none.txt"), characters, 10)
