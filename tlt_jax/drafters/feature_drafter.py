"""What EAGLE and EAGLE-3 share: one layer that reads the policy's features, its own cache, and drafting by feeding its output back.

Slot t of a row holds the pair (feature of position t, token t + 1) and its output predicts token t + 2. Committed slots are made from true features
(`extend`); during a round the drafter's own output stands in for the features that are not known yet, and nothing of that is kept.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from tlt_jax.drafters import tree_growth
from tlt_jax.drafters.drafter import Pick, PolicyView, Root, Window
from tlt_jax.drafters.tree_growth import Beam
from tlt_jax.models import attention, decoder, kv_cache, rope
from tlt_jax.models.decoder import NO_WINDOW
from tlt_jax.models.kv_cache import KVCache, NewTokens
from tlt_jax.models.specs import PolicySpec
from tlt_jax.records import Tree
from tlt_jax.strategies import Strategy


@flax.struct.dataclass
class FeatureState:
    """Committed slots, and the output at the last one."""

    cache: KVCache
    hidden_BD: jax.Array


class DraftLayer(nnx.Module):
    """The one layer, cut around attention; its parts `attention`, `mlp_norm` and `mlp` are made by what extends it."""

    def project(self, embedded_BTD: jax.Array, g_BTD: jax.Array, rotation) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        """(residual stream, (query, key, value)); `g` is the fused feature, or the output fed back."""
        raise NotImplementedError

    def rotated(self, x_BTD: jax.Array, rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries and keys, and values, of the layer's input."""
        attention = self.attention
        return rope.rotate(attention.query(x_BTD), *rotation), rope.rotate(attention.key(x_BTD), *rotation), attention.value(x_BTD)

    def finish(self, residual_BTD: jax.Array, attended_BTHC: jax.Array) -> jax.Array:
        """Its output, which drafting feeds back."""
        x_BTD = residual_BTD + self.attention.output(attended_BTHC)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


def layer_like(spec: PolicySpec) -> PolicySpec:
    """A drafter's layer with the widths and the rotary embedding of a policy: full attention, no q/k norm."""
    return dataclasses.replace(spec, num_layers=1, windows=(None,), qk_norm=False, tied=False)


def policy_head(spec: PolicySpec, params: dict, ids_E: jax.Array | None) -> jax.Array:
    """[D, E] columns of a policy's head for the draft tokens, all of them without ids."""
    matrix, transposed = decoder.head_matrix(spec, params)
    chosen = matrix if ids_E is None else jnp.take(matrix, ids_E, axis=0 if transposed else 1)
    return chosen.T if transposed else chosen


class FeatureRows:
    """What happens to the rows of a feature drafter's state."""

    def forget(self, state: FeatureState, rows_B: jax.Array) -> FeatureState:
        """The given rows as new; what they held stays behind their length."""
        return state.replace(cache=state.cache.replace(lengths_B=jnp.where(rows_B, 0, state.cache.lengths_B)))

    def gather_rows(self, state: FeatureState, index_B: jax.Array) -> FeatureState:
        """Rows in a new order or number."""
        return FeatureState(kv_cache.gather_rows(state.cache, index_B), state.hidden_BD[index_B])

    def put_rows(self, state: FeatureState, slots_A: jax.Array, source: FeatureState) -> FeatureState:
        """The rows of another state in slots of this one."""
        return FeatureState(kv_cache.put_rows(state.cache, slots_A, source.cache), state.hidden_BD.at[slots_A].set(source.hidden_BD, mode="drop"))


@dataclasses.dataclass(frozen=True)
class FeatureDrafter(FeatureRows):
    """`spec` is the policy's, `layer_spec` that of the drafter's layer as a one-layer decoder of the same width."""

    spec: PolicySpec
    layer_spec: PolicySpec
    segments = 0

    def layer(self, params: dict) -> DraftLayer:
        """The layer with its parameters."""
        raise NotImplementedError

    def fuse(self, params: dict, features_BTF: jax.Array) -> jax.Array:
        """g of true features."""
        raise NotImplementedError

    def logits(self, params: dict, policy_params: dict, hidden_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """float32 logits of outputs, and the global ids of their columns (None: all of the policy's)."""
        raise NotImplementedError

    def training_logits(self, params: dict, policy_head_DE: jax.Array, hidden_BTD: jax.Array) -> jax.Array:
        """float32 logits over the draft tokens in training, where `policy_head_DE` holds their columns of the policy's head."""
        raise NotImplementedError

    def unroll(self, params: dict, embedded_BTD: jax.Array, features_BTF: jax.Array, places: tuple[jax.Array, jax.Array], steps: int) -> list[jax.Array]:
        """Outputs [B, T, D] of `steps` unroll steps over packed rows, as drafting makes them (the training-time test of EAGLE-3).

        Step s of slot t reads token t + 1 + s and the output of step s − 1 (the true feature at s = 0), stands at position t + s, and attends to the true
        slots up to t and to its own earlier steps. `embedded_BTD` are the tokens' own embeddings, `places` (positions, segments), segment 0 = padding.
        """
        layer, (positions_BT, segments_BT) = self.layer(params), places
        see_BTT = attention.visible(positions_BT, positions_BT, NO_WINDOW) & (segments_BT[:, :, None] == segments_BT[:, None, :])
        g_BTD, outputs, own = self.fuse(params, features_BTF), [], []
        for step in range(steps):
            shifted_BTD = jnp.pad(embedded_BTD[:, 1 + step :], ((0, 0), (0, 1 + step), (0, 0)))
            residual, (query, key, value) = layer.project(shifted_BTD, g_BTD, rope.rotation(self.layer_spec, positions_BT + step, length=0))
            own.append((key, value))
            g_BTD = layer.finish(residual, _true_and_own(query, own, see_BTT))
            outputs.append(g_BTD)
        return outputs

    def init_state(self, rows: int, length: int, dtype, block: int) -> FeatureState:
        """Rows that have seen nothing."""
        return FeatureState(kv_cache.init_cache(self.layer_spec, rows, length, dtype, block=block), jnp.zeros((rows, self.spec.hidden_size), dtype))

    def extend(self, params: dict, policy_params: dict, state: FeatureState, window: Window) -> FeatureState:
        """Commit slots of true features; slots of a row that started late stand at the front, their rotation is that of their position."""
        cache, positions_BT = state.cache, window.start_B[:, None] + jnp.arange(window.next_tokens_BT.shape[1])[None, :]
        layer = self.layer(params)
        embedded = policy_params["embed"]["embedding"][window.next_tokens_BT]
        g_BTD = self.fuse(params, window.features_BTF.astype(embedded.dtype))
        residual, (query, key, value) = layer.project(embedded, g_BTD, rope.rotation(self.layer_spec, positions_BT, length=0))
        cache = kv_cache.append(cache, 0, key, value)
        new = NewTokens(key, value, positions_BT, attention.visible(positions_BT, positions_BT, NO_WINDOW), NO_WINDOW)
        hidden_BTD = layer.finish(residual, kv_cache.attend(cache, 0, query, new))
        last_BD = jnp.take_along_axis(hidden_BTD, jnp.maximum(window.count_B - 1, 0)[:, None, None], axis=1)[:, 0]
        last_BD = jnp.where(window.count_B[:, None] > 0, last_BD, state.hidden_BD)
        return FeatureState(cache.replace(lengths_B=cache.lengths_B + window.count_B), last_BD)

    def propose(self, params: dict, policy: PolicyView, state: FeatureState, root: Root, pick: Pick, strategy: Strategy) -> Tree:
        """Feed the output back level by level; the first level comes from the last committed slot."""
        layer, embedding, ids = self.layer(params), policy.params["embed"]["embedding"], []

        def logits_of(hidden_BTD):
            logits, ids_V = self.logits(params, policy.params, hidden_BTD)
            ids.append(ids_V)
            return logits

        def expand(carry, level: int, beam: Beam):
            nodes, hidden_BUD = carry
            positions_BU = jnp.broadcast_to(root.position_B[:, None] + level - 1, beam.tokens_BU.shape)
            nodes = tree_growth.next_level(nodes, beam.parent_BU, positions_BU)
            g_BUD = jnp.take_along_axis(hidden_BUD, beam.parent_BU[:, :, None], axis=1)
            residual, projected = layer.project(embedding[beam.tokens_BU], g_BUD, rope.rotation(self.layer_spec, positions_BU, length=0))
            attended, nodes = tree_growth.attend_level(state.cache, 0, nodes, projected, NO_WINDOW)
            hidden_BUD = layer.finish(residual, attended)
            return logits_of(hidden_BUD), (nodes, hidden_BUD)

        hidden_B1D = state.hidden_BD[:, None]
        nodes = tree_growth.no_nodes(self.layer_spec, 1, hidden_B1D.shape[0], hidden_B1D.dtype)
        first_BV = logits_of(hidden_B1D)[:, 0]
        return tree_growth.grow(first_BV, expand, (nodes, hidden_B1D), lambda *arguments: pick(*arguments, ids_V=ids[0]), strategy)


def _true_and_own(query_BTHC: jax.Array, own: list, see_BTT: jax.Array) -> jax.Array:
    """Attention to the first step's keys under a mask, and to the later steps' keys of the same slot; [B, T, H, C]."""
    query_BTKGC = attention.grouped(query_BTHC, own[0][0].shape[2])
    true_BKGTT = jnp.einsum("btkgc,bskc->bkgts", query_BTKGC, own[0][0], preferred_element_type=jnp.float32)
    scores = [jnp.where(see_BTT[:, None, None], true_BKGTT, attention.NEGATIVE)]
    scores += [jnp.einsum("btkgc,btkc->bkgt", query_BTKGC, key, preferred_element_type=jnp.float32)[..., None] for key, _ in own[1:]]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(query_BTHC.dtype)
    length = see_BTT.shape[2]
    attended = jnp.einsum("bkgts,bskc->btkgc", weights[..., :length], own[0][1])
    for step, (_, value) in enumerate(own[1:]):
        attended = attended + jnp.einsum("bkgt,btkc->btkgc", weights[..., length + step], value)
    return attended.reshape(query_BTHC.shape)
