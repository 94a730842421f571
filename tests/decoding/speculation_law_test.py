"""Independent of the coupling: the law of whole sequences of speculative decoding against exact enumeration over a vocabulary of 8."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tlt_jax.decoding import rollout
from tlt_jax.decoding.rollout import Admission, Slots
from tlt_jax.decoding.rounds import Decoding, Weights
from tlt_jax.decoding.sampling import make_sampling
from tlt_jax.drafters.truncated import Truncated
from tlt_jax.models import decoder
from tlt_jax.models.decoder import abstract_params
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.strategies import Strategy

SPEC = PolicySpec(
    family="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, rope=RopeSpec("default", 100.0),
    rms_norm_eps=1e-5, max_position_embeddings=32, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, windows=(None, None))
PROMPT, TOKENS, ROWS, BATCHES, TEMPERATURE = (3, 1), 4, 4096, 50, 1.3
SAMPLES = ROWS * BATCHES


@pytest.fixture(scope="module")
def policy():
    random = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: (random.normal(size=leaf.shape) * 0.6).astype(np.float32), abstract_params(SPEC))


@pytest.fixture(scope="module")
def exact(policy):
    """Probability of every sequence of TOKENS tokens, from one forward over all of them."""
    sequences = np.array(list(itertools.product(range(8), repeat=TOKENS)), np.int32)
    text = np.concatenate([np.tile(PROMPT, (len(sequences), 1)), sequences], axis=1)
    logprobs = jax.nn.log_softmax(jax.jit(functools.partial(decoder.forward, SPEC))(policy, text).logits_BTV / TEMPERATURE)
    steps = np.take_along_axis(np.asarray(logprobs)[:, len(PROMPT) - 1 : -1], sequences[:, :, None], axis=2)[:, :, 0]
    return np.exp(steps.sum(axis=1, dtype=np.float64))


@pytest.mark.parametrize("strategy", [Strategy(3, 1, 3), Strategy(2, 3, 9)], ids=["chain", "tree"])
def test_speculative_sequences_have_the_exact_law(policy, exact, strategy):
    drafter = Truncated(SPEC, 1)
    decoding = Decoding(SPEC, drafter, strategy, rounds=TOKENS)
    weights, sampling, stops = Weights(jax.tree.map(jnp.asarray, policy), {}), make_sampling(TEMPERATURE, vocabulary=8), jnp.full((1,), -1)
    tokens = np.zeros((1, 1, 8), np.int32)
    tokens[0, 0, : len(PROMPT)] = PROMPT

    @jax.jit
    def sample(keys):
        entries = Admission(jnp.asarray(tokens), jnp.array([len(PROMPT)]), jnp.arange(ROWS), jnp.zeros((ROWS,), jnp.int32), keys, jnp.full((ROWS,), TOKENS))
        state = rollout.init_state(decoding, Slots(ROWS, 16, block=16), jnp.float32)
        state, first, _ = rollout.admit(decoding, weights, state, entries, sampling, stops)
        _, emitted = rollout.advance(decoding, weights, state, sampling, stops)
        return jnp.concatenate([first.token_B[:, None], emitted.tokens_BR[:, : TOKENS - 1]], axis=1), emitted.forwards_B

    random, counts, forwards = np.random.default_rng(9), np.zeros(8**TOKENS), 0
    for _ in range(BATCHES):
        drawn, used = sample(random.integers(0, 2**32, (ROWS, 2), dtype=np.uint32))
        counts += np.bincount(np.asarray(drawn) @ 8 ** np.arange(TOKENS)[::-1], minlength=8**TOKENS)
        forwards += int(used.sum())
    assert SAMPLES >= 200_000 and forwards < 0.95 * SAMPLES * (TOKENS - 1)  # drafts were accepted
    expected = exact * SAMPLES
    rare = expected < 5
    observed, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3
