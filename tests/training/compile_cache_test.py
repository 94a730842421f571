"""Where compiled programs are kept: the environment first, then the config, and never an error that nobody asked for."""

import pathlib
import subprocess
import sys

import pytest

from tlt_jax.training import compile_cache
from tlt_jax.training.command_line import load_config


@pytest.fixture
def environment(monkeypatch, tmp_path):
    monkeypatch.delenv(compile_cache.VARIABLE)
    monkeypatch.setattr(pathlib.Path, "home", lambda: tmp_path / "home")
    return compile_cache.os.environ


def generate(*options):
    load_config(["--config.data.task=arithmetic", *options], command="generate")


def test_programs_are_kept_in_the_home_by_kind_of_processor(environment, tmp_path):
    generate()
    folder = pathlib.Path(environment.pop(compile_cache.VARIABLE))
    assert folder.is_dir() and folder.parent == tmp_path / "home" / ".cache" / "tlt_jax" and folder.name == f"programs-{compile_cache.processor()}"


def test_the_environment_goes_before_the_config_and_an_empty_name_keeps_nothing(environment, monkeypatch, tmp_path):
    generate("--config.compile_cache=")
    assert compile_cache.VARIABLE not in environment
    monkeypatch.setenv(compile_cache.VARIABLE, "elsewhere")
    generate(f"--config.compile_cache={tmp_path / 'named'}")
    assert environment[compile_cache.VARIABLE] == "elsewhere"


def test_a_home_that_cannot_be_written_is_no_error_and_a_named_directory_is_one(environment, capsys, tmp_path):
    (tmp_path / "home").touch()
    generate()
    assert compile_cache.VARIABLE not in environment
    with pytest.raises(SystemExit):
        generate(f"--config.compile_cache={tmp_path / 'home' / 'named'}")
    assert "compile_cache=" in capsys.readouterr().err and compile_cache.VARIABLE not in environment


def test_jax_takes_the_directory_of_the_config(environment, tmp_path):
    program = (
        "import sys; from tlt_jax.training.command_line import load_config; "
        f"load_config(['--config.compile_cache={tmp_path / 'named'}'], command='generate'); import jax; print(jax.config.jax_compilation_cache_dir)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=pathlib.Path(__file__).parents[2])
    assert done.stdout.strip() == str(tmp_path / "named")
