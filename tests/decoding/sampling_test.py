"""Drawing tokens: the law under every truncation, the extremes of the noise, padding ids, and the log-probabilities that come with a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tlt_jax import noise
from tlt_jax.decoding import sampling
from tlt_jax.decoding.sampling import make_sampling, sample

draw = jax.jit(sample)
ROWS = 20_000


def keys(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, (rows, 2), dtype=np.uint32)


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def processed(logits_V, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after temperature, top-k, top-p and min-p, one after the other in Hugging Face's order; ties at a threshold stay."""
    scores = np.asarray(logits_V, np.float64) / temperature
    if top_k:
        scores = np.where(scores < np.sort(scores)[-min(top_k, len(scores))], -np.inf, scores)
    if top_p < 1:
        ascending = np.sort(scores)
        removed = np.cumsum(np.exp(log_softmax(ascending))) <= 1 - top_p
        removed[-1] = False
        scores = np.where(scores < ascending[~removed].min(), -np.inf, scores)
    if min_p:
        probabilities = np.exp(log_softmax(scores))
        scores = np.where(probabilities < min_p * probabilities.max(), -np.inf, scores)
    return np.exp(log_softmax(scores))


LOGITS = np.random.default_rng(5).normal(size=29).astype(np.float32) * 1.7
TRUNCATIONS = [
    dict(), dict(top_k=5), dict(top_k=100), dict(top_p=0.8), dict(top_p=0.05), dict(min_p=0.1), dict(top_k=8, top_p=0.7), dict(top_p=0.95, min_p=0.08),
    dict(top_k=12, top_p=0.9, min_p=0.05)]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_tokens_follow_the_processed_law(temperature, truncation):
    settings = make_sampling(temperature, **truncation, vocabulary=len(LOGITS))
    drawn = draw(np.broadcast_to(LOGITS, (ROWS, len(LOGITS))), keys(ROWS), np.arange(ROWS) % 300, settings)
    expected = processed(LOGITS, temperature, **truncation)
    counts = np.bincount(drawn.token_B, minlength=len(LOGITS))
    assert not counts[expected == 0].any()
    kept = expected > 0
    if kept.sum() > 1:
        merged = kept & (ROWS * expected < 5)
        seen, due = (np.append(values[kept & ~merged], values[merged].sum()) for values in (counts, ROWS * expected))
        assert stats.chisquare(seen[due > 0], due[due > 0]).pvalue > 1e-3
    full = log_softmax(LOGITS.astype(np.float64) / temperature)
    np.testing.assert_allclose(drawn.logprob_B, full[drawn.token_B], atol=1e-5)
    np.testing.assert_allclose(drawn.sampling_logprob_B, np.log(expected[drawn.token_B]), atol=1e-5)


def test_rare_tokens_of_a_large_vocabulary_come_as_often_as_their_mass():
    """One common token, 4,095 of 9e-6 each (drawn about 380 times) and 12,288 of 1e-13 each (drawn never)."""
    vocabulary, rows, times = 16_384, 512, 20
    probabilities = np.full((vocabulary,), 1e-13)
    probabilities[1:4096] = 9e-6
    probabilities[0] = 1 - probabilities[1:].sum()
    logits = np.broadcast_to(np.log(probabilities).astype(np.float32), (rows, vocabulary))
    settings = make_sampling(1.0, vocabulary=vocabulary)
    tokens = np.concatenate([np.asarray(draw(logits, keys(rows, seed), np.arange(rows), settings).token_B) for seed in range(times)])
    rare = tokens[(tokens > 0) & (tokens < 4096)]
    assert stats.binomtest(len(rare), rows * times, probabilities[1:4096].sum()).pvalue > 1e-3
    assert not (tokens >= 4096).any()
    assert stats.chisquare(np.histogram(rare, bins=8, range=(1, 4096))[0]).pvalue > 1e-3


@pytest.mark.parametrize("word", [0, 2**32 - 1])
@pytest.mark.parametrize("truncation", [dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)], ids=str)
def test_the_extreme_words_of_the_noise_never_let_a_token_in_that_is_not_kept(monkeypatch, word, truncation):
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32) * 30
    best = logits.argmax(1)

    def extreme(key_B2, ids_V):
        """The extreme on every token, and in the second half of the rows the opposite extreme on the best one."""
        words = jnp.full((4, 50), word, jnp.uint32)
        return words.at[jnp.arange(2, 4), best[2:]].set(2**32 - 1 - word)

    monkeypatch.setattr(noise, "hash_words", extreme)
    drawn = sample(logits, keys(4), np.arange(4), make_sampling(1.0, **truncation, vocabulary=50))
    np.testing.assert_array_equal(drawn.token_B, best)
    assert np.isfinite(drawn.logprob_B).all()
    np.testing.assert_allclose(drawn.sampling_logprob_B, 0, atol=1e-6)


def test_a_row_draws_the_same_token_wherever_it_stands_and_however_many_rows_there_are():
    random = np.random.default_rng(1)
    logits, key, position = random.normal(size=(64, 300)).astype(np.float32), keys(64), random.integers(0, 99, 64)
    settings = make_sampling(1.0, vocabulary=300)
    together = np.asarray(draw(logits, key, position, settings).token_B)
    order = random.permutation(64)
    np.testing.assert_array_equal(draw(logits[order], key[order], position[order], settings).token_B, together[order])
    np.testing.assert_array_equal([draw(logits[row][None], key[row][None], position[row][None], settings).token_B[0] for row in range(64)], together)


def test_draws_at_neighbouring_positions_and_of_neighbouring_rows_are_independent():
    logits = np.broadcast_to(np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32), (ROWS, 4))
    settings = make_sampling(1.0, vocabulary=4)
    key, position = keys(ROWS), np.arange(ROWS)
    now, after = (np.asarray(draw(logits, key, position + step, settings).token_B) for step in (0, 1))
    counter = np.stack([np.arange(ROWS), np.zeros(ROWS)], axis=1).astype(np.uint32)
    row = np.asarray(draw(logits, counter, np.zeros(ROWS, np.int32), settings).token_B)
    for first, second in ((now, after), (row[:-1], row[1:])):
        table = np.histogram2d(first, second, bins=4)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("truncation", [dict(), dict(top_k=3), dict(top_p=0.9), dict(min_p=0.5)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_past_the_vocabulary_are_never_drawn_however_likely_the_model_finds_them(temperature, truncation):
    logits = np.zeros((10_000, 16), np.float32)
    logits[:, 12:] = 20
    drawn = draw(logits, keys(10_000), np.arange(10_000), make_sampling(temperature, **truncation, vocabulary=12))
    counts = np.bincount(drawn.token_B, minlength=12)
    assert len(counts) == 12
    if temperature:
        assert stats.chisquare(counts).pvalue > 1e-3
    np.testing.assert_allclose(drawn.logprob_B, log_softmax(logits.astype(np.float64))[0, 0], rtol=1e-5)  # the full vocabulary, padding ids too
    np.testing.assert_allclose(drawn.sampling_logprob_B, np.log(1 / 12) if truncation else drawn.logprob_B, rtol=1e-5)


@pytest.mark.parametrize(("truncation", "kept"), [
    (dict(top_k=2), {0, 1, 2, 3}), (dict(top_k=1), {0}), (dict(top_k=4), {0, 1, 2, 3}), (dict(top_p=0.5), {0, 1, 2, 3}), (dict(min_p=0.5), {0, 1, 2, 3}),
    (dict(top_k=5, min_p=0.25), set(range(6))), (dict(top_p=0.001), {0})], ids=str)
def test_tokens_that_tie_at_the_threshold_all_stay(truncation, kept):
    """Probabilities 4 : 2 : 2 : 2 : 1 : 1, exact in float32."""
    logits = np.log2([[4, 2, 2, 2, 1, 1]]).astype(np.float32) * np.float32(np.log(2))
    tokens = sampling.kept_tokens(logits, make_sampling(1.0, **truncation, vocabulary=6))
    assert set(np.flatnonzero(np.asarray(tokens)[0])) == kept


def test_a_top_p_of_one_cuts_nothing_where_the_sum_of_probabilities_has_rounded_to_one():
    logits = np.array([[40, 3, 2, 1, 0, -1]], np.float32)
    assert sampling.kept_tokens(logits, make_sampling(1.0, top_k=4, vocabulary=6)).sum() == 4


def test_log_probabilities_are_those_of_the_full_vocabulary_and_sampling_ones_those_of_the_kept_set():
    logits = np.broadcast_to(np.log([0.4, 0.3, 0.2, 0.1]).astype(np.float32), (100, 4))
    drawn = draw(logits, keys(100), np.arange(100), make_sampling(1.0, top_k=2, vocabulary=4))
    assert set(np.asarray(drawn.token_B)) == {0, 1}
    np.testing.assert_allclose(drawn.logprob_B, np.log([0.4, 0.3])[drawn.token_B], atol=1e-5)
    np.testing.assert_allclose(drawn.sampling_logprob_B, np.log([4 / 7, 3 / 7])[drawn.token_B], atol=1e-5)


def test_temperature_zero_takes_the_best_token_with_the_log_probability_of_temperature_one():
    logits = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32) * 3
    logits[0, 7] = logits[0, 21] = 99
    for truncation in (dict(), dict(top_k=3, top_p=0.5)):
        drawn = draw(logits, keys(50), np.arange(50), make_sampling(0.0, **truncation, vocabulary=40))
        np.testing.assert_array_equal(drawn.token_B, logits.argmax(1))
        np.testing.assert_allclose(drawn.logprob_B, log_softmax(logits.astype(np.float64)).max(1), atol=1e-5)


def test_bfloat16_logits_are_scored_in_float32_never_above_zero_and_alike_in_batches_of_one_and_eight():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(8, 50_000)) * 4, jnp.bfloat16).at[0, 3].set(80)
    settings = make_sampling(1.0, vocabulary=50_000)
    together = draw(logits, keys(8), np.arange(8), settings)
    assert together.logprob_B.dtype == jnp.float32 and (np.asarray(together.logprob_B) <= 0).all()
    exact = log_softmax(np.asarray(logits, np.float64))
    np.testing.assert_allclose(together.logprob_B, exact[np.arange(8), together.token_B], atol=1e-4)
    for row in range(8):
        alone = draw(logits[row][None], keys(8)[row][None], np.array([row]), settings)
        np.testing.assert_allclose(alone.logprob_B[0], together.logprob_B[row], atol=1e-4)


def test_changing_a_sampling_value_compiles_nothing():
    program = jax.jit(lambda *arguments: sample(*arguments))
    for values in ((1.0,), (0.0,), (0.7, 5), (1.5, 0, 0.9), (1.0, 3, 0.5, 0.1)):
        program(np.zeros((2, 8), np.float32), keys(2), np.arange(2), make_sampling(*values, vocabulary=7))
    assert program._cache_size() == 1


@pytest.mark.parametrize("vocabulary", [1, 30, 128, 300])
def test_the_best_token_is_the_first_of_equal_scores_at_every_vocabulary_size(vocabulary):
    scores = np.random.default_rng(2).integers(-3, 3, (40, vocabulary)).astype(np.float32)
    scores[0] = -np.inf
    np.testing.assert_array_equal(sampling.best_token(jnp.asarray(scores)), scores.argmax(axis=1))
