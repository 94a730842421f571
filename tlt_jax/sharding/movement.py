"""Arrays between host, train mesh and slices: the only place that puts or gets.

Publication is a jitted reshard on the global mesh (cast, replicated over slices) followed by a re-wrap of each slice's
own shards, which copies nothing: the views share buffers, so neither side may donate them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from tlt_jax.sharding.meshes import SLICE_AXES, Meshes
from tlt_jax.sharding.rules import param_shardings


def to_device(tree, shardings):
    """Host arrays onto devices; every process must hold the same whole arrays."""

    def put(leaf, sharding):
        leaf = np.asarray(leaf)
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(put, tree, shardings)


def to_host(tree):
    """numpy copies of whole arrays on every process; a sharded array that spans processes is gathered first."""

    def get(leaf):
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return multihost_utils.process_allgather(leaf, tiled=True)
        return leaf

    return jax.device_get(jax.tree.map(get, tree))


def to_slice(tree, mesh: Mesh, other: Mesh):
    """Arrays that lie on the slice `mesh` as arrays on another slice of the same shape, from device to device: nothing passes through the host."""
    counterpart = dict(zip(mesh.devices.flat, other.devices.flat, strict=True))

    def put(array: jax.Array) -> jax.Array:
        shards = [jax.device_put(shard.data, counterpart[shard.device]) for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(other, array.sharding.spec), shards)

    return jax.tree.map(put, tree)


def publish_shardings(meshes: Meshes, params):
    """Target of the reshard: every slice holds all parameters, sharded by tensor inside the slice."""

    def on_publish_mesh(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(meshes.publish, sharding.spec)

    one_slice = Mesh(meshes.publish.devices[0], SLICE_AXES)
    return jax.tree.map(on_publish_mesh, param_shardings(one_slice, params))


def reshard(params, dtype):
    """Traced body of publication: only the dtype changes, placement comes from the compiled program's shardings."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def lies_there(array: jax.Array, target: NamedSharding, dtype) -> bool:
    """Whether publication has nothing to do for an array: same dtype, and the same part of it on every device."""
    return array.dtype == jnp.dtype(dtype) and array.sharding.is_equivalent_to(target, array.ndim)


def relabel(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The same buffers under an equivalent sharding of another mesh."""
    return jax.make_array_from_single_device_arrays(array.shape, sharding, [shard.data for shard in array.addressable_shards])


def wrap_for_slice(published, slice_mesh: Mesh):
    """The published arrays as arrays on one local slice, on the same buffers."""
    devices = set(slice_mesh.devices.flat)

    def wrap(array: jax.Array) -> jax.Array:
        shards = [shard.data for shard in array.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(array.shape, NamedSharding(slice_mesh, array.sharding.spec), shards)

    return jax.tree.map(wrap, published)
