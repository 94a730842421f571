"""The two views of the devices: shapes, order, and shapes that do not fit."""

import jax
import numpy as np
import pytest

from tlt_jax.sharding.meshes import build_meshes


@pytest.mark.parametrize(("shape", "slices", "tensor"), [((8, 1, 1), 8, 1), ((2, 2, 2), 2, 2), ((1, 4, 2), 1, 8), ((2, 2, 1), 2, 1), ((1, 1, 1), 1, 1)])
def test_slices_are_equal_disjoint_blocks_of_the_train_meshes_devices_in_order(shape, slices, tensor):
    meshes = build_meshes(shape, slices, tensor)
    used = int(np.prod(shape))
    assert dict(meshes.train.shape) == dict(zip(("data", "fsdp", "tensor"), shape, strict=True))
    assert dict(meshes.publish.shape) == {"slice": slices, "data": used // slices // tensor, "tensor": tensor}
    assert meshes.slice_ids == tuple(range(slices))
    for mesh in meshes.slices:
        assert dict(mesh.shape) == {"data": used // slices // tensor, "tensor": tensor}
    in_order = [device for mesh in meshes.slices for device in mesh.devices.flat]
    assert in_order == list(meshes.train.devices.flat) == list(meshes.publish.devices.flat) == jax.devices()[:used]


@pytest.mark.parametrize(("shape", "slices", "tensor"), [((8, 1, 1), 3, 1), ((8, 1, 1), 4, 4), ((2, 1, 1), 4, 1), ((1, 1, 1), 1, 2)])
def test_slices_that_do_not_divide_the_devices_are_an_error_with_the_numbers(shape, slices, tensor):
    with pytest.raises(ValueError, match=rf"{int(np.prod(shape))} devices .*rollout_slices={slices} .*rollout_tensor={tensor}"):
        build_meshes(shape, slices, tensor)


def test_a_train_mesh_larger_than_the_machine_is_an_error_that_says_both_numbers():
    with pytest.raises(ValueError, match=r"8.*16"):
        build_meshes((16, 1, 1), 1, 1)
