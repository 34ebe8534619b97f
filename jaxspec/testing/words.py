"""A tokenizer without training, for table models that are to be prompted with text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec import optional_imports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def word_tokenizer(
    words: Sequence[str] | Mapping[str, int],
    *,
    end: str = "</s>",
    unknown: str = "<unk>",
    **options: Any,
) -> PreTrainedTokenizerFast:
    """Makes a tokenizer of transformers whose tokens are words; their ids are their places in
    `words`, or its values.

    Args:
        words: the vocabulary, `end` and `unknown` among it.
        end: the token that ends a row.
        unknown: the token for words that are not in the vocabulary.
        **options: options of `PreTrainedTokenizerFast`: pad_token, chat_template, ...

    Raises:
        ValueError: a word is there twice, or `end` or `unknown` is not there.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> tokenizer = word_tokenizer(["<unk>", "</s>", "the", "old", "dog"])
        >>> tokenizer("the old cat")["input_ids"]
        [2, 3, 0]
        >>> model = table_model(jax.random.key(6), vocab=5)._replace(tokenizer=tokenizer)
        >>> jaxspec.generate(model, "the old", max_new_tokens=4).texts
        ['dog the dog old']
    """
    optional_imports.import_transformers()  # late: it takes a second
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if isinstance(words, Mapping):
        ids = dict(words)
    else:
        ids = {word: i for i, word in enumerate(words)}
    if len(ids) < len(words):
        raise ValueError(
            f"{len(words) - len(ids)} of {len(words)} words are there twice: expected each once"
        )
    absent = {end, unknown} - set(ids)
    if absent:
        raise ValueError(
            f"the words lack {', '.join(sorted(absent))}: expected the end token and the unknown "
            "one"
        )
    raw = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": end, "unk_token": unknown, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special, **options)
