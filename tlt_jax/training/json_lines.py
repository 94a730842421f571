"""A file of JSON records, one a line, that survives a killed process: appended and flushed at once, cut back on resume.

Knows nothing of what the records mean.
"""

import json
from collections.abc import Callable

from etils import epath


class Journal:
    """A file that a run appends to."""

    def __init__(self, path: epath.Path):
        self._path = path

    def set_aside(self) -> None:
        """Renames a file that is there to the first free NAME.1, NAME.2, …"""
        if self._path.exists():
            number = 1
            while (old := self._path.parent / f"{self._path.name}.{number}").exists():
                number += 1
            self._path.rename(old)


class JsonLines(Journal):
    """One append-only file of JSON objects."""

    def __init__(self, path: epath.Path):
        super().__init__(path)
        self._file = None

    def write(self, record: dict) -> None:
        """Appends one record and flushes it."""
        if self._file is None:
            self._file = self._path.open("a")
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def read(self) -> list[dict]:
        """All records; a last line without its end (the process was killed while writing it) is left out, any other broken line raises ValueError."""
        if not self._path.exists():
            return []
        lines = self._path.read_text().split("\n")
        records = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{self._path}:{number}: not a JSON record ({error.msg}); mend or remove the line") from None
        return records

    def keep(self, wanted: Callable[[dict], bool]) -> None:
        """Rewrites the file with the records that `wanted` accepts, through a second file so that a kill loses nothing."""
        if not self._path.exists():
            return
        kept = [record for record in self.read() if wanted(record)]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept)
        if text != self._path.read_text():
            new = self._path.parent / f"{self._path.name}.new"
            new.write_text(text)
            new.replace(self._path)

    def close(self) -> None:
        """Closes the file; a later write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
