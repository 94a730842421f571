"""Enforces the layout of the code by reading it: layers, where jax may do what, budgets, names, forbidden constructs, prose.

One finding is `file:line: rule: what`. An exception is a line of EXCEPTIONS with its reason; one that no longer applies fails too.
"""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# From the top down; what stands in one group does not know the others of that group.
COMMANDS = ("train", "distill", "generate", "evaluate", "export", "bench", "simulate", "report")
LEVELS = (
    (*COMMANDS, "configs"),
    ("training",),
    ("runtime", "planning"),
    ("decoding", "objectives", "distillation"),
    ("drafters",),
    ("checkpoints",),
    ("sharding",),
    ("models",),
    ("tasks", "rewards", "scheduling"),
    ("strategies", "records", "noise", "masked", "logprobs", "optimizers"),
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
DEVICE_PURE = ("models", "drafters", "decoding", "objectives", "distillation", "records", "noise", "masked", "logprobs", "optimizers")
HOST_PURE = ("tasks", "rewards", "scheduling", "strategies")
HOST_FILES = tuple(
    f"tlt_jax/training/{name}.py"
    for name in (
        "settings", "settings_rules", "algorithm_rules", "presets", "command_line", "compile_cache", "reporting", "health", "progress", "curves", "json_lines",
        "text_buffer", "timeline_files")
)
JAX_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax", "chex")
SETTINGS_FILES = tuple(f"tlt_jax/training/{name}.py" for name in ("settings", "settings_rules", "algorithm_rules", "presets", "command_line"))

BANNED_WORDS = {"utils", "util", "helper", "helpers", "manager", "base", "common", "lib", "misc"}
LINES = {"module": 400, "class": 150, "function": 60, "command": 80}
METHODS, PARAMETERS = 10, 6

# "rule path name": reason; the name is the first word of the finding
EXCEPTIONS = {
    "handlers tlt_jax/rewards/math.py broad": "verify never raises: sympy and math-verify raise anything at all on hostile text",
    "handlers tlt_jax/rewards/expressions.py broad": "the LaTeX parser raises a bare Exception for text it cannot read",
    "handlers tlt_jax/rewards/pool.py broad": "a user's reward may raise anything; it becomes a counted error with its traceback",
    "handlers tlt_jax/rewards/worker.py broad": "as in pool.py, inside the worker process",
    "dynamic_attributes tlt_jax/rewards/user_function.py imports": "a user's reward file is loaded by its path",
    "parameters tlt_jax/models/decoder.py forward": "public signature, as users of a forward pass know it: two structs and the call's own options",
    "parameters tlt_jax/objectives/losses.py clipped_policy_loss": "public signature: one array a term of the formula",
}


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def product_files() -> list[pathlib.Path]:
    return sorted([*(ROOT / "tlt_jax").rglob("*.py"), *(ROOT / "configs").rglob("*.py")])


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def unit_of(path: pathlib.Path) -> str:
    """The name that LEVELS knows: configs, a package of tlt_jax or a module directly in it."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "configs" else parts[1]


def imported_modules(path: pathlib.Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every import, relative ones resolved; `from a import b` gives a.b, since b may be a module."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (above, node.module) if part)
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def imported_unit(module: str) -> str | None:
    """The unit of LEVELS that an import of ours goes to; None for other people's packages."""
    parts = module.split(".")
    if parts[0] == "configs":
        return "configs"
    return parts[1] if parts[0] == "tlt_jax" and len(parts) > 1 else None


def referenced_names(path: pathlib.Path) -> list[tuple[int, str]]:
    """(line, last name) of every name, attribute and imported name."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Name):
            found.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute):
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.alias):
            found.append((node.lineno, node.name.rsplit(".", 1)[-1]))
    return found


def definitions(path: pathlib.Path, *kinds: type) -> list:
    return [node for node in ast.walk(parsed(path)) if isinstance(node, kinds)]


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def layers(path):
    """imports go down, siblings stay apart"""
    unit = unit_of(path)
    if unit == "__init__":
        return [(line, f"tlt_jax/__init__.py imports {module}") for line, module in imported_modules(path)]
    if unit not in LEVEL_OF:
        return [(1, f"{unit} has no place in LEVELS of tests/architecture_test.py")]
    found = []
    for line, module in imported_modules(path):
        other = imported_unit(module)
        if other is None or other == unit:
            continue
        if other not in LEVEL_OF:
            found.append((line, f"imports {module}, which has no place in LEVELS"))
        elif LEVEL_OF[other] == LEVEL_OF[unit]:
            found.append((line, f"imports its sibling {other}"))
        elif LEVEL_OF[other] < LEVEL_OF[unit]:
            found.append((line, f"imports {other}, which is above {unit}"))
    return found


def host_purity(path):
    """host-pure code imports neither jax nor anything that may"""
    name, unit = name_of(path), unit_of(path)
    if unit not in HOST_PURE and name not in HOST_FILES:
        return []
    found = [(line, f"imports {module}") for line, module in imported_modules(path) if module.split(".")[0] in JAX_PACKAGES]
    for line, module in imported_modules(path):
        other = imported_unit(module)
        is_host_file = any(f"tlt_jax/{'/'.join(module.split('.')[1:3])}.py" == file for file in HOST_FILES)
        if other is not None and other not in HOST_PURE and not is_host_file:
            found.append((line, f"imports {module}, which is not host-pure"))
    return found


def device_purity(path):
    """traced code knows no file, clock, process or config"""
    if unit_of(path) not in DEVICE_PURE:
        return []
    forbidden = {"time", "os", "sys", "pathlib", "json", "random", "threading", "subprocess", "ml_collections", "etils", "io"}
    return [(line, f"imports {module}") for line, module in imported_modules(path) if module.split(".")[0] in forbidden]


def one_place(path):
    """what compiles, places, moves and configures stands in one place each"""
    name = name_of(path)
    places = (
        ({"jit", "pjit", "pmap"}, name == "tlt_jax/runtime/programs.py", "only runtime/programs.py compiles"),
        ({"PartitionSpec", "NamedSharding"}, name.startswith("tlt_jax/sharding/"), "only sharding/ names shardings"),
        ({"device_put", "device_get"}, name == "tlt_jax/sharding/movement.py", "only sharding/movement.py moves arrays"),
        (
            {"ConfigDict", "ml_collections"},
            name in SETTINGS_FILES or unit_of(path) in (*COMMANDS, "configs"),
            "only the settings files, commands and configs know ConfigDict",
        ),
    )
    references = referenced_names(path)
    references += [(line, module.split(".")[0]) for line, module in imported_modules(path)]
    return sorted({(line, f"{word}: {where}") for words, allowed, where in places if not allowed for line, word in references if word in words})


def budgets(path):
    """modules, commands, classes and functions stay small"""
    lines = len(path.read_text().splitlines())
    kind = "command" if unit_of(path) in COMMANDS else "module"
    found = [(lines, f"{path.name} has {lines} lines, the limit of a {kind} is {LINES[kind]}")] if lines > LINES[kind] else []
    for node in definitions(path, ast.ClassDef, *FUNCTIONS):
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        size = node.end_lineno - node.lineno + 1
        if size > LINES[kind]:
            found.append((node.lineno, f"{node.name} has {size} lines, the limit of a {kind} is {LINES[kind]}"))
        methods = [child for child in node.body if isinstance(child, FUNCTIONS)]
        if kind == "class" and len(methods) > METHODS:
            found.append((node.lineno, f"{node.name} has {len(methods)} methods, the limit is {METHODS}"))
    return found


def parameters(path):
    """more parameters than six are owed a struct"""
    found = []
    for node in definitions(path, *FUNCTIONS):
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([argument for argument in every if argument.arg not in ("self", "cls")])
        if count > PARAMETERS:
            found.append((node.lineno, f"{node.name} has {count} parameters, the limit is {PARAMETERS}"))
    return found


def names(path):
    """a name is a promise"""
    found = [(1, f"module name {path.stem}")] if set(path.stem.split("_")) & BANNED_WORDS else []
    for node in definitions(path, ast.ClassDef, *FUNCTIONS):
        words = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", node.name) if isinstance(node, ast.ClassDef) else [node.name.strip("_")]
        if {word.lower() for word in words} & BANNED_WORDS:
            found.append((node.lineno, f"name {node.name} holds one of {', '.join(sorted(BANNED_WORDS))}"))
    return found


@functools.cache
def glossary() -> set[str]:
    """The dimension letters that the docstring of records.py explains, as `B rows   T new tokens` in indented lines."""
    lines = ast.get_docstring(parsed(ROOT / "tlt_jax" / "records.py")).splitlines()
    return {letter for line in lines if line.startswith("    ") for letter in re.findall(r"\b([A-Z]) (?=\w)", line)}


def dimension_keys(path):
    """array names end in letters of the glossary"""
    words = [(node.lineno, node.id) for node in definitions(path, ast.Name)] + [(node.lineno, node.arg) for node in definitions(path, ast.arg)]
    suffixes = [(line, word, re.fullmatch(r"_?[a-z][a-z0-9_]*_([A-Z]+)", word)) for line, word in words]
    return sorted({(line, f"{word}: not all of {match[1]} is in the glossary") for line, word, match in suffixes if match and set(match[1]) - glossary()})


def dynamic_attributes(path):
    """attributes are declared, never probed or made up"""
    found = []
    for node in definitions(path, ast.Call):
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called in ("hasattr", "setattr", "delattr") or (called == "getattr" and len(node.args) > 2):
            found.append((node.lineno, f"{called} with a default" if called == "getattr" else called))
    found += [(node.lineno, "global statement") for node in definitions(path, ast.Global)]
    return found + [(line, f"imports {module}") for line, module in imported_modules(path) if module.split(".")[0] == "importlib"]


def handlers(path):
    """a handler names its errors and does something"""
    found = []
    for node in definitions(path, ast.ExceptHandler):
        caught = [node.type] if not isinstance(node.type, ast.Tuple) else node.type.elts
        if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in caught):
            found.append((node.lineno, f"broad handler: except {ast.unparse(node.type) if node.type else ''}".rstrip()))
        if all(isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)) for line in node.body):
            found.append((node.lineno, "the handler does nothing"))
    for node in definitions(path, ast.Call):
        if ast.unparse(node.func).endswith("suppress") and any(ast.unparse(kind) in ("Exception", "BaseException") for kind in node.args):
            found.append((node.lineno, "suppresses every error"))
    return found


def prose(path):
    """modules, public functions and public classes say what they are"""
    tree = parsed(path)
    found = [] if ast.get_docstring(tree) else [(1, "no module docstring")]
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)) and not node.name.startswith("_") and not ast.get_docstring(node):
            found.append((node.lineno, f"{node.name} has no docstring"))
    return found


def leftovers(path):
    """no notes to self, no path of one machine, no file from outside the repository"""
    words = (
        r"\bTODO\b",
        r"\bFIXME\b",
        r"\bXXX\b",
        r"\.\./shared",
        r"\bshared/(cases|data|golden|hooks|peers|reference|design)",
        r"(?<![\w.])/(home|root|tmp|Users|work)/",
    )
    lines = path.read_text().splitlines()
    return [(number, f"holds {re.search(word, line)[0]!r}") for number, line in enumerate(lines, start=1) for word in words if re.search(word, line)]


def violations(rule, files) -> tuple[list[str], set[str]]:
    """The findings of a rule that no exception covers, and the exceptions that were used."""
    found, used = [], set()
    for path in files:
        for line, text in rule(path):
            key = f"{rule.__name__} {name_of(path)} {text.split()[0]}".rstrip(":")
            if key in EXCEPTIONS:
                used.add(key)
            else:
                found.append(f"{name_of(path)}:{line}: {rule.__doc__}: {text}")
    return found, used


RULES = (layers, host_purity, device_purity, one_place, budgets, parameters, names, dimension_keys, dynamic_attributes, handlers, prose)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_product_keeps_the_rule(rule):
    found, _ = violations(rule, product_files())
    assert not found, "\n" + "\n".join(found)


def test_the_product_and_its_scripts_hold_no_leftovers():
    scripts = [path for path in (ROOT / "launch").iterdir() if path.is_file()]
    found, _ = violations(leftovers, [*product_files(), *scripts])
    assert not found, "\n" + "\n".join(found)


def test_every_exception_still_applies():
    used = set().union(*(violations(rule, product_files())[1] for rule in RULES))
    present = {name_of(path) for path in product_files()}
    stale = [key for key in EXCEPTIONS if key.split()[1] in present and key not in used]
    assert not stale, f"remove from EXCEPTIONS: {stale}"


BROKEN = (
    (layers, "tlt_jax/models/x.py", "from tlt_jax.runtime import programs", "imports runtime, which is above models"),
    (layers, "tlt_jax/tasks/x.py", "from ..rewards import math", "imports its sibling rewards"),
    (layers, "tlt_jax/training/x.py", "from configs import quickstart", "imports configs, which is above training"),
    (layers, "tlt_jax/stray/x.py", "", "has no place in LEVELS"),
    (host_purity, "tlt_jax/scheduling/x.py", "import jax.numpy as jnp", "imports jax.numpy"),
    (host_purity, "tlt_jax/tasks/x.py", "from tlt_jax import records", "imports tlt_jax.records, which is not host-pure"),
    (host_purity, "tlt_jax/training/reporting.py", "def f():\n    import jax", "imports jax"),
    (device_purity, "tlt_jax/models/x.py", "import time", "imports time"),
    (one_place, "tlt_jax/models/x.py", "f = jax.jit(g)", "jit: only runtime/programs.py"),
    (one_place, "tlt_jax/runtime/x.py", "from jax.sharding import NamedSharding", "NamedSharding: only sharding/"),
    (one_place, "tlt_jax/sharding/meshes.py", "jax.device_put(x)", "device_put: only sharding/movement.py"),
    (one_place, "tlt_jax/training/rl.py", "import ml_collections", "ml_collections: only the settings files"),
    (budgets, "tlt_jax/noise.py", "\n" * 401, "has 401 lines"),
    (budgets, "tlt_jax/train.py", "\n" * 81, "the limit of a command is 80"),
    (budgets, "tlt_jax/noise.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
    (budgets, "tlt_jax/noise.py", "class A:\n" + "    def f(self): ...\n" * 11, "A has 11 methods"),
    (parameters, "tlt_jax/noise.py", "def f(self, a, b, c, d, *, e, f, g): ...", "f has 7 parameters"),
    (names, "tlt_jax/text_utils.py", "", "module name text_utils"),
    (names, "tlt_jax/noise.py", "class CacheManager: ...", "CacheManager"),
    (dimension_keys, "tlt_jax/noise.py", "logits_BY = 1", "logits_BY"),
    (dynamic_attributes, "tlt_jax/noise.py", "getattr(x, 'y', None)", "getattr with a default"),
    (dynamic_attributes, "tlt_jax/noise.py", "hasattr(x, 'y')", "hasattr"),
    (dynamic_attributes, "tlt_jax/noise.py", "import importlib", "imports importlib"),
    (handlers, "tlt_jax/noise.py", "try: f()\nexcept (OSError, Exception): g()", "broad handler"),
    (handlers, "tlt_jax/noise.py", "try: f()\nexcept: g()", "broad handler"),
    (handlers, "tlt_jax/noise.py", "try: f()\nexcept OSError: pass", "does nothing"),
    (handlers, "tlt_jax/noise.py", "with contextlib.suppress(Exception): f()", "suppresses every error"),
    (prose, "tlt_jax/noise.py", "x = 1", "no module docstring"),
    (prose, "tlt_jax/noise.py", "'Text.'\ndef f(): ...", "f has no docstring"),
    (leftovers, "tlt_jax/noise.py", "# " + "TODO mend", "TODO"),
    (leftovers, "tlt_jax/noise.py", "open('../' 'shared')".replace("' '", ""), "../shared"),
)


@pytest.mark.parametrize(("rule", "name", "source", "words"), BROKEN)
def test_a_rule_sees_what_it_forbids(rule, name, source, words, tmp_path, monkeypatch):
    glossary()
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    found, _ = violations(rule, [path])
    assert len(found) == 1, found
    assert found[0].startswith(f"{name}:")
    assert words in found[0]


def module_names(files) -> list[str]:
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_importing_every_module_starts_no_jax_backend_and_changes_no_environment():
    # Other people's packages come first: what they do to the environment is not ours.
    others = {module.split(".")[0] for path in product_files() for _, module in imported_modules(path)} - {"tlt_jax", "configs"}
    code = ["import contextlib, os", *(f"with contextlib.suppress(ImportError): import {name}" for name in sorted(others))]
    code += ["from jax._src import xla_bridge", "before = dict(os.environ)"]
    code += [f"import {name}" for name in module_names(product_files())]
    code += ["assert before == dict(os.environ), 'an import changed the environment'"]
    code += ["assert not xla_bridge.backends_are_initialized(), 'an import started a jax backend'"]
    done = run_python("\n".join(code))
    assert done.returncode == 0, done.stderr


def test_host_pure_modules_run_without_jax():
    files = [path for path in product_files() if unit_of(path) in HOST_PURE or name_of(path) in HOST_FILES]
    imports = "\n".join(f"import {name}" for name in module_names(files))
    done = run_python(f"import sys\nsys.modules['jax'] = None\n{imports}")
    assert done.returncode == 0, done.stderr
