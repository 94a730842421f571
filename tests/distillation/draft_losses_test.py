"""What a drafter is trained on is what it does when it drafts: unrolled outputs, pairs, packing, and a loss that only its own weights lower."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tlt_jax.distillation.acceptance import Rules, acceptance, expected_accept_length
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
from tlt_jax.training.draft_texts import unfilled
from tlt_jax.training.experience import Packing, Trajectory, pack

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


def texts(lengths=LENGTHS):
    random = np.random.default_rng(5)
    return [random.integers(0, 24, length).astype(np.int32) for length in lengths]


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
    return with_features(DraftBatch(tokens, positions, segments, mask, None, None), drafter)


def with_features(empty, drafter):
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


def summed(drafter, settings, params, batches):
    """(loss, metrics, gradients of the summed loss) over batches of one shape, as an update adds them up."""

    @jax.jit
    def one(weights, data):
        def objective(weights):
            loss, metrics = draft_objective(drafter, settings, weights, data)
            return loss.sum, (loss, metrics)

        gradients, (loss, metrics) = jax.grad(objective, has_aux=True)(weights)
        return loss, metrics, gradients

    parts = [one(trained(params), (frozen_of(drafter, params), batch)) for batch in batches]
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)


@pytest.mark.parametrize("steps", [3, 7])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_packed_texts_give_the_loss_the_metrics_and_the_gradients_of_texts_alone(name, steps):
    """One text a row with padding, against micro-batches of several texts a row in another order: what an update adds up is the same to 1e-5."""
    drafter, settings = DRAFTERS[name], DraftLoss(temperature=0.8, steps=steps, feature_weight=0.3)
    params, lengths = params_of(drafter), (9, 12, 7, 4, 15, 8)
    alone = [batch_of([[text] for text in texts(lengths)], drafter, width=19)]
    trajectories = [Trajectory(text, PROMPT, np.zeros(len(text) - PROMPT, np.float32)) for text in reversed(texts(lengths))]
    packed = pack(trajectories, Packing(tokens_per_microbatch=35, row_multiple=1, row_length=31)).batches
    assert len(packed) == 2 and max(batch.segments_BT.max() for batch in packed) > 2
    (loss, metrics, gradients), (other, packed_metrics, packed_gradients) = (
        summed(drafter, settings, params, batches) for batches in (alone, [with_features(unfilled(batch), drafter) for batch in packed]))
    assert loss.weight == other.weight == sum(length - PROMPT for length in lengths)
    jax.tree.map(lambda one, two: np.testing.assert_allclose(two, one, rtol=1e-5), (loss, metrics), (other, packed_metrics))
    jax.tree.map(lambda one, two: np.testing.assert_allclose(two, one, rtol=0, atol=1e-5 * float(jnp.abs(one).max())), gradients, packed_gradients)


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


def test_the_expected_accept_length_is_the_mean_number_of_tokens_of_a_round():
    rates = [0.8, 0.5, 0.25]
    ends = [(1, 0.2), (2, 0.8 * 0.5), (3, 0.8 * 0.5 * 0.75), (4, 0.8 * 0.5 * 0.25)]  # tokens of a round, and how probable it is that it ends there
    metrics = {f"drafter/acceptance_{level}": rate for level, rate in enumerate(rates)}
    assert expected_accept_length(metrics) == pytest.approx(sum(tokens * share for tokens, share in ends))
    assert expected_accept_length({}) == 1
