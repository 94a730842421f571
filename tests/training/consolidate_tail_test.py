"""Where rollout.consolidate_tail takes effect: in runs that lend slices, and nowhere else are rounds timed or programs compiled for it."""

import pytest

from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.sharding.meshes import build_meshes
from tlt_jax.training import build
from tlt_jax.training.draft_training import lending_settings
from tlt_jax.training.settings import default_config

SPEC = PolicySpec(
    family="llama", vocab_size=29, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, rope=RopeSpec("default", 100.0),
    rms_norm_eps=1e-5, max_position_embeddings=64, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None,))


@pytest.mark.parametrize(("consolidate", "freeze", "slices", "many_phases", "moves"), [
    (True, False, 2, True, True), (False, False, 2, True, False), (True, True, 2, True, False), (True, False, 1, True, False), (True, False, 2, False, False)])
def test_rows_move_only_in_a_run_that_lends_slices(consolidate, freeze, slices, many_phases, moves):
    config = default_config()
    config.speculative.method = "eagle"
    config.drafter.update({"quanta_per_step": 2, "freeze": freeze})
    config.rollout.consolidate_tail = consolidate
    drivers = build.make_drivers(config, SPEC, build_meshes((2, 1, 1), slices, 1), compile_ahead=many_phases)
    assert [driver.settings.consolidate for driver in drivers] == [moves] * slices
    assert lending_settings(config).consolidate == consolidate
