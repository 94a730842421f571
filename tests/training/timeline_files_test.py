"""timeline.json.gz: a trace that json opens, that a kill cannot spoil and a resume does not double; and a step as a picture."""

import gzip
import json
import time
import zlib

import pytest
from etils import epath

from tlt_jax.scheduling.timeline import KINDS, Span, with_idle
from tlt_jax.training import timeline_files
from tlt_jax.training.timeline_files import TimelineFile, draw

SPANS = with_idle([Span(0, "rollout", 10.0, 11.5), Span(0, "update", 12.0, 14.0), Span(1, "speculative", 10.0, 12.1234567)], 2, 10.0, 14.0)


def write_steps(path, steps, stage="rl"):
    """A file that is not closed, as a killed run leaves it."""
    timeline = TimelineFile(epath.Path(path))
    for step in steps:
        timeline.write(stage, step, SPANS)
    return timeline


def members(path):
    """The sizes of the gzip members of a file, in bytes."""
    data, sizes = path.read_bytes(), []
    while data:
        member = zlib.decompressobj(wbits=31)
        member.decompress(data)
        sizes.append(len(data) - len(member.unused_data))
        data = member.unused_data
    return sizes


def events(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def steps_of(path):
    """The steps by their markers; every step must have all of its spans, once."""
    found = events(path)
    steps = [(event["args"]["stage"], event["args"]["step"]) for event in found if event["ph"] == "i"]
    spans = [(event["args"]["stage"], event["args"]["step"]) for event in found if event["ph"] == "X"]
    assert sorted(spans) == sorted(steps * len(SPANS))
    return steps


def test_a_closed_timeline_is_one_json_array_of_trace_events(tmp_path):
    path = tmp_path / "timeline.json.gz"
    timeline = write_steps(path, (1, 2))
    timeline.write("rl", 3, [Span(2, "idle", 20.0, 21.0)])
    timeline.close()
    found = events(path)
    names = {event["tid"]: event["args"]["name"] for event in found if event["ph"] == "M"}
    assert names == {0: "rollout slices", 1: "slice 0", 2: "slice 1", 3: "slice 2"} and {event["pid"] for event in found} == {1}
    assert len(names) == sum(event["ph"] == "M" for event in found)
    first = [event for event in found if event["ph"] == "X" and event["args"] == {"stage": "rl", "step": 1}]
    assert [(names[event["tid"]], event["name"]) for event in first] == [(f"slice {span.slice}", span.kind) for span in SPANS]
    assert [event["dur"] for event in first] == pytest.approx([1e6 * (span.end - span.start) for span in SPANS], abs=1)
    assert all(event["cat"] == "slice" and isinstance(event["ts"], int) for event in first)
    for event, following in zip(first, first[1:], strict=False):  # a viewer drops events that overlap, be it by a microsecond
        assert event["tid"] != following["tid"] or event["ts"] + event["dur"] == following["ts"]
    marks = [(event["name"], event["ts"]) for event in found if event["ph"] == "i" and event["s"] == "p"]
    assert [name for name, _ in marks] == ["rl step 1", "rl step 2", "rl step 3"] and marks[0][1] == min(event["ts"] for event in first)


def test_a_closed_timeline_is_one_gzip_member_and_can_be_written_on(tmp_path):
    path = tmp_path / "timeline.json.gz"
    write_steps(path, range(1, 40)).close()
    again = TimelineFile(epath.Path(path))
    again.write("rl", 40, SPANS)
    assert len(members(path)) == 2
    again.close()
    again.close()
    assert len(members(path)) == 1
    assert steps_of(path) == [("rl", step) for step in range(1, 41)]


def test_without_its_end_it_is_an_array_but_for_the_bracket(tmp_path):
    path = tmp_path / "timeline.json.gz"
    timeline = write_steps(path, (1, 2))
    timeline.close()
    timeline.write("rl", 3, SPANS)
    text = gzip.decompress(path.read_bytes()).decode()
    assert {event["args"].get("step") for event in json.loads(text + "]")} == {None, 1, 2, 3}


def test_a_kill_at_any_byte_of_the_last_step_leaves_the_earlier_ones_and_a_resume_mends_the_file(tmp_path):
    path, cut = tmp_path / "timeline.json.gz", tmp_path / "cut.json.gz"
    write_steps(path, (1, 2, 3))
    whole = path.read_bytes()
    for size in range(sum(members(path)[:2]), len(whole)):
        cut.write_bytes(whole[:size])
        resumed = TimelineFile(epath.Path(cut))
        resumed.keep(lambda place: place["step"] <= 2)
        resumed.write("rl", 3, SPANS)
        resumed.close()
        assert steps_of(cut) == [("rl", 1), ("rl", 2), ("rl", 3)], size


def test_a_resumed_timeline_has_each_step_once(tmp_path):
    path = tmp_path / "timeline.json.gz"
    timeline = write_steps(path, (1, 2), stage="sft")
    for step in (1, 2, 3, 4):
        timeline.write("rl", step, SPANS)
    timeline.close()
    resumed = TimelineFile(epath.Path(path))
    resumed.keep(lambda place: place["stage"] == "sft" or place["step"] <= 2)
    resumed.write("rl", 3, SPANS)
    resumed.close()
    assert steps_of(path) == [("sft", 1), ("sft", 2), ("rl", 1), ("rl", 2), ("rl", 3)]
    assert sum(event["ph"] == "M" for event in events(path)) == 3


def test_a_resume_that_changes_nothing_leaves_the_file_as_it_was_byte_for_byte(tmp_path, monkeypatch):
    path = tmp_path / "timeline.json.gz"
    write_steps(path, (1, 2)).close()
    before = path.read_bytes()
    monkeypatch.setattr(time, "time", lambda: 1e9)
    resumed = TimelineFile(epath.Path(path))
    resumed.keep(lambda place: True)
    resumed.close()
    assert path.read_bytes() == before


def test_a_new_run_sets_the_old_timeline_aside(tmp_path):
    path = tmp_path / "timeline.json.gz"
    write_steps(path, (1, 2)).close()
    new = TimelineFile(epath.Path(path))
    new.set_aside()
    new.write("rl", 1, SPANS)
    new.close()
    assert steps_of(path) == [("rl", 1)] and steps_of(tmp_path / "timeline.json.gz.1") == [("rl", 1), ("rl", 2)]


@pytest.mark.parametrize(
    "content", [b"notes", gzip.compress(b"notes\n"), gzip.compress(b"[{}\n")[:-8] + b"\0" * 8], ids=["plain text", "zipped text", "wrong checksum"])
def test_a_file_that_is_no_timeline_is_named_and_left_alone(tmp_path, content):
    path = tmp_path / "timeline.json.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"timeline.json.gz: not a timeline .*; move the file away"):
        TimelineFile(epath.Path(path)).write("rl", 1, SPANS)
    assert path.read_bytes() == content


def test_a_step_without_spans_writes_and_draws_nothing(tmp_path):
    timeline = TimelineFile(epath.Path(tmp_path / "timeline.json.gz"))
    timeline.write("rl", 1, [])
    timeline.close()
    draw([], epath.Path(tmp_path / "timeline.png"), "rl step 1")
    assert not list(tmp_path.iterdir())


def test_the_picture_is_a_png_with_a_row_for_each_slice_and_a_colour_for_each_kind_that_occurs(tmp_path, monkeypatch):
    figures, write_png = [], timeline_files.write_png
    monkeypatch.setattr(timeline_files, "write_png", lambda figure, path: (figures.append(figure), write_png(figure, path)))
    path = tmp_path / "timeline.png"
    draw([*SPANS, Span(5, "compile", 11.0, 12.0)], epath.Path(path), "rl step 12")
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    assert axes.get_title() == "rl step 12" and axes.get_xlabel() == "seconds"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["slice 0", "slice 1", "slice 5"]
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["rollout", "speculative", "idle", "update", "compile"]
    bars = [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width(), group.get_label()) for group in axes.containers for bar in group]
    assert sorted(bars) == sorted((span.slice, span.start - 10, span.end - span.start, span.kind) for span in (*SPANS, Span(5, "compile", 11.0, 12.0)))
    assert len(set(timeline_files.COLOURS.values())) == len(KINDS)
