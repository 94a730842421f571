"""A tokenizer of single characters for models trained from scratch, saved as an ordinary tokenizer directory."""

from collections.abc import Sequence

from tlt_jax.tasks.tokenizer import Tokenizer, load_tokenizer, quietly

PAD, BEGIN, END, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
WORDS = ("####",)


def character_tokenizer(alphabet: str, directory: str, *, words: Sequence[str] = WORDS, chat_template: str | None = None) -> Tokenizer:
    """Build it in `directory` and load it: ids 0 to 3 are <pad>, <bos>, <eos>, <unk>, then one token per word of `words` and per character of `alphabet`.

    A plain text gets <bos> in front. A character outside the alphabet is an error when it is encoded, never an unknown token.
    """
    import tokenizers  # here: only runs from scratch build a tokenizer
    from tokenizers import decoders, models, pre_tokenizers, processors

    with quietly():
        import transformers

    entries = [PAD, BEGIN, END, UNKNOWN, *words, *sorted(set(alphabet) - set(words))]
    core = tokenizers.Tokenizer(models.WordLevel({entry: number for number, entry in enumerate(entries)}, unk_token=UNKNOWN))
    longest_first = sorted(words, key=len, reverse=True)
    pattern = "|".join([*(_literal(word) for word in longest_first), r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    specials = {"pad_token": PAD, "bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
    built = transformers.PreTrainedTokenizerFast(tokenizer_object=core, refuses_unknown=True, **specials)
    if chat_template:
        built.chat_template = chat_template
    built.save_pretrained(directory)
    return load_tokenizer(directory)


def _literal(word: str) -> str:
    """`word` as an Oniguruma pattern that matches just it."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in word)
