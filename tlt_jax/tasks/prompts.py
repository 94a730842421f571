"""Prompts as token ids, the protocol of a task, and the resumable order in which prompts are drawn.

`Prompt.prompt_ids` are the only ids of a prompt: rollout and update both take them, so a cut prompt is cut once, here.
"""

import dataclasses
import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol

import numpy as np

from tlt_jax.tasks.columns import Columns, conversation, difficulty_value, normalized_answer, value_of
from tlt_jax.tasks.text_files import DataError, Row
from tlt_jax.tasks.tokenizer import Tokenizer, TokenizerError

_SHOWN = 5  # rows named in a message


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt. `key` is its identity in the sampling noise: it depends on the data source and the row's id (or index), never on the text,
    the place in a batch or the file's folder. `columns` are all columns of the row, for reward functions."""

    key: int
    source: str
    row: int
    text: str
    prompt_ids: tuple[int, ...]
    answer: str
    difficulty: float | None = None
    columns: dict = dataclasses.field(default_factory=dict, hash=False, repr=False)


class Task(Protocol):
    """Where prompts and verdicts come from. `reward_kind`: "math" (math-verify), "exact" (equal text) or "task" (`scorer` decides)."""

    name: str
    reward_kind: str
    scorer: Callable[..., float] | None  # score(prompt, response, answer, metadata) -> float; picklable; None unless reward_kind is "task"

    def prompts(self) -> Sequence[Prompt]:
        """All prompts, in the order of the data; the same list on every call."""

    def describe(self) -> str:
        """Lines for the start of a run: which columns were matched, what the length limit did."""

    def worked_solution(self, prompt: Prompt) -> str:
        """A response to learn from in supervised warm-up. Raises DataError when the task has none."""

    def wrong_solution(self, prompt: Prompt) -> str:
        """A wrong response beside the worked one, for a reward model to learn from. Raises DataError when the task makes none."""


@dataclasses.dataclass(frozen=True)
class PromptSettings:
    """How rows become prompts. `instruction` with `{question}` is a format string (`{{}}` prints braces), else text added on a line of its own."""

    max_prompt_tokens: int | None = None
    over_long: Literal["error", "drop", "truncate_left"] = "error"
    system_prompt: str | None = None  # put before conversations that bring no system message of their own
    instruction: str = ""
    chat: bool | Literal["auto"] = "auto"  # auto: the chat template when there is one, or when the data are conversations
    enable_thinking: bool | None = None  # None: the row's own `enable_thinking` column, else the template's default

    def __post_init__(self):
        if self.over_long not in ("error", "drop", "truncate_left"):
            raise ValueError(f"over_long={self.over_long!r} must be error, drop or truncate_left")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens={self.max_prompt_tokens} must be at least 1")
        if "{question}" in self.instruction:
            try:
                self.instruction.format(question="")
            except (KeyError, IndexError, ValueError) as error:
                raise ValueError(f"instruction {self.instruction!r}: {error}; only {{question}} may stand in braces, write {{{{}}}} for {{}}") from error


@dataclasses.dataclass(frozen=True)
class LengthReport:
    """What the length limit did. `longest` is in tokens, before dropping or cutting; `with_tools` rows offer tools to the policy."""

    rows: int
    kept: int
    dropped: int
    truncated: int
    longest: int
    limit: int | None
    with_tools: int = 0

    def describe(self) -> str:
        """One line for the start of a run."""
        limit = "no limit" if self.limit is None else f"limit {self.limit}"
        tools = f"; {self.with_tools} rows offer tools: tool calls are not run" if self.with_tools else ""
        kept = f"prompts: {self.kept} of {self.rows} rows, longest {self.longest} tokens ({limit})"
        return f"{kept}, {self.dropped} dropped, {self.truncated} cut on the left{tools}"


def prompt_key(source: str, identity: str | int) -> int:
    """Stable 64-bit hash (blake2b) of a data source and an id (text) or row index (int)."""
    kind = "row" if isinstance(identity, int) else "id"
    return int.from_bytes(hashlib.blake2b(f"{source}\0{kind}\0{identity}".encode(), digest_size=8).digest(), "big")


def render_prompts(rows: Sequence[Row], columns: Columns, tokenizer: Tokenizer, settings: PromptSettings) -> tuple[list[Prompt], LengthReport]:
    """Render and encode every row, in order, and apply the length limit to the rendered ids (generation prompt counted).

    Raises DataError with the rows' places: a row without its column, a bad answer, two rows of one key, prompts above the limit under
    `over_long="error"`, or no prompt left.
    """
    prompts = [_prompt(row, columns, tokenizer, settings) for row in rows]
    _refuse_duplicates(rows, prompts, columns)
    limit, lengths = settings.max_prompt_tokens, [len(prompt.prompt_ids) for prompt in prompts]
    over = [number for number, length in enumerate(lengths) if limit is not None and length > limit]
    if over and (settings.over_long == "error" or (settings.over_long == "drop" and len(over) == len(prompts))):
        shown = ", ".join(f"{rows[number].place} ({lengths[number]})" for number in over[:_SHOWN])
        raise DataError(
            f"{len(over)} of {len(prompts)} prompts are longer than data.max_prompt_tokens={limit} tokens: {shown}"
            f"{', …' if len(over) > _SHOWN else ''}; raise the limit or set data.over_long to drop or truncate_left"
        )
    if not prompts:
        raise DataError("no rows, so no prompts")
    with_tools = sum(bool(row.columns.get("tools")) for row in rows)
    report = LengthReport(len(prompts), len(prompts), 0, 0, max(lengths), limit, with_tools)
    if over and settings.over_long == "drop":
        away = set(over)
        prompts = [prompt for number, prompt in enumerate(prompts) if number not in away]
        report = dataclasses.replace(report, kept=len(prompts), dropped=len(over))
    elif over:
        for number in over:
            prompts[number] = _cut(prompts[number], tokenizer, settings, rows[number].place)
        report = dataclasses.replace(report, truncated=len(over))
    return prompts, report


def _prompt(row: Row, columns: Columns, tokenizer: Tokenizer, settings: PromptSettings) -> Prompt:
    source = str(value_of(row, columns.source)) if columns.source else row.file_name
    identity = row.index
    if columns.id:
        identity = value_of(row, columns.id)
        if identity is None or isinstance(identity, (dict, list, float)):
            raise DataError(f"{row.place}: the id in column {columns.id} is {identity!r}; give each row a text or integer, or set data.columns.id=row_index")
        identity = str(identity)
    asked, last_turn = _asked(row, columns)
    answer = last_turn if columns.answer is None else value_of(row, columns.answer)
    no_answer = columns.answer is None and last_turn is None
    text, chat = _rendered(asked, row, tokenizer, settings)
    try:
        ids = tokenizer.encode(text, add_special_tokens=not chat)
    except (TokenizerError, UnicodeEncodeError, TypeError) as error:
        raise DataError(f"{row.place}: the prompt cannot be encoded: {error}") from error
    if not ids:
        raise DataError(f"{row.place}: the prompt is empty")
    difficulty = difficulty_value(value_of(row, columns.difficulty)) if columns.difficulty else None
    reference = "" if no_answer else normalized_answer(answer, row.place)
    return Prompt(prompt_key(source, identity), source, row.index, text, tuple(ids), reference, difficulty, row.columns)


def _asked(row: Row, columns: Columns) -> tuple[str | list[dict], str | None]:
    """The question (text or messages) and the assistant turn that a conversation ends with, which is its answer and no part of the prompt."""
    if columns.prompt is None:
        raise DataError(f"{row.place}: no prompt column")
    value = value_of(row, columns.prompt)
    if isinstance(value, str):
        return with_input(value, row, columns), None
    if not isinstance(value, list):
        raise DataError(f"{row.place}: the prompt in column {columns.prompt} is {type(value).__name__}; text or a list of messages is expected")
    messages = conversation(value, row.place)
    last_turn = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not messages:
        raise DataError(f"{row.place}: the conversation holds no question")
    return messages, last_turn


def _rendered(asked: str | list[dict], row: Row, tokenizer: Tokenizer, settings: PromptSettings) -> tuple[str, bool]:
    """Text of the prompt, and whether the chat template printed it (then it brings its own special tokens)."""
    spoken = isinstance(asked, list)
    chat = (spoken or tokenizer.has_chat_template) if settings.chat == "auto" else settings.chat
    if not chat:
        if spoken or settings.system_prompt or row.columns.get("tools"):
            reason = "the data are conversations" if spoken else "a system prompt or tools need a chat template"
            raise DataError(f"{row.place}: {reason}, and the prompt is rendered as plain text: set model.chat_template")
        return instructed(asked, settings), False
    messages = asked if spoken else [{"role": "user", "content": asked}]
    last_user = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if last_user is not None:
        last_user["content"] = instructed(last_user["content"], settings)
    if settings.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": settings.system_prompt})
    thinking, tools = thinking_of(row, settings), _tools(row)
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=True, enable_thinking=thinking, tools=tools), True
    except TokenizerError as error:
        raise DataError(f"{row.place}: {error}") from error


def with_input(question: str, row: Row, columns: Columns) -> str:
    """The question with the row's `input` column, which stands beside an `instruction` column and belongs to it."""
    more = row.columns.get("input") if columns.prompt == "instruction" else None
    return f"{question}\n\n{more}" if isinstance(more, str) and more else question


def instructed(question: str, settings: PromptSettings) -> str:
    """The question with the instruction."""
    if "{question}" in settings.instruction:
        return settings.instruction.format(question=question)
    return f"{question}\n{settings.instruction}" if settings.instruction else question


def thinking_of(row: Row, settings: PromptSettings) -> bool | None:
    """Whether the chat template lets the assistant think: the setting, else the row's own column, else None."""
    own = row.columns.get("enable_thinking")
    if settings.enable_thinking is None and not (own is None or isinstance(own, bool)):
        raise DataError(f"{row.place}: enable_thinking is {own!r}; true or false is expected")
    return own if settings.enable_thinking is None else settings.enable_thinking


def _tools(row: Row) -> list[dict] | None:
    """The row's `tools` for the chat template: JSON schemas, as objects or as text (parquet), or bare names. Calls are printed, never run."""
    offered = row.columns.get("tools")
    if not offered:
        return None
    if not isinstance(offered, list) or not all(isinstance(tool, (str, dict)) for tool in offered):
        raise DataError(f"{row.place}: tools must be a list of JSON schemas or names, not {offered!r:.80}")
    return [_tool(tool, row.place) if isinstance(tool, str) else tool for tool in offered]


def _tool(tool: str, place: str) -> dict:
    if not tool.lstrip().startswith("{"):
        return {"type": "function", "function": {"name": tool}}
    try:
        return json.loads(tool)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: a tool is not a JSON schema ({error.msg}): {tool[:80]}") from error


def _cut(prompt: Prompt, tokenizer: Tokenizer, settings: PromptSettings, place: str) -> Prompt:
    """The last `max_prompt_tokens` tokens: only the earliest go, so the generation prompt at the end stays."""
    ids = prompt.prompt_ids[-settings.max_prompt_tokens :]
    if tokenizer.has_chat_template and settings.chat is not False:
        opening = tokenizer.encode(tokenizer.generation_prompt(settings.enable_thinking), add_special_tokens=False)
        if len(opening) >= len(ids):
            raise DataError(f"{place}: data.max_prompt_tokens={len(ids)} leaves no room beside the generation prompt of {len(opening)} tokens")
    return dataclasses.replace(prompt, prompt_ids=ids, text=tokenizer.decode(ids, skip_special_tokens=False))


def _refuse_duplicates(rows: Sequence[Row], prompts: Sequence[Prompt], columns: Columns) -> None:
    """Two prompts of one key would be given the same noise and be taken for one group."""
    seen: dict[int, Row] = {}
    for row, prompt in zip(rows, prompts, strict=True):
        first = seen.setdefault(prompt.key, row)
        if first is not row:
            what = f"id {value_of(row, columns.id)!r} (column {columns.id})" if columns.id else "row index"
            raise DataError(
                f"{first.place} and {row.place} have the same {what} in source {prompt.source!r}: make the ids unique, or set data.columns.id=row_index"
            )


class PromptOrder:
    """Which prompts come next. Every epoch gives each index once, shuffled by (seed, epoch); the state is exact and JSON-able.

    `draw` never gives an index twice in one call (two equal keys in one step would get the same noise): at an epoch's end, indices already
    drawn are kept back for the next call.
    """

    def __init__(self, count: int, seed: int, *, shuffle: bool = True):
        if count < 1:
            raise ValueError("an order needs at least one prompt")
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._epoch, self._position = 0, 0
        self._waiting: deque[int] = deque()
        self._order = self._epoch_order()

    @property
    def epoch(self) -> int:
        """The epoch (from 0) of the prompt drawn last; a finished epoch counts until the next draw."""
        return self._epoch

    def _epoch_order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._count))
        return np.random.default_rng((self._seed, self._epoch)).permutation(self._count).tolist()

    def draw(self, count: int, *, avoid: Collection[int] = ()) -> list[int]:
        """The next `count` indices, none twice, none of `avoid` (those already drawn in this step)."""
        taken = set(avoid)
        if count + len(taken) > self._count:
            raise ValueError(f"{count + len(taken)} different prompts are asked for in one step and there are {self._count}: lower batch.prompts_per_step")
        drawn, kept_back, waiting = [], [], len(self._waiting)
        while len(drawn) < count:
            index = self._waiting.popleft() if waiting > 0 else self._next()
            waiting -= 1
            (kept_back if index in taken else drawn).append(index)
            taken.add(index)
        self._waiting.extendleft(reversed(kept_back))
        return drawn

    def _next(self) -> int:
        if self._position == self._count:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        self._position += 1
        return self._order[self._position - 1]

    def put_back(self, indices: Sequence[int]) -> None:
        """Indices that were drawn and not trained on: they are drawn again first, after a restart too."""
        self._waiting.extendleft(int(index) for index in reversed(indices))

    def state(self) -> dict:
        """What `restore` needs."""
        fixed = {"count": self._count, "seed": self._seed, "shuffle": self._shuffle}
        return fixed | {"epoch": self._epoch, "position": self._position, "waiting": list(self._waiting)}

    def restore(self, state: dict) -> None:
        """Continue where `state` was taken. Raises DataError when the data size, the seed or the shuffling changed since."""
        if "count" not in state:
            raise DataError("the prompt order was saved with a curriculum: resume with its settings (curriculum.*), or use another --workdir")
        for name, mine in (("count", self._count), ("seed", self._seed), ("shuffle", self._shuffle)):
            if state[name] != mine:
                raise DataError(f"the prompt order was saved with {name}={state[name]} and now {name}={mine}: resume with the same data and seed")
        self._epoch, self._position = state["epoch"], state["position"]
        self._waiting = deque(state["waiting"])
        self._order = self._epoch_order()
