"""EAGLE-3 (arXiv 2503.01840): three intermediate features fused, one layer that reads the embedding beside them, its own norm and head over draft tokens.

Features are the residual stream entering layers 2, L // 2 and L − 3 of the policy, un-normalised, side by side. The residual of the layer is the
un-normalised fused feature (`norm_before_residual` false), and the output before the last norm is fed back.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from tlt_jax.drafters.feature_drafter import DraftLayer, FeatureDrafter, policy_head
from tlt_jax.models import decoder
from tlt_jax.models.layers import MLP, Attention, Projection, RMSNorm, product
from tlt_jax.models.specs import PolicySpec


class Eagle3Layer(DraftLayer):
    """The drafter's own weights but its head."""

    def __init__(self, spec: PolicySpec, features: int, *, rngs: nnx.Rngs):
        width = spec.hidden_size
        self.fc = Projection((features,), (width,), False, rngs=rngs)
        self.input_norm = RMSNorm(width, spec.rms_norm_eps)
        self.hidden_norm = RMSNorm(width, spec.rms_norm_eps)
        self.attention = Attention(spec, inputs=2 * width, rngs=rngs)
        self.mlp_norm = RMSNorm(width, spec.rms_norm_eps)
        self.mlp = MLP(spec, rngs=rngs)
        self.norm = RMSNorm(width, spec.rms_norm_eps)

    def project(self, embedded_BTD: jax.Array, g_BTD: jax.Array, rotation):
        """The embedding half of the input comes first."""
        x_BTX = jnp.concatenate([self.input_norm(embedded_BTD), self.hidden_norm(g_BTD)], axis=-1)
        return g_BTD, self.rotated(x_BTX, rotation)


@functools.cache
def _definition(spec: PolicySpec, features: int) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Eagle3Layer(spec, features, rngs=nnx.Rngs(0))))[0]


def default_capture(layers: int) -> tuple[int, int, int]:
    """The layers whose input is captured. Raises ValueError where they would not be three different ones (policies of fewer than 7 layers)."""
    low, middle, high = 2, layers // 2, layers - 3
    if not low < middle < high:
        raise ValueError(
            f"eagle3 reads the inputs of layers 2, L // 2 and L - 3, which are not three rising layers when L = {layers}: name others in "
            "drafter.capture_layers, or use speculative.method=eagle")
    return low, middle, high


@dataclasses.dataclass(frozen=True)
class Eagle3(FeatureDrafter):
    """`vocabulary` draft tokens of the drafter's own head."""

    vocabulary: int
    capture_layers: tuple[int, ...]

    @property
    def features(self) -> int:
        """F: the captured streams side by side."""
        return len(self.capture_layers) * self.spec.hidden_size

    def init_params(self, rng: jax.Array, policy_params: dict) -> dict:
        """As near to the policy's last layer as the form allows: the last captured stream through it, and the policy's norm and head."""
        width, last = self.spec.hidden_size, decoder.layer_params(policy_params, self.spec.num_layers - 1)
        params = nnx.to_pure_dict(nnx.state(Eagle3Layer(self.layer_spec, self.features, rngs=nnx.Rngs(params=rng)), nnx.Param))
        params["fc"]["kernel"] = params["fc"]["kernel"] * 0.05 + jnp.eye(self.features, width, k=width - self.features)
        params |= {"hidden_norm": last["attention_norm"], "mlp_norm": last["mlp_norm"], "mlp": last["mlp"], "norm": policy_params["final_norm"]}
        for name in ("query", "key", "value"):
            kernel = params["attention"][name]["kernel"]
            params["attention"][name] = {**last["attention"][name], "kernel": jnp.concatenate([0.05 * kernel[:width], last["attention"][name]["kernel"]])}
        params["attention"]["output"] = last["attention"]["output"]
        ids = jnp.arange(self.vocabulary, dtype=jnp.int32)
        return {"layer": params, "head": {"kernel": policy_head(self.spec, policy_params, ids)}, "ids": ids}

    def prepare(self, params: dict, policy_params: dict) -> dict:
        """The parameters in the policy's dtype."""
        dtype = policy_params["embed"]["embedding"].dtype
        return {**params, **jax.tree.map(lambda leaf: leaf.astype(dtype), {"layer": params["layer"], "head": params["head"]})}

    def layer(self, params: dict) -> Eagle3Layer:
        """The layer with its parameters."""
        return nnx.merge(_definition(self.layer_spec, self.features), params["layer"])

    def fuse(self, params: dict, features_BTF: jax.Array) -> jax.Array:
        """fc over the captured streams."""
        return self.layer(params).fc(features_BTF)

    def logits(self, params: dict, policy_params: dict, hidden_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The drafter's own head on its normed output."""
        return self.training_logits(params, params["head"]["kernel"], hidden_BTD), params["ids"]

    def training_logits(self, params: dict, policy_head_DE: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
        """The drafter's own head; the policy's is the teacher's."""
        return product(self.layer(params).norm(hidden_BTD), params["head"]["kernel"], ((2,), (0,)), jnp.float32)
