"""Small real tokenizers with chat templates, written to a directory and loaded as a user's model would be."""

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.tasks.tokenizer import load_tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# As Qwen3's: thinking of turns before the last question is not printed; a missing thought of later turns is printed empty.
THINKING = """{%- set asked = namespace(last=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set asked.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
  {%- set thought = message.reasoning_content if message.reasoning_content is string else '' -%}
  {%- set words = message.content -%}
  {%- if '</think>' in words -%}
    {%- set thought = words.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
    {%- set words = words.split('</think>')[-1].lstrip('\\n') -%}
  {%- endif -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if loop.index0 > asked.last -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
  {{- words + '<|im_end|>\\n' -}}
{%- else -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

MARKED = """{% for message in messages %}
{% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}"""

MISTRAL = (
    "{{ bos_token }}{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{ '[INST] ' + message.content + ' [/INST]' }}{%- else -%}{{ message.content + '<|endoftext|>' }}{%- endif -%}"
    "{%- endfor -%}"
)


def byte_level_directory(directory, template=None):
    """A byte-level tokenizer (one token a byte, and one for two line feeds) in a new directory; returns its path."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {entry: number for number, entry in enumerate([*alphabet, "ĊĊ"])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIALS)
    built = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>", bos_token="<s>")
    if template:
        built.chat_template = template
    built.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    """Makes a loaded byte-level tokenizer with a chat template (None = a base model without one)."""
    made = {}

    def make(template=None):
        if template not in made:
            made[template] = load_tokenizer(byte_level_directory(tmp_path_factory.mktemp("tokenizer"), template))
        return made[template]

    return make


@pytest.fixture(scope="session")
def templates():
    """The chat templates by name."""
    return {"chatml": CHATML, "thinking": THINKING, "marked": MARKED, "mistral": MISTRAL}


@pytest.fixture(scope="session")
def characters(tmp_path_factory):
    """The quickstart's character tokenizer."""
    return character_tokenizer("0123456789+-*=?#\n ", str(tmp_path_factory.mktemp("characters")))


@pytest.fixture(scope="session")
def write_tokenizer():
    """Writes a byte-level tokenizer directory: (directory, template or None) -> path."""
    return byte_level_directory
