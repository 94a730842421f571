"""What supervised stages learn from, read from files: answers with a mask of what the assistant says, and pairs of a better and a worse answer.

Conversations are rendered once, as a whole, and only the assistant's turns count (see `chat_spans`). Where the tokenizer has no chat template, or the rows are
plain text and no conversations, an answer is prompt + answer + end-of-text token. What follows the last token of the assistant (a line feed) is cut off.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from tlt_jax.tasks.columns import Columns, conversation, match_columns, value_of
from tlt_jax.tasks.prompts import PromptSettings, instructed, thinking_of, with_input
from tlt_jax.tasks.text_files import DataError, Row, read_rows
from tlt_jax.tasks.tokenizer import Tokenizer, TokenizerError


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """Token ids of a whole conversation and, for each, whether the assistant says it."""

    place: str
    ids: tuple[int, ...]
    mask: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Preference:
    """Two answers to one prompt."""

    better: Demonstration
    worse: Demonstration


@dataclasses.dataclass(frozen=True)
class _Reader:
    tokenizer: Tokenizer
    settings: PromptSettings

    def demonstration(self, row: Row, asked: str | list[dict], answer: str | None) -> Demonstration:
        """The row's prompt with `answer` after it; None: the conversation ends with the answer itself."""
        spoken = isinstance(asked, list)
        if not spoken and not self.tokenizer.has_chat_template:
            return self._plain(row, asked, answer)
        messages = [dict(message) for message in asked] if spoken else [{"role": "user", "content": asked}]
        messages += [] if answer is None else [{"role": "assistant", "content": answer}]
        if not messages or messages[-1]["role"] != "assistant":
            raise DataError(f"{row.place}: the conversation does not end with the assistant, so there is nothing to learn")
        last_user = next((message for message in reversed(messages) if message["role"] == "user"), None)
        if last_user is not None:
            last_user["content"] = instructed(last_user["content"], self.settings)
        if self.settings.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.settings.system_prompt})
        try:
            ids, mask = self.tokenizer.assistant_mask(messages, enable_thinking=thinking_of(row, self.settings))
        except (TokenizerError, TypeError) as error:
            raise DataError(f"{row.place}: the row cannot be encoded: {error}") from error
        end = len(mask) - mask[::-1].index(1) if 1 in mask else 0
        # A template that ends no turn with a token: the answer ends as a policy's must.
        ends = [self.tokenizer.eos_id] if end and self.tokenizer.turn_end_id is None and self.tokenizer.eos_id not in (None, ids[end - 1]) else []
        return self._checked(row, ids[:end] + ends, mask[:end] + [1] * len(ends))

    def _plain(self, row: Row, prompt: str, answer: str | None) -> Demonstration:
        if self.settings.system_prompt:
            raise DataError(f"{row.place}: a system prompt needs a chat template: set model.chat_template")
        try:
            asked = self.tokenizer.encode(instructed(prompt, self.settings), add_special_tokens=True)
            said = self.tokenizer.encode(answer or "", add_special_tokens=False)
        except (TokenizerError, UnicodeEncodeError, TypeError) as error:
            raise DataError(f"{row.place}: the row cannot be encoded: {error}") from error
        # A tokenizer that ends every text with its end token must not end the prompt with it.
        asked = asked[:-1] if asked[-1:] == [self.tokenizer.eos_id] else asked
        said = [*said, *([] if self.tokenizer.eos_id is None else [self.tokenizer.eos_id])]
        return self._checked(row, [*asked, *said], [0] * len(asked) + [1] * len(said))

    def _checked(self, row: Row, ids: Sequence[int], mask: Sequence[int]) -> Demonstration:
        if 1 not in mask:
            raise DataError(f"{row.place}: the assistant says nothing")
        if mask[0]:
            raise DataError(f"{row.place}: nothing stands before the assistant's first word, so it cannot be predicted: is the prompt empty?")
        return Demonstration(row.place, tuple(ids), tuple(mask))


def read_demonstrations(
    path: str, tokenizer: Tokenizer, settings: PromptSettings, overrides: Mapping[str, str | None] | None = None
) -> list[Demonstration]:
    """One for each row: a conversation that ends with the assistant, or a prompt and a completion column. Raises DataError with the row's place."""
    rows = read_rows(path)
    columns, reader = match_columns(rows, overrides), _Reader(tokenizer, settings)
    return [reader.demonstration(row, *_asked_and_said(row, columns)) for row in rows]


def _asked_and_said(row: Row, columns: Columns) -> tuple[str | list[dict], str | None]:
    asked = _asked(row, columns)
    if isinstance(asked, list) and asked[-1]["role"] == "assistant":
        return asked, None
    if columns.completion is None:
        raise DataError(f"{row.place}: neither a completion column nor a conversation that ends with the assistant, so there is nothing to learn")
    return _answered(row, asked, columns.completion)


def _asked(row: Row, columns: Columns) -> str | list[dict]:
    asked = value_of(row, columns.prompt)
    if isinstance(asked, list):
        return conversation(asked, row.place)
    if isinstance(asked, str):
        return with_input(asked, row, columns)
    raise DataError(f"{row.place}: the prompt in column {columns.prompt} is {type(asked).__name__}; text or a list of messages is expected")


def _answered(row: Row, asked: str | list[dict], column: str) -> tuple[str | list[dict], str | None]:
    """The prompt and an answer column's text, or one conversation where the column holds messages: they follow the prompt when the assistant begins, else
    they are the whole conversation."""
    said = value_of(row, column)
    if isinstance(said, str):
        return asked, said
    if not isinstance(said, list):
        raise DataError(f"{row.place}: column {column} holds {type(said).__name__}; text or messages are expected")
    turns, question = conversation(said, row.place), [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if turns[-1]["role"] != "assistant":
        raise DataError(f"{row.place}: the messages in column {column} do not end with the assistant")
    if isinstance(asked, str) and turns[-1].keys() == {"role", "content"} and turns[:-1] in ([], question):
        return asked, turns[-1]["content"]  # no more than a text says, so it needs no chat template
    return turns if turns[0]["role"] != "assistant" else [*question, *turns], None


def read_preferences(path: str, tokenizer: Tokenizer, settings: PromptSettings, overrides: Mapping[str, str | None] | None = None) -> list[Preference]:
    """One for each row with the columns `chosen` and `rejected`: text beside a prompt column, or messages, with the prompt in them where there is no such
    column. Raises DataError with the row's place, also where the two answers are equal."""
    rows = read_rows(path)
    columns, reader = match_columns(rows, overrides, required=("chosen", "rejected")), _Reader(tokenizer, settings)
    return [_preference(row, columns, reader) for row in rows]


def _preference(row: Row, columns: Columns, reader: _Reader) -> Preference:
    if columns.prompt is not None:
        asked = _asked(row, columns)
        better, worse = (reader.demonstration(row, *_answered(row, asked, column)) for column in (columns.chosen, columns.rejected))
    else:
        both = [value_of(row, column) for column in (columns.chosen, columns.rejected)]
        if not all(isinstance(one, list) for one in both):
            raise DataError(f"{row.place}: {columns.chosen} and {columns.rejected} are texts, and there is no prompt column: name it with data.columns.prompt")
        better, worse = (reader.demonstration(row, conversation(one, row.place), None) for one in both)
    if better.ids == worse.ids:
        raise DataError(f"{row.place}: {columns.chosen} and {columns.rejected} are the same text, so neither is better")
    return Preference(better, worse)
