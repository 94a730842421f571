"""EAGLE (arXiv 2401.15077): one decoder layer over fc(embedding of the next token, feature); the policy's embedding and head, shared and frozen.

The published network: features after the policy's final norm, no input norm before the layer, no norm after it. `vocabulary` > 0 drafts over that many
tokens, whose rows of the policy's head are cut out once for each published version; their ids are a parameter.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from tlt_jax.drafters.feature_drafter import DraftLayer, FeatureDrafter, policy_head
from tlt_jax.models import decoder
from tlt_jax.models.layers import MLP, Attention, Projection, RMSNorm
from tlt_jax.models.specs import PolicySpec


class EagleLayer(DraftLayer):
    """The drafter's own weights."""

    def __init__(self, spec: PolicySpec, *, rngs: nnx.Rngs):
        self.fc = Projection((2 * spec.hidden_size,), (spec.hidden_size,), True, rngs=rngs)
        self.attention = Attention(spec, rngs=rngs)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec, rngs=rngs)

    def project(self, embedded_BTD: jax.Array, g_BTD: jax.Array, rotation):
        """The embedding half of fc comes first."""
        x_BTD = self.fc(jnp.concatenate([embedded_BTD, g_BTD], axis=-1))
        return x_BTD, self.rotated(x_BTD, rotation)


@functools.cache
def _definition(spec: PolicySpec) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: EagleLayer(spec, rngs=nnx.Rngs(0))))[0]


@dataclasses.dataclass(frozen=True)
class Eagle(FeatureDrafter):
    """`vocabulary` draft tokens; 0 = all."""

    vocabulary: int = 0

    capture_layers = ()

    @property
    def features(self) -> int:
        """F: the final feature."""
        return self.spec.hidden_size

    def init_params(self, rng: jax.Array, policy_params: dict) -> dict:
        """The policy's last layer behind an fc that hands the feature through; the draft tokens are the first ids until they are chosen."""
        layer = decoder.layer_params(policy_params, self.spec.num_layers - 1)
        width = self.spec.hidden_size
        kernel = jnp.concatenate([jnp.zeros((width, width)), jnp.eye(width)]) + 0.01 * width**-0.5 * jax.random.normal(rng, (2 * width, width))
        attention = {name: leaf for name, leaf in layer["attention"].items() if name not in ("query_norm", "key_norm")}
        params = {"fc": {"kernel": kernel, "bias": jnp.zeros((width,))}, "attention": attention, "mlp_norm": layer["mlp_norm"], "mlp": layer["mlp"]}
        return {"layer": params, **({"ids": jnp.arange(self.vocabulary, dtype=jnp.int32)} if self.vocabulary else {})}

    def prepare(self, params: dict, policy_params: dict) -> dict:
        """The parameters in the policy's dtype and, with a reduced vocabulary, the head's columns of its tokens."""
        dtype = policy_params["embed"]["embedding"].dtype
        prepared = {**params, "layer": jax.tree.map(lambda leaf: leaf.astype(dtype), params["layer"])}
        if not self.vocabulary:
            return prepared
        return prepared | {"head": policy_head(self.spec, policy_params, params["ids"])}

    def layer(self, params: dict) -> EagleLayer:
        """The layer with its parameters."""
        return nnx.merge(_definition(self.layer_spec), params["layer"])

    def fuse(self, params: dict, features_BTF: jax.Array) -> jax.Array:
        """Features as they are."""
        return features_BTF

    def logits(self, params: dict, policy_params: dict, hidden_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The policy's head on the predicted feature."""
        if not self.vocabulary:
            return decoder.head_logits(self.spec, policy_params, hidden_BTD), None
        return jnp.einsum("btd,dv->btv", hidden_BTD, params["head"], preferred_element_type=jnp.float32), params["ids"]

    def training_logits(self, params: dict, policy_head_DE: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
        """The policy's head, frozen."""
        return jnp.einsum("btd,de->bte", hidden_BTD, policy_head_DE, preferred_element_type=jnp.float32)
