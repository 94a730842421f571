"""README and docs say what the code does: links, keys, metrics, commands, snippets and quoted messages are checked against it."""

import ast
import functools
import importlib
import pathlib
import re

import pytest

from tlt_jax.rewards import math
from tlt_jax.rewards.items import Outcome, RewardItem
from tlt_jax.rewards.user_function import load_reward
from tlt_jax.tasks.columns import ALIASES
from tlt_jax.training.command_line import config_from_file, load_config, override
from tlt_jax.training.reporting import NAMESPACES
from tlt_jax.training.settings import declared_keys, default_config
from tlt_jax.training.settings_rules import batch_equation, validate

ROOT = pathlib.Path(__file__).parents[1]
ALL_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in ALL_PAGES if page.name != "verification.md"]  # a log of runs, not a text about the code
COMMANDS = ("train", "generate", "evaluate", "distill", "export")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

METRIC = re.compile(rf"({'|'.join(NAMESPACES)})/[a-z0-9_]+")
KEY = re.compile(rf"((?:{'|'.join({name.split('.')[0] for name in declared_keys() if '.' in name})})(?:\.[a-z_0-9]+)+)(?:=(.*))?")
FILE_NAME = re.compile(r".*\.(json|jsonl|py|md|gguf|safetensors|jinja)")
READERS_OF_METRICS = ("health.py", "curves.py")
NOT_REPORTED = {
    "sampler/logprob_diff_mean": "renamed to sampler/logprob_difference_mean before it is reported",
    "value/kernel": "the path of a parameter",
    "value/bias": "the path of a parameter",
}
TIMED_WITHOUT_A_PART = {"timing/step_seconds"}


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def prose(page: pathlib.Path) -> str:
    """The page without code blocks, quoted messages, and other trainers' names: the first column of migrating tables, all but the first of aliases."""
    text = re.sub(r"^```.*?^```$|^### `.*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text, migrating, table = text.partition("## Migrating from verl and TRL")
    if migrating:
        text += "\n".join(line.split(" | ", 1)[-1] for line in table.splitlines())
    text, aliases, table = text.partition("## Aliases")
    return text + ("\n".join(line.split(" | ", 1)[0] for line in table.splitlines()) if aliases else "")


def quoted(page: pathlib.Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def anchors(page: pathlib.Path) -> set[str]:
    """The heading anchors of a page, by GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@functools.cache
def source_texts() -> tuple[set[str], list[str]]:
    """(every text literal of the product, every f-string with a \\0 for each value)."""
    literals, templates = set(), []
    for path in [*(ROOT / "tlt_jax").rglob("*.py"), *(ROOT / "configs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name not in READERS_OF_METRICS:
                literals.add(node.value)
            if isinstance(node, ast.JoinedStr):
                templates.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
    return literals, templates


def snippet_files(tmp_path: pathlib.Path) -> None:
    """Writes every python block that starts with `# NAME.py` under that name, beside the repository's configs."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for page in PAGES:
        for code in blocks(page, "python"):
            if named := re.match(r"# (\w+\.py)\n", code):
                (tmp_path / named[1]).write_text(code)


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.stem)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@each_page
def test_no_line_is_longer_than_160_characters(page):
    assert not [number for number, line in enumerate(page.read_text().splitlines(), 1) if len(line) > 160]


@each_page
def test_every_config_key_is_declared_and_takes_the_value_that_is_shown(page):
    declared = declared_keys()
    named = re.findall(r"--config\.([a-z_0-9.]+)", page.read_text())
    problems = [name for name in named if name.strip(".") not in declared]
    for word in quoted(page):
        found = KEY.fullmatch(word)
        if found is None or FILE_NAME.fullmatch(word):
            continue
        name, value = found.groups()
        if name not in declared and not any(key.startswith(f"{name}.") for key in declared):
            problems.append(word)
        elif value and not re.search(r"[A-Z]{3}|…|^c$", value):
            config = default_config()
            override(config, name, value)
            choices = declared[name].allowed
            if choices and isinstance(choices[0], str) and value not in choices:
                problems.append(word)
    assert not problems


@each_page
def test_every_python_snippet_compiles(page):
    for code in blocks(page, "python"):
        compile(code, page.name, "exec")


@each_page
def test_every_command_is_accepted_by_its_command_line(page, tmp_path, monkeypatch, capsys):
    snippet_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\.venv/bin/)?python -m tlt_jax\.(\w+) (.*)", line)
            if found is None:
                assert line.startswith((".venv/bin/python -m pip", "launch/")), line
                continue
            command = importlib.import_module(f"tlt_jax.{found[1]}")
            try:
                load_config(found[2].split(), command=found[1], extra_flags=vars(command).get("_flags"))
            except SystemExit:
                pytest.fail(f"{line}\n{capsys.readouterr().err}")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_a_command_stands_in_its_table(command, capsys):
    module = importlib.import_module(f"tlt_jax.{command}")
    with pytest.raises(SystemExit):
        load_config(["--help"], command=command, extra_flags=vars(module).get("_flags"))
    usage = capsys.readouterr().out.partition("\n\n")[0]
    section = (ROOT / "docs" / "commands.md").read_text().partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    in_table = set(re.findall(r"^\| `(--\w+)`", section, re.MULTILINE))
    assert set(re.findall(r"--\w+", usage)) == in_table


def test_every_metric_that_is_described_is_emitted():
    literals, templates = source_texts()
    # A template that says nothing but the namespace (reward/<any key of a user's function>) proves no name.
    patterns = [re.compile(re.escape(text).replace("\0", r"\w+")) for text in templates if METRIC.match(text.replace("\0", "", 1))]
    for page in PAGES:
        names = [word for word in quoted(page) if METRIC.fullmatch(word)]
        unknown = [name for name in names if name not in literals and not any(pattern.fullmatch(name) for pattern in patterns)]
        assert unknown in ([], ["reward/finished"]), page.name  # reward/finished is the README's example of a user's own number


def test_every_metric_that_is_emitted_is_described():
    described = {word for word in quoted(ROOT / "docs" / "metrics.md") if METRIC.fullmatch(word)}
    emitted = {text for text in source_texts()[0] if METRIC.fullmatch(text) and not text.endswith("_")}  # what ends so is the start of a template
    assert emitted - described - set(NOT_REPORTED) == set()


def test_every_timed_part_of_a_step_is_described():
    described = {word for word in quoted(ROOT / "docs" / "metrics.md") if word.startswith("timing/")}
    timed = set(re.findall(r'timing\.of\("(\w+)"\)', (ROOT / "tlt_jax" / "training" / "rl.py").read_text()))
    assert described == {f"timing/{name}_seconds" for name in timed} | TIMED_WITHOUT_A_PART


def test_every_quoted_error_message_is_one_of_the_code():
    literals, templates = source_texts()
    texts = [*literals, *templates]
    messages = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(messages) > 50
    for message in messages:
        pattern = re.compile(".*".join(re.escape(part) for part in message.split("…")), re.DOTALL)
        assert any(pattern.search(text) for text in texts), message


def test_the_column_names_are_those_of_the_code():
    text = (ROOT / "docs" / "data_formats.md").read_text()
    shown = {meaning: tuple(re.findall(r"`([^`]+)`", names)) for meaning, names in re.findall(r"^\* \*\*(\w+)\*\*: (.*(?:\n  .*)*)", text, re.MULTILINE)}
    assert shown == ALIASES


@pytest.mark.parametrize("name", ["ppo_qwen2_5_7b", "grpo_qwen2_5_7b"])
def test_the_batch_equations_are_those_of_the_configs(name):
    assert batch_equation(config_from_file(str(ROOT / "configs" / f"{name}.py"))) in (ROOT / "docs" / "concepts.md").read_text()


def test_the_math_verdicts_are_those_of_the_code():
    rows = re.findall(r"^\| `(.+)` \| `(.+)` \| (yes|no) \|$", (ROOT / "docs" / "rewards.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for reference, response, right in rows:
        assert math.verify(response, reference) is (right == "yes"), (reference, response)


def test_the_readme_config_is_valid(tmp_path, monkeypatch):
    snippet_files(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    validate(config_from_file(str(tmp_path / "my_run.py")))


def test_the_readme_reward_loads_and_scores(tmp_path):
    snippet_files(tmp_path)
    function = load_reward(tmp_path / "my_reward.py", "score")
    right, cut = RewardItem("3 + 4?", "3 + 4 = 7", "7"), RewardItem("3 + 4?", "hm", "7", finish_reason="length")
    assert function.score((right, cut)) == [Outcome(1.0, {"finished": 1.0}, "7"), Outcome(0.0, {"finished": 0.0}, None)]


@pytest.mark.parametrize(
    ("file", "function", "grouped"), [("by_name.py", "score", False), ("from_verl.py", "compute_score", False), ("from_trl.py", "score", True)]
)
def test_the_reward_forms_load_and_score(tmp_path, file, function, grouped):
    snippet_files(tmp_path)
    loaded = load_reward(tmp_path / file, function)
    outcomes = loaded.score((RewardItem("3 + 4?", "It is 7", "7"), RewardItem("3 + 4?", "It is 8", "7")))
    assert loaded.grouped is grouped
    assert [outcome.score for outcome in outcomes] == [1.0, 0.0]
