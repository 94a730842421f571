"""A task read from the user's own file: rows, matched columns, rendered prompts. The verdict comes from a reward chosen in the config."""

import dataclasses
import functools
from collections.abc import Mapping

from tlt_jax.tasks.columns import Columns, conversation, match_columns, value_of
from tlt_jax.tasks.prompts import LengthReport, Prompt, PromptSettings, render_prompts
from tlt_jax.tasks.text_files import DataError, Row, read_rows
from tlt_jax.tasks.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class FileTask:
    """Prompts of `path`. `reward_kind` "math" and "exact" need an answer column, or conversations that end with the assistant; "user" does not."""

    path: str
    tokenizer: Tokenizer
    settings: PromptSettings
    overrides: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    reward_kind: str = "math"
    name: str = "prompts"
    scorer: None = None

    @functools.cached_property
    def _read(self) -> tuple[Columns, tuple[Prompt, ...], LengthReport]:
        rows = read_rows(self.path)
        columns = match_columns(rows, self.overrides)
        if self.reward_kind in ("math", "exact") and columns.answer is None and not _ends_with_assistant(rows[0], columns):
            match_columns(rows, self.overrides, required=("answer",))
        prompts, report = render_prompts(rows, columns, self.tokenizer, self.settings)
        return columns, tuple(prompts), report

    def prompts(self) -> tuple[Prompt, ...]:
        """All prompts; read and checked on the first call."""
        return self._read[1]

    def describe(self) -> str:
        """Two lines for the start of a run: matched columns, lengths."""
        columns, _, report = self._read
        return f"{columns.describe()}\n{report.describe()}"

    def worked_solution(self, prompt: Prompt) -> str:
        """The text of the completion column, or the assistant turn that ends the conversation."""
        columns = self._read[0]
        row = Row(prompt.row, prompt.columns, self.path, prompt.row)
        if columns.completion is not None and isinstance(text := value_of(row, columns.completion), str):
            return text
        asked = value_of(row, columns.prompt)
        turns = conversation(asked, row.place) if isinstance(asked, list) else []
        if turns and turns[-1]["role"] == "assistant":
            return turns[-1]["content"]
        raise DataError(
            f"{prompt.source}, row {prompt.row} (counted from 0): no worked answer to learn from; supervised warm-up needs a completion column or "
            "conversations that end with the assistant"
        )

    def wrong_solution(self, prompt: Prompt) -> str:
        """Raises DataError: a file brings its own pairs."""
        raise DataError(f"{self.name}: this task makes no wrong answers; give a file of pairs, stages.reward_model.path")


def _ends_with_assistant(row: Row, columns: Columns) -> bool:
    asked = value_of(row, columns.prompt)
    return isinstance(asked, list) and conversation(asked, row.place)[-1]["role"] == "assistant"
