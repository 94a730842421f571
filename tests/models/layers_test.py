"""Products of a few rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.models.layers import FAST_ROWS, product


@pytest.mark.parametrize("lead", [(1,), (1, 1), (2, 3), (1, FAST_ROWS), (3, FAST_ROWS)])
@pytest.mark.parametrize("axes", [((-1,), (0,)), ((-2, -1), (0, 1))])
def test_few_rows_in_bfloat16_give_what_the_plain_product_gives(lead, axes):
    x = jax.random.normal(jax.random.key(0), (*lead, *(6, 8)[-len(axes[0]):])).astype(jnp.bfloat16)
    kernel = jax.random.normal(jax.random.key(1), (*x.shape[len(lead):], 5, 4))
    axes = (tuple(axis % x.ndim for axis in axes[0]), axes[1])
    expected = jax.lax.dot_general(x.astype(jnp.float32), kernel.astype(jnp.bfloat16).astype(jnp.float32), (axes, ((), ())))
    got = product(x, kernel, axes, jnp.float32)
    assert got.shape == expected.shape and got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert product(x, kernel, axes).dtype == jnp.bfloat16
