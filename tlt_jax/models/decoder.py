"""The one decoder family: trunk plus policy, value or reward head, as pure functions over a nested dict of parameters.

Layers are stacked on a leading axis and scanned (or unstacked and unrolled, for decoding on a CPU); in decoding the
cache travels in the scan's carry and is updated in place. The NNX modules of `layers.py` are the definition of a layer;
here they are merged with a slice of the stack. Sampling, losses and placement live elsewhere.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tlt_jax.models import attention, kv_cache, rope
from tlt_jax.models.kv_cache import KVCache, NewTokens
from tlt_jax.models.layers import DecoderLayer, fan_in_normal, product
from tlt_jax.models.specs import PolicySpec

NO_WINDOW = 2**30


@flax.struct.dataclass
class DecoderOutput:
    """What a forward returns; fields that were not asked for are None."""

    logits_BTV: jax.Array | None  # float32
    features_BTD: jax.Array  # after the final norm
    aux_features_BTF: jax.Array | None  # captured residual streams, concatenated on the last axis
    cache: KVCache | None  # new entries written; lengths not moved: committing is the caller's decision


@functools.cache
def layer_definition(spec: PolicySpec) -> nnx.GraphDef:
    """The module of one layer without its parameters, for `nnx.merge`."""
    return nnx.split(nnx.eval_shape(lambda: DecoderLayer(spec, rngs=nnx.Rngs(0))))[0]


def init_params(spec: PolicySpec, rng: jax.Array) -> dict:
    """Fresh float32 parameters: normal kernels of standard deviation fan_in^-0.5, unit norms, zero biases."""
    embed_rng, head_rng, layers_rng = jax.random.split(rng, 3)

    def one_layer(key):
        return nnx.to_pure_dict(nnx.state(DecoderLayer(spec, rngs=nnx.Rngs(params=key)), nnx.Param))

    params = {
        "embed": {"embedding": fan_in_normal(embed_rng, (spec.hidden_size,), (spec.vocab_size,)).T},
        "layers": jax.vmap(one_layer)(jax.random.split(layers_rng, spec.num_layers)),
        "final_norm": {"scale": jnp.ones((spec.hidden_size,))},
    }
    outputs = spec.vocab_size if spec.head == "policy" else 1
    if spec.head != "policy" or not spec.tied:
        params["head"] = {"kernel": fan_in_normal(head_rng, (spec.hidden_size,), (outputs,))}
    return params


def abstract_params(spec: PolicySpec, dtype="float32") -> dict:
    """Shapes and dtypes of `init_params` without making an array."""
    tree = jax.eval_shape(lambda: init_params(spec, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), tree)


def unstacked(layers: dict) -> tuple:
    """The stack of layers as one tree a layer, which `forward` runs one after the other instead of in a scan.

    A scan copies each layer's weights out of the stack before it reads them. Where decoding waits for memory that shows: measured on CPU in float32, 10 to
    25 % of a step. The price is a program that takes four times as long to compile.
    """
    count = jax.tree.leaves(layers)[0].shape[0]
    return tuple(jax.tree.map(lambda stack, index=index: stack[index], layers) for index in range(count))


def layer_params(params: dict, index: int) -> dict:
    """The parameters of one layer, stacked or not."""
    layers = params["layers"]
    return layers[index] if isinstance(layers, tuple) else jax.tree.map(lambda stack: stack[index], layers)


def forward(spec: PolicySpec, params: dict, tokens_BT, *, positions_BT=None, segments_BT=None, cache: KVCache | None = None, mask=None,
            capture_layers: tuple[int, ...] = (), compute_logits: bool = True, remat: bool = False) -> DecoderOutput:
    """Run the decoder on T new tokens a row.

    Without a cache: a full causal forward, `positions_BT` default 0…T−1, `segments_BT` (packed rows) keeps sequences apart.
    With a cache: tokens follow each row's committed slots; `mask` [B, T, T] says which new tokens see which (default causal; a
    tree passes its ancestor matrix with its own positions). `capture_layers`: residual stream entering those layers.
    `remat` recomputes each whole layer in the backward pass; otherwise matmul outputs are kept.
    """
    if missing := [layer for layer in capture_layers if not 0 <= layer < spec.num_layers]:
        raise ValueError(f"capture_layers {missing}: the model's layers are 0 to {spec.num_layers - 1}.")
    tokens_BT = jnp.asarray(tokens_BT)
    rows, length = tokens_BT.shape
    if positions_BT is None:
        start_B = jnp.zeros((rows,), jnp.int32) if cache is None else cache.lengths_B
        positions_BT = start_B[:, None] + jnp.arange(length, dtype=jnp.int32)[None, :]
    positions_BT = jnp.asarray(positions_BT)
    if spec.rope.kind == "dynamic" and cache is not None and cache.slots > spec.rope.original_max_position_embeddings:
        raise ValueError(
            f"dynamic RoPE changes every earlier key once a sequence passes {spec.rope.original_max_position_embeddings} tokens; decoding with a cache of "
            f"{cache.slots} slots would be wrong. Lower rollout.max_new_tokens or use a checkpoint with yarn or llama3 scaling.")
    rotation = rope.rotation(spec, positions_BT, length=jnp.max(positions_BT) + 1 if cache is None else 0)
    same_BTT = None if segments_BT is None else segments_BT[:, :, None] == segments_BT[:, None, :]
    windows = np.array([NO_WINDOW if w is None else w for w in spec.windows], np.int32)
    definition = layer_definition(spec)

    def new_mask(window):
        allowed = attention.visible(positions_BT, positions_BT, window)
        allowed = allowed if mask is None else allowed & mask
        return allowed if same_BTT is None else allowed & same_BTT

    def layer_step(carry, scanned):
        x_BTD, cache, captured = carry
        layer_params, index, window = scanned
        captured = [jnp.where(index == layer, x_BTD, kept) for layer, kept in zip(capture_layers, captured, strict=True)]
        layer = nnx.merge(definition, layer_params)
        query, key, value = layer.project(x_BTD, rotation)
        if cache is None:
            attended = attention.causal_attention(query, key, value, new_mask(window))
        else:
            cache = kv_cache.append(cache, index, key, value)
            attended = kv_cache.attend(cache, index, query, NewTokens(key, value, positions_BT, new_mask(window), window))
        return (layer.finish(x_BTD, attended), cache, captured), None

    x_BTD = params["embed"]["embedding"][tokens_BT]
    carry = (x_BTD, cache, [jnp.zeros_like(x_BTD) for _ in capture_layers])
    # Inside a scan nothing is lost to common subexpressions. Without `remat` the matmul outputs are kept and only what lies between them is recomputed:
    # measured 20 % less time than keeping everything (CPU, 0.8M parameters), since less is written and read back.
    policy = None if remat else jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    step = layer_step if cache is not None else jax.checkpoint(layer_step, policy=policy, prevent_cse=False)
    if isinstance(params["layers"], tuple):
        for index, layer_params in enumerate(params["layers"]):
            carry, _ = step(carry, (layer_params, index, int(windows[index])))
    else:
        carry, _ = jax.lax.scan(step, carry, (params["layers"], jnp.arange(spec.num_layers), windows))
    x_BTD, cache, captured = carry
    features_BTD = final_norm(spec, params, x_BTD)
    logits_BTV = head_logits(spec, params, features_BTD) if compute_logits else None
    return DecoderOutput(logits_BTV, features_BTD, jnp.concatenate(captured, axis=-1) if captured else None, cache)


def final_norm(spec: PolicySpec, params: dict, x_BTD: jax.Array) -> jax.Array:
    """The norm before the head, statistics in float32."""
    wide = x_BTD.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + spec.rms_norm_eps)
    return normed.astype(x_BTD.dtype) * params["final_norm"]["scale"].astype(x_BTD.dtype).reshape((1,) * (x_BTD.ndim - 1) + (-1,))


def head_matrix(spec: PolicySpec, params: dict) -> tuple[jax.Array, bool]:
    """The head's matrix and whether it is stored [V, D] (the tied embedding) and not [D, V]."""
    tied = spec.head == "policy" and spec.tied
    return (params["embed"]["embedding"], True) if tied else (params["head"]["kernel"], False)


def head_logits(spec: PolicySpec, params: dict, features: jax.Array) -> jax.Array:
    """float32 logits (or one value) for features [..., D]."""
    matrix, transposed = head_matrix(spec, params)
    return product(features, matrix, ((features.ndim - 1,), (1 if transposed else 0,)), jnp.float32)
