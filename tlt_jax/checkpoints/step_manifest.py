"""What a saved step must hold, written beside its items just before the step is committed, and the checks made against it.

The manifest (`manifest.json` in the step's directory) names every item with the path, shape and dtype of its leaves, and every file with its size, so a step
that lost an item or a part of a file is known before anything is read onto a device. It knows no Orbax manager and places no array.
"""

import json
import math

import jax
from etils import epath

HOST_ITEM = "host"
RESERVED_ITEMS = (HOST_ITEM, "metrics")
_MANIFEST_FILE = "manifest.json"
_FORMAT = 1
_PROBLEMS_SHOWN = 20

Leaves = dict[str, jax.ShapeDtypeStruct]


def describe_leaves(tree) -> Leaves:
    """Path → shape and dtype of every leaf; raises TypeError that names a leaf that is no plain array (a Python number, a typed key)."""
    leaves = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            raise TypeError(f"leaf {path} is {type(leaf).__name__}, not a jax array: put Python values into `host`")
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"leaf {path} has dtype {leaf.dtype}: save jax.random.key_data(key) instead")
        leaves[path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaves


def check_plain_json(value, where: str = HOST_ITEM) -> None:
    """Raises TypeError naming the place of the first value that JSON would not give back unchanged (tuples, numpy numbers, keys that are no strings)."""
    if type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}: JSON keys are strings")
            check_plain_json(inner, f"{where}.{key}")
    elif type(value) is list:
        for index, inner in enumerate(value):
            check_plain_json(inner, f"{where}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"{where} is {type(value).__name__}, which JSON does not give back as it was: use dict, list, str, int, float, bool or None")


def write_manifest(directory: epath.Path, step: int, items: dict[str, Leaves]) -> None:
    """Writes the manifest into the one staged (not yet committed) directory of `step`; every item's files must be complete by now."""
    staged = [path for path in directory.iterdir() if path.name == str(step) or path.name.startswith(f"{step}.")]
    if len(staged) != 1:
        raise OSError(f"{directory} should hold one staged directory of step {step}, found {[path.name for path in staged]}")
    files = {}
    for name in [*(name for name, leaves in items.items() if leaves), HOST_ITEM]:
        files[name] = _file_sizes(staged[0] / name)
    described = {name: {path: [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves.items()} for name, leaves in items.items()}
    manifest = {"format": _FORMAT, "step": step, "items": described, "files": files}
    (staged[0] / _MANIFEST_FILE).write_text(json.dumps(manifest))


def read_manifest(step_path: epath.Path) -> dict[str, Leaves]:
    """The items of a step and their leaves; raises OSError or ValueError when the manifest is missing or cut."""
    items = _load(step_path)["items"]
    return {name: {path: jax.ShapeDtypeStruct(tuple(shape), dtype) for path, (shape, dtype) in leaves.items()} for name, leaves in items.items()}


def find_problems(step_path: epath.Path) -> list[str]:
    """What is missing or cut in a committed step, a line per item; empty when the step is complete. Reads file sizes, not contents."""
    try:
        files = _load(step_path)["files"]
    except (OSError, ValueError) as error:
        return [f"its manifest cannot be read ({error})"]
    problems = []
    for name, sizes in files.items():
        if not (step_path / name).exists():
            problems.append(f"item {name!r} is missing")
            continue
        found = _file_sizes(step_path / name)
        wrong = [f"{path} has {found.get(path, 0)} of {size} bytes" for path, size in sizes.items() if found.get(path) != size]
        if wrong:
            problems.append(f"item {name!r} is damaged: {wrong[0]}" + (f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""))
    return problems


def list_mismatches(name: str, saved: Leaves, wanted) -> list[str]:
    """One line per leaf of item `name` that is absent, extra, of another shape or dtype, or has no sharding in the tree `wanted` of ShapeDtypeStruct."""
    asked = describe_leaves(wanted)
    lines = [f"{name}/{path}: saved {_show(saved[path])}, not asked for" for path in saved if path not in asked]
    lines += [f"{name}/{path}: asked for {_show(asked[path])}, not saved" for path in asked if path not in saved]
    for path in [path for path in asked if path in saved]:
        if (saved[path].shape, saved[path].dtype) != (asked[path].shape, asked[path].dtype):
            lines.append(f"{name}/{path}: saved {_show(saved[path])}, asked for {_show(asked[path])}")
    for keys, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        if leaf.sharding is None:
            lines.append(f"{name}/{jax.tree_util.keystr(keys, simple=True, separator='/')}: no sharding was asked for")
    return lines


def join_problems(lines: list[str]) -> str:
    """The lines as one indented block, cut after the first twenty with a count of the rest."""
    shown = lines[:_PROBLEMS_SHOWN]
    rest = [f"… and {len(lines) - len(shown)} more"] if len(lines) > len(shown) else []
    return "".join(f"\n  {line}" for line in [*shown, *rest])


def finite_metric(metrics: dict | None, name: str | None) -> dict | None:
    """`{name: value}` when the metric is there and finite; None otherwise, so that a NaN can never count as the best."""
    if metrics is None or name is None or name not in metrics or not math.isfinite(metrics[name]):
        return None
    return {name: float(metrics[name])}


def _load(step_path: epath.Path) -> dict:
    manifest = json.loads((step_path / _MANIFEST_FILE).read_text())
    if manifest["format"] != _FORMAT:
        raise ValueError(f"{step_path} has manifest format {manifest['format']}, this version reads {_FORMAT}")
    return manifest


def _file_sizes(root: epath.Path) -> dict[str, int]:
    sizes = {}
    for path in root.iterdir():
        if path.is_dir():
            sizes.update({f"{path.name}/{inner}": size for inner, size in _file_sizes(path).items()})
        else:
            sizes[path.name] = path.stat().length
    return sizes


def _show(leaf: jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
