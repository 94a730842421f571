"""One optimizer step: the same on every mesh, for every split into micro-batches and every packing; skipped when it must be, and counted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tlt_jax.objectives import policy_update
from tlt_jax.objectives.losses import LossSettings
from tlt_jax.objectives.policy_update import VALUE_HEAD, Pass, PolicyObjective
from tlt_jax.optimizers import OptimizerSettings, make_optimizer
from tlt_jax.runtime import policy_driver
from tlt_jax.runtime.policy_driver import Learner, NonFiniteUpdates, Publisher
from tlt_jax.runtime.programs import LearnerPrograms, compile_counter, init_program, score_program
from tlt_jax.sharding import movement, rules
from tlt_jax.sharding.meshes import build_meshes
from tlt_jax.training.experience import Packing, Trajectory, pack, unpack

ROW, ROWS = 32, 8
LOSS = LossSettings(beta=0.05, entropy_coef=0.01, importance_sampling_cap=2.0)
MESHES = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
EIGHT = [(8, 1, 1), (2, 2, 2), (1, 4, 2)]


def trajectories(vocabulary, count=20, seed=0):
    """Sequences of 5 to 16 tokens with random numbers of the size that training sees."""
    random, made = np.random.default_rng(seed), []
    for _ in range(count):
        prompt, response = int(random.integers(1, 6)), int(random.integers(4, 11))

        def near(scale, size=response):
            return (random.normal(size=size) * scale).astype(np.float32)

        logprobs = near(0.3) - 3.5
        made.append(Trajectory(
            random.integers(0, vocabulary, prompt + response).astype(np.int32), prompt, logprobs, trained=bool(random.random() > 0.1),
            advantages=np.full(response, random.normal(), np.float32), old_logprobs=logprobs + near(0.05), reference_logprobs=logprobs + near(0.2),
            old_values=near(1), returns=near(1)))
    return made


def batch_of(sequences, rows=ROWS, row=ROW):
    (batch,) = pack(sequences, Packing(rows * row, rows, row)).batches
    return batch


def rows_of(batch, rows):
    """These rows of a batch; what the batch has one of (the weight of the KL) stays."""
    return jax.tree.map(lambda leaf: leaf[rows] if leaf.ndim else leaf, batch)


def split(batch, parts):
    """`parts` micro-batches of equal numbers of rows."""
    return [rows_of(batch, rows) for rows in np.array_split(np.arange(len(batch.tokens_BT)), parts)]


@functools.cache
def learner_programs(spec, shape, optimizer, settings=LOSS, critic=""):
    """`critic`: "" for a policy, "shared" for a policy with a value head, "own" for a critic."""
    mesh = build_meshes(shape, 1, 1).train
    run = Pass(spec, temperature=0.9)
    if critic == "own":
        objective = functools.partial(policy_update.value_objective, dataclasses.replace(run, spec=dataclasses.replace(spec, head="value")), settings)
    else:
        policy = PolicyObjective(run, settings, False, shared_critic=critic == "shared", with_entropy=True)
        objective = functools.partial(policy_update.policy_objective, policy)
    return LearnerPrograms(mesh, objective, optimizer, params_for(spec, critic))


def params_for(spec, critic=""):
    random = np.random.default_rng(0)
    shapes = policy_update.decoder.abstract_params(dataclasses.replace(spec, head="value" if critic == "own" else "policy"))
    params = jax.tree.map(lambda leaf: (random.normal(size=leaf.shape) * 0.4).astype(np.float32), shapes)
    return params | ({VALUE_HEAD: {"kernel": (random.normal(size=(spec.hidden_size, 1)) * 0.4).astype(np.float32)}} if critic == "shared" else {})


SGD = optax.sgd(1.0)
ADAM = make_optimizer(OptimizerSettings(lr=1e-2, weight_decay=0.1))


def learner(spec, shape=(1, 1, 1), optimizer=SGD, max_skips=5, **options):
    programs = learner_programs(spec, shape, optimizer, **options)
    params = params_for(spec, options.get("critic", ""))
    return Learner(programs, movement.to_device(params, programs.params_placement), max_skips=max_skips)


def gradients(one, batches):
    """Gradient of the mean loss, and that loss, on the host."""
    totals, loss, _ = movement.to_host(one.programs.gradients(one.params, [policy_driver.place_batch(one.programs.mesh, batch) for batch in batches]))
    return jax.tree.map(lambda leaf: leaf / loss.weight, totals), float(loss.sum / loss.weight)


def assert_near(actual, expected, tolerance):
    """Every leaf within `tolerance` of the largest entry of that leaf."""
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        largest = np.abs(other).max()
        assert largest > 0 or path[-1].key == "bias", path
        assert np.abs(one - other).max() <= tolerance * max(largest, 1e-3), jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def batch(tiny):
    return batch_of(trajectories(tiny.vocabulary))


@pytest.fixture(scope="module")
def one_device(tiny, batch):
    """(gradient, loss, parameters after an SGD step of lr 1) on one device."""
    one = learner(tiny.spec)
    gradient, loss = gradients(one, [batch])
    stats = one.update([batch])
    assert stats["total_loss"] == pytest.approx(loss, rel=1e-5) and stats["skipped"] == 0
    return gradient, loss, movement.to_host(one.params)


@pytest.mark.parametrize("shape", [*MESHES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in EIGHT)])
def test_loss_gradients_and_a_step_of_plain_sgd_are_those_of_one_device(tiny, batch, one_device, shape):
    expected_gradient, expected_loss, expected_params = one_device
    many = learner(tiny.spec, shape)
    gradient, loss = gradients(many, [batch])
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert_near(gradient, expected_gradient, 1e-4)
    stats = many.update([batch])
    assert stats["grad_norm"] == pytest.approx(float(optax.global_norm(expected_gradient)), rel=1e-4)
    start = params_for(tiny.spec)
    moves = [jax.tree.map(np.subtract, movement.to_host(params), start) for params in (many.params, expected_params)]
    assert_near(*moves, 1e-4)
    jax.tree.map(lambda move, slope: np.testing.assert_allclose(move, -slope, atol=1e-5), moves[0], gradient)


def test_a_step_of_plain_sgd_of_lr_one_moves_against_the_gradient_and_lowers_the_loss(tiny, batch, one_device):
    _, loss, stepped = one_device
    moved = learner(tiny.spec)
    small = jax.tree.map(lambda start, end: start + 1e-2 * (end - start), params_for(tiny.spec), stepped)
    moved.params = movement.to_device(small, moved.programs.params_placement)
    assert gradients(moved, [batch])[1] < loss


def test_micro_batches_of_8_4_and_1_rows_give_the_same_gradients(tiny, batch, one_device):
    expected, loss, _ = one_device
    for parts in (2, 8):
        gradient, part_loss = gradients(learner(tiny.spec), split(batch, parts))
        assert part_loss == pytest.approx(loss, rel=1e-6)
        apart = optax.global_norm(jax.tree.map(np.subtract, gradient, expected)) / optax.global_norm(expected)
        assert apart < 1e-6, (parts, apart)
        assert_near(gradient, expected, 3e-6)


SEQUENCE_MEAN = dataclasses.replace(LOSS, loss_agg_mode="seq-mean-token-mean")
DIVISORS = {
    "sequence mean": dict(settings=SEQUENCE_MEAN), "own critic": dict(critic="own"), "shared critic": dict(critic="shared"),
    "constant": dict(settings=dataclasses.replace(LOSS, loss_agg_mode="constant", max_length=16)),
    "sequence ratio": dict(settings=dataclasses.replace(LOSS, ratio_level="sequence", importance_sampling_cap=None))}


@pytest.mark.parametrize("name", [
    "sequence mean", "shared critic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("constant", "sequence ratio", "own critic"))])
def test_which_rows_share_a_micro_batch_changes_no_gradient(tiny, batch, name):
    """Full rows with full rows and short ones with short ones, against a mix; one row length, so that one program serves both."""
    one = learner(tiny.spec, **DIVISORS[name])
    order = np.argsort(batch.mask_BT.sum(1))
    batches = [split(rows_of(batch, order), 4), split(batch, 4)]
    (expected, loss), (gradient, other_loss) = (gradients(one, parts) for parts in batches)
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert_near(gradient, expected, 3e-6)


def test_a_shared_critic_is_refused_where_its_gradient_would_depend_on_the_micro_batches(tiny):
    with pytest.raises(ValueError, match="token-mean"):
        policy_update.PolicyObjective(policy_update.Pass(tiny.spec), SEQUENCE_MEAN, on_policy=True, shared_critic=True)


def test_packing_and_the_order_of_sequences_change_no_gradient(tiny, one_device):
    one, sequences = learner(tiny.spec), trajectories(tiny.vocabulary)
    expected, loss, _ = one_device
    shuffled = [sequences[index] for index in np.random.default_rng(1).permutation(len(sequences))]
    alone = pack(shuffled, Packing(8 * 16, 8, 16)).batches  # rows of 16 columns: one or two sequences each
    assert len(alone) > 1
    for batches in ([batch_of(shuffled)], alone):
        gradient, other_loss = gradients(one, batches)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert_near(gradient, expected, 1e-5)


@pytest.mark.parametrize("shape", [(2, 1, 2)])
def test_scores_come_back_to_their_sequences_whatever_the_packing(tiny, shape):
    mesh, sequences = build_meshes(shape, 1, 1).train, trajectories(tiny.vocabulary)
    params = params_for(tiny.spec)
    placed = movement.to_device(params, rules.param_shardings(mesh, params))
    program = score_program(mesh, functools.partial(policy_update.score_logprobs, Pass(tiny.spec, temperature=0.9)))
    packed = pack(sequences, Packing(4 * 32, 4, 32))
    scores = unpack(packed, policy_driver.score(program, mesh, placed, packed.batches), sequences)
    tokens = np.zeros((len(sequences), 16), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.tokens)] = sequence.tokens
    logprobs = np.asarray(jax.nn.log_softmax(jax.jit(functools.partial(policy_update.decoder.forward, tiny.spec))(params, tokens).logits_BTV / 0.9))
    for row, (sequence, score) in enumerate(zip(sequences, scores, strict=True)):
        columns = np.arange(sequence.prompt_length, len(sequence.tokens))
        np.testing.assert_allclose(score, logprobs[row, columns - 1, sequence.tokens[columns]], atol=1e-4)


def bits(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), movement.to_host(tree))


@pytest.mark.parametrize(("poison", "value"), [("advantages_BT", np.nan), ("advantages_BT", np.inf), ("old_logprobs_BT", np.nan)])
def test_a_step_with_a_non_finite_gradient_changes_nothing_and_is_counted_until_too_many_come_in_a_row(tiny, batch, poison, value):
    one = learner(tiny.spec, optimizer=ADAM, max_skips=2)
    array = getattr(batch, poison).copy()
    array[tuple(np.argwhere(batch.mask_BT)[3])] = value
    bad = batch.replace(**{poison: array})
    before = bits((one.params, one.opt_state))
    assert one.update([batch, bad])["skipped"] == 1
    assert bits((one.params, one.opt_state)) == before
    assert one.update([batch])["skipped"] == 0
    assert (one.updates, one.skipped, one.skips_in_a_row) == (2, 1, 0)
    moved = bits(one.params)
    assert moved != before[0]
    one.update([bad])
    with pytest.raises(NonFiniteUpdates, match="max_skips=2"):
        one.update([bad])
    assert bits(one.params) == moved and one.skipped == 3


def test_a_batch_without_a_trained_token_has_loss_zero_and_changes_nothing_not_even_by_weight_decay(tiny, batch):
    one = learner(tiny.spec, optimizer=ADAM)
    empty = batch.replace(mask_BT=np.zeros_like(batch.mask_BT))
    before = bits((one.params, one.opt_state))
    stats = one.update([empty])
    assert stats["total_loss"] == 0 and stats["grad_norm"] == 0 and stats["skipped"] == 0
    assert all(np.isfinite(number) for number in stats.values())
    assert bits((one.params, one.opt_state)) == before
    assert one.updates == 1


@pytest.mark.parametrize("shape", [(2, 2, 1), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((4, 1, 1), (1, 4, 1)))])
def test_replicas_stay_bit_equal_and_near_one_device_over_three_steps(tiny, batch, shape):
    many, one = learner(tiny.spec, shape, ADAM), learner(tiny.spec, optimizer=ADAM)
    for _ in range(3):
        many.update([batch])
        one.update([batch])
    for leaf in jax.tree.leaves((many.params, many.opt_state)):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(different) == 1 for different in copies.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), movement.to_host(many.params), movement.to_host(one.params))


def test_optimizer_moments_lie_where_their_parameters_lie(tiny):
    many = learner(tiny.spec, (2, 2, 1), ADAM)
    states = jax.tree.leaves(many.opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState))
    moments = [state for state in states if isinstance(state, optax.ScaleByAdamState)]
    assert moments
    for tree in (moments[0].mu, moments[0].nu):
        jax.tree.map(lambda moment, param: np.testing.assert_equal(moment.sharding, param.sharding), tree, many.params)
    assert any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(moments[0].mu))


def test_an_update_after_publication_leaves_the_published_weights_as_they_were(tiny, batch):
    """Views and parameters share buffers, so an update that donated its parameters would change or delete what a slice decodes with."""
    meshes = build_meshes((1, 1, 1), 1, 1)
    one = learner(tiny.spec)
    publisher = Publisher(meshes, one.params, "float32")
    (view,) = publisher.publish(one.params)
    before = bits(view)
    one.update([batch])
    assert bits(view) == before and publisher.version == 1
    (newer,) = publisher.publish(one.params)
    assert bits(newer) == bits(one.params) != before and publisher.version == 2


def test_a_second_update_of_the_same_shape_compiles_nothing(tiny, batch):
    one = learner(tiny.spec)
    one.update([batch, batch])
    before = compile_counter().count
    one.update([batch, batch])
    assert compile_counter().count == before


def test_initial_parameters_are_made_in_place_and_alike_on_every_mesh(tiny):
    def make():
        return policy_update.decoder.init_params(tiny.spec, jax.random.key(3))

    made = []
    for shape in ((1, 1, 1), (1, 2, 2)):
        mesh = build_meshes(shape, 1, 1).train
        params = init_program(mesh, make, policy_update.decoder.abstract_params(tiny.spec))()
        jax.tree.map(lambda leaf, sharding: np.testing.assert_equal(leaf.sharding, sharding), params, rules.param_shardings(mesh, params))
        made.append(movement.to_host(params))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), *made)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(made[0]))
