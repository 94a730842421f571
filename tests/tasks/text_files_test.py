"""Reading rows: what an editor, Windows, a broken copy or parquet does to a file changes nothing, or is an error with file and line."""

import datetime
import decimal
import json
import sys

import pyarrow
import pytest
from pyarrow import parquet

from tlt_jax.tasks.text_files import DataError, read_rows

RECORDS = [
    {"messages": [{"role": "user", "content": "2+2"}], "answer": "4"},
    {"messages": [{"role": "user", "content": "3+3\u2028x", "name": "é"}], "answer": "6"},
    {"messages": [{"role": "user", "content": "1+1"}], "answer": "2"},
]
LINES = [json.dumps(record, ensure_ascii=False) for record in RECORDS]


def written(directory, name, content):
    path = directory / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def columns_of(path):
    return [row.columns for row in read_rows(path)]


def is_plain(value):
    if type(value) is dict:
        return all(is_plain(inner) for inner in value.values())
    return all(map(is_plain, value)) if type(value) is list else type(value) in (str, bool, int, float, type(None))


def test_a_byte_order_mark_changes_no_row_and_absent_keys_stay_absent(tmp_path):
    plain = written(tmp_path, "plain.jsonl", "\n".join(LINES))
    marked = written(tmp_path, "marked.jsonl", b"\xef\xbb\xbf" + "\n".join(LINES).encode())
    assert columns_of(plain) == columns_of(marked) == RECORDS


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_wide_encoding_is_an_error_that_says_how_to_convert(tmp_path, encoding):
    path = written(tmp_path, "wide.jsonl", "\n".join(LINES).encode(encoding))
    with pytest.raises(DataError, match=r"wide\.jsonl.*iconv"):
        read_rows(path)


def test_a_byte_that_is_not_utf8_names_its_line(tmp_path):
    path = written(tmp_path, "latin.jsonl", LINES[0].encode() + b'\n{"question": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: byte 0xe9"):
        read_rows(path)


def test_line_ends_and_blank_lines_of_a_hand_edited_file_change_no_row(tmp_path):
    path = written(tmp_path, "edited.jsonl", f"{LINES[0]}\r\n\r\n{LINES[1]}\r\n   \r\n\r\n{LINES[2]}")
    rows = read_rows(path)
    assert [row.columns for row in rows] == RECORDS
    assert [row.number for row in rows] == [1, 3, 6] and [row.index for row in rows] == [0, 1, 2]


def test_a_cut_last_record_names_file_and_physical_line(tmp_path):
    path = written(tmp_path, "cut.jsonl", f"{LINES[0]}\r\n\r\n{LINES[1]}\r\n \r\n{LINES[2][:20]}")
    with pytest.raises(DataError, match=r"cut\.jsonl:5: .*cut"):
        read_rows(path)


def test_a_broken_line_in_the_middle_is_not_called_cut(tmp_path):
    path = written(tmp_path, "broken.jsonl", f"{LINES[0]}\n{LINES[1][:-3]}\n{LINES[2]}\n")
    with pytest.raises(DataError, match=r"broken\.jsonl:2: ") as error:
        read_rows(path)
    assert "cut" not in str(error.value)


def test_a_line_that_is_no_object_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"list\.jsonl:2: .*not list"):
        read_rows(written(tmp_path, "list.jsonl", '{"prompt": "a"}\n[1]\n'))


def test_json_is_read_as_a_list_or_as_lines(tmp_path):
    as_list = written(tmp_path, "list.json", "\n " + json.dumps(RECORDS, indent=1))
    as_lines = written(tmp_path, "lines.json", "\n".join(LINES))
    assert columns_of(as_list) == columns_of(as_lines) == RECORDS


def test_a_cut_json_list_names_its_line(tmp_path):
    with pytest.raises(DataError, match=r"list\.json:\d+: not JSON"):
        read_rows(written(tmp_path, "list.json", json.dumps(RECORDS, indent=1)[:60]))


def test_parquet_gives_plain_values_through_all_levels(tmp_path):
    record = {"messages": [{"role": "user", "content": "hi"}], "tools": ["a", "b"], "enable_thinking": True, "extra": {"index": 3, "deep": [[1.5]]}}
    path = str(tmp_path / "rows.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([record, record]), path)
    assert columns_of(path) == [record, record]
    assert all(is_plain(columns) for columns in columns_of(path))


def test_parquet_decimals_and_dates_become_plain_too(tmp_path):
    path = str(tmp_path / "rows.parquet")
    parquet.write_table(pyarrow.table({"a": [decimal.Decimal("18.00"), decimal.Decimal("1.50")], "d": [datetime.date(2026, 1, 2)] * 2}), path)
    assert columns_of(path) == [{"a": 18, "d": "2026-01-02"}, {"a": 1.5, "d": "2026-01-02"}]
    assert all(is_plain(columns) for columns in columns_of(path))


def test_a_cut_parquet_file_is_an_error_that_names_it(tmp_path):
    whole = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a"] * 100}), whole)
    path = written(tmp_path, "cut.parquet", whole.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cut\.parquet"):
        read_rows(path)


def test_a_directory_gives_its_files_in_order_and_one_running_index(tmp_path):
    written(tmp_path, "b.jsonl", "\n".join(LINES[1:]))
    written(tmp_path, "a.jsonl", LINES[0])
    written(tmp_path, "README.md", "no data")
    rows = read_rows(str(tmp_path))
    assert [row.columns for row in rows] == RECORDS
    assert [row.index for row in rows] == [0, 1, 2]
    assert [row.place.rsplit("/")[-1] for row in rows] == ["a.jsonl:1", "b.jsonl:1", "b.jsonl:2"]


@pytest.mark.parametrize(("part", "kept"), [("1:3", [1, 2]), (":1", [0]), ("2:", [2]), ("-1:", [2])])
def test_a_slice_keeps_the_rows_and_their_index(tmp_path, part, kept):
    path = written(tmp_path, "rows.jsonl", "\n".join(LINES))
    assert [row.index for row in read_rows(f"{path}@[{part}]")] == kept


def test_an_empty_slice_an_empty_file_and_an_empty_directory_are_errors(tmp_path):
    path = written(tmp_path, "rows.jsonl", "\n".join(LINES))
    empty = written(tmp_path, "empty.jsonl", "\n\n")
    (tmp_path / "folder").mkdir()
    for bad, message in ((f"{path}@[7:9]", "keeps none of the 3"), (empty, "no rows"), (str(tmp_path / "folder"), "holds no")):
        with pytest.raises(DataError, match=message):
            read_rows(bad)


def test_a_missing_file_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="data/train.jsonl: no such file"):
        read_rows("data/train.jsonl")


def test_a_hub_id_without_the_datasets_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for identifier in ("openai/gsm8k", "hf://datasets/openai/gsm8k"):
        with pytest.raises(DataError, match="pip install datasets"):
            read_rows(identifier)


def test_a_hub_id_gives_config_and_split_to_the_datasets_package(tmp_path, monkeypatch):
    asked = []

    class Datasets:
        @staticmethod
        def load_dataset(name, config, split):
            asked.append((name, config, split))
            return RECORDS

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    assert columns_of("openai/gsm8k:main:test") == RECORDS
    read_rows("a/b:dev")
    read_rows("a/b")
    assert asked == [("openai/gsm8k", "main", "test"), ("a/b", None, "dev"), ("a/b", None, "train")]


def test_an_unknown_format_is_an_error(tmp_path):
    with pytest.raises(DataError, match="known formats"):
        read_rows(written(tmp_path, "rows.csv", "prompt\na\n"))
