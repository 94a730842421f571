"""Export of a drafter that learned in a run: the checkpoint alone says which it is, and what is written is the published form with the run's weights."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.export_test import exported, make_run, same
from tlt_jax import export
from tlt_jax.checkpoints.drafter_files import DrafterFiles, LoadedDrafter, load_drafter, save_drafter
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.checkpoints.pretrained import load_policy
from tlt_jax.checkpoints.run_model import SHARED_VALUE_HEAD
from tlt_jax.drafters.feature_drafter import layer_like
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.runtime.programs import new_drafter
from tlt_jax.training.drafting import load_params, make_drafter
from tlt_jax.training.settings import default_config
from tlt_jax.training.settings_rules import copy_with

SPEC = PolicySpec(
    family="llama", vocab_size=20, hidden_size=16, intermediate_size=24, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=6, rope=RopeSpec("default", 100.0),
    rms_norm_eps=1e-5, max_position_embeddings=96, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None,) * 8)
IDS = np.array([1, 4, 5, 19], np.int32)
RUNS = {
    "eagle": {"speculative.method": "eagle"}, "eagle of 7 tokens": {"speculative.method": "eagle", "drafter.draft_vocab_size": 7},
    "eagle3": {"speculative.method": "eagle3"}, "eagle3 of four layers": {"speculative.method": "eagle3", "drafter.capture_layers": ("0", "2", "5", "7")},
    "eagle3 of 7 tokens": {"speculative.method": "eagle3", "drafter.draft_vocab_size": 7},
    "eagle3 from a path": {"speculative.method": "eagle3", "drafter.path": "start"}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A policy as loaded from a directory, and beside it one of EAGLE-3's with other layers, widths and tokens than a new one has."""
    root = tmp_path_factory.mktemp("models")
    save_policy(root / "model", SPEC, decoder.init_params(SPEC, jax.random.key(0)))
    files = DrafterFiles("eagle3", dataclasses.replace(layer_like(SPEC), intermediate_size=40), len(IDS), (1, 3, 6))
    drafter = make_drafter(copy_with(default_config(), {"speculative.method": "eagle3", "drafter.draft_vocab_size": len(IDS)}), SPEC)
    params = dict(drafter.init_params(jax.random.key(1), decoder.init_params(SPEC, jax.random.key(0)))) | {"ids": IDS}
    params["layer"] = dict(params["layer"]) | {"mlp": {
        "gate": {"kernel": jnp.ones((16, 40))}, "up": {"kernel": jnp.ones((16, 40))}, "down": {"kernel": jnp.ones((40, 16))}}}
    save_drafter(root / "start", SPEC, LoadedDrafter(files, params))
    return root, load_policy(root / "model")


def trained_run(policy, tmp_path, name):
    """A workdir with a drafter whose every weight has moved; (workdir, what it drafts with, all its parameters)."""
    root, loaded = policy
    said = {"drafter.path": "", "drafter.draft_vocab_size": 0} | RUNS[name]
    if said["drafter.path"]:
        said["drafter.path"] = str(root / said["drafter.path"])
    config = copy_with(default_config(), said)
    drafter, random = make_drafter(config, SPEC), np.random.default_rng(3)
    params = load_params(config, SPEC, "float32") or new_drafter(drafter, loaded.params)
    ids = {"ids": params.pop("ids")} if "ids" in params else {}
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) * 0.3, jnp.float32), params)
    saved = {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}
    shared = loaded.params | {SHARED_VALUE_HEAD: {"kernel": jnp.ones((16, 1))}}
    return make_run(tmp_path / "run", loaded.source, {"policy": shared, "drafter": params}, step=4, host={"config": saved}), drafter, params | ids


def drafted(drafter, params, policy_params):
    """Logits and their ids of two unroll steps."""
    random = np.random.default_rng(5)
    embedded, features = (jnp.asarray(random.normal(size=(1, 6, width)), jnp.float32) for width in (SPEC.hidden_size, drafter.features))
    params = drafter.prepare(params, policy_params)
    outputs = drafter.unroll(params, embedded, features, (jnp.arange(6)[None], jnp.ones((1, 6), jnp.int32)), 2)
    return [array for hidden in outputs for array in drafter.logits(params, policy_params, hidden)]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_any_drafter_exports_its_weights_and_tokens_from_the_checkpoint_alone(policy, tmp_path, name, capsys):
    workdir, drafter, params = trained_run(policy, tmp_path, name)
    output = exported(workdir, tmp_path / "out", "--what=drafter")
    assert "drafter of step 4, float32" in capsys.readouterr().out
    loaded = load_drafter(output, SPEC)
    same(loaded.params, params)
    assert loaded.files == DrafterFiles(RUNS[name]["speculative.method"], drafter.layer_spec, drafter.vocabulary, drafter.capture_layers or None)
    config = copy_with(default_config(), {"speculative.method": RUNS[name]["speculative.method"], "drafter.path": str(output)})
    again = make_drafter(config, SPEC)
    assert again == drafter
    for one, two in zip(drafted(drafter, params, policy[1].params), drafted(again, loaded.params, policy[1].params), strict=True):
        np.testing.assert_array_equal(one, two)


def test_the_files_say_what_the_engines_read(policy, tmp_path):
    for name, ids in (("eagle of 7 tokens", np.arange(7)), ("eagle3 of 7 tokens", np.arange(7)), ("eagle3 from a path", IDS), ("eagle3", np.arange(20))):
        workdir, _, params = trained_run(policy, tmp_path / name, name)
        output = exported(workdir, tmp_path / name / "out", "--what=drafter")
        tensors, config = load_file(output / "model.safetensors"), json.loads((output / "config.json").read_text())
        assert config["head_dim"] == 6 and config["max_position_embeddings"] >= 96 and config["vocab_size"] == 20 and config["num_hidden_layers"] == 1
        assert config["draft_vocab_size"] == len(ids) and config["hidden_size"] == 16 and config["tie_word_embeddings"] is False
        assert tensors["d2t"].dtype == np.int64 and (tensors["d2t"] + np.arange(len(ids)) == ids).all()
        layers = {tensor.split(".")[0] for tensor in tensors if "." in tensor}
        if name.startswith("eagle3"):
            assert tensors["t2d"].dtype == bool and np.flatnonzero(tensors["t2d"]).tolist() == ids.tolist()
            assert layers == {"midlayer", "fc", "norm", "lm_head"} and config["architectures"] == ["LlamaForCausalLMEagle3"]
        else:
            assert layers == {"layers", "fc"} and config["architectures"] == ["LlamaForCausalLMEagle"]
            np.testing.assert_array_equal(tensors["fc.bias"], params["layer"]["fc"]["bias"])


def test_policy_and_drafter_go_to_directories_of_their_own_and_an_earlier_export_is_replaced(policy, tmp_path):
    workdir, _, params = trained_run(policy, tmp_path, "eagle3")
    for _ in range(2):
        output = exported(workdir, tmp_path / "out", "--what=policy,drafter")
    same(load_policy(output / "policy").params, policy[1].params)
    same(load_drafter(output / "drafter", SPEC).params, params)
    (output / "drafter" / "notes.txt").write_text("mine")
    assert export.main([f"--workdir={workdir}", f"--output={output / 'drafter'}", "--what=drafter"]) == 2


def test_a_start_directory_that_has_moved_is_said_and_named_anew(policy, tmp_path, capsys):
    workdir, _, params = trained_run(policy, tmp_path, "eagle3 from a path")
    start, moved = policy[0] / "start", tmp_path / "moved"
    shutil.copytree(start, moved)
    start.rename(policy[0] / "gone")
    try:
        assert export.main([f"--workdir={workdir}", f"--output={tmp_path / 'out'}", "--what=policy,drafter"]) == 2
        said = capsys.readouterr().err
        assert str(start) in said and "--config.speculative.method=eagle3 --config.drafter.path=DIR" in said and not (tmp_path / "out").exists()
        output = exported(workdir, tmp_path / "out", "--what=drafter", "--config.speculative.method=eagle3", f"--config.drafter.path={moved}")
        same(load_drafter(output, SPEC).params, params)
    finally:
        (policy[0] / "gone").rename(start)
