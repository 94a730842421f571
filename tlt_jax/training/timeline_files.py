"""The timeline of slices as files: timeline.json.gz for chrome://tracing and Perfetto, and one step as a PNG.

The file is a JSON array of trace events (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, JSON Array Format), gzipped. It
grows by a gzip member a step: members in a row are one gzip file (RFC 1952, section 2.2), and the format calls the closing "]" optional for tracers that may
be killed. Closing the file writes it anew as one member with its "]", because chrome://tracing is reported to show only the beginning of files that were
compressed piece by piece (catapult issue 4633). Perfetto's gzip reader takes several members, but none that a kill cut short: a resume mends that.
"""

import gzip
import io
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

from etils import epath
from matplotlib.figure import Figure

from tlt_jax.scheduling.timeline import KINDS, Span
from tlt_jax.training.curves import write_png
from tlt_jax.training.json_lines import Journal

# Of Okabe and Ito, told apart by colour-blind people too; idle is what is not there.
COLOURS = dict(zip(KINDS, ("#56B4E9", "#0072B2", "#009E73", "#E69F00", "#DDDDDD", "#D55E00", "#CC79A7", "#000000"), strict=True))
CHUNK = 2**16
GZIP = 31  # zlib's wbits for a gzip member
PROCESS = 1  # of the trace; Perfetto takes process 0 and thread 0 for the kernel's


class TimelineFile(Journal):
    """One growing timeline.json.gz: each line of it is "[" or "," and an event. Times are the wall clock's, so that a resumed run goes on behind itself."""

    def __init__(self, path: epath.Path):
        super().__init__(path)
        self._epoch = time.time() - time.monotonic()
        self._named: set[int] | None = None  # threads whose names stand in the file; None: not opened

    def write(self, stage: str, step: int, spans: Sequence[Span]) -> None:
        """Appends a step's spans, which must not overlap on a slice."""
        if not spans:
            return
        if self._named is None:
            self.keep(lambda place: True)
        place = {"stage": stage, "step": step}
        names = {0: ("process_name", "rollout slices")} | {one.slice + 1: ("thread_name", f"slice {one.slice}") for one in spans}
        events = [
            {"ph": "M", "name": name, "pid": PROCESS, "tid": tid, "args": {"name": value}} for tid, (name, value) in names.items() if tid not in self._named]
        first = min(spans, key=lambda span: span.start)
        events.append({"ph": "i", "s": "p", "name": f"{stage} step {step}", "cat": "step", "pid": PROCESS, "tid": first.slice + 1,
                       "ts": self._microseconds(first.start), "args": place})
        for one in spans:
            start, end = self._microseconds(one.start), self._microseconds(one.end)  # rounded alike, so that neighbours still do not overlap
            events.append({"ph": "X", "name": one.kind, "cat": "slice", "pid": PROCESS, "tid": one.slice + 1, "ts": start, "dur": end - start, "args": place})
        with self._path.open("ab") as file:
            file.write(gzip.compress("".join(map(self._line, events)).encode()))

    def keep(self, wanted: Callable[[dict], bool]) -> None:
        """Rewrites the file with the steps that `wanted`, given {"stage": …, "step": …}, accepts; through a second file so that a kill loses nothing.

        Raises ValueError for a file that is no timeline.
        """
        self._rewrite(wanted, "")

    def close(self) -> None:
        """Ends the array, in one gzip member; a later write opens it again."""
        if self._named:
            self._rewrite(lambda place: True, "]\n")
        self._named = None

    def _rewrite(self, wanted: Callable[[dict], bool], end: str) -> None:
        self._named = set()
        if not self._path.exists():
            return
        new = self._path.parent / f"{self._path.name}.new"
        # Without a time in it, a file whose steps stay is the same file.
        with new.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as member, io.TextIOWrapper(member, encoding="utf-8") as text:
            for event in _events(self._path):
                if event["ph"] == "M" or wanted(event["args"]):
                    text.write(self._line(event))
            text.write(end)
        new.replace(self._path)

    def _line(self, event: dict) -> str:
        opening = "," if self._named else "["  # the first event of a file is a name
        if event["ph"] == "M":
            self._named.add(event["tid"])
        return f"{opening}{json.dumps(event)}\n"

    def _microseconds(self, moment: float) -> int:
        return round(1e6 * (self._epoch + moment))


def _events(path: epath.Path) -> Iterator[dict]:
    """The events of a file, up to the last whole line if a kill cut it short. Raises ValueError for one that is broken otherwise."""
    member, left, line = zlib.decompressobj(wbits=GZIP), b"", b""
    try:
        with path.open("rb") as file:
            while chunk := left or file.read(CHUNK):
                *lines, line = (line + member.decompress(chunk)).split(b"\n")
                yield from (json.loads(whole[1:]) for whole in lines if whole != b"]")
                left = member.unused_data
                if member.eof:
                    member = zlib.decompressobj(wbits=GZIP)
    except (zlib.error, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a timeline that this program wrote ({error}); move the file away") from None


def draw(spans: Sequence[Span], path: epath.Path, title: str) -> None:
    """Spans as a PNG: a row for each slice, seconds since the first span, a colour for each kind; no span at all draws nothing."""
    if not spans:
        return
    slices, begin = sorted({span.slice for span in spans}), min(span.start for span in spans)
    figure = Figure(figsize=(12, 1.5 + 0.4 * len(slices)), layout="constrained")
    axes = figure.subplots()
    for kind, colour in COLOURS.items():
        own = [span for span in spans if span.kind == kind]
        if own:
            axes.barh([span.slice for span in own], [span.end - span.start for span in own], left=[span.start - begin for span in own],
                      color=colour, label=kind)
    axes.set(title=title, xlabel="seconds")
    axes.set_yticks(slices, labels=[f"slice {number}" for number in slices])
    axes.invert_yaxis()
    axes.margins(x=0)
    figure.legend(loc="outside right upper")
    write_png(figure, path)
