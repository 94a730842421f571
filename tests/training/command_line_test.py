"""Text to config: values by type, misspelt names, config files that cannot be read, and the flags of a command."""

import pathlib
import subprocess
import sys

import pytest

from tlt_jax.training.command_line import load_config
from tlt_jax.training.settings import declared_keys, default_config, read_key

ROOT = pathlib.Path(__file__).parents[2]
BOOLEANS = [name for name, key in declared_keys().items() if isinstance(key.default, bool)]


def loaded(*argv, **options):
    return load_config(["--workdir=x", *argv], **options)[0]


def refused(capsys, *argv, **options):
    """The message of a command line that is refused with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        load_config(argv, **options)
    assert caught.value.code == 2
    return capsys.readouterr().err


LEARNS = ("--config.drafter.quanta_per_step=1", "--config.speculative.method=eagle")
NEEDED = {"drafter.freeze": LEARNS, "rollout.consolidate_tail": LEARNS, "reward.whiten": ("--config.algorithm.name=rloo",)}  # what a key is nothing without


@pytest.mark.parametrize("name", BOOLEANS)
def test_a_boolean_takes_words_in_any_case_and_keeps_its_default_when_absent(name, capsys):
    for word, value in (("true", True), ("True", True), ("1", True), ("YES", True), ("false", False), ("False", False), ("0", False), ("no", False)):
        assert read_key(loaded(f"--config.{name}={word}", *NEEDED.get(name, ())), name) is value
    assert read_key(loaded(), name) is read_key(default_config(), name)
    assert f"{name} must be true or false (bool), not 'maybe'" in refused(capsys, "--workdir=x", f"--config.{name}=maybe")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("optimizer.lr", "1e-6", 1e-6),
        ("optimizer.lr", "3e-4", 3e-4),
        ("optimizer.lr", "0.001", 0.001),
        ("optimizer.lr", ".5", 0.5),
        ("optimizer.lr", "1", 1.0),
        ("rollout.max_new_tokens", "1_000", 1000),
        ("mesh.train.fsdp", "-1", -1),
        ("stages.order", "sft,rl", ("sft", "rl")),
        ("stages.order", "('sft', 'rl')", ("sft", "rl")),
        ("stages.order", "sft", ("sft",)),
        ("data.instruction", "a = b, c", "a = b, c"),
        ("data.system_prompt", "", ""),
        ("checkpoint.resume", "12", "12"),
    ],
)
@pytest.mark.parametrize("form", ["equals", "space"])
def test_a_value_is_read_by_the_type_of_its_key(name, text, value, form):
    arguments = [f"--config.{name}={text}"] if form == "equals" else [f"--config.{name}", text]
    got = read_key(loaded(*arguments, "--config.batch.tokens_per_microbatch=20000"), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.rollout.max_new_tokens=1.5", ("rollout.max_new_tokens", "a whole number (int)", "'1.5'")),
        ("--config.seed=one", ("seed", "a whole number (int)", "'one'")),
        ("--config.optimizer.lr=small", ("optimizer.lr", "a number (float)", "'small'")),
        ("--config.optimizer.lr=nan", ("optimizer.lr", "a number (float)", "'nan'")),
        ("--config.mesh.train.fsdp=a", ("mesh.train.fsdp", "int", "'a'")),
        ("--config.rollout.temprature=1", ("rollout.temprature", "rollout.temperature")),
        ("--config.mesh.train=8", ("mesh.train is a group", "mesh.train.fsdp")),
        ("--config.seed", ("--config.seed needs a value",)),
        ("--wrkdir=x", ("--wrkdir", "did you mean --workdir")),
        ("--optimizer.lr=1", ("did you mean --config.optimizer.lr",)),
        ("--config.rollout.stop=x", ("stop strings are not built",)),
        ("--config=configs/quikstart.py", ("no such file", "configs/quickstart.py")),
        ("--config=README.md", ("--config=README.md",)),
        ("stray", ("stray is not a flag",)),
    ],
)
def test_a_mistake_is_one_line_with_the_name_and_what_to_do(argument, words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    message = refused(capsys, "--workdir=x", argument)
    assert all(word in message for word in words), message
    assert len(message.strip().splitlines()) == 1


def test_contradictions_are_all_reported(capsys):
    message = refused(capsys, "--workdir=x", "--config.algorithm.num_generations=1", "--config.rollout.top_k=3")
    assert len(message.strip().splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def get_config():\n\treturn 1\n        x\n", ("config.py:3",)),
        ("def get_config(:\n", ("config.py:1",)),
        ("x = 1\n", ("does not define get_config()",)),
        ("", ("does not define get_config()",)),
        ("def get_config():\n    return {}\n", ("must return the config", "dict")),
        ("import nothing_of_that_name\n", ("config.py:1", "nothing_of_that_name")),
        ("{body}    config.rollout.temprature = 1.0\n    return config\n", ("config.py:4", 'Did you mean "temperature"')),
        ("{body}    config.seed = 'x'\n    return config\n", ("config.py:4", "seed")),
        ("def inner():\n    return 1 + ''\ndef get_config():\n    return inner()\n", ("config.py:2", "TypeError")),
        ("{body}    config.algorithm.num_generations = 1\n    return config\n", ("algorithm.num_generations=1",)),
    ],
)
def test_a_config_file_that_cannot_be_used_is_one_line_with_file_and_line(text, words, tmp_path, capsys):
    body = "from tlt_jax.training.settings import default_config\ndef get_config():\n    config = default_config()\n"
    path = tmp_path / "config.py"
    path.write_text(text.replace("{body}", body))
    message = refused(capsys, "--workdir=x", f"--config={path}")
    assert all(word in message for word in words), message
    assert len(message.strip().splitlines()) == 1


def test_overrides_change_the_file_and_the_last_one_wins(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("from tlt_jax.training.settings import default_config\ndef get_config():\n    c = default_config()\n    c.seed = 5\n    return c\n")
    assert loaded(f"--config={path}").seed == 5
    assert loaded("--config.seed=6", f"--config={path}", "--config.seed=7").seed == 7


def test_the_loaded_config_is_locked_even_when_the_file_unlocks_it(tmp_path):
    path = tmp_path / "config.py"
    path.write_text("from tlt_jax.training.settings import default_config\ndef get_config():\n    return default_config().unlock()\n")
    assert loaded(f"--config={path}").is_locked


def test_train_needs_a_workdir_unless_it_is_a_dry_run(capsys):
    assert "--workdir=DIR is needed" in refused(capsys)
    assert load_config(["--dry_run"])[1].dry_run
    assert load_config([], command="evaluate")[1].workdir is None


def test_a_command_adds_its_own_flags():
    config, args = load_config(
        ["--model", "m", "--config.seed=3"], extra_flags=lambda parser: parser.add_argument("--model", required=True), command="generate"
    )
    assert (args.model, config.seed) == ("m", 3)


def test_help_shows_the_example_and_every_key(capsys):
    with pytest.raises(SystemExit) as caught:
        load_config(["--help"], description="Trains.", example="python -m tlt_jax.train --config=configs/quickstart.py")
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"{name}=" in shown and key.meaning in shown for name, key in declared_keys().items())
    assert "python -m tlt_jax.train --config=configs/quickstart.py" in shown


def test_a_mistake_in_a_fresh_process_leaves_no_traceback():
    code = "import sys; from tlt_jax.training.command_line import load_config; load_config(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, "--workdir=x", "--config.sed=1"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "the nearest name is seed" in done.stderr
