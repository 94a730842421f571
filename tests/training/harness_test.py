"""evaluate --harness: every request type against a direct computation, without lm_eval and, where it is installed, through its own tasks."""

import functools
import json
import math
import sys
from typing import NamedTuple

import jax
import numpy as np
import pytest

from tlt_jax import evaluate
from tlt_jax.checkpoints.huggingface_export import save_policy
from tlt_jax.models import decoder
from tlt_jax.models.specs import PolicySpec, RopeSpec
from tlt_jax.tasks.character_tokenizer import character_tokenizer
from tlt_jax.tasks.continuations import Generation, Span
from tlt_jax.training import build, harness, text_answers
from tlt_jax.training.likelihood import Likelihood, batches, filled, shared_rows
from tlt_jax.training.settings import default_config
from tlt_jax.training.settings_rules import copy_with

ALPHABET = "abcdefghij .\n"
POSITIONS = 40
SPEC = PolicySpec(
    family="llama", vocab_size=4 + 1 + len(ALPHABET), hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
    rope=RopeSpec("default", 10000.0), rms_norm_eps=1e-5, max_position_embeddings=POSITIONS, tied=True, qkv_bias=False, output_bias=False, mlp_bias=False,
    qk_norm=False, windows=(None, None))
CHAT = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'a. ' }}{% endif %}"
TEXTS = ["abc de fgh.", "a", "jihg fed cba. " * 7, ""]  # the third is longer than two windows
PAIRS = [("abc ", "def"), ("", "jj."), ("a b", " c"), ("a b", " d"), ("a b", " cd"), ("abcdefghij " * 5, "jab")]


class Request(NamedTuple):
    """What the adapter reads of an Instance of lm_eval."""

    args: tuple


class Direct:
    """The same numbers by one full forward a text: no batch, no padding that counts, no shared row."""

    def __init__(self, directory):
        random = np.random.default_rng(4)
        self.params = jax.tree.map(lambda leaf: (random.normal(size=leaf.shape) * 0.5).astype(np.float32), decoder.abstract_params(SPEC))
        save_policy(directory, SPEC, self.params)
        self.tokenizer = character_tokenizer(ALPHABET, str(directory), chat_template=CHAT)
        self._forward = jax.jit(functools.partial(decoder.forward, SPEC))

    def logprobs(self, ids):
        tokens = np.zeros((1, POSITIONS), np.int32)
        tokens[0, : len(ids)] = ids
        logits = np.asarray(self._forward(self.params, tokens).logits_BTV, np.float64)[0, : len(ids)]
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def continuation(self, read, scored, limit=POSITIONS):
        """(log-probability, greedy or not) of the ids `scored` behind the ids `read`."""
        ids = [*read, *scored][-(limit + 1) :]
        logprobs = self.logprobs(ids[:-1])[-len(scored) :]
        return sum(logprobs[step, token] for step, token in enumerate(scored)), list(logprobs.argmax(-1)) == list(scored)

    def text(self, text, limit=POSITIONS):
        """The log-probability of a whole text, every token behind the window that it stands in."""
        start, ids, total = self.tokenizer.bos_id, self.ids(text), 0.0
        for place, token in enumerate(ids):
            end = min(place // limit * limit + limit, len(ids))
            window = [start, *ids][max(end - limit, 0) : place + 1]
            total += self.logprobs(window)[-1, token]
        return total

    def ids(self, text, special=True):
        return self.tokenizer.encode(text, add_special_tokens=special)

    def answer(self, text, tokens, stops, limit=POSITIONS):
        stops = [stops] if isinstance(stops, str) else stops
        ids, written = self.ids(text)[-(limit - tokens) :], []
        while len(written) < tokens:
            written.append(int(self.logprobs([*ids, *written])[-1].argmax()))
            answer = self.tokenizer.decode(written, skip_special_tokens=True)
            if written[-1] == self.tokenizer.eos_id or any(stop in answer for stop in stops):
                break
        return min((answer.split(stop)[0] for stop in stops), key=len, default=answer)

    def pair(self, context, continuation, limit=POSITIONS):
        """As `continuation`, of two texts; every character is a token, so that spaces at the border are all there is to mind."""
        kept = context.rstrip()
        read = self.ids(kept) if context else [self.tokenizer.bos_id]
        return self.continuation(read, self.ids(context[len(kept) :] + continuation, special=False), limit)


@pytest.fixture(scope="module")
def direct(tmp_path_factory):
    direct = Direct(tmp_path_factory.mktemp("model"))
    direct.directory = direct.tokenizer.backend.name_or_path
    return direct


@pytest.fixture(scope="module")
def config(direct):
    return copy_with(default_config(), {"model.path": direct.directory, "batch.tokens_per_microbatch": 512, "rollout.slots": 2, "precision.rollout": "float32"})


@pytest.fixture(scope="module")
def opened(config):
    return build.open_checkpoint(config)


@pytest.fixture(scope="module")
def adapter(config, opened):
    return harness.HarnessModel(config, opened, POSITIONS)


@pytest.fixture
def one_device(monkeypatch):
    every = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: every[:1])


def assert_scores(found, expected):
    assert [logprob for logprob, _ in found] == pytest.approx([logprob for logprob, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_continuations_have_the_log_likelihood_of_a_forward_of_their_own(adapter, direct):
    best = direct.answer("abc", 3, ())
    pairs = [*PAIRS, ("abc", best)]
    found = adapter.loglikelihood([Request(pair) for pair in pairs])
    assert_scores(found, [direct.pair(*pair) for pair in pairs])
    assert found[-1][1] is True


def test_texts_longer_than_the_context_are_scored_in_windows(config, opened, direct):
    for limit in (POSITIONS, 7):
        found = harness.HarnessModel(config, opened, limit).loglikelihood_rolling([Request((text,)) for text in TEXTS])
        assert found == pytest.approx([direct.text(text, limit) for text in TEXTS], abs=1e-4)


def test_a_long_context_loses_its_beginning(config, opened, direct):
    adapter = harness.HarnessModel(config, opened, 12)
    assert_scores(adapter.loglikelihood([Request(PAIRS[-1])]), [direct.pair(*PAIRS[-1], limit=12)])


def test_continuations_that_differ_in_the_last_token_share_a_row():
    rows = shared_rows([Span((1, 2), (3,)), Span((1, 2), (4,)), Span((1,), (2, 5)), Span((1, 2, 3), (4,))])
    assert [(row.ids, row.asked) for row in rows] == [((1, 2, 3), ((3, (4,)),)), ((1, 2), ((0, (3,)), (1, (4,)), (2, (2, 5))))]
    batch = filled(next(batches(rows, 64, 64, 1))[0], rows)
    assert batch.columns_BM[1, :4].tolist() == [1, 1, 0, 1] and batch.targets_BM[1, :4].tolist() == [3, 4, 2, 5]


def test_batches_hold_every_row_once_within_the_budget_and_in_few_shapes():
    lengths = np.random.default_rng(0).integers(1, 300, 500)
    rows = shared_rows([Span((number + 1,) * int(length), (1,)) for number, length in enumerate(lengths)])
    planned = list(batches(rows, 300, 1024, 4))
    assert [row for _, own in planned for row in own] == rows
    assert all(shape.rows % 4 == 0 and len(own) <= shape.rows and max(len(row.ids) for row in own) <= shape.length <= 300 for shape, own in planned)
    assert all(shape.rows * shape.length <= 1024 or shape.rows == 4 for shape, _ in planned)
    assert len({shape for shape, _ in planned}) <= 8


def test_weights_that_overflow_are_an_error_and_no_number(config, opened, monkeypatch):
    likelihood = Likelihood(config, opened, build.make_meshes(config), POSITIONS)
    likelihood._params = jax.tree.map(lambda leaf: leaf * np.nan, likelihood._params)
    with pytest.raises(ValueError, match="precision.rollout=float32"):
        likelihood.score([Span((1,), (5,))])


def test_answers_are_greedy_and_end_before_their_stop_strings(adapter, direct, one_device, capsys):
    free = direct.answer("abc", 12, ())
    asked = [
        ("abc", {"max_gen_toks": 12, "until": []}), ("abc", {"max_gen_toks": 12, "until": [free[4:6]]}), ("ab" * 30, {"max_gen_toks": 12}),
        ("j", {"max_gen_toks": 3, "until": "jj", "do_sample": False}), ("", {"max_gen_toks": 3})]
    found = adapter.generate_until([Request(one) for one in asked])
    assert found == [direct.answer(text, options["max_gen_toks"], options.get("until", ())) for text, options in asked]
    assert found[1] == free[: free.index(free[4:6])]


def test_a_row_ends_soon_after_its_stop_string(config, opened, direct, one_device, monkeypatch):
    written = []
    cut = text_answers.answer_text
    monkeypatch.setattr(text_answers, "answer_text", lambda *given: written.append(len(given[2].token_ids)) or cut(*given))
    free = direct.answer("abc", 30, ())
    adapter = harness.HarnessModel(copy_with(config, {"rollout.rounds_per_dispatch": 2}), opened, POSITIONS)
    texts = ["abc", "abd", "abe", "abf", "abg"]  # more than slots: a slot that has ended is taken again
    found = adapter.generate_until([Request((text, {"max_gen_toks": 30, "until": [free[2]]})) for text in texts])
    assert found == [direct.answer(text, 30, [free[2]]) for text in texts]
    assert written[0] <= 3 + 2 * 3 < 30


def test_sampled_answers_to_the_same_text_differ_and_come_again(adapter, one_device):
    asked = [Request(("abc", {"max_gen_toks": 12, "do_sample": True, "temperature": 1.0}))] * 3
    found = adapter.generate_until(asked)
    assert len(set(found)) == 3 and found == adapter.generate_until(asked)


def test_a_prompt_keeps_its_end_and_leaves_room_for_the_answer(direct):
    how = Generation(POSITIONS - 3)
    assert text_answers.prompt_ids(direct.tokenizer, text_answers.Asked("abcde", how), POSITIONS) == tuple(direct.ids("cde", special=False))


def test_an_answer_that_leaves_no_room_for_a_prompt_is_refused(adapter):
    with pytest.raises(ValueError, match=f"up to {POSITIONS} tokens, and the model reads {POSITIONS} in all"):
        adapter.generate_until([Request(("a", {"max_gen_toks": POSITIONS}))])


def test_the_chat_template_opens_an_answer_or_leaves_the_last_message_open(adapter):
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    assert adapter.apply_chat_template(chat[:1]) == "ab\na. "
    assert adapter.apply_chat_template(chat, add_generation_prompt=False) == "ab\ncd"


def test_what_cannot_be_run_is_refused(direct, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    given = [f"--model={direct.directory}"]
    for more, words in (
        (["--harness=hellaswag"], "pip install 'lm_eval>="),
        (["--harness=x", f"--harness_tasks={tmp_path / 'nowhere'}"], "nowhere: there is no such directory"),
        (["--harness_shots=5"], "say how --harness=TASK is run"),
        (["--harness=x", "--harness_shots=-1"], "must be at least 0"),
        (["--harness=x", "--harness_context=0"], "must be at least 1"),
    ):
        assert evaluate.main([*given, *more]) == 2
        assert words in capsys.readouterr().err


# Through lm_eval itself.

QUESTIONS = [{"q": "abc", "good": "de", "bad": "fgh"}, {"q": "a b c", "good": "d", "bad": "j. j"}, {"q": "jih", "good": "gf", "bad": "ab"}]
YAML = {
    "choices": 'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_target: 0\ndoc_to_choice: "{{[good, bad]}}"',
    "last_words": 'output_type: loglikelihood\ndoc_to_text: "{{q}}"\ndoc_to_target: " {{good}}"\nmetric_list:\n'
    "  - {metric: perplexity, aggregation: perplexity}\n  - {metric: acc, aggregation: mean}",
    "texts": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    "metric_list:\n  - {metric: word_perplexity, aggregation: weighted_perplexity}\n  - {metric: byte_perplexity, aggregation: weighted_perplexity}",
    "answers": 'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{answer}}"\ngeneration_kwargs: {until: ["\\n", "b"], max_gen_toks: 9}\n'
    "metric_list:\n  - {metric: exact_match, aggregation: mean}",
}


@pytest.fixture
def tasks(tmp_path, direct):
    """Four tasks of a few rows, one a request type and one for several choices."""
    pytest.importorskip("lm_eval", reason="needs lm_eval, which requirements.txt does not install")
    rows = {
        "choices": QUESTIONS, "last_words": QUESTIONS, "texts": [{"text": text} for text in TEXTS[:3]],
        "answers": [{"q": one["q"], "answer": direct.answer(one["q"], 9, ("\n", "b")) if number else "no"} for number, one in enumerate(QUESTIONS)]}
    for name, text in YAML.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        place = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path / 'cache'}}}\ntest_split: test"
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{place}\n{text}\n")
    return tmp_path


def metrics(found, name):
    return {metric: numbers["value"] for metric, numbers in found["tasks"][name]["metrics"].items()}


def test_tasks_of_every_kind_have_the_metrics_of_a_direct_computation(tasks, direct, one_device, capsys):
    output = tasks / "report.json"
    command = [
        f"--model={direct.directory}", f"--harness={','.join(YAML)}", f"--harness_tasks={tasks}", f"--output={output}", "--config.rollout.slots=2"]
    assert evaluate.main(command) == 0
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    scores = [[direct.pair(one["q"], f" {one[kind]}") for kind in ("good", "bad")] for one in QUESTIONS]
    assert metrics(found, "choices")["acc"] == pytest.approx(np.mean([good > bad for (good, _), (bad, _) in scores]))
    normed = [good / len(one["good"]) > bad / len(one["bad"]) for one, ((good, _), (bad, _)) in zip(QUESTIONS, scores, strict=True)]
    assert metrics(found, "choices")["acc_norm"] == pytest.approx(np.mean(normed))
    words = metrics(found, "last_words")
    assert math.log(words["perplexity"]) == pytest.approx(-np.mean([good for (good, _), _ in scores]), abs=1e-4)
    assert words["acc"] == pytest.approx(np.mean([greedy for (_, greedy), _ in scores]))
    total = sum(direct.text(text) for text in TEXTS[:3])
    assert math.log(metrics(found, "texts")["byte_perplexity"]) == pytest.approx(-total / sum(map(len, TEXTS[:3])), abs=1e-4)
    assert metrics(found, "answers")["exact_match"] == pytest.approx(2 / 3)
    assert found["tasks"]["texts"]["samples"] == 3 and found["context"] == POSITIONS
    assert "exact_match" in printed and f"{words['perplexity']:.4f}" in printed


def test_examples_come_before_questions_and_the_chat_template_around_them(tasks, direct, one_device, monkeypatch):
    seen = []
    monkeypatch.setattr(harness.HarnessModel, "loglikelihood", lambda self, requests: [(-1.0, False) for one in requests if seen.append(one.args[0]) is None])
    config = copy_with(default_config(), {"model.path": direct.directory, "evaluation.limit": 1})
    found = harness.evaluate(config, harness.Wanted(("choices",), str(tasks), shots=1))
    assert found["tasks"]["choices"]["shots"] == 1 and found["tasks"]["choices"]["samples"] == 1
    assert seen[0].endswith("\n\nabc") and len(seen) == 2
    harness.evaluate(config, harness.Wanted(("choices",), str(tasks), chat=True))
    assert seen[-1] == "abc\na. "


def test_a_task_that_is_not_there_or_cannot_be_read_is_named(tasks, direct, monkeypatch, capsys):
    from lm_eval.tasks import TaskManager

    def only_own(manager, include_path=None, include_defaults=True, init=TaskManager.__init__):
        init(manager, include_path=include_path, include_defaults=False)  # the list of shipped tasks takes seconds to read

    monkeypatch.setattr(TaskManager, "__init__", only_own)
    (tasks / "texts.jsonl").unlink()
    for name, words in (("choises", "there is no such task; did you mean choices?"), ("texts", "--harness=texts: a task cannot be read")):
        assert evaluate.main([f"--model={direct.directory}", f"--harness={name}", f"--harness_tasks={tasks}"]) == 2
        assert words in capsys.readouterr().err
