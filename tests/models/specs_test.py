"""Reading config.json: both layouts, transformers' defaults, and a clear refusal of what the decoder does not compute."""

import dataclasses
import json
import logging

import numpy as np
import pytest

from tlt_jax.models.specs import RopeSpec, config_from_spec, spec_from_config

SIZES = {
    "vocab_size": 113,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
NAMES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}


def config(family="llama", **changes):
    """A config of `family`; a change to Ellipsis removes the field."""
    fields = SIZES | {"architectures": [f"{NAMES[family]}ForCausalLM"], "model_type": family} | changes
    return {name: value for name, value in fields.items() if value is not ...}


@pytest.mark.parametrize("family", NAMES)
def test_a_spec_is_hashable_and_survives_the_way_through_a_config(family):
    spec = spec_from_config(config(family))
    assert spec_from_config(json.loads(json.dumps(config_from_spec(spec, dtype="float32")))) == spec
    assert len({spec, spec_from_config(config(family))}) == 1


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "truncate": False, "attention_factor": 1.2},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0},
    ],
)
def test_both_layouts_of_a_rope_give_the_same_spec_and_a_config_again(scaling):
    old = spec_from_config(config(rope_scaling=scaling, rope_theta=1e6))
    older = spec_from_config(config(rope_scaling={"type": scaling["rope_type"]} | {k: v for k, v in scaling.items() if k != "rope_type"}, rope_theta=1e6))
    new = spec_from_config(config(rope_parameters=scaling | {"rope_theta": 1e6}, rope_theta=...))
    assert old == older == new
    assert new.rope.kind == scaling["rope_type"] and new.rope.theta == 1e6 and new.rope.factor == scaling["factor"]
    assert spec_from_config(config_from_spec(new, dtype="float32")) == new


def test_the_theta_inside_rope_parameters_counts():
    assert spec_from_config(config("qwen2", rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6})).rope == RopeSpec("default", 1e6)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("layout", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_scaling": {"type": "linear", "factor": 2.0}}])
def test_a_qwen_without_theta_is_an_error(family, layout):
    with pytest.raises(ValueError, match="rope_theta is missing"):
        spec_from_config(config(family, rope_theta=..., **layout))


def test_a_llama_without_theta_takes_ten_thousand():
    assert spec_from_config(config(rope_theta=...)).rope.theta == 10000.0


def test_layouts_that_disagree_are_an_error():
    with pytest.raises(ValueError, match="rope_theta has several values"):
        spec_from_config(config(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}))
    with pytest.raises(ValueError, match="disagree"):
        spec_from_config(config(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}))


def test_yarn_resolves_its_defaults_as_transformers_does():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    rope = spec_from_config(config(rope_scaling=yarn)).rope
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (32.0, 1.0, True)
    np.testing.assert_allclose(rope.attention_factor, 0.1 * np.log(4.0) + 1)
    with_scales = spec_from_config(config(rope_scaling=yarn | {"mscale": 0.5, "mscale_all_dim": 1.0})).rope
    np.testing.assert_allclose(with_scales.attention_factor, (0.05 * np.log(4.0) + 1) / (0.1 * np.log(4.0) + 1))
    assert spec_from_config(config(rope_scaling=yarn | {"factor": None})).rope.factor == 256 / 64


def test_a_top_level_original_length_goes_before_the_nested_one():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert spec_from_config(config(rope_scaling=yarn, original_max_position_embeddings=32)).rope.original_max_position_embeddings == 32


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("qwen2", {"sliding_window": 4, "use_sliding_window": False}, (None, None, None)),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, (None, 4, 4)),
        ("qwen2", {"sliding_window": 4, "use_sliding_window": True}, (None, None, None)),
        ("qwen3", {"sliding_window": 4, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (4, None, 4)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("mistral", {}, (4096, 4096, 4096)),
        ("llama", {"layer_types": ["full_attention"] * 3}, (None, None, None)),
    ],
)
def test_windows_follow_the_switch_the_first_layer_and_the_layer_types(family, changes, windows):
    spec = spec_from_config(config(family, **changes))
    assert spec.windows == windows
    assert spec_from_config(config_from_spec(spec, dtype="float32")) == spec


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM"),
        ("llama", {"architectures": ..., "model_type": "gemma"}, "model_type 'gemma'"),
        ("llama", {"model_type": "qwen2"}, "does not go with"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen2", {"num_experts": 8}, "num_experts = 8"),
        ("llama", {"num_local_experts": 8}, "num_local_experts = 8"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("qwen2", {"use_mrope": True}, "use_mrope = True"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type = 'longrope'"),
        ("llama", {"rope_scaling": {"type": "su", "factor": 2.0}}, "rope_type = 'su'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        ("llama", {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}}, "high_freq_factor 1.0"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 4}, "use_sliding_window is false"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 4}, "layer_types"),
        ("llama", {"sliding_window": 4}, "sliding_window = 4"),
        ("mistral", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers = 2.5"),
        ("llama", {"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size 48 is not a multiple"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ("llama", {"head_dim": 13}, "head_dim 13 is odd"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "2 labels"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_name(family, changes, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        spec_from_config(config(family, **changes))


def test_fields_that_change_nothing_pass():
    deepseek = {"use_mrope": False, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 21, "use_cache": True, "attention_dropout": 0.0}
    spec = spec_from_config(config("qwen2", **deepseek))
    assert spec.windows == (None,) * 3 and spec.qkv_bias and not spec.output_bias and not spec.qk_norm


def test_each_family_has_its_biases_norms_and_head_size():
    llama = spec_from_config(config("llama", attention_bias=True, mlp_bias=True, num_key_value_heads=None))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias, llama.num_kv_heads, llama.head_dim) == (True, True, True, 4, 12)
    qwen3 = spec_from_config(config("qwen3", head_dim=...))
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.head_dim) == (True, False, 128)
    assert spec_from_config(config("mistral", num_attention_heads=8, num_key_value_heads=..., head_dim=16)).num_kv_heads == 8
    assert not spec_from_config(config("mistral")).qkv_bias


def test_a_spec_that_no_config_can_say_is_refused():
    spec = dataclasses.replace(spec_from_config(config("mistral")), qk_norm=True)
    with pytest.raises(ValueError, match="No Mistral config"):
        config_from_spec(spec, dtype="float32")


def test_golden_configs_agree_with_transformers_own_reading(shared):
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import AutoConfig

    for path in sorted((shared / "golden").glob("*/config.json")):
        theirs, ours = AutoConfig.from_pretrained(path.parent), spec_from_config(json.loads(path.read_text()))
        assert (ours.rope.kind, ours.rope.theta) == (theirs.rope_parameters["rope_type"], theirs.rope_parameters["rope_theta"])
        assert (ours.vocab_size, ours.num_kv_heads, ours.tied, ours.rms_norm_eps) == (
            theirs.vocab_size,
            theirs.num_key_value_heads,
            theirs.tie_word_embeddings,
            theirs.rms_norm_eps,
        )
