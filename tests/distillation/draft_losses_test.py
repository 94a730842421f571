"""What a drafter is trained on is what it does when it drafts: unrolled outputs, pairs, packing, and a loss that only its own weights lower."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tlt_jax.distillation.acceptance import Rules, acceptance
from tlt_jax.distillation.draft_losses import DraftLoss, draft_objective
from tlt_jax.distillation.pairs import DraftBatch, Frozen, counted, teach
from tlt_jax.drafters.drafter import PolicyView, Root, Window
from tlt_jax.drafters.eagle import Eagle
from tlt_jax.drafters.eagle3 import Eagle3
from tlt_jax.drafters.feature_drafter import layer_like, policy_head
from tlt_jax.models import kv_cache
from tlt_jax.models.decoder import abstract_params
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.strategies import Strategy

SPEC = PolicySpec(
    family="llama", vocab_size=24, hidden_size=16, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, rope=RopeSpec("default", 100.0),
    rms_norm_eps=1e-5, max_position_embeddings=64, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None,) * 3)
DRAFTERS = {
    "eagle": Eagle(SPEC, layer_like(SPEC), 11), "eagle of all tokens": Eagle(SPEC, layer_like(SPEC)), "eagle3": Eagle3(SPEC, layer_like(SPEC), 11, (0, 1, 2))}
LENGTHS, PROMPT = (9, 12, 7), 3
SETTINGS = DraftLoss(temperature=0.8, steps=3)


@pytest.fixture(params=DRAFTERS)
def drafter(request):
    return DRAFTERS[request.param]


def policy():
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: (random.normal(size=leaf.shape) * 0.4).astype(np.float32), abstract_params(SPEC))


def params_of(drafter):
    params = drafter.init_params(jax.random.key(1), policy())
    if "ids" not in params:
        return params
    params = params | {"ids": jnp.array([0, 2, 3, 5, 8, 11, 13, 17, 20, 21, 23])}
    return params | ({"head": {"kernel": policy_head(SPEC, policy(), params["ids"])}} if "head" in params else {})


def texts():
    random = np.random.default_rng(5)
    return [random.integers(0, 24, length).astype(np.int32) for length in LENGTHS]


def batch_of(rows, drafter, width=32):
    """Rows of texts side by side, with the policy's features."""
    shape = (len(rows), width)
    tokens, positions, segments, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row, members in enumerate(rows):
        column = 0
        for number, text in enumerate(members, start=1):
            place = slice(column, column + len(text))
            tokens[row, place], positions[row, place], segments[row, place] = text, np.arange(len(text)), number
            mask[row, column + PROMPT : column + len(text)] = 1
            column += len(text)
    empty = DraftBatch(tokens, positions, segments, mask, None, None)
    return empty.replace(**dict(zip(("features_BTF", "final_BTD"), teach(SPEC, drafter.capture_layers, policy(), empty), strict=True)))


def frozen_of(drafter, params):
    return Frozen(policy()["embed"]["embedding"], policy_head(SPEC, policy(), params.get("ids")))


def trained(params):
    return {name: leaf for name, leaf in params.items() if name != "ids"}


def test_an_unrolled_output_is_the_output_of_drafting_the_same_tokens(drafter):
    """The output at unroll step s of slot t against the drafter's logits at draft level s, when the level's token is forced to be the text's."""
    text, params = texts()[1], params_of(drafter)
    batch, prepared = batch_of([[text]], drafter), drafter.prepare(params, policy())
    outputs = drafter.unroll(params, policy()["embed"]["embedding"][batch.tokens_BT], batch.features_BTF, (batch.positions_BT, batch.segments_BT), 4)
    slot = 5  # features of positions 0..5 are known, token 6 is the root
    window = Window(text[None, 1 : slot + 2], batch.features_BTF[:, : slot + 1], jnp.zeros((1,), jnp.int32), jnp.array([slot + 1]))
    state = drafter.extend(prepared, policy(), drafter.init_state(1, 32, jnp.float32, 8), window)
    seen = []

    def pick(logits_BUV, level, count, ids_V=None):
        seen.append(logits_BUV[0, 0])
        return jnp.full((1, 1, count), int(text[slot + 2 + level])), jnp.zeros((1, 1, count))

    root = Root(text[None, slot + 1], jnp.array([slot + 1]), jnp.zeros((1, 32), jnp.int32))
    view = PolicyView(policy(), kv_cache.init_cache(SPEC, 1, 32, jnp.float32, block=8))
    drafter.propose(prepared, view, state, root, pick, Strategy(4, 1, 4))
    for level, logits in enumerate(seen):
        expected, _ = drafter.logits(prepared, policy(), outputs[level][:, slot : slot + 1])
        np.testing.assert_allclose(logits, expected[0, 0], atol=2e-5)


def test_packed_texts_give_the_loss_of_texts_alone(drafter):
    params = params_of(drafter)
    frozen = frozen_of(drafter, params)
    packed, _ = draft_objective(drafter, SETTINGS, trained(params), (frozen, batch_of([texts()], drafter)))
    alone, _ = draft_objective(drafter, SETTINGS, trained(params), (frozen, batch_of([[text] for text in texts()], drafter)))
    np.testing.assert_allclose(packed.sum, alone.sum, rtol=2e-5)
    assert packed.weight == alone.weight == sum(length - PROMPT for length in LENGTHS)


def test_slots_count_when_the_token_they_predict_is_a_response_token_of_their_text():
    """Text of 9, prompt of 3: slot t predicts token t + 2, so slots 1 to 6 count, and one fewer for each further level."""
    batch = batch_of([[texts()[0], texts()[2]]], DRAFTERS["eagle"])
    for step in range(3):
        expected = np.zeros(32)
        expected[PROMPT - 2 - step if PROMPT - 2 - step > 0 else 0 : 9 - 2 - step] = 1
        expected[9 + max(PROMPT - 2 - step, 0) : 9 + 7 - 2 - step] = 1
        np.testing.assert_array_equal(counted(batch, step)[0], expected)


def test_training_lowers_the_loss_of_a_batch_and_raises_acceptance(drafter):
    params = params_of(drafter)
    data, weights = (frozen_of(drafter, params), batch_of([texts()], drafter)), trained(params)
    optimizer = optax.adam(3e-3)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights, state):
        (value, metrics), gradients = jax.value_and_grad(lambda weights: (lambda loss, metrics: (loss.value, metrics))(
            *draft_objective(drafter, SETTINGS, weights, data)), has_aux=True)(weights)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(weights, updates), state, value, metrics

    history = []
    for _ in range(60):
        weights, state, value, metrics = step(weights, state)
        history.append((float(value), float(metrics["drafter/acceptance_0"].value)))
    assert history[-1][0] < history[0][0] and history[-1][1] > history[0][1] + 0.05


def test_coupled_candidates_are_accepted_as_their_rules_say():
    """An oracle of a drafter (all tokens, the policy's own feature) is always right under coupled noise and reaches Σ min(p, p) = 1."""
    drafter = dataclasses.replace(DRAFTERS["eagle of all tokens"])
    batch, params = batch_of([texts()], drafter), params_of(drafter)
    found = acceptance(drafter, Rules(1.0, candidates=4, draws=64, levels=2), drafter.prepare(params, policy()), policy(), batch)
    for level in range(2):
        rates = {name: float(found[f"{name}_{level}"].value) for name in ("coupled_1", "coupled_m", "greedy_m", "rejection")}
        optimum, weakest = rates["rejection"], rates["rejection"] / (2 - rates["rejection"])
        assert weakest - 0.06 <= rates["coupled_1"] <= optimum + 0.06 and rates["coupled_1"] < rates["coupled_m"] and rates["greedy_m"] <= 1
