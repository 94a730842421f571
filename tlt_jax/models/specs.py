"""Model specs: a frozen, hashable description of a decoder, read from a Hugging Face config.json (layouts of transformers 4 and 5).

Meaning of fields and their defaults follow transformers 5.24 (`models/{llama,qwen2,qwen3,mistral}`, `modeling_rope_utils.py`). What this module does
not do: it reads no files, knows no tensors and computes no rotary tables. Host code: it never imports jax.
"""

import dataclasses
import math
from typing import Any, Literal

from absl import logging

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base `theta` and its scaling. Fields that the kind does not use are None.

    For "dynamic" `original_max_position_embeddings` is the config's `max_position_embeddings` (transformers scales past that length).
    For "yarn" every default is resolved: `attention_factor` multiplies cos and sin, `mscale*` are kept only to write the config back.
    """

    kind: RopeKind
    theta: float
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclasses.dataclass(frozen=True)
class PolicySpec:
    """Everything that fixes a decoder's shapes and mathematics; usable as a static value of traced functions.

    `windows` has one entry a layer: None is full attention, w lets position i see positions i-w+1 .. i.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    rms_norm_eps: float
    max_position_embeddings: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    head: Literal["policy", "value", "reward"] = "policy"


_MODEL_NAMES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
_ARCHITECTURES = {f"{name}ForCausalLM": (family, "policy") for family, name in _MODEL_NAMES.items()} | {
    f"{name}ForSequenceClassification": (family, "reward") for family, name in _MODEL_NAMES.items()
}
# What transformers assumes when the key is absent; None for key/value heads means "as many as query heads".
_DEFAULTS = {
    "llama": {"max_position_embeddings": 2048, "num_key_value_heads": None, "head_dim": None},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": None, "max_window_layers": 28, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28, "sliding_window": 4096},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
}
_BIAS_FIELDS = {"llama": ("attention_bias", "mlp_bias"), "qwen2": (), "qwen3": ("attention_bias",), "mistral": ()}

# Fields that would change the mathematics of this decoder, each with the values under which it does not.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "clip_qkv": (None,),
    "use_mrope": (None, False),
    "use_qk_norm": (None, False),
    "rope_local_base_freq": (None,),
    "sliding_window_pattern": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None,),
    "attn_temperature_tuning": (None, False),
    "attention_multiplier": (None, 1),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "num_experts_per_tok": (None, 0),
    "moe_intermediate_size": (None, 0),
}

_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
_ROPE_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_ROPE_KNOWN = frozenset(_ROPE_ALWAYS).union(*_ROPE_KEYS.values())


def spec_from_config(config: dict[str, Any]) -> PolicySpec:
    """The spec of a Hugging Face config.json given as a dict.

    Raises ValueError, naming the field and its value, for an architecture or a field that this decoder does not compute, for sizes that do not
    fit each other, and for a Qwen config that holds no rope theta in either layout.
    """
    family, head = _architecture(config)
    _refuse_foreign_fields(config, family)
    defaults = _DEFAULTS[family]
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", defaults["num_key_value_heads"] or heads, null=heads)
    hidden = _size(config, "hidden_size")
    head_dim = _head_dim(config, defaults["head_dim"], hidden, heads)
    if heads % kv_heads:
        raise ValueError(f"config: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}.")
    layers = _size(config, "num_hidden_layers")
    max_positions = _size(config, "max_position_embeddings", defaults["max_position_embeddings"])
    attention_bias = family in ("llama", "qwen3") and _flag(config, "attention_bias")
    return PolicySpec(
        family=family,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_rope(config, family, max_positions),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        tied=_flag(config, "tie_word_embeddings"),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=family == "llama" and _flag(config, "mlp_bias"),
        qk_norm=family == "qwen3",
        windows=_windows(config, family, layers),
        head=head,
    )


def config_from_spec(spec: PolicySpec, *, dtype: str) -> dict[str, Any]:
    """A config.json for a model that came from no Hugging Face directory; `dtype` names the file's tensors ("float32", …).

    The rope is written in both layouts, so that transformers 4 and 5, vLLM and SGLang read the same base. spec_from_config inverts it.
    """
    config = architecture_fields(spec.family, spec.head) | {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "tie_word_embeddings": spec.tied,
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    biases = {"attention_bias": spec.output_bias, "mlp_bias": spec.mlp_bias}
    config |= {field: biases[field] for field in _BIAS_FIELDS[spec.family]}
    scaling = {key: value for key in _ROPE_KEYS[spec.rope.kind] if (value := vars(spec.rope)[key]) is not None}
    config["rope_theta"] = spec.rope.theta
    config["rope_parameters"] = {"rope_type": spec.rope.kind, "rope_theta": spec.rope.theta} | scaling
    if spec.rope.kind != "default":
        config["rope_scaling"] = {"rope_type": spec.rope.kind} | scaling
    config |= _window_fields(spec)
    if spec_from_config(config) != spec:
        raise ValueError(f"No {_MODEL_NAMES[spec.family]} config.json can say what this spec says (biases, q/k norm or windows of another family): {spec}.")
    return config


def architecture_fields(family: str, head: str) -> dict[str, Any]:
    """The config fields that name a family and its head. A head with one output is a sequence classification model with one label."""
    if head == "policy":
        return {"architectures": [f"{_MODEL_NAMES[family]}ForCausalLM"], "model_type": family}
    one_label = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "head_role": head}
    return {"architectures": [f"{_MODEL_NAMES[family]}ForSequenceClassification"], "model_type": family} | one_label


def _architecture(config: dict[str, Any]) -> tuple[str, str]:
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    known = f"Supported: {', '.join(sorted(_ARCHITECTURES))}."
    if not names:
        if model_type not in _MODEL_NAMES:
            raise ValueError(f"config: model_type {model_type!r} is not supported and architectures is empty. {known}")
        return model_type, "policy"
    if len(names) != 1 or names[0] not in _ARCHITECTURES:
        raise ValueError(f"config: architectures {names!r} is not supported. {known}")
    family, head = _ARCHITECTURES[names[0]]
    if model_type not in (None, family):
        raise ValueError(f"config: model_type {model_type!r} does not go with architectures {names!r}.")
    if head == "reward":
        labels = config.get("num_labels") or len(config.get("id2label") or (0, 0))
        if labels != 1:
            raise ValueError(f"config: id2label/num_labels gives {labels} labels; a value or reward head has one.")
        head = config.get("head_role", "reward")
        if head not in ("value", "reward"):
            raise ValueError(f"config: head_role {head!r} is neither 'value' nor 'reward'.")
    return family, head


def _refuse_foreign_fields(config: dict[str, Any], family: str) -> None:
    for field, neutral in _NEUTRAL_VALUES.items():
        if field in config and config[field] not in neutral:
            raise ValueError(f"config: {field} = {config[field]!r} is not supported (this decoder computes {field} = {neutral[0]!r}).")
    for field in ("attention_bias", "mlp_bias"):
        # Qwen2 has q/k/v biases whatever the field says, as in transformers.
        if field not in _BIAS_FIELDS[family] and config.get(field) and (family, field) != ("qwen2", "attention_bias"):
            raise ValueError(f"config: {field} = {config[field]!r} is not supported for model_type {family!r}.")
    if config.get("attention_dropout"):
        logging.warning("config: attention_dropout = %r is not applied; training runs without dropout.", config["attention_dropout"])


_REQUIRED = object()


def _size(config: dict[str, Any], field: str, default: Any = _REQUIRED, *, null: Any = _REQUIRED) -> int:
    """A positive integer; `default` when absent, `null` when the file says null."""
    value = config.get(field, default)
    value = null if value is None else value
    if value is _REQUIRED:
        raise ValueError(f"config: {field} is missing.")
    if type(value) is not int or value <= 0:
        raise ValueError(f"config: {field} = {value!r} is not a positive integer.")
    return value


def _number(fields: dict[str, Any], field: str, default: float | None = None) -> float:
    value = fields.get(field)
    value = default if value is None else value
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"config: {field} = {value!r} is not a positive number.")
    return float(value)


def _flag(config: dict[str, Any], field: str) -> bool:
    value = config.get(field)
    if value not in (None, True, False):
        raise ValueError(f"config: {field} = {value!r} is not true or false.")
    return bool(value)


def _head_dim(config: dict[str, Any], default: int | None, hidden: int, heads: int) -> int:
    given = config.get("head_dim", default)
    if given is None and hidden % heads:
        raise ValueError(f"config: hidden_size {hidden} is not a multiple of num_attention_heads {heads} and head_dim is not given.")
    head_dim = hidden // heads if given is None else _size({"head_dim": given}, "head_dim")
    if head_dim % 2:
        raise ValueError(f"config: head_dim {head_dim} is odd; rotary embeddings turn pairs of channels.")
    return head_dim


def _rope(config: dict[str, Any], family: str, max_positions: int) -> RopeSpec:
    layouts = [_rope_layout(config, key, family, max_positions) for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    if not layouts:
        layouts = [_rope_layout(config | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters", family, max_positions)]
    if any(layout != layouts[0] for layout in layouts):
        raise ValueError(f"config: rope_scaling {config['rope_scaling']!r} and rope_parameters {config['rope_parameters']!r} disagree; keep one.")
    return layouts[0]


def _rope_layout(config: dict[str, Any], key: str, family: str, max_positions: int) -> RopeSpec:
    fields = config[key]
    if not isinstance(fields, dict):
        raise ValueError(f"config: {key} = {fields!r} is not an object.")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise ValueError(f"config: {key}.rope_type = {kind!r} is not supported. Supported: {', '.join(_ROPE_KEYS)}.")
    if unknown := sorted(set(fields) - _ROPE_KNOWN):
        raise ValueError(f"config: {key} has unknown fields {unknown} ({ {field: fields[field] for field in unknown} }).")
    if fields.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"config: {key}.partial_rotary_factor = {fields['partial_rotary_factor']!r} is not supported (only 1).")
    if unused := sorted(set(fields) - set(_ROPE_ALWAYS) - set(_ROPE_KEYS[kind])):
        logging.warning("config: %s fields %s have no meaning for rope_type %r and are not used (as in transformers).", key, unused, kind)
    rope = RopeSpec(kind=kind, theta=_theta(config, fields, family))
    if kind == "default":
        return rope
    original = config.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings") or max_positions
    if kind == "yarn":
        return _yarn(rope, fields, original, max_positions)
    rope = dataclasses.replace(rope, factor=_number(fields, "factor"))
    if kind == "linear":
        return rope
    if kind == "dynamic":
        return dataclasses.replace(rope, original_max_position_embeddings=max_positions)
    low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
    if high <= low:
        raise ValueError(f"config: {key}.high_freq_factor {high} is not above low_freq_factor {low}.")
    return dataclasses.replace(rope, original_max_position_embeddings=original, low_freq_factor=low, high_freq_factor=high)


def _theta(config: dict[str, Any], fields: dict[str, Any], family: str) -> float:
    places = (fields, config, config.get("rope_parameters") or {})
    given = {float(theta) for place in places if (theta := place.get("rope_theta")) is not None}
    if len(given) > 1:
        raise ValueError(f"config: rope_theta has several values: {sorted(given)} at the top level and in rope_parameters/rope_scaling; keep one.")
    if not given and family in ("qwen2", "qwen3"):
        raise ValueError(f"config: rope_theta is missing, both at the top level and in rope_parameters; {family} models differ in it, so no default is taken.")
    return _number({"rope_theta": next(iter(given), None)}, "rope_theta", 10000.0)


def _yarn(rope: RopeSpec, fields: dict[str, Any], original: int, max_positions: int) -> RopeSpec:
    """YaRN (arXiv 2309.00071) with transformers' defaults: `factor: null` is the ratio of the lengths, attention 0.1 ln(factor) + 1."""
    if "factor" not in fields:
        raise ValueError("config: rope factor is missing for rope_type 'yarn'.")
    factor = _number(fields, "factor", max_positions / original)
    mscale, mscale_all_dim = fields.get("mscale"), fields.get("mscale_all_dim")

    def attention_scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    attention = attention_scale(mscale) / attention_scale(mscale_all_dim) if mscale and mscale_all_dim else attention_scale(1.0)
    return dataclasses.replace(
        rope,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_number(fields, "attention_factor", attention),
        beta_fast=float(fields.get("beta_fast") or 32),
        beta_slow=float(fields.get("beta_slow") or 1),
        truncate=bool(fields.get("truncate", True)),
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
    )


def _windows(config: dict[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = None
    if family == "mistral" or (family in ("qwen2", "qwen3") and _flag(config, "use_sliding_window")):
        window = config.get("sliding_window", _DEFAULTS[family]["sliding_window"])
    elif family == "llama" and config.get("sliding_window") is not None:
        raise ValueError(f"config: sliding_window = {config['sliding_window']!r} has no meaning for model_type 'llama'; remove it or correct model_type.")
    if window is not None:
        window = _size({"sliding_window": window}, "sliding_window")
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", _DEFAULTS[family]["max_window_layers"]) if family in ("qwen2", "qwen3") else 0
        return tuple(window if index >= first else None for index in range(layers))
    if unknown := sorted(set(map(str, types)) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"config: layer_types holds {unknown}; only full_attention and sliding_attention are supported.")
    if len(types) != layers:
        raise ValueError(f"config: layer_types has {len(types)} entries for num_hidden_layers {layers}.")
    if "sliding_attention" in types and window is None:
        raise ValueError("config: layer_types holds sliding_attention, but sliding_window is null or use_sliding_window is false.")
    if family == "mistral" and window is not None and "full_attention" in types:
        raise ValueError(f"config: layer_types {types!r} mixes kinds; transformers' mistral applies sliding_window {window} to every layer.")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _window_fields(spec: PolicySpec) -> dict[str, Any]:
    window = next((size for size in spec.windows if size is not None), None)
    if spec.family == "mistral":
        return {"sliding_window": window}
    if spec.family == "llama":
        return {}
    types = ["full_attention" if size is None else "sliding_attention" for size in spec.windows]
    first = types.index("sliding_attention") if window is not None else spec.num_layers
    return {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": first, "layer_types": types}
