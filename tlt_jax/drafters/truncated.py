"""The policy's own first layers, its norm and its head as a drafter: no parameters, no state, and the policy's keys and values of these layers."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from tlt_jax.drafters import tree_growth
from tlt_jax.drafters.drafter import Pick, PolicyView, Root, Stateless
from tlt_jax.drafters.tree_growth import Beam
from tlt_jax.models import decoder, rope
from tlt_jax.models.specs import PolicySpec
from tlt_jax.records import Tree
from tlt_jax.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class Truncated(Stateless):
    """The first `layers` layers of a policy; all of them make an oracle, which proposes what the policy draws."""

    spec: PolicySpec
    layers: int

    def propose(self, params: dict, policy: PolicyView, state, root: Root, pick: Pick, strategy: Strategy) -> Tree:
        """A tree of the shallow policy's picks."""
        definition, embedding = decoder.layer_definition(self.spec), policy.params["embed"]["embedding"]
        windows = [decoder.NO_WINDOW if window is None else window for window in self.spec.windows]
        layers = [(nnx.merge(definition, decoder.layer_params(policy.params, index)), windows[index]) for index in range(self.layers)]

        def run(nodes, level: int, tokens_BU, parent_BU):
            positions_BU = jnp.broadcast_to(root.position_B[:, None] + level, tokens_BU.shape)
            nodes, rotation = tree_growth.next_level(nodes, parent_BU, positions_BU), rope.rotation(self.spec, positions_BU, length=0)
            x_BUD = embedding[tokens_BU]
            for index, (layer, window) in enumerate(layers):
                attended, nodes = tree_growth.attend_level(policy.cache, index, nodes, layer.project(x_BUD, rotation), window)
                x_BUD = layer.finish(x_BUD, attended)
            return decoder.head_logits(self.spec, policy.params, decoder.final_norm(self.spec, policy.params, x_BUD)), nodes

        def expand(nodes, level: int, beam: Beam):
            return run(nodes, level, beam.tokens_BU, beam.parent_BU)

        rows = root.token_B.shape[0]
        start = tree_growth.no_nodes(self.spec, self.layers, rows, embedding.dtype)
        logits_B1V, nodes = run(start, 0, root.token_B[:, None], jnp.zeros((rows, 1), jnp.int32))
        return tree_growth.grow(logits_B1V[:, 0], expand, nodes, pick, strategy)
