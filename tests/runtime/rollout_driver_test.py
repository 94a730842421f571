"""Rollouts: the tokens are those of plain decoding of each request alone, whatever the order, slots, slices and dispatches; ends, counts and memory."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax import noise
from tlt_jax.decoding.sampling import kept_tokens, make_sampling, scaled
from tlt_jax.models import decoder
from tlt_jax.models.decoder import forward
from tlt_jax.models.specs import RopeSpec
from tlt_jax.runtime.event_loop import roll_out
from tlt_jax.runtime.programs import SlicePrograms, compile_counter
from tlt_jax.runtime.rollout_driver import Lengths, RolloutDriver, row_bucket

NEAR_TIE = 1e-4
WIDTH = 64  # columns of the teacher-forced forward
SAMPLINGS = {"greedy": dict(temperature=0.0), "plain": dict(temperature=1.0), "truncated": dict(temperature=0.8, top_k=12, top_p=0.9, min_p=0.02)}


@pytest.fixture(scope="module")
def requests(tiny):
    return tiny.requests(tiny.prompts(), 2)


@pytest.fixture(scope="module")
def reference(engine_of, requests):
    """Completions on one device, without stop ids, per way of sampling."""
    return {name: engine_of().run(requests, **sampling) for name, sampling in SAMPLINGS.items()}


@functools.cache
def teacher(spec):
    return jax.jit(functools.partial(forward, spec))


def forced_logits(tiny, completions, params=None):
    """Per completion the logits [n, V] that predict its tokens, from one full forward over prompt and response."""
    tokens = np.zeros((len(completions), WIDTH), np.int32)
    for row, completion in enumerate(completions):
        text = (*completion.request.prompt_ids, *completion.token_ids)
        tokens[row, : len(text)] = text
    logits = np.asarray(teacher(tiny.spec)(tiny.params() if params is None else params, tokens).logits_BTV)
    starts = [len(completion.request.prompt_ids) for completion in completions]
    return [row[start - 1 : start - 1 + len(completion.token_ids)] for row, start, completion in zip(logits, starts, completions, strict=True)]


def perturbed(tiny, completion, logits, temperature, **truncation):
    """[n, V] log-scores whose argmax is the token at each position: from the full forward and the row's noise."""
    sampling = make_sampling(temperature, **truncation, vocabulary=tiny.vocabulary)
    scores = scaled(logits, sampling)
    if temperature:
        count, start = len(completion.token_ids), len(completion.request.prompt_ids)
        key = np.tile(np.array([completion.request.noise_words()], np.uint32), (count, 1))
        race = scores - jnp.log(noise.exponentials(key, np.arange(start, start + count), np.arange(tiny.spec.vocab_size)))
        scores = jnp.where(kept_tokens(scores, sampling), race, -jnp.inf)
    return np.asarray(scores)[:, : tiny.vocabulary]


def assert_same(tiny, expected, actual, **sampling):
    """Equal tokens up to the first position whose two best scores nearly tie; at most 1 % of the rows (one of few) may part there."""
    parted = [index for index in expected if expected[index].token_ids != actual[index].token_ids]
    for index, logits in zip(parted, forced_logits(tiny, [expected[index] for index in parted]), strict=True) if parted else ():
        pairs = zip(expected[index].token_ids, actual[index].token_ids, strict=True)
        first = next(position for position, (one, other) in enumerate(pairs) if one != other)
        best = np.sort(perturbed(tiny, expected[index], logits, **sampling)[first])[-2:]
        assert best[1] - best[0] < NEAR_TIE, f"request {index} parts at token {first} without a near tie"
    assert len(parted) <= max(1, len(expected) // 100)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_the_best_scores_of_a_full_forward_and_log_probabilities_equal_its(tiny, reference, name):
    """Teacher forcing the result position by position is the plain loop over full forwards, in one program."""
    completions = list(reference[name].values())
    wrong = 0
    for completion, logits in zip(completions, forced_logits(tiny, completions), strict=True):
        scores = perturbed(tiny, completion, logits, **SAMPLINGS[name])
        best = np.sort(scores, axis=1)
        near = best[:, -1] - best[:, -2] < NEAR_TIE
        tokens = np.array(completion.token_ids)
        assert ((scores.argmax(1) == tokens) | near).all()
        wrong += (scores.argmax(1) != tokens).sum()
        expected = jax.nn.log_softmax(logits / (SAMPLINGS[name]["temperature"] or 1.0))
        np.testing.assert_allclose(completion.logprobs, np.asarray(expected)[np.arange(len(tokens)), tokens], atol=1e-4)
        assert len(completion.logprobs) == len(completion.sampling_logprobs) == len(tokens) == completion.forwards == 24
        assert (np.array(completion.sampling_logprobs) >= np.array(completion.logprobs) - 1e-6).all()
        assert completion.finish_reason == "length" and completion.accept_length == 1.0
    assert wrong <= 1
    assert len({completion.token_ids for completion in completions}) == (6 if name == "greedy" else 12)


def test_the_order_of_the_requests_changes_no_token(engine_of, tiny, requests, reference):
    shuffled = [requests[index] for index in np.random.default_rng(0).permutation(len(requests))]
    assert_same(tiny, reference["plain"], engine_of().run(shuffled), temperature=1.0)


@pytest.mark.parametrize("changes", [dict(rounds_per_dispatch=1), dict(rounds_per_dispatch=16), dict(prefill_tokens=1), dict(prefill_tokens=1000)], ids=str)
def test_dispatch_length_and_prefill_budget_change_no_token(engine_of, tiny, requests, reference, changes):
    actual = engine_of().run(requests, dataclasses.replace(tiny.settings, **changes), **SAMPLINGS["truncated"])
    assert_same(tiny, reference["truncated"], actual, **SAMPLINGS["truncated"])


@pytest.mark.parametrize("slots", [1, 3, pytest.param(16, marks=pytest.mark.slow)])
def test_the_number_of_slots_changes_no_token(engine_of, tiny, requests, reference, slots):
    assert_same(tiny, reference["plain"], engine_of().run(requests, dataclasses.replace(tiny.settings, slots=slots)), temperature=1.0)


def test_a_request_alone_draws_what_it_draws_in_a_batch(engine_of, tiny, requests, reference):
    alone = {request.index: engine_of().run([request])[request.index] for request in requests[::4]}
    assert_same(tiny, {index: reference["plain"][index] for index in alone}, alone, temperature=1.0)


@pytest.mark.parametrize(("devices", "slices", "tensor"), [
    (2, 2, 1), (2, 1, 2), pytest.param(4, 4, 1, marks=pytest.mark.slow), pytest.param(8, 2, 2, marks=pytest.mark.slow)])
def test_slices_and_tensor_parallel_slices_change_no_token(engine_of, tiny, requests, reference, devices, slices, tensor):
    """(8, 2, 2): two slices of data 2 by tensor 2 each."""
    actual = engine_of(devices=devices, slices=slices, tensor=tensor).run(requests)
    assert_same(tiny, reference["plain"], actual, temperature=1.0)
    for index, completion in actual.items():
        if completion.token_ids == reference["plain"][index].token_ids:
            np.testing.assert_allclose(completion.logprobs, reference["plain"][index].logprobs, atol=1e-4)


def test_seed_step_prompt_sample_and_draw_each_change_the_tokens(engine_of, requests, reference):
    original = requests[2]
    changed = [
        dataclasses.replace(original, **{field: getattr(original, field) + 1}, index=place)
        for place, field in enumerate(("seed", "step", "prompt", "sample", "draw"))]
    tokens = {completion.token_ids for completion in engine_of().run(changed).values()}
    assert len(tokens | {reference["plain"][2].token_ids}) == 6


def cut(completion, stop_ids, limit):
    """What the unstopped completion becomes: tokens up to the first stop id or the limit, stop first."""
    tokens = completion.token_ids[:limit]
    ends = [place for place, token in enumerate(tokens) if token in stop_ids]
    return (tokens[: ends[0] + 1], "stop") if ends else (tokens, "length")


@pytest.mark.parametrize("kind", ["one", "two", "many", "first tokens", "at the limit"])
def test_a_row_ends_at_its_first_stop_id_or_exactly_at_its_limit_and_stop_wins(engine_of, tiny, requests, reference, kind):
    texts = {index: completion.token_ids for index, completion in reference["plain"].items()}
    common = [token for token, _ in collections.Counter(token for text in texts.values() for token in text).most_common()]
    stop_ids = {
        "one": common[4:5], "two": common[4:6], "many": common[10:], "first tokens": [texts[0][0], texts[5][0]],
        "at the limit": [texts[1][8], texts[4][3]]}[kind]
    limits = {0: 1, 2: 2, 3: 5, 1: 9, 4: 4}
    limited = [dataclasses.replace(request, max_new_tokens=limits.get(request.index, 24)) for request in requests]
    actual = engine_of().run(limited, stop_ids=tuple(stop_ids))
    reasons = collections.Counter()
    for request in limited:
        completion = actual[request.index]
        tokens, reason = cut(reference["plain"][request.index], stop_ids, request.max_new_tokens)
        assert (completion.token_ids, completion.finish_reason) == (tokens, reason)
        assert len(completion.logprobs) == len(completion.sampling_logprobs) == len(tokens)
        reasons[reason] += 1
    assert set(reasons) == {"stop", "length"} or kind == "many"
    assert actual[0].token_ids == texts[0][:1]


def test_the_samples_of_a_prompt_share_one_prefill_and_differ(engine_of, tiny, monkeypatch):
    engine = engine_of()
    prompts, admitted = tiny.prompts(2), []
    original = engine.programs[0].admit

    def watching(params, state, admission, *rest):
        admitted.append((np.asarray(admission.lengths_P), np.asarray(admission.source_A)[np.asarray(admission.slots_A) < state.active_B.shape[0]]))
        return original(params, state, admission, *rest)

    monkeypatch.setattr(engine.programs[0], "admit", watching)
    completions = engine.run(tiny.requests(prompts, 2))
    assert len(admitted) == 1
    lengths, sources = admitted[0]
    assert sorted(lengths[lengths > 0]) == sorted(len(prompt) for prompt in prompts) and len(np.unique(sources)) == 2 and len(sources) == 4
    assert len({completion.token_ids for completion in completions.values()}) == 4


def drive(driver, queue, watch):
    """Run one driver to the end, calling `watch(driver, queue, finished)` after every turn."""
    queue, turns = collections.deque(queue), 0
    while queue or driver.active or driver.in_flight:
        turns += 1
        assert turns < 1000, "a lost row never ends"
        if driver.in_flight:
            jax.block_until_ready(driver.in_flight[0].finish)
        finished = driver.step(queue, allowance=len(queue) + driver.active)
        watch(driver, queue, finished)


def test_free_slots_are_refilled_at_once_and_two_dispatches_are_kept_queued(engine_of, tiny, requests):
    uneven = [dataclasses.replace(request, max_new_tokens=1 + 5 * (request.index % 4)) for request in requests]
    seen = []

    def watch(driver, queue, finished):
        seen.extend(finished)
        assert driver.active <= 4 and len(driver.rows) <= 4
        if queue:
            assert driver.active == 4
        if driver.active:
            assert len(driver.in_flight) >= 2

    drive(engine_of().drivers()[0], uneven, watch)
    assert len(seen) == len(requests)


def test_rows_shrink_to_the_bucket_of_what_still_decodes_and_keep_their_tokens(engine_of, tiny, requests, reference):
    """Only request 5 runs on; it sits behind rows that end."""
    uneven = [dataclasses.replace(request, max_new_tokens=24 if request.index == 5 else 4) for request in requests[2:6]]
    buckets, finished = [], []

    def watch(driver, _, done):
        buckets.append(len(driver.rows))
        finished.extend(done)

    driver = engine_of().drivers()[0]
    drive(driver, uneven, watch)
    assert buckets[0] == 4 and buckets[-1] == 1
    for completion in finished:
        assert completion.token_ids == reference["plain"][completion.request.index].token_ids[: completion.request.max_new_tokens]


@pytest.mark.parametrize(("changes", "match"), [
    (dict(max_new_tokens=0), "max_new_tokens=0"), (dict(prompt_ids=()), "prompt of 0"), (dict(max_new_tokens=100), "at most 100"),
    (dict(prompt_ids=(1,) * 21), "prompt at most 20")], ids=str)
def test_a_request_that_cannot_be_decoded_is_an_error_and_not_a_wrong_answer(engine_of, requests, changes, match):
    with pytest.raises(ValueError, match=match):
        engine_of().run([dataclasses.replace(requests[0], **changes)])


def test_a_response_may_fill_the_announced_length_to_the_last_token(engine_of, tiny):
    """Prompt and response together hold 128 tokens, as many as the cache has slots."""
    request = tiny.requests([tiny.prompts()[1]], max_new=108)[0]
    completion = engine_of().run([request, dataclasses.replace(request, index=1, max_new_tokens=40)], length=128)
    assert len(completion[0].token_ids) == 108
    assert completion[0].token_ids[:40] == completion[1].token_ids
    text = np.array([[*request.prompt_ids, *completion[0].token_ids]], np.int32)
    expected = np.asarray(jax.nn.log_softmax(teacher(tiny.spec)(tiny.params(), text).logits_BTV))[0, 19:-1]
    np.testing.assert_allclose(completion[0].logprobs, expected[np.arange(108), completion[0].token_ids], atol=1e-4)


def test_slices_share_the_queue_evenly_and_the_hook_runs_every_turn(engine_of, requests):
    drivers = engine_of(devices=2, slices=2).drivers()
    held, done = [], []
    roll_out(drivers, requests[:4], done.append, lambda: held.append([driver.active for driver in drivers]))
    assert held[0] == [2, 2] and held[-1] == [0, 0] and len(done) == 4


def test_dynamic_rope_decodes_up_to_its_original_length_and_not_past_it(engine_of, tiny, requests, reference):
    """Within it the rule is the default one. A cache of the next bucket, 128 slots, would be longer than the model's 96."""
    engine = engine_of()
    spec = dataclasses.replace(tiny.spec, rope=RopeSpec("dynamic", 100.0, factor=2.0, original_max_position_embeddings=96), max_position_embeddings=96)
    driver = RolloutDriver(SlicePrograms(spec, engine.meshes.slices[0], "float32", block=16), tiny.settings)
    finished = []
    for length in (90, 97):
        driver.start(engine.publisher.publish(engine.params)[0], 1, make_sampling(1.0, vocabulary=tiny.vocabulary), (), Lengths(20, length))
        if length == 97:
            with pytest.raises(ValueError, match="96 tokens"):
                driver.step(collections.deque(requests[:2]), allowance=2)
        else:
            drive(driver, requests[:2], lambda driver, queue, done: finished.extend(done))
    assert {completion.request.index: completion.token_ids for completion in finished} == {index: reference["plain"][index].token_ids for index in (0, 1)}


def test_a_second_equal_phase_compiles_nothing(engine_of, requests):
    engine = engine_of()
    engine.run(requests)
    before = compile_counter().count
    engine.run(requests)
    engine.run(requests, temperature=0.5, top_k=4)
    assert compile_counter().count == before


def test_one_prompt_that_enters_alone_compiles_nothing_when_admissions_were_compiled_ahead(engine_of, tiny, requests):
    """At first many prompts enter together; later rows end one by one."""
    driver = engine_of().drivers(dataclasses.replace(tiny.settings, compile_ahead=True))[0]
    drive(driver, requests[:4], lambda *_: None)
    before = compile_counter().count
    drive(driver, [dataclasses.replace(request, max_new_tokens=3 + 3 * request.index) for request in requests], lambda *_: None)
    assert compile_counter().count == before


def test_a_phase_that_shrinks_otherwise_compiles_nothing_when_sizes_were_compiled_ahead(engine_of, tiny):
    """From 16 rows to 4 and 1 by every way, after a phase whose rows all end together."""
    requests, settings, sizes = tiny.requests(tiny.prompts(), 2), dataclasses.replace(tiny.settings, slots=16, compile_ahead=True), set()

    def phase(limits):
        limited = [dataclasses.replace(request, max_new_tokens=limit) for request, limit in zip(requests, limits, strict=True)]
        drive(engine_of().drivers(settings)[0], limited, lambda driver, *_: sizes.add(len(driver.rows)))

    phase([24] * 12)
    before = compile_counter().count
    for limits in ([4] * 11 + [24], [4] * 8 + [12] * 3 + [24], [4] * 9 + [24] * 3):
        phase(limits)
    assert compile_counter().count == before and sizes == {16, 4, 1}


@pytest.mark.parametrize("layout", [dict(), dict(devices=2, slices=2)], ids=str)
def test_the_next_phase_decodes_with_the_weights_published_for_it(engine_of, tiny, requests, reference, layout):
    engine = engine_of(**layout)
    other = jax.tree.map(lambda old, new: jax.device_put(new, old.sharding), engine.params, tiny.params(seed=1))
    completions = engine.run(requests, params=other)
    versions = {completion.policy_version for completion in completions.values()}
    for completion, logits in zip(completions.values(), forced_logits(tiny, list(completions.values()), tiny.params(seed=1)), strict=True):
        expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(24), completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
    back = engine.run(requests)
    assert_same(tiny, reference["plain"], back, temperature=1.0)
    assert versions == {engine.publisher.version - 1} and {completion.policy_version for completion in back.values()} == {engine.publisher.version}


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_releasing_a_driver_frees_its_cache_and_its_view_of_the_weights(engine_of, requests):
    engine = engine_of()
    engine.run(requests[:2])
    before = live_bytes()
    driver = engine.drivers()[0]
    drive(driver, requests[:2], lambda *_: None)
    cache = driver.state.cache.keys_LBKSC.nbytes
    assert live_bytes() >= before + 2 * cache
    driver.release()
    assert live_bytes() - before < cache / 2


@pytest.mark.parametrize(("rows", "slots", "bucket"), [(1, 16, 1), (2, 16, 4), (5, 16, 16), (3, 3, 3), (1, 1, 1), (65, 100, 100)])
def test_rows_are_rounded_up_to_a_bucket_and_the_slots_are_the_largest(rows, slots, bucket):
    assert row_bucket(rows, slots) == bucket


def test_layers_one_by_one_give_what_the_stack_gives(tiny):
    params, tokens = decoder.init_params(tiny.spec, jax.random.key(3)), jnp.arange(10)[None]
    apart = params | {"layers": decoder.unstacked(params["layers"])}
    assert len(apart["layers"]) == tiny.spec.num_layers
    np.testing.assert_allclose(forward(tiny.spec, apart, tokens).logits_BTV, forward(tiny.spec, params, tokens).logits_BTV, atol=1e-5)
