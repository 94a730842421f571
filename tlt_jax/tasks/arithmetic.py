"""Generated arithmetic with a worked solution, for the quickstart: `47-8+5=?` -> `47-8=39`, `39+5=44`, `#### 44`, a line each.

A problem is a number up to 99 and a chain of 1 to `max_steps` operations with one-digit numbers; every value on the way is 0 to 99. Multiplication comes
first if at all, so that working from the left is also the rule of school. The number of steps has a power-law tail, and with it the length of a right response.

A problem depends on (seed, split, index) only. A text belongs to one split for every seed (by its hash), so held-out problems are
in no training set, whatever its seed or size; their indices start at HELD_OUT_FIRST.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import random
import re
from collections.abc import Callable
from typing import Literal

from tlt_jax.tasks.columns import Columns
from tlt_jax.tasks.prompts import LengthReport, Prompt, PromptSettings, render_prompts
from tlt_jax.tasks.text_files import DataError, Row
from tlt_jax.tasks.tokenizer import Tokenizer

ALPHABET = "0123456789+-*=?#\n "
LARGEST = 99
HELD_OUT_FIRST = 1_000_000_000
_HELD_OUT_SHARE = 10  # one text in ten is held out
_MULTIPLIERS = (2, 3)
_KEYS = 1 << 20
_QUESTION = re.compile(r"(\d+)((?:[-+*]\d+)+)=\?")
_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclasses.dataclass(frozen=True)
class ArithmeticSettings:
    """`n` steps are drawn with weight `n ** -tail_exponent`: smaller = longer tail. The first number is 1 to `start_max`, operands are 1 to `operand_max`.

    A small `start_max` leaves so few short problems that a model learns them by heart and fails on the held-out ones.
    """

    max_steps: int = 6
    tail_exponent: float = 1.5
    start_max: int = 9
    operand_max: int = 9
    multiply_share: float = 0.2  # share of the problems that start with a multiplication

    def __post_init__(self):
        numbers = 1 <= self.start_max <= LARGEST and 1 <= self.operand_max <= 9
        if self.max_steps < 1 or not numbers or self.tail_exponent < 0 or not 0 <= self.multiply_share <= 1:
            raise ValueError(f"{self}: max_steps >= 1, start_max 1 to 99, operand_max 1 to 9, tail_exponent >= 0 and multiply_share 0 to 1 are expected")


def problem(settings: ArithmeticSettings, seed: int, index: int) -> str:
    """The question with this index; indices from HELD_OUT_FIRST on are held-out ones."""
    draw = random.Random(f"{seed} {index}").random  # the one generator whose numbers Python promises to keep
    held_out = index >= HELD_OUT_FIRST
    while True:
        text = _chain(settings, draw)
        if is_held_out(text) == held_out:
            return text


def is_held_out(question: str) -> bool:
    """Which split a question's text belongs to, for every seed."""
    return hashlib.blake2b(question.encode(), digest_size=4).digest()[0] % _HELD_OUT_SHARE == 0


def _chain(settings: ArithmeticSettings, draw: Callable[[], float]) -> str:
    """A question from numbers in [0, 1), drawn one after the other."""
    steps = 1 + bisect.bisect(_step_shares(settings), draw())
    first, multiplies = draw(), draw() < settings.multiply_share
    value = 1 + int(first * (settings.operand_max if multiplies else settings.start_max))
    text = str(value)
    for step in range(steps):
        if step == 0 and multiplies:
            sign, operand = "*", _MULTIPLIERS[int(draw() * len(_MULTIPLIERS))]
        else:
            operand = 1 + int(draw() * settings.operand_max)
            sign = "+-"[int(draw() * 2)]
            sign = "+" if value < operand else "-" if value + operand > LARGEST else sign
        value = _OPERATIONS[sign](value, operand)
        text += f"{sign}{operand}"
    return f"{text}=?"


@functools.lru_cache(maxsize=8)
def _step_shares(settings: ArithmeticSettings) -> tuple[float, ...]:
    """Share of the problems with at most 1, 2, … max_steps − 1 steps."""
    weights = [steps**-settings.tail_exponent for steps in range(1, settings.max_steps + 1)]
    return tuple(share / sum(weights) for share in itertools.accumulate(weights[:-1]))


def solve(question: str) -> str:
    """The worked solution, one operation a line and `#### answer` at the end. Raises DataError when the text is no such question."""
    matched = _QUESTION.fullmatch(question)
    if matched is None:
        raise DataError(f"{question!r} is not a question of the arithmetic task")
    value, lines = int(matched[1]), []
    for sign, operand in re.findall(r"([-+*])(\d+)", matched[2]):
        after = _OPERATIONS[sign](value, int(operand))
        lines.append(f"{value}{sign}{operand}={after}")
        value = after
    return "\n".join([*lines, f"#### {value}"])


def worked_solution(prompt: Prompt) -> str:
    """The worked solution of a prompt of this task."""
    return solve(prompt.columns["question"])


def wrong_solution(prompt: Prompt) -> str:
    """A wrong response as policies give them, the same for a prompt every time: a step goes wrong and the rest follows from it, the last line gives another
    number than the steps, the steps stop before the end, or only a wrong number is given."""
    draw = random.Random(f"wrong {prompt.key}").random
    lines, answer = solve(prompt.columns["question"]).split("\n"), int(prompt.answer)
    kind, slip = int(draw() * 10), 1 + int(draw() * 9)
    slip = slip if draw() < 0.5 else -slip
    if kind < 5:
        return _with_slip(prompt.columns["question"], int(draw() * (len(lines) - 1)), slip)
    if kind < 7:
        return "\n".join([*lines[:-1], f"#### {answer + slip}"])
    if kind < 8:
        return "\n".join(lines[: 1 + int(draw() * (len(lines) - 1))])
    return f"#### {answer + slip}"


def _with_slip(question: str, wrong_step: int, slip: int) -> str:
    """The worked solution with `slip` added to the result of one step; every step after it is right."""
    matched = _QUESTION.fullmatch(question)
    value, lines = int(matched[1]), []
    for step, (sign, operand) in enumerate(re.findall(r"([-+*])(\d+)", matched[2])):
        after = _OPERATIONS[sign](value, int(operand))
        after += slip if step == wrong_step else 0
        lines.append(f"{value}{sign}{operand}={after}")
        value = after
    return "\n".join([*lines, f"#### {value}"])


def score(prompt: str, response: str, answer: str, metadata: dict) -> float:
    """1.0 when the last line of the response is exactly `#### answer`, else 0.0. The lines above it are not judged."""
    lines = response.rstrip("\n").split("\n")
    return float(lines[-1] == f"#### {answer}")


@dataclasses.dataclass(frozen=True)
class ArithmeticTask:
    """`size` problems of one split, rendered for `tokenizer`. `difficulty` of a prompt is its number of steps."""

    tokenizer: Tokenizer
    size: int
    seed: int = 0
    split: Literal["train", "held_out"] = "train"
    settings: ArithmeticSettings = ArithmeticSettings()
    prompt_settings: PromptSettings = PromptSettings()
    worked_share: float = 1.0  # of the demonstrations: this share shows the steps, the others only give the answer
    name: str = "arithmetic"
    reward_kind: str = "task"

    def __post_init__(self):
        if self.split not in ("train", "held_out") or not 0 < self.size <= HELD_OUT_FIRST:
            raise ValueError(f"split={self.split!r}, size={self.size}: split is train or held_out and size 1 to {HELD_OUT_FIRST}")

    @property
    def scorer(self):
        """`score`: exact, and picklable by name."""
        return score

    def describe(self) -> str:
        """One line for the start of a run."""
        return self._rendered[1].describe()

    @functools.cached_property
    def _rendered(self) -> tuple[list[Prompt], LengthReport]:
        first = HELD_OUT_FIRST if self.split == "held_out" else 0
        rows = [_row(self.settings, self.seed, index) for index in range(first, first + self.size)]
        columns = Columns(prompt="question", answer="answer", source="data_source", id="id", difficulty="steps")
        return render_prompts(rows, columns, self.tokenizer, self.prompt_settings)

    @functools.cached_property
    def _prompts(self) -> tuple[Prompt, ...]:
        return tuple(self._rendered[0])

    def prompts(self) -> tuple[Prompt, ...]:
        """All problems of the split; `columns` of a prompt hold question, worked `solution`, answer, steps."""
        return self._prompts

    def worked_solution(self, prompt: Prompt) -> str:
        """The demonstration of a prompt: its worked solution or the bare answer, chosen by the prompt's key, so that nothing in the text tells which."""
        shows_steps = prompt.key % _KEYS < self.worked_share * _KEYS
        return worked_solution(prompt) if shows_steps else f"#### {prompt.answer}"

    def wrong_solution(self, prompt: Prompt) -> str:
        """See the function."""
        return wrong_solution(prompt)


def _row(settings: ArithmeticSettings, seed: int, index: int) -> Row:
    question = problem(settings, seed, index)
    solution = solve(question)
    columns = {"data_source": "arithmetic", "id": f"{seed}-{index}", "question": question, "solution": solution}
    columns |= {"answer": solution.rsplit("#### ", 1)[1], "steps": solution.count("\n")}
    return Row(index, columns, "arithmetic", index)
