"""Any data set of reasoning-gym by name. Its own `score_answer` gives the verdict, in whatever process that is asked.

Only (name, seed, size, arguments, index) travel to a scoring process, which makes the data set again once; an entry that comes out different
there (a data set that is not a function of its seed) is an error, not a wrong verdict.
"""

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Mapping

from tlt_jax.tasks.columns import Columns
from tlt_jax.tasks.prompts import LengthReport, Prompt, PromptSettings, render_prompts
from tlt_jax.tasks.text_files import DataError, Row
from tlt_jax.tasks.tokenizer import Tokenizer

INSTRUCTION = "{question}\nGive only the final answer between <answer> and </answer> at the end."
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ReasoningGymScorer:
    """score(prompt, response, answer, metadata) -> float between 0 and 1. Picklable; `arguments` is a JSON object."""

    dataset: str
    size: int
    seed: int
    arguments: str = "{}"

    def __call__(self, prompt: str, response: str, answer: str, metadata: dict) -> float:
        """The data set's verdict on the last <answer>…</answer> of the response; 0.0 when there is none."""
        entry = _entry(self, metadata["index"])
        if entry["question"] != metadata["question"]:
            raise DataError(f"reasoning-gym {self.dataset}, entry {metadata['index']}: made again it asks something else, so it cannot be scored")
        given = _ANSWER.findall(response)
        return float(_dataset(self).score_answer(given[-1].strip(), entry)) if given else 0.0


@functools.lru_cache(maxsize=16)
def _dataset(scorer: ReasoningGymScorer):
    import reasoning_gym  # here: a second of import that only this task needs

    names = reasoning_gym.factory.DATASETS
    if scorer.dataset not in names:
        near = difflib.get_close_matches(scorer.dataset, names, 3)
        raise DataError(f"reasoning-gym has no data set {scorer.dataset!r}; {'nearest: ' + ', '.join(near) if near else 'it has: ' + ', '.join(sorted(names))}")
    try:
        return reasoning_gym.create_dataset(scorer.dataset, size=scorer.size, seed=scorer.seed, **json.loads(scorer.arguments))
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"reasoning-gym {scorer.dataset} does not take {scorer.arguments}: {error}") from error


@functools.lru_cache(maxsize=4096)
def _entry(scorer: ReasoningGymScorer, index: int) -> dict:
    """One entry; the completions of a prompt share it."""
    return _dataset(scorer)[index]


@dataclasses.dataclass(frozen=True)
class ReasoningGymTask:
    """`size` problems of a data set, rendered for `tokenizer`. An empty instruction becomes one that asks for <answer> tags."""

    dataset: str
    tokenizer: Tokenizer
    size: int = 1000
    seed: int = 0
    arguments: Mapping[str, object] = dataclasses.field(default_factory=dict)
    prompt_settings: PromptSettings = PromptSettings()
    reward_kind: str = "task"

    @property
    def name(self) -> str:
        """The data set's name under its source."""
        return f"reasoning_gym/{self.dataset}"

    @property
    def scorer(self) -> ReasoningGymScorer:
        """The verdict, picklable."""
        return ReasoningGymScorer(self.dataset, self.size, self.seed, json.dumps(dict(self.arguments), sort_keys=True))

    def describe(self) -> str:
        """One line for the start of a run."""
        return self._rendered[1].describe()

    @functools.cached_property
    def _prompts(self) -> tuple[Prompt, ...]:
        return tuple(dataclasses.replace(prompt, answer=str(prompt.columns["answer"] or "")) for prompt in self._rendered[0])

    @functools.cached_property
    def _rendered(self) -> tuple[list[Prompt], LengthReport]:
        settings = self.prompt_settings
        if not settings.instruction:
            settings = dataclasses.replace(settings, instruction=INSTRUCTION)
        rows = [self._row(index) for index in range(self.size)]
        columns = Columns(prompt="question", source="data_source", id="id")
        return render_prompts(rows, columns, self.tokenizer, settings)

    def _row(self, index: int) -> Row:
        entry = _entry(self.scorer, index)
        columns = {"data_source": self.name, "id": f"{self.seed}-{index}", "index": index}
        columns |= {"question": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
        return Row(index, columns, self.name, index)

    def prompts(self) -> tuple[Prompt, ...]:
        """All problems. Raises DataError with the nearest names when there is no such data set."""
        return self._prompts

    def worked_solution(self, prompt: Prompt) -> str:
        """Only the answer in its tags: these data sets bring no reasoning."""
        if not prompt.answer:
            raise DataError(f"{self.name}, entry {prompt.row}: no reference answer to learn from")
        return f"<answer>{prompt.answer}</answer>"

    def wrong_solution(self, prompt: Prompt) -> str:
        """Raises DataError: what a wrong answer looks like depends on the data set."""
        raise DataError(f"{self.name}: this task makes no wrong answers; give a file of pairs, stages.reward_model.path")
