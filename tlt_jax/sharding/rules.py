"""Which logical dimension of each array lives on which mesh axis: the only place with PartitionSpecs.

Parameters are recognised by the end of their path, so the same rules place optimizer moments and gradients. A
dimension that an axis does not divide stays whole on every device.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PARAMETER_DIMENSIONS = {
    "embed/embedding": ("vocab", "width"),
    "head/kernel": ("width", "vocab"),
    "query/kernel": ("layers", "width", "heads", "channels"),
    "key/kernel": ("layers", "width", "kv_heads", "channels"),
    "value/kernel": ("layers", "width", "kv_heads", "channels"),
    "output/kernel": ("layers", "heads", "channels", "width"),
    "query/bias": ("layers", "heads", "channels"),
    "key/bias": ("layers", "kv_heads", "channels"),
    "value/bias": ("layers", "kv_heads", "channels"),
    "gate/kernel": ("layers", "width", "hidden"),
    "up/kernel": ("layers", "width", "hidden"),
    "down/kernel": ("layers", "hidden", "width"),
    "gate/bias": ("layers", "hidden"),
    "up/bias": ("layers", "hidden"),
}

TRAIN_AXIS_OF = {"vocab": "tensor", "width": "fsdp", "heads": "tensor", "kv_heads": "tensor", "hidden": "tensor", "rows": ("data", "fsdp")}
SLICE_AXIS_OF = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "hidden": "tensor", "rows": "data"}

STATE_DIMENSIONS = {
    "keys_LBKSC": ("layers", "rows", "kv_heads", "slots", "channels"),
    "values_LBKSC": ("layers", "rows", "kv_heads", "slots", "channels"),
    "segments_MS": ("inner", "inner"),
    "group_M": ("inner",),
}


def _axis_table(mesh: Mesh) -> dict:
    return TRAIN_AXIS_OF if "fsdp" in mesh.axis_names else SLICE_AXIS_OF


def _axis_size(mesh: Mesh, axis) -> int:
    size = 1
    for name in axis if isinstance(axis, tuple) else (axis,):
        size *= mesh.shape[name]
    return size


def _sharding(mesh: Mesh, dimensions: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    table = _axis_table(mesh)
    axes = []
    for dimension, size in zip(dimensions, shape, strict=True):
        axis = table.get(dimension)
        axes.append(axis if axis is not None and size % _axis_size(mesh, axis) == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*axes))


def _path_names(path) -> list[str]:
    names = []
    for entry in path:
        match entry:
            case jax.tree_util.DictKey(key=key):
                names.append(str(key))
            case jax.tree_util.GetAttrKey(name=name):
                names.append(name)
    return names


def param_shardings(mesh: Mesh, tree):
    """A NamedSharding for every array (or ShapeDtypeStruct) of a parameter, gradient or optimizer tree."""

    def place(path, leaf):
        dimensions = PARAMETER_DIMENSIONS.get("/".join(_path_names(path)[-2:]))
        return replicated(mesh) if dimensions is None or len(dimensions) != len(leaf.shape) else _sharding(mesh, dimensions, leaf.shape)

    return jax.tree_util.tree_map_with_path(place, tree)


def state_shardings(mesh: Mesh, state):
    """Placement of a slice's row state: rows over data, key/value heads over tensor."""

    def place(path, leaf):
        names = _path_names(path)
        dimensions = STATE_DIMENSIONS.get(names[-1], ("rows",) + ("inner",) * (len(leaf.shape) - 1))
        return _sharding(mesh, dimensions, leaf.shape) if leaf.shape else replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def batch_shardings(mesh: Mesh, tree):
    """Rows of every array over the data-like axes."""
    return jax.tree.map(lambda leaf: _sharding(mesh, ("rows",) + ("inner",) * (len(leaf.shape) - 1), leaf.shape) if leaf.shape else replicated(mesh), tree)


def batch_rows_multiple(mesh: Mesh) -> int:
    """Batches on `mesh` need a multiple of this many rows."""
    return _axis_size(mesh, _axis_table(mesh)["rows"])


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec())
