"""The generate command on tiny models: golden tokens, the form and order of the output, stop ids, and mistakes found before device work."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tlt_jax import generate
from tlt_jax.checkpoints.drafter_files import DrafterFiles, LoadedDrafter, save_drafter
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.checkpoints.pretrained import load_policy
from tlt_jax.drafters.eagle import Eagle
from tlt_jax.drafters.eagle3 import Eagle3
from tlt_jax.drafters.feature_drafter import layer_like
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.training import build, generation

GOLDEN = ("llama", "llama3_rope_tied", "llama_sharded_fp16", "mistral_window", "qwen2_tied", "qwen2_yarn", "qwen3")
SPEC = PolicySpec(
    family="llama", vocab_size=16, hidden_size=16, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
    rope=RopeSpec("default", 10000.0), rms_norm_eps=1e-5, max_position_embeddings=64, tied=False, qkv_bias=False, output_bias=False, mlp_bias=False,
    qk_norm=False, windows=(None,))
ALPHABET = "abcdefg"  # ids 5 to 11; 2 is <eos>, 4 is ####, 12 to 15 are padding rows
TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture
def devices(monkeypatch):
    """How many of the devices the commands see; one unless a test says more."""
    every = jax.devices()

    def see(count):
        monkeypatch.setattr(jax, "devices", lambda *_: every[:count])

    see(1)
    limit = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # every command compiles anew, mostly the same tiny programs
    yield see
    jax.config.update("jax_persistent_cache_min_compile_time_secs", limit)


def make_model(directory, follower=None, *, logit=20.0, stop_ids=None, alphabet=ALPHABET, template=None):
    """A model that says follower[token] after each token, `logit` above the others; without follower every token is equally likely."""
    params = jax.tree.map(np.zeros_like, decoder.init_params(SPEC, jax.random.key(0)))
    params["embed"]["embedding"], params["final_norm"]["scale"] = np.eye(16, dtype=np.float32), np.ones(16, np.float32)
    head = np.zeros((16, 16), np.float32)
    for token, after in (follower or {}).items():
        head[token, after] = logit / 4  # the norm makes 4 of the one-hot embedding's 1
    params["head"]["kernel"] = head
    save_policy(directory, SPEC, params)
    if stop_ids is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids}))
    if alphabet:
        character_tokenizer(alphabet, str(directory), chat_template=template)
    return directory


@pytest.fixture
def flat(tmp_path):
    """A model for which every real token is equally likely."""
    return make_model(tmp_path / "model")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(tmp_path, model, rows, *options):
    prompts, output = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "completions.jsonl"
    assert generate.main([f"--model={model}", f"--prompts={prompts}", f"--output={output}", "--config.rollout.max_new_tokens=8", *options]) == 0
    assert not (tmp_path / "completions.jsonl.partial").exists()
    return [json.loads(line) for line in output.read_text().splitlines()]


def refused(tmp_path, capsys, model, rows, *options):
    """The message of a run that ends with code 2; no device is used."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(rows) if isinstance(rows, str) else write_rows(prompts, rows)
    output = tmp_path / "completions.jsonl"
    assert generate.main([f"--model={model}", f"--prompts={prompts}", f"--output={output}", "--config.rollout.max_new_tokens=8", *options]) == 2
    assert not output.exists()
    return capsys.readouterr().err


@pytest.fixture
def no_device_work(monkeypatch):
    def fail(*_):
        raise AssertionError("devices were touched")

    monkeypatch.setattr(build, "make_meshes", fail)


@pytest.mark.parametrize("name", GOLDEN)
def test_greedy_tokens_equal_the_golden_continuation_up_to_the_first_stop_id(name, shared, tmp_path, devices):
    expected = load_file(shared / "golden" / name / "expected.safetensors")
    given = [{"prompt_ids": row.tolist()} for row in expected["tokens"]]
    rows = run(tmp_path, shared / "golden" / name, given, "--config.rollout.temperature=0", "--config.rollout.max_new_tokens=16")
    assert len(rows) == 2
    for row, tokens, greedy in zip(rows, expected["tokens"], expected["greedy"].tolist(), strict=True):
        until = greedy[: greedy.index(2) + 1] if 2 in greedy else greedy
        assert row["token_ids"] == until
        assert row["finish_reason"] == ("stop" if 2 in greedy else "length")
        assert (row["prompt_ids"], row["prompt"], row["text"], row["accept_length"]) == (tokens.tolist(), None, None, 1.0)


def test_a_drafter_directory_changes_no_token_and_says_how_many_it_saved(shared, tmp_path, devices):
    model = shared / "golden" / "llama"
    loaded = load_policy(model)
    layer = layer_like(loaded.spec)
    one = Eagle3(loaded.spec, layer, loaded.spec.vocab_size, (0, 1))
    files = DrafterFiles("eagle3", layer, one.vocabulary, one.capture_layers)
    save_drafter(tmp_path / "drafter", loaded.spec, LoadedDrafter(files, one.init_params(jax.random.key(0), loaded.params)))
    given = [{"prompt_ids": [3, 9, 4, 8, 5]}, {"prompt_ids": [7, 7]}]
    options = ("--config.rollout.temperature=0.9", "--config.rollout.max_new_tokens=24", "--config.rollout.num_generations=2")
    plain = run(tmp_path, model, given, *options)
    drafted = run(tmp_path, model, given, *options, f"--drafter={tmp_path / 'drafter'}", "--config.speculative.strategies=3_2_6")
    assert [row["token_ids"] for row in drafted] == [row["token_ids"] for row in plain]
    assert all(row["accept_length"] >= 1 for row in drafted) and any(row["accept_length"] > 1 for row in drafted)


def test_a_drafter_without_weights_changes_no_token(shared, tmp_path, devices):
    given, model = [{"prompt_ids": [3, 9, 4, 8, 5]}], shared / "golden" / "qwen2_tied"
    plain = run(tmp_path, model, given)
    drafted = run(tmp_path, model, given, "--config.speculative.method=prompt_lookup", "--config.speculative.strategies=2_2_4")
    assert [row["token_ids"] for row in drafted] == [row["token_ids"] for row in plain]


def test_a_drafter_of_another_model_is_refused_before_device_work(shared, tmp_path, flat, capsys, no_device_work):
    spec = load_policy(shared / "golden" / "llama").spec
    one = Eagle(spec, layer_like(spec))
    params = one.init_params(jax.random.key(0), decoder.init_params(spec, jax.random.key(0)))
    save_drafter(tmp_path / "drafter", spec, LoadedDrafter(DrafterFiles("eagle", layer_like(spec), 0, None), params))
    message = refused(tmp_path, capsys, flat, [{"prompt_ids": [5]}], f"--drafter={tmp_path / 'drafter'}")
    assert f"hidden_size {spec.hidden_size}, the policy has 16; the drafter was made for another model" in message


def test_every_stop_id_of_tokenizer_and_generation_config_ends_a_row_and_stop_wins_over_the_limit(tmp_path, devices):
    # a b c d … are 5 6 7 8 9 10 11: from f (10) the chain comes to 7 first, from ## (4) to 9, from a (5) to 2; from g (11) to none.
    model = make_model(tmp_path / "model", {10: 6, 6: 7, 4: 8, 8: 9, 5: 3, 3: 2, 11: 11, 7: 5, 9: 5, 2: 5}, stop_ids=[7, 9])
    given = [{"prompt_ids": [token]} for token in (10, 4, 5, 11)]
    for limit, reason in ((8, "length"), (2, "length")):
        rows = run(tmp_path, model, given, "--config.rollout.temperature=0", f"--config.rollout.max_new_tokens={limit}")
        assert [row["token_ids"] for row in rows] == [[6, 7], [8, 9], [3, 2], [11] * limit]
        assert [row["finish_reason"] for row in rows] == ["stop", "stop", "stop", reason]
    assert [row["text"] for row in rows] == ["b", "d", "<unk>", "gg"]
    assert all(len(row["token_ids"]) == len(row["logprobs"]) for row in rows)
    assert run(tmp_path, model, given[:1], "--config.rollout.temperature=0", "--config.rollout.max_new_tokens=1")[0]["finish_reason"] == "length"


def test_rows_come_in_input_order_with_all_fields_and_ids_of_padding_rows_are_never_drawn(tmp_path, flat, devices):
    given = [{"id": "x", "prompt": "abc"}, {"prompt_ids": [5] * 9}, {"id": 7, "prompt": "a", "answer": "1"}, {"prompt": "gfedcba"}]
    rows = run(tmp_path, flat, given, "--config.rollout.num_generations=3", "--config.rollout.slots=4", "--config.rollout.max_new_tokens=40")
    assert [(row["id"], row["sample"]) for row in rows] == [(name, sample) for name in ("x", 1, 7, 3) for sample in range(3)]
    for row in rows:
        assert list(row) == ["id", "sample", "prompt", "prompt_ids", "token_ids", "logprobs", "text", "finish_reason", "accept_length"]
        assert max(row["token_ids"]) < 12
        assert len(row["logprobs"]) == len(row["token_ids"]) <= 40
        assert (row["token_ids"][-1] == 2) == (row["finish_reason"] == "stop")
        np.testing.assert_allclose(row["logprobs"], np.log(1 / 16), atol=1e-5)
    assert rows[0]["prompt"] == "abc" and rows[0]["prompt_ids"] == [1, 5, 6, 7]
    assert rows[3]["prompt"] == "a" * 9
    assert len({tuple(row["token_ids"]) for row in rows}) > 8


def test_tokens_depend_on_the_seed_and_on_no_slice_order_or_row_count(tmp_path, flat, devices):
    given = [{"id": f"{number}", "prompt_ids": [5 + number % 3] * (number + 1)} for number in range(5)]
    plain = {row["id"]: row["token_ids"] for row in run(tmp_path, flat, given)}
    devices(2)
    split = {row["id"]: row["token_ids"] for row in run(tmp_path, flat, given[::-1], "--config.rollout.slots=2")}
    assert split == plain
    assert {row["id"]: row["token_ids"] for row in run(tmp_path, flat, given, "--config.seed=1")} != plain


def test_truncated_sampling_adds_the_log_probability_it_drew_from(tmp_path, devices):
    model = make_model(tmp_path / "peaked", {5: 6, 6: 5}, logit=1.0)
    rows = run(tmp_path, model, [{"prompt_ids": [5]}], "--config.rollout.top_k=1")
    assert rows[0]["token_ids"] == [6, 5] * 4
    np.testing.assert_allclose(rows[0]["sampling_logprobs"], 0.0, atol=1e-6)
    np.testing.assert_allclose(rows[0]["logprobs"], 1.0 - np.log(np.e + 15), atol=1e-4)


def test_a_conversation_is_rendered_by_the_template_and_a_text_as_its_user(tmp_path, devices):
    model = make_model(tmp_path / "model", alphabet=ALPHABET + "[]>", template=TEMPLATE)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]
    rows = run(tmp_path, model, [{"messages": messages}, {"prompt": "ab"}])
    assert [row["prompt"] for row in rows] == ["[ab][c][d]>", "[ab]>"]


@pytest.mark.parametrize(("rows", "words"), [
    ('{"prompt_ids": [5]}\n{"prompt_ids": [5\n', ("prompts.jsonl:2", "not JSON")),
    ("", ("prompts.jsonl", "no rows")),
    ([{"prompt": "a"}, {"prompt_ids": [5, 16]}], ("prompts.jsonl:2", "token id 16", "16 embedding rows")),
    ([{"prompt_ids": []}], ("prompts.jsonl:1", "prompt_ids")),
    ([{"prompt_ids": "5"}], ("prompts.jsonl:1", "prompt_ids")),
    ([{"question": "a"}], ("prompts.jsonl:1", "one of prompt, messages, prompt_ids", "question")),
    ([{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}], ("prompts.jsonl:1", "both prompt and messages")),
    ([{"messages": [{"role": "user", "content": "a"}]}], ("prompts.jsonl:1", "model.chat_template")),
    ([{"id": 1, "prompt": "a"}, {"id": "1", "prompt": "b"}], ("prompts.jsonl:1", "prompts.jsonl:2", "same id")),
    ([{"prompt_ids": [5]}, {"prompt_ids": [5] * 57}], ("prompts.jsonl:2", "57 prompt tokens", "rollout.max_new_tokens=8", "max_position_embeddings=64")),
])
def test_a_row_that_cannot_be_used_is_named_by_file_and_line_before_device_work(tmp_path, flat, capsys, no_device_work, rows, words):
    message = refused(tmp_path, capsys, flat, rows)
    assert all(word in message for word in words), message


def test_a_prompt_that_just_fits_the_model_is_taken(tmp_path, flat, devices):
    assert len(run(tmp_path, flat, [{"prompt_ids": [5] * 56}])) == 1


def test_text_without_a_tokenizer_is_an_error_and_token_ids_are_not(tmp_path, capsys, devices):
    model = make_model(tmp_path / "model", alphabet="", stop_ids=2)
    assert "has no tokenizer files, so rows need prompt_ids" in refused(tmp_path, capsys, model, [{"prompt": "a"}])
    assert run(tmp_path, model, [{"prompt_ids": [5]}])[0]["text"] is None


def test_a_model_that_is_absent_unsupported_or_no_policy_is_one_clear_error(tmp_path, flat, capsys, no_device_work):
    rows = [{"prompt_ids": [5]}]
    assert "does not exist" in refused(tmp_path, capsys, tmp_path / "nowhere", rows)
    config = json.loads((flat / "config.json").read_text())
    (flat / "config.json").write_text(json.dumps(config | {"architectures": ["MixtralForCausalLM"]}))
    assert "architectures ['MixtralForCausalLM'] is not supported" in refused(tmp_path, capsys, flat, rows)
    spec = dataclasses.replace(SPEC, head="reward")
    save_policy(tmp_path / "reward", spec, decoder.init_params(spec, jax.random.key(0)))
    assert "is a reward model" in refused(tmp_path, capsys, tmp_path / "reward", rows)


def test_what_is_not_built_or_left_out_is_refused_by_name(tmp_path, flat, capsys, no_device_work):
    rows = [{"prompt_ids": [5]}]
    assert "d has no config.json; a drafter is an EAGLE or EAGLE-3 directory" in refused(tmp_path, capsys, flat, rows, "--drafter=d")
    assert "--model=DIR is needed" in refused(tmp_path, capsys, "", rows)
    assert generate.main([f"--model={flat}"]) == 2
    assert "--prompts=FILE.jsonl and --output=FILE.jsonl are needed" in capsys.readouterr().err
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    assert generate.main([f"--model={flat}", f"--prompts={prompts}", f"--output={prompts}"]) == 2
    assert "is the file of prompts" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        generate.main([f"--model={flat}", "--workdir=x"])


def test_rows_wait_for_those_before_them_and_a_stopped_run_keeps_what_is_finished(tmp_path, capsys):
    path = tmp_path / "deep" / "rows.jsonl"
    with generation.OrderedFile(str(path), 3) as output:
        output.add(1, {"n": 1})
        assert output.partial.read_text() == ""
        output.add(0, {"n": 0})
        assert output.partial.read_text() == '{"n": 0}\n{"n": 1}\n'
        output.add(2, {"n": 2})
    assert path.read_text() == '{"n": 0}\n{"n": 1}\n{"n": 2}\n'
    with pytest.raises(KeyboardInterrupt), generation.OrderedFile(str(path), 3) as output:
        output.add(0, {"n": 10})
        output.add(2, {"n": 12})
        raise KeyboardInterrupt
    assert path.read_text().startswith('{"n": 0}')
    assert output.partial.read_text() == '{"n": 10}\n{"n": 12}\n'
    assert "2 of 3 completions are kept in" in capsys.readouterr().err


def test_an_interrupted_run_ends_with_130_and_keeps_the_finished_rows(tmp_path, flat, devices, monkeypatch, capsys):
    count = 0

    def interrupt(display):
        nonlocal count
        count = display.finished
        if count:
            raise KeyboardInterrupt

    monkeypatch.setattr(generation.Display, "turn", interrupt)
    prompts, output = write_rows(tmp_path / "prompts.jsonl", [{"prompt_ids": [5]}] * 3), tmp_path / "out.jsonl"
    few = ["--config.rollout.slots=2", "--config.rollout.max_new_tokens=4"]
    assert generate.main([f"--model={flat}", f"--prompts={prompts}", f"--output={output}", *few]) == 130
    kept = (tmp_path / "out.jsonl.partial").read_text().splitlines()
    assert len(kept) == count >= 1
    assert not output.exists()


def test_an_overflow_is_an_error_that_names_the_row(tmp_path, capsys, devices):
    params = decoder.init_params(SPEC, jax.random.key(0))
    params["final_norm"]["scale"] = np.full(16, np.inf, np.float32)
    save_policy(tmp_path / "model", SPEC, params)
    message = refused(tmp_path, capsys, tmp_path / "model", [{"prompt_ids": [5]}])
    assert "prompts.jsonl:1: a log-probability is not finite" in message


@pytest.mark.slow
def test_a_gguf_gives_the_reference_continuation_up_to_the_first_near_tie(shared, smollm2_gguf, tmp_path, devices):
    reference = json.loads((shared / "golden" / "smollm2_reference.json").read_text())["prompts"]
    reference = [row | {name: row[name][:24] for name in ("token_ids", "logprobs", "margin")} for row in reference]  # the engine goes on in smollm2_test
    longest = max(len(row["token_ids"]) for row in reference)
    options = ["--config.rollout.temperature=0", "--config.precision.rollout=float32", f"--config.rollout.max_new_tokens={longest}"]
    rows = run(tmp_path, smollm2_gguf, [{"prompt_ids": row["prompt_ids"]} for row in reference], *options)
    for row, wanted in zip(rows, reference, strict=True):
        until = next((place for place, margin in enumerate(wanted["margin"]) if margin < 0.01), len(wanted["token_ids"]))
        assert row["token_ids"][:until] == wanted["token_ids"][:until]
        np.testing.assert_allclose(row["logprobs"][:until], wanted["logprobs"][:until], atol=2e-3)
        if until == len(wanted["token_ids"]) and row["finish_reason"] == "stop":
            assert row["prompt"] == wanted["text"]
            assert wanted["completion"].startswith(row["text"]) and len(row["token_ids"]) == until
