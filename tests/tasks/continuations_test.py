"""Contexts and continuations as tokens, windows of long texts, generation options: by example, and against lm-evaluation-harness where it is installed."""

import pytest
import tokenizers
import transformers
from tokenizers import models, processors

from tlt_jax.tasks.continuations import Generation, Span, cut_at_stops, encode_pair, fitted, generation, rolling_windows, start_id, text_ids
from tlt_jax.tasks.tokenizer import load_tokenizer

WORDS = ["<s>", "</s>", "a", "b", "c", " ", "\n", "ab", " c"]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
MERGES = [("a", "b"), (" ", "c")]
PAIRS = [
    ("a", "c"), ("a ", "c"), ("a", " c"), ("a \n", "b"), ("ca", "bc"), ("ca", " ab"), ("", "ab"), ("", "<s>a"), (" ", "c"), ("<s>a", "c"), ("b\n\n", "c c"),
]


def merging(directory, *, begins=True, **specials):
    """A tokenizer whose merges reach over the border of context and continuation; `begins`: it puts <s> before a text."""
    core = tokenizers.Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(WORDS)}, merges=MERGES))
    core.add_special_tokens(["<s>", "</s>"])
    if begins:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, **(specials or SPECIALS)).save_pretrained(directory)
    return load_tokenizer(str(directory))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return merging(tmp_path_factory.mktemp("begins"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return merging(tmp_path_factory.mktemp("plain"), begins=False)


def shown(span):
    return " ".join(WORDS[token] for token in span.context), [WORDS[token] for token in span.continuation]


@pytest.mark.parametrize(
    ("context", "continuation", "read", "scored"),
    [
        ("a", "c", "<s> a", ["c"]),
        ("a ", "c", "<s> a", [" c"]),  # the space counts to the continuation, as in running text
        ("a", " c", "<s> a", [" c"]),
        ("ca", "bc", "<s> c a", ["c"]),  # together "a" and "b" are one token, which stands where the context's last one stood
        ("", "ab", "<s>", ["ab"]),
        ("", "<s>a", "<s>", ["a"]),  # no second begin token
        ("<s>a", "c", "<s> a", ["c"]),  # a chat template printed it
    ],
)
def test_a_pair_is_tokenized_as_running_text_and_cut_where_the_context_alone_ends(tokenizer, context, continuation, read, scored):
    assert shown(encode_pair(tokenizer, context, continuation)) == (read, scored)


def test_a_continuation_without_a_token_of_its_own_is_refused(tokenizer, plain):
    with pytest.raises(ValueError, match="'b' adds no token to its context, which ends in 'a'"):
        encode_pair(plain, "a", "b")
    with pytest.raises(ValueError, match="adds no token"):
        encode_pair(tokenizer, "", "")


def test_a_context_of_spaces_alone_leaves_the_start_token_to_read(plain):
    assert shown(encode_pair(plain, " ", "c")) == ("<s>", [" c"])


def test_the_start_is_the_begin_token_else_the_end_of_text(tmp_path, tokenizer):
    assert start_id(tokenizer) == 0
    assert start_id(merging(tmp_path / "end", begins=False, eos_token="</s>")) == 1
    with pytest.raises(ValueError, match="neither a begin token nor an end-of-text token"):
        start_id(merging(tmp_path / "none", begins=False, pad_token="c"))


@pytest.mark.parametrize(("count", "limit"), [(0, 4), (1, 4), (4, 4), (5, 4), (10, 4), (12, 4), (3, 1), (7, 3)])
def test_windows_score_every_token_once_behind_as_much_text_as_fits(count, limit):
    ids = list(range(100, 100 + count))
    spans = rolling_windows(ids, 7, limit)
    assert [token for span in spans for token in span.continuation] == ids
    text, place = (7, *ids), 1
    for number, span in enumerate(spans):
        whole = span.context + span.continuation
        assert whole == text[place + len(span.continuation) - len(whole) : place + len(span.continuation)]
        assert len(whole) - 1 == limit or (number == 0 and len(whole) - 1 == min(count, limit))
        place += len(span.continuation)


def test_windows_are_those_of_the_worked_example():
    assert rolling_windows(range(10), 99, 4) == [Span((99,), (0, 1, 2, 3)), Span((3,), (4, 5, 6, 7)), Span((5, 6, 7), (8, 9))]


def test_a_span_loses_the_beginning_of_its_context_and_nothing_else():
    span = Span((1, 2, 3, 4), (5, 6))
    assert fitted(span, 5) == span
    assert fitted(span, 3) == Span((3, 4), (5, 6))
    assert fitted(span, 2) == Span((4,), (5, 6))
    with pytest.raises(ValueError, match="has 2 tokens, more than the 1 that the model reads"):
        fitted(span, 1)


def test_generation_options_are_read_under_all_their_names():
    assert generation({}) == Generation(256)
    assert generation({"until": "\n", "max_gen_toks": 7, "do_sample": False, "temperature": 0.7}) == Generation(7, ("\n",))
    assert generation({"until": ["a", ""], "max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9}) == Generation(5, ("a",), 0.7, 0, 0.9)
    assert generation({"max_tokens": 3, "max_gen_toks": 2, "do_sample": True, "top_k": 4, "num_beams": 1}) == Generation(2, (), 1.0, 4)
    for options, words in (({"num_beams": 4}, "num_beams=4"), ({"typical_p": 0.2}, "typical_p=0.2")):
        with pytest.raises(ValueError, match=words):
            generation(options)


def test_a_text_is_cut_at_one_stop_string_after_the_other():
    assert cut_at_stops("one\ntwo. three", (".", "\n")) == "one"
    assert cut_at_stops("abc", ("bc", "ab")) == "a"
    assert cut_at_stops("abc", ()) == "abc"


def test_pairs_and_windows_are_those_of_lm_evaluation_harness(tokenizer, plain):
    model = pytest.importorskip("lm_eval.api.model", reason="needs lm_eval, which requirements.txt does not install")
    from lm_eval import utils

    def encode_with(own):
        class Peer:
            backend, prefix_token_id = "causal", start_id(own)

            def tok_encode(self, text, add_special_tokens=None):
                return list(text_ids(own, text) if add_special_tokens is None else own.encode(text, add_special_tokens=add_special_tokens))

            def _encode_pair(self, *pair):
                return model.TemplateLM._encode_pair(self, *pair)

            def _loglikelihood_tokens(self, requests, **_):
                return [Span(tuple(context), tuple(continuation)) for _, context, continuation in requests]

        class Instance:
            def __init__(self, *args):
                self.args = args

        return model.TemplateLM.loglikelihood(Peer(), [Instance(*pair) for pair in PAIRS], disable_tqdm=True)

    assert [encode_pair(tokenizer, *pair) for pair in PAIRS] == encode_with(tokenizer)
    peers = encode_with(plain)
    for pair, peer in zip(PAIRS, peers, strict=True):
        if peer.context and peer.continuation:  # lm_eval fails on the others later
            assert encode_pair(plain, *pair) == peer
    for count in range(15):
        ids = list(range(count))
        windows = [utils.make_disjoint_window(pair) for pair in utils.get_rolling_token_windows(ids, 99, 4, 1)]
        assert rolling_windows(ids, 99, 4) == [Span(*map(tuple, pair)) for pair in windows]
