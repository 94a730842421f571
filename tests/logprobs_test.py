import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.logprobs import chunked_token_logprobs, linear_head, token_logprobs


def reference(logits, temperature):
    scaled = np.asarray(logits, np.float64) / (temperature or 1.0)
    logprobs = scaled - scaled.max(-1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
    return logprobs, -(np.exp(logprobs) * logprobs).sum(-1)


def problem(positions=37, width=8, vocabulary=101, dtype=np.float32):
    random = np.random.default_rng(0)
    features = jnp.asarray(random.standard_normal((positions, width)), dtype)
    weight = jnp.asarray(random.standard_normal((vocabulary, width)), dtype)
    return features, weight, jnp.asarray(random.integers(0, vocabulary, positions)), jnp.asarray(random.standard_normal(positions), jnp.float32)


@pytest.mark.parametrize(
    ("temperature", "logprobs", "entropy"),
    [
        (1.0, [-0.407606, -1.407606, -2.407606], 0.832396),
        (0.6, [-0.202573, -1.869240, -3.535906], 0.556749),
        (2.0, [-0.680270, -1.180270, -1.680270], 1.020191),
        (0.0, [-0.407606, -1.407606, -2.407606], 0.832396),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_logprobs_and_entropy_are_those_of_logits_over_temperature_and_zero_means_one(temperature, logprobs, entropy, traced):
    logits_BTV = jnp.broadcast_to(jnp.asarray([2.0, 1.0, 0.0]), (1, 3, 3))
    score = jax.jit(token_logprobs) if traced else token_logprobs
    got_BT, entropy_BT = score(logits_BTV, jnp.asarray([[0, 1, 2]]), temperature)
    np.testing.assert_allclose(got_BT[0], logprobs, atol=1e-6)
    np.testing.assert_allclose(entropy_BT[0], [entropy] * 3, atol=1e-6)


def test_bf16_logits_of_a_large_vocabulary_are_reduced_in_float32_alike_in_batches_of_one_and_eight():
    random = np.random.default_rng(1)
    logits_BTV = jnp.asarray(4 * random.standard_normal((8, 1, 50_000)), jnp.bfloat16)
    targets_BT = jnp.asarray(random.integers(0, 50_000, (8, 1)))
    together_BT, entropy_BT = token_logprobs(logits_BTV, targets_BT, 0.7)
    assert together_BT.dtype == entropy_BT.dtype == jnp.float32
    logprobs, entropy = reference(logits_BTV.astype(jnp.float32), 0.7)
    np.testing.assert_allclose(together_BT, np.take_along_axis(logprobs, np.asarray(targets_BT)[..., None], -1)[..., 0], atol=1e-4)
    np.testing.assert_allclose(entropy_BT, entropy, atol=1e-4)
    alone = np.concatenate([token_logprobs(logits_BTV[row : row + 1], targets_BT[row : row + 1], 0.7)[0] for row in range(8)])
    np.testing.assert_allclose(alone, together_BT, atol=1e-5)


def test_no_logprob_is_above_zero_and_huge_logits_stay_finite():
    logits = jnp.asarray([[1e4, 0.0, -1e4], [3e38, 3e38, -3e38]])
    logprobs, entropy = token_logprobs(logits, jnp.asarray([0, 1]), 1.0)
    np.testing.assert_allclose(logprobs, [0.0, -np.log(2)], atol=1e-6)
    np.testing.assert_allclose(entropy, [0.0, np.log(2)], atol=1e-6)


def test_an_excluded_token_is_impossible_and_changes_neither_entropy_nor_gradients():
    def score(logits):
        logprobs, entropy = token_logprobs(logits, jnp.asarray([0]), 1.0)
        return logprobs.sum() + entropy.sum()

    value, gradient = jax.jit(jax.value_and_grad(score))(jnp.asarray([[2.0, 1.0, -jnp.inf]]))
    alone, gradient_alone = jax.jit(jax.value_and_grad(score))(jnp.asarray([[2.0, 1.0]]))
    np.testing.assert_allclose(value, alone, rtol=1e-6)
    np.testing.assert_allclose(gradient[0], [*gradient_alone[0], 0.0], atol=1e-6)
    assert token_logprobs(jnp.asarray([[2.0, -jnp.inf]]), jnp.asarray([1]), 1.0)[0] == -np.inf


@pytest.mark.parametrize("target", [-1, 3])
def test_a_target_outside_the_vocabulary_is_nan_and_not_another_tokens_logprob(target):
    assert np.isnan(token_logprobs(jnp.zeros((1, 3)), jnp.asarray([target]), 1.0)[0])


def test_the_entropy_gradient_is_that_of_the_formula():
    logits, temperature = np.random.default_rng(2).standard_normal((4, 7)), 0.7
    gradient = jax.jit(jax.grad(lambda logits: token_logprobs(logits, jnp.zeros(4, int), temperature)[1].sum()))(jnp.asarray(logits, jnp.float32))
    logprobs, entropy = reference(logits, temperature)
    np.testing.assert_allclose(gradient, -np.exp(logprobs) * (logprobs + entropy[:, None]) / temperature, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 36, 1000])
def test_chunks_change_neither_values_nor_gradients(tied, chunk):
    features_ND, embedding_VD, targets_N, weights_N = problem()
    weight = embedding_VD if tied else embedding_VD.T

    def loss(features_ND, weight, chunk):
        logprobs_N, entropy_N = chunked_token_logprobs(features_ND, linear_head(weight, tied=tied), targets_N, 0.8, chunk=chunk)
        return (logprobs_N * weights_N).sum() + 0.3 * (entropy_N * weights_N).sum(), (logprobs_N, entropy_N)

    def whole(features_ND, weight):
        logits_NV = features_ND @ (weight.T if tied else weight)
        logprobs_N, entropy_N = token_logprobs(logits_NV, targets_N, 0.8)
        return (logprobs_N * weights_N).sum() + 0.3 * (entropy_N * weights_N).sum(), (logprobs_N, entropy_N)

    gradients, got = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)(features_ND, weight, chunk)
    expected_gradients, expected = jax.jit(jax.grad(whole, (0, 1), has_aux=True))(features_ND, weight)
    jax.tree.map(lambda left, right: np.testing.assert_allclose(left, right, atol=2e-5), (got, gradients), (expected, expected_gradients))


def test_bf16_features_are_multiplied_into_float32_logits():
    features_ND, embedding_VD, targets_N, _ = problem(dtype=jnp.bfloat16)
    logprobs_N, _ = chunked_token_logprobs(features_ND, linear_head(embedding_VD, tied=True), targets_N, 1.0, chunk=8)
    logits = np.asarray(features_ND, np.float64) @ np.asarray(embedding_VD, np.float64).T
    np.testing.assert_allclose(logprobs_N, reference(logits, 1.0)[0][np.arange(37), targets_N], atol=1e-4)


def test_a_traced_temperature_compiles_once_for_all_temperatures():
    features_ND, embedding_VD, targets_N, _ = problem()
    score = jax.jit(lambda temperature: chunked_token_logprobs(features_ND, linear_head(embedding_VD, tied=True), targets_N, temperature, chunk=8)[0])
    at = {temperature: score(temperature) for temperature in (0.0, 0.5, 1.0)}
    np.testing.assert_array_equal(at[0.0], at[1.0])
    assert np.abs(at[0.5] - at[1.0]).max() > 0.1 and score._cache_size() == 1


def test_no_array_of_positions_by_vocabulary_exists_forward_or_backward():
    features_ND, embedding_VD, targets_N, weights_N = problem(64)

    def loss(features_ND, chunk):
        return (chunked_token_logprobs(features_ND, linear_head(embedding_VD, tied=True), targets_N, 1.0, chunk=chunk)[0] * weights_N[0]).sum()

    def holds_all_logits(chunk):
        program = jax.jit(jax.grad(loss), static_argnums=1).lower(features_ND, chunk).as_text()
        return "tensor<64x101xf32>" in program or "tensor<8x8x101xf32>" in program

    assert holds_all_logits(64) and not holds_all_logits(8)


def test_entropy_that_is_not_asked_for_is_none_and_costs_nothing():
    features_ND, embedding_VD, targets_N, _ = problem()

    def flops(with_entropy):
        def score(features_ND):
            return chunked_token_logprobs(features_ND, linear_head(embedding_VD, tied=True), targets_N, 1.0, with_entropy=with_entropy)

        return jax.jit(score).lower(features_ND).compile().cost_analysis()["flops"]

    assert chunked_token_logprobs(features_ND, linear_head(embedding_VD, tied=True), targets_N, 1.0, chunk=8, with_entropy=False)[1] is None
    assert flops(False) < flops(True)


def test_positions_split_over_devices_are_not_gathered_by_the_chunks():
    mesh = jax.make_mesh((8,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    features_ND, embedding_VD, targets_N, _ = problem(128)
    head = linear_head(embedding_VD, tied=True)
    score = jax.jit(lambda features_ND, targets_N: chunked_token_logprobs(features_ND, head, targets_N, 1.0, chunk=32)[0], in_shardings=split)
    compiled = score.lower(features_ND, targets_N).compile()
    assert not {"all-gather", "all-to-all", "collective-permute"} & set(compiled.as_text().replace("(", " ").split())
    got_N = compiled(jax.device_put(features_ND, split), jax.device_put(targets_N, split))
    np.testing.assert_allclose(got_N, token_logprobs(head(features_ND), targets_N, 1.0)[0], atol=1e-5)


def test_a_chunk_below_one_is_refused():
    features_ND, embedding_VD, targets_N, _ = problem()
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        chunked_token_logprobs(features_ND, linear_head(embedding_VD, tied=True), targets_N, 1.0, chunk=0)
