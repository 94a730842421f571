r"""GSM8K: `question` and a worked `answer` that ends with `#### 42`.

With a chat template the policy is asked for \boxed{}, without one for the data's own `####` line; math verification takes both.
"""

import dataclasses
import re
from collections.abc import Mapping

from tlt_jax.tasks.file_task import FileTask
from tlt_jax.tasks.prompts import Prompt, PromptSettings
from tlt_jax.tasks.tokenizer import Tokenizer

CHAT_INSTRUCTION = "{question}\nReason step by step, and put the final answer within \\boxed{{}}."
PLAIN_INSTRUCTION = '{question}\nReason step by step, and write the final answer after "####".\n'
_CALCULATOR_NOTE = re.compile(r"<<[^<>]*>>")


@dataclasses.dataclass(frozen=True)
class Gsm8kTask(FileTask):
    """A file task whose worked solutions lose the `<<48/2=24>>` notes, which were made for a calculator."""

    name: str = "gsm8k"

    def worked_solution(self, prompt: Prompt) -> str:
        """The worked answer as a person would write it, `#### 42` line included."""
        return _CALCULATOR_NOTE.sub("", super().worked_solution(prompt))


def gsm8k_task(path: str, tokenizer: Tokenizer, settings: PromptSettings, overrides: Mapping[str, str | None] | None = None) -> Gsm8kTask:
    """The task on a file or Hub id (`openai/gsm8k:main:train`). An empty `settings.instruction` becomes the one that fits the tokenizer."""
    if not settings.instruction:
        chat = tokenizer.has_chat_template and settings.chat is not False
        settings = dataclasses.replace(settings, instruction=CHAT_INSTRUCTION if chat else PLAIN_INSTRUCTION)
    return Gsm8kTask(path, tokenizer, settings, overrides or {})
