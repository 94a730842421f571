"""The Bradley–Terry loss: reference vectors, a score per sequence, and pairs that weigh the same wherever they lie in a packed batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.objectives.policy_update import Pass, accumulate, gradients
from tlt_jax.objectives.preference import pair_losses, preference_objective, score_columns, score_pairs
from tlt_jax.records import PairBatch
from tlt_jax.training.experience import Packing, pack_pairs, packing_for

SPEC = PolicySpec(
    family="qwen2", vocab_size=20, hidden_size=8, intermediate_size=12, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, rope=RopeSpec("default", 100.0),
    rms_norm_eps=1e-5, max_position_embeddings=64, tied=True, qkv_bias=True, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None, None),
    head="reward")
RUN, ROW, ROWS, SLOTS = Pass(SPEC), 32, 2, 8
PAIRS = [([1, 2, 3, 4], [1, 2, 5]), ([6, 7], [6, 8, 9, 10, 11]), ([12, 3, 3], [12, 3, 4]), ([2, 13, 4, 14, 9, 6], [2, 3]), ([5, 1], [5, 2, 7])]


def batches_of(pairs, row=ROW, rows=ROWS):
    return pack_pairs(pairs, Packing(rows * row, rows, row))


def padded_pairs(batch, pairs):
    """The batch with room for more pairs in a row: one compiled shape for all tests."""
    more = [(0, 0), (0, pairs - batch.better_BY.shape[1])]
    better_BY, worse_BY = (np.pad(ends_BY, more, constant_values=batch.tokens_BT.shape[1]) for ends_BY in (batch.better_BY, batch.worse_BY))
    return batch.replace(better_BY=better_BY, worse_BY=worse_BY)


@pytest.fixture(scope="module")
def params():
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: (random.normal(size=leaf.shape) * 0.5).astype(np.float32), decoder.abstract_params(SPEC))


@functools.cache
def program(margin=0.0):
    return jax.jit(functools.partial(gradients, functools.partial(preference_objective, RUN, margin)))


def learned(params, pairs, margin=0.0, **packing):
    """Mean gradient, mean loss and the metrics of all pairs."""
    parts = [program(margin)(params, padded_pairs(batch, SLOTS)) for batch in batches_of(pairs, **packing)]
    gradient, loss, metrics = functools.reduce(functools.partial(jax.tree.map, jnp.add), parts)
    return jax.tree.map(lambda leaf: leaf / loss.weight, gradient), float(loss.value), {name: float(mean.value) for name, mean in metrics.items()}


def scores_alone(params, texts):
    """The score of each text, which lies alone in a row."""
    score = jax.jit(functools.partial(score_columns, RUN))
    found = []
    for ids in texts:
        tokens_BT, segments_BT = np.zeros((2, 1, 8), np.int32)
        tokens_BT[0, : len(ids)], segments_BT[0, : len(ids)] = ids, 1
        none_BY = np.full((1, 1), 8, np.int32)
        batch = PairBatch(tokens_BT, np.arange(8, dtype=np.int32)[None], segments_BT, none_BY, none_BY)
        found.append(float(score(params, batch)[0, len(ids) - 1]))
    return found


@pytest.mark.parametrize(("scores", "margin", "loss"), [((1.0, 0.2), 0.0, 0.371101), ((1.0, 0.2), 0.5, 0.554355), ((0.3, 0.3), 0.0, np.log(2))])
def test_the_loss_holds_the_reference_vectors(scores, margin, loss):
    np.testing.assert_allclose(pair_losses(jnp.float32(scores[0] - scores[1]), margin), loss, atol=1e-6)


def test_the_loss_of_a_gap_beyond_float32s_exp_is_finite_with_its_gradient():
    gaps = jnp.float32([-200.0, 200.0])
    np.testing.assert_allclose(pair_losses(gaps, 0.0), [200.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda gaps: pair_losses(gaps, 0.0).sum())(gaps), [-1.0, 0.0], atol=1e-6)


def test_scores_of_the_reference_vector_give_its_loss_through_the_head(params, monkeypatch):
    monkeypatch.setattr("tlt_jax.objectives.preference.score_columns", lambda run, params, batch: jnp.float32([[9.0, 1.0, 9.0, 0.2]]))
    batch = PairBatch(*(np.zeros((1, 4), np.int32) for _ in range(3)), np.int32([[1, 4]]), np.int32([[3, 4]]))
    for margin, loss in ((0.0, 0.371101), (0.5, 0.554355)):
        found, metrics = preference_objective(RUN, margin, params, batch)
        np.testing.assert_allclose([found.value, found.weight], [loss, 1], atol=1e-6)
        np.testing.assert_allclose(metrics["reward/model_gap"].value, 0.8, atol=1e-6)


def test_a_sequences_score_is_that_of_its_last_token(params):
    (batch,) = batches_of(PAIRS)
    alone = [scores_alone(params, pair) for pair in PAIRS]
    gaps_BY = np.asarray(score_pairs(RUN, params, batch))
    real = batch.better_BY < ROW
    assert real.sum() == len(PAIRS) and not gaps_BY[~real].any()
    np.testing.assert_allclose(sorted(gaps_BY[real]), sorted(better - worse for better, worse in alone), atol=1e-5)
    longer = batch.replace(better_BY=np.where(real, batch.better_BY - 1, ROW))
    assert np.abs(np.asarray(score_pairs(RUN, params, longer)) - gaps_BY)[real].min() > 1e-3


def test_packed_pairs_weigh_like_pairs_alone_in_loss_and_gradient(params):
    for margin in (0.0, 0.5):
        gradient, loss, metrics = learned(params, PAIRS, margin)
        each = [learned(params, [pair], margin) for pair in PAIRS]
        np.testing.assert_allclose(loss, np.mean([one[1] for one in each]), atol=1e-5)
        for name, value in metrics.items():
            np.testing.assert_allclose(value, np.mean([one[2][name] for one in each]), atol=1e-5)
        jax.tree.map(lambda whole, *parts: np.testing.assert_allclose(whole, sum(parts) / len(parts), atol=1e-5), gradient, *(one[0] for one in each))
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) > 1e-2


def test_micro_batches_add_up_to_the_mean_of_all_pairs(params):
    pairs = PAIRS * 3
    several = batches_of(pairs)
    assert len(several) > 1
    add = jax.jit(functools.partial(accumulate, functools.partial(preference_objective, RUN, 0.0)))
    batches = [padded_pairs(batch, SLOTS) for batch in several]
    totals = functools.reduce(functools.partial(add, params), batches[1:], program()(params, batches[0]))
    gradient, loss, _ = learned(params, PAIRS)
    assert float(totals[1].weight) == len(pairs)
    np.testing.assert_allclose(totals[1].value, loss, atol=1e-5)
    jax.tree.map(lambda total, mean: np.testing.assert_allclose(total / len(pairs), mean, atol=1e-5), totals[0], gradient)


def test_padding_changes_neither_loss_nor_gradient(params):
    (batch,) = batches_of(PAIRS)
    batch = padded_pairs(batch, SLOTS)
    gradient, loss, metrics = program()(params, batch)
    empty = batch.segments_BT == 0
    other = batch.replace(tokens_BT=np.where(empty, 7, batch.tokens_BT), positions_BT=np.where(empty, 3, batch.positions_BT))
    with_row = jax.tree.map(lambda leaf: np.concatenate([leaf, np.full_like(leaf, ROW if leaf.shape[1] == SLOTS else 0)]), batch)
    for changed in (other, with_row):
        found = program()(params, changed)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), found, (gradient, loss, metrics))


def test_a_batch_of_no_pairs_has_loss_zero_and_gradients_of_zero(params):
    (batch,) = batches_of(PAIRS)
    none_BY = np.full((ROWS, SLOTS), ROW, np.int32)
    gradient, loss, metrics = program()(params, batch.replace(better_BY=none_BY, worse_BY=none_BY))
    assert float(loss.weight) == float(loss.value) == 0 and not any(leaf.any() for leaf in jax.tree.leaves(gradient))
    assert all(float(mean.value) == 0 for mean in metrics.values())


def test_metrics_are_the_share_of_pairs_in_the_right_order_and_the_mean_gap(params):
    gaps = np.array([better - worse for better, worse in (scores_alone(params, pair) for pair in PAIRS)])
    _, loss, metrics = learned(params, PAIRS)
    assert 0 < (gaps > 0).mean() < 1
    expected = {"reward/model_accuracy": (gaps > 0).mean(), "reward/model_gap": gaps.mean(), "reward/model_loss": np.log1p(np.exp(-gaps)).mean()}
    assert metrics == pytest.approx(expected, abs=1e-5) and loss == pytest.approx(metrics["reward/model_loss"])
    _, _, turned = learned(params, [(worse, better) for better, worse in PAIRS])
    assert turned["reward/model_accuracy"] == pytest.approx((gaps < 0).mean()) and turned["reward/model_gap"] == pytest.approx(-gaps.mean(), abs=1e-5)


def test_a_model_that_scores_everything_alike_is_never_right(params):
    alike = dict(params, head=jax.tree.map(np.zeros_like, params["head"]))
    gradient, loss, metrics = learned(alike, PAIRS)
    assert loss == pytest.approx(np.log(2)) and metrics["reward/model_accuracy"] == 0
    assert np.abs(gradient["head"]["kernel"]).max() > 1e-3


def test_scores_are_float32_where_the_model_computes_in_bfloat16(params):
    run = dataclasses.replace(RUN, compute_dtype="bfloat16")
    (batch,) = batches_of(PAIRS)
    gaps_BY, half_BY = (jax.jit(functools.partial(score_pairs, one))(params, batch) for one in (RUN, run))
    assert half_BY.dtype == jnp.float32
    np.testing.assert_allclose(half_BY, gaps_BY, atol=0.15)


lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=15)


@settings(max_examples=60, deadline=None)
@given(lengths=lengths, rows=st.sampled_from([1, 2, 4]), budget=st.integers(1, 3))
def test_packing_keeps_both_of_a_pair_in_one_row_and_loses_none(lengths, rows, budget):
    numbers = iter(range(1, 10_000))
    pairs = [tuple([next(numbers) for _ in range(length)] for length in pair) for pair in lengths]
    batches = batches_of(pairs, row=24, rows=rows) if budget == 1 else pack_pairs(pairs, Packing(24 * rows * budget, rows, 24))
    assert len({batch.tokens_BT.shape for batch in batches}) == len({batch.better_BY.shape for batch in batches}) == 1
    found = []
    for batch in batches:
        assert batch.tokens_BT.shape[1] == 24 and len(batch.tokens_BT) % rows == 0 and batch.tokens_BT.size <= 24 * rows * budget
        assert batch.better_BY.shape == batch.worse_BY.shape == (len(batch.tokens_BT), batch.better_BY.shape[1])
        assert ((batch.better_BY == 24) == (batch.worse_BY == 24)).all()
        for row, slot in np.argwhere(batch.better_BY < 24):
            pair = []
            for end in (batch.better_BY[row, slot], batch.worse_BY[row, slot]):
                (columns,) = np.nonzero(batch.segments_BT[row] == batch.segments_BT[row, end])
                assert columns.tolist() == list(range(columns[0], end + 1)) and batch.segments_BT[row, end] > 0
                np.testing.assert_array_equal(batch.positions_BT[row, columns], np.arange(len(columns)))
                pair.append(batch.tokens_BT[row, columns].tolist())
            found.append(tuple(pair))
    assert sorted(found) == sorted(pairs)
    assert sum((batch.segments_BT > 0).sum() for batch in batches) == sum(map(sum, lengths))


def test_the_row_of_a_packing_does_not_depend_on_the_pairs_that_are_drawn():
    packing = packing_for([len(better) + len(worse) for better, worse in PAIRS], 0, 128, 2)
    shapes = {batch.tokens_BT.shape[1] for pairs in (PAIRS, PAIRS[:1], PAIRS[2:]) for batch in pack_pairs(pairs, packing)}
    assert shapes == {packing.row_length}


def test_a_pair_that_no_row_holds_is_an_error():
    with pytest.raises(ValueError, match="sequence 1 has 14 tokens"):
        batches_of([([1], [2]), ([3] * 7, [4] * 7)], row=12)
