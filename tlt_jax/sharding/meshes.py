"""The two views of the devices: one global train mesh, and rollout slices that are small meshes of their own.

Both views keep the flat device order, so that a reshard between them is one program and the shards can be re-wrapped
without a copy. A slice never spans two processes.
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

TRAIN_AXES = ("data", "fsdp", "tensor")
SLICE_AXES = ("data", "tensor")
PUBLISH_AXES = ("slice", "data", "tensor")


@dataclasses.dataclass(frozen=True)
class Meshes:
    """`train`: the global mesh. `publish`: the same devices as (slice, data, tensor). `slices`: one mesh a slice of this process."""

    train: Mesh
    publish: Mesh
    slices: tuple[Mesh, ...]
    slice_ids: tuple[int, ...]  # global number of each local slice


def build_meshes(train_shape: tuple[int, int, int], slice_count: int, slice_tensor: int) -> Meshes:
    """Meshes over the first data · fsdp · tensor devices; shapes are resolved and checked in settings.

    Raises ValueError when slices do not divide the devices or would span processes.
    """
    used = int(np.prod(train_shape))
    devices = np.array(jax.devices()[:used])
    if used % slice_count or (used // slice_count) % slice_tensor:
        raise ValueError(
            f"{used} devices cannot be cut into mesh.rollout_slices={slice_count} slices with mesh.rollout_tensor={slice_tensor}; "
            f"slices × tensor must divide {used}.")
    publish = Mesh(devices.reshape(slice_count, -1, slice_tensor), PUBLISH_AXES)
    local, ids = [], []
    for number, block in enumerate(publish.devices):
        owners = {device.process_index for device in block.flat}
        if len(owners) > 1:
            raise ValueError(f"rollout slice {number} would span processes {sorted(owners)}; use more, smaller slices (mesh.rollout_slices).")
        if owners == {jax.process_index()}:
            local.append(Mesh(block, SLICE_AXES))
            ids.append(number)
    return Meshes(Mesh(devices.reshape(train_shape), TRAIN_AXES), publish, tuple(local), tuple(ids))
