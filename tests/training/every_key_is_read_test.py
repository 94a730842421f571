"""Every declared config key is read somewhere in the product: a key that nothing reads would be a setting that is silently ignored.

Read from the source: chains like `session.config.rollout.slots`, their shorter names (`rollout = config.rollout`), `config.precision[name]` with the names
that the function is called with, and `group.to_dict()`. The checks of settings_rules.py do not count.
"""

import ast
import pathlib

import pytest

from tlt_jax.training.settings import declared_keys

ROOT = pathlib.Path(__file__).parents[2]
NOTHING_TO_READ = {
    "rollout.allow_truncation": "only settings_rules.py reads it: it lifts a check",
}


class Reads(ast.NodeVisitor):
    """The dotted names that one file reads from `config`, and the subscripts by a parameter: (function, parameter's place, group)."""

    def __init__(self, tree: ast.Module):
        self.names: set[str] = set()
        self.by_parameter: list[tuple[str, int, str]] = []
        self.calls: list[tuple[str, list]] = []
        self._aliases: list[dict[str, str]] = [{}]
        self._functions: list[ast.AST] = []
        self.visit(tree)

    def chain(self, node) -> str | None:
        """The dotted name of a node that stands for (a part of) the config, "" for all of it; None for anything else."""
        if isinstance(node, ast.Name):
            if node.id == "config":
                return ""
            return next((aliases[node.id] for aliases in reversed(self._aliases) if node.id in aliases), None)
        if isinstance(node, ast.Attribute):
            if node.attr == "config":
                return ""
            return self._inside(self.chain(node.value), node.attr)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self._inside(self.chain(node.value), str(node.slice.value))
        return None

    def _inside(self, group, name):
        return None if group is None else f"{group}.{name}".removeprefix(".")

    def visit_FunctionDef(self, node):
        self._aliases.append({})
        self._functions.append(node)
        self.generic_visit(node)
        self._aliases.pop()
        self._functions.pop()

    def visit_Assign(self, node):
        target, value = node.targets[0], node.value
        pairs = zip(target.elts, value.elts, strict=True) if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) else [(target, value)]
        for one, other in pairs:
            name = self.chain(other)
            if isinstance(one, ast.Name) and name:
                self._aliases[-1][one.id] = name
        self.generic_visit(node)

    def visit_Attribute(self, node):
        self._note(node)

    def visit_Subscript(self, node):
        group, index = self.chain(node.value), node.slice
        if group and isinstance(index, ast.Name) and self._functions:
            names = [argument.arg for argument in self._functions[-1].args.args]
            if index.id in names:
                self.by_parameter.append((self._functions[-1].name, names.index(index.id), group))
        self._note(node)

    def visit_Call(self, node):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr == "to_dict" and self.chain(function.value):
            self.names.add(f"{self.chain(function.value)}.*")
        self.calls.append((ast.unparse(function).rsplit(".", 1)[-1], node.args))
        self.generic_visit(node)

    def _note(self, node):
        name = self.chain(node)
        if name and isinstance(node.ctx, ast.Load):
            self.names.add(name)
        self.generic_visit(node)


def keys_read(files) -> set[str]:
    """The declared keys that the files read."""
    found = [Reads(ast.parse(path.read_text())) for path in files]
    names = set().union(*(reads.names for reads in found))
    for function, place, group in (entry for reads in found for entry in reads.by_parameter):
        for called, arguments in (call for reads in found for call in reads.calls):
            if called == function and len(arguments) > place and isinstance(arguments[place], ast.Constant):
                names.add(f"{group}.{arguments[place].value}")
    whole = {name.removesuffix("*") for name in names if name.endswith(".*")}
    return {key for key in declared_keys() if key in names or any(key.startswith(prefix) for prefix in whole)}


def product() -> list[pathlib.Path]:
    places = [*(ROOT / "tlt_jax" / "training").glob("*.py"), *(ROOT / "tlt_jax").glob("*.py")]
    return [path for path in places if path.stem not in ("settings", "settings_rules", "command_line")]


READ = keys_read(product())


@pytest.mark.parametrize("key", declared_keys())
def test_the_key_is_read(key):
    assert (key in READ) is (key not in NOTHING_TO_READ)


@pytest.mark.parametrize(("source", "key", "read"), [
    ("def f(config): return config.rollout.slots", "rollout.slots", True),
    ("def f(self): return self.session.config.rollout.slots", "rollout.slots", True),
    ("def f(config):\n r, s = config.rollout, config.seed\n return r.slots", "rollout.slots", True),
    ("def f(config):\n r = config.rollout\ndef g(r): return r.slots", "rollout.slots", False),
    ("def f(config): config.rollout.slots = 1", "rollout.slots", False),
    ("def f(config, name): return config.rollout[name]\nf(config, 'slots')", "rollout.slots", True),
    ("def f(config, name): return config.rollout[name]\nf(config, 'top_k')", "rollout.slots", False),
    ("def f(config): return config.mesh.train.to_dict()", "mesh.train.fsdp", True),
    ("def f(config): return config.to_dict()", "mesh.train.fsdp", False),
    ("def f(rollout): return rollout.slots", "rollout.slots", False),
])
def test_a_read_is_seen_and_an_assignment_or_another_name_is_not(tmp_path, source, key, read):
    path = tmp_path / "x.py"
    path.write_text(source)
    assert (key in keys_read([path])) is read
