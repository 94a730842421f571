"""Every config file builds, validates, says how to launch it, and fits one device and eight."""

import ast
import pathlib

import pytest

from tlt_jax.training.command_line import config_from_file, load_config
from tlt_jax.training.settings import declared_keys
from tlt_jax.training.settings_rules import batch_equation, resolve_mesh, validate

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "fragments"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_builds_and_validates(path):
    config = config_from_file(str(path))
    validate(config)
    assert config.is_locked
    assert "sequences a step" in batch_equation(config)
    for devices in (1, 8):
        resolve_mesh(config.mesh.train.to_dict(), devices)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_says_how_to_launch_it_on_what_and_what_to_expect(path):
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert all(word in text for word in ("Launch:", "Hardware:", "Time:", "Result:"))
    assert f"configs/{path.name}" in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_key_can_be_given_its_own_value_on_the_command_line(path):
    config = config_from_file(str(path))
    texts = {}
    for name in declared_keys():
        value = config
        for part in name.split("."):
            value = value[part]
        texts[name] = ",".join(value) if isinstance(value, tuple) else str(value)
    again, _ = load_config([f"--config={path}", "--workdir=x", *(f"--config.{name}={text}" for name, text in texts.items())])
    assert again.to_dict() == config.to_dict()


def test_the_plain_baseline_differs_in_speculation_only():
    plain, speculative = (config_from_file(str(ROOT / "configs" / f"{name}.py")).to_dict() for name in ("plain_decoding", "grpo_qwen2_5_7b"))
    assert plain.pop("speculative")["method"] == "off"
    del speculative["speculative"]
    assert plain == speculative
