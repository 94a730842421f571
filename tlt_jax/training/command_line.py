"""The command line of every command: --config=FILE.py, --config.group.key=value, --workdir, --dry_run and the command's own flags.

Turns text into a checked config or into one clear message and exit code 2. What the keys mean is in settings.py; nothing is run here.
"""

import argparse
import difflib
import math
import pathlib
import runpy
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from tlt_jax.training.compile_cache import keep_programs
from tlt_jax.training.presets import PRESETS, apply_preset
from tlt_jax.training.settings import SettingsError, declared_keys, default_config
from tlt_jax.training.settings_rules import unknown_key, validate

_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")
_HAS_WORKDIR, _HAS_DRY_RUN = ("train", "distill", "export"), ("train", "distill")
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", tuple: "a comma-separated list", str: "text"}
# What plain Python code in a config file can raise; anything else is a fault of this package and keeps its traceback.
_CONFIG_FILE_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, NameError, OSError, TypeError, ValueError)


def load_config(
    argv: Sequence[str],
    *,
    extra_flags: Callable[[argparse.ArgumentParser], object] | None = None,
    command: str = "train",
    description: str = "",
    example: str = "python -m tlt_jax.train --config=configs/quickstart.py --workdir=runs/quickstart --config.seed=1",
) -> tuple[ConfigDict, argparse.Namespace]:
    """The checked, locked config and the flags (config, workdir and dry_run where the command has them, and what `extra_flags` adds to the parser).

    `argv` is without the program's name; --help shows `description` and `example`. A mistake of the user ends in SystemExit(2) and a message on stderr.
    """
    parser = _parser(command, description, example)
    if extra_flags is not None:
        extra_flags(parser)
    try:
        overrides, others = _split_overrides(argv)
        args, unknown = parser.parse_known_args(others)
        if unknown:
            raise SettingsError([_unknown_flag(parser, unknown[0])])
        if command in _HAS_WORKDIR and not args.workdir and not args.dry_run:
            raise SettingsError(["--workdir=DIR is needed: the run's directory, with its checkpoints, metrics and samples"])
        config = config_from_file(args.config) if args.config else default_config()
        if args.preset is not None:
            apply_preset(config, args.preset)
        for name, text in overrides:
            override(config, name, text)
        validate(config, command=command)
        keep_programs(config)
    except SettingsError as error:
        print("\n".join(f"{parser.prog}: error: {problem}" for problem in error.problems), file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        print(f"{parser.prog}: error: compile_cache={config.compile_cache}: {error.strerror}; name another directory, or '' for none", file=sys.stderr)
        raise SystemExit(2) from None
    return config, args


def override(config: ConfigDict, name: str, text: str) -> None:
    """Sets the key with a dotted name from text, by the type of its default; raises SettingsError with the key, the type and the text."""
    declared = declared_keys()
    if name not in declared:
        raise SettingsError([unknown_key(name)])
    kind = type(declared[name].default)
    try:
        value = _parse(kind, text)
    except ValueError:
        raise SettingsError([f"{name} must be {_TYPE_NAMES[kind]} ({kind.__name__}), not {text!r}"]) from None
    *groups, last = name.split(".")
    for group in groups:
        config = config[group]
    config[last] = value


def config_from_file(path: str) -> ConfigDict:
    """What get_config() of a Python file returns; raises SettingsError with file and line when the file cannot give one."""
    if not pathlib.Path(path).is_file():
        raise SettingsError([f"--config={path}: there is no such file{_nearest_file(path)}"])
    if not path.endswith(".py"):
        raise SettingsError([f"--config={path}: a config is a Python file that defines get_config(), see configs/quickstart.py"])
    try:
        get_config = runpy.run_path(path).get("get_config")
        config = get_config() if callable(get_config) else None
    except SyntaxError as error:
        raise SettingsError([f"{error.filename}:{error.lineno}:{error.offset}: {error.msg}"]) from None
    except _CONFIG_FILE_ERRORS as error:
        raise SettingsError([f"{_place(error, path)}: {_first_words(error)}"]) from None
    if get_config is None:
        raise SettingsError([f"{path}: does not define get_config()"])
    if not isinstance(config, ConfigDict):
        raise SettingsError([f"{path}: get_config() must return the config of tlt_jax.training.settings.default_config(), not {type(config).__name__}"])
    return config.lock()


def _parse(kind: type, text: str):
    if kind is bool:
        word = text.strip().lower()
        if word not in _TRUE + _FALSE:
            raise ValueError(text)
        return word in _TRUE
    if kind is float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(text)
        return value
    if kind is tuple:
        return tuple(part.strip(" '\"") for part in text.strip(" ()[]").split(",") if part.strip(" '\""))
    return kind(text)


def _split_overrides(argv: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Takes --config.name=value and --config.name value out of the arguments."""
    overrides, others, waiting = [], [], list(argv)
    while waiting:
        flag = waiting.pop(0)
        if not flag.startswith("--config."):
            others.append(flag)
            continue
        name, equals, text = flag.removeprefix("--config.").partition("=")
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise SettingsError([f"--config.{name} needs a value: --config.{name}=VALUE"])
            text = waiting.pop(0)
        overrides.append((name, text))
    return overrides, others


def _parser(command: str, description: str, example: str) -> argparse.ArgumentParser:
    keys = "\n".join(f"  {name}={_shown(key.default)}\n{textwrap.indent(key.meaning, ' ' * 6)}" for name, key in declared_keys().items())
    parser = argparse.ArgumentParser(
        prog=f"python -m tlt_jax.{command}",
        description=description,
        epilog=f"example:\n  {example}\n\nconfig keys and defaults (--config.KEY=VALUE):\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.py", help="Python file with get_config(); without it the defaults below are used")
    parser.set_defaults(workdir=None, dry_run=False, preset=None)
    if command == "train":
        parser.add_argument("--preset", metavar="NAME", help=f"an algorithm's settings, over the file's and below --config.KEY: {', '.join(PRESETS)}")
    if command in _HAS_WORKDIR:
        parser.add_argument("--workdir", metavar="DIR", help="directory of the run: checkpoints, metrics and samples")
    if command in _HAS_DRY_RUN:
        parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print what would run, and end")
    return parser


def _shown(value) -> str:
    return ",".join(value) if isinstance(value, tuple) else repr(value) if isinstance(value, str) and (not value or not value.isprintable()) else str(value)


def _unknown_flag(parser: argparse.ArgumentParser, flag: str) -> str:
    name = flag.partition("=")[0]
    known = [text for text in parser.format_usage().replace("[", " ").replace("]", " ").split() if text.startswith("--")]
    close = difflib.get_close_matches(name, known, n=1)
    if name.removeprefix("--") in declared_keys():
        close = [f"--config.{name.removeprefix('--')}"]
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)} and --config.KEY=VALUE"
    return f"{flag} is not a flag; {hint}"


def _nearest_file(path: str) -> str:
    folder = pathlib.Path(path).parent
    names = [str(file) for file in folder.glob("*.py")] if folder.is_dir() else []
    close = difflib.get_close_matches(path, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _place(error: BaseException, path: str) -> str:
    """File and line where the error left the user's files: the config itself, or the line in it that called further."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return f"{path}:{lines[-1]}" if lines else path


def _first_words(error: BaseException) -> str:
    """ConfigDict's errors name the key first and then print the whole config; keep the first sentence and its suggestion."""
    lines = str(error).strip("'\"").replace("\\n", "\n").splitlines() or [""]
    first = lines[0].split(" Other fields present")[0]
    guess = [line.strip("'\"") for line in lines[1:] if line.startswith("Did you mean")]
    return f"{type(error).__name__}: {' '.join([first, *guess])}"
