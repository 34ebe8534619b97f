"""Languages of models that translate: the tokenizer marks the source's, the decoder's row begins
with the target's.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from typing import Any

from jaxspec.core import LanguageModel, Model
from jaxspec.nets import find, net_of


def with_languages(model: Model, source: str | None = None, target: str | None = None) -> Model:
    """Returns a model that translates from and to some languages: NLLB, M2M-100 or mBART.

        nllb = jaxspec.load("facebook/nllb-200-distilled-600M", source_language="eng_Latn",
        target_language="deu_Latn") french = jaxspec.with_languages(nllb, target="fra_Latn")

    A drafter's rows begin as its target's do, so it needs no languages. For rows of several
    languages in one batch give a `Prompt` with an `encoder` part, whose tokens are each row's
    beginning.

    Args:
        model: the model, with its tokenizer.
        source: the language of prompts, as the tokenizer spells it: "eng_Latn", "en_XX", "en". None
            leaves it as it is.
        target: the language to write. It is the first token after the start token; of a model whose
            start token is a language (mBART) the start token itself.

    Raises:
        ValueError: the tokenizer has no such language, or none at all; Marian's are in its prompts
            (">>deu<< Hello").
    """
    lm = model.lm
    tokenizer = model.tokenizer
    config = model.config
    if source is not None:
        language_id(model, source)  # raises if the model lacks it
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.src_lang = source
    if target is not None:
        names = []
        if find(config):
            names = [field.name for field in dataclasses.fields(config)]
        # A trimmed or mapped model differs from the network of its configuration.
        if "begin_tokens" not in names or lm != _network_of(model, config):
            raise ValueError(
                f"{_name(model)} cannot be given a target language: expected a network with a "
                "beginning of its rows, such as NLLB's, before its vocabulary is trimmed or mapped"
            )
        token = language_id(model, target)
        if config.start_token in languages(tokenizer).values():  # mBART
            config = dataclasses.replace(config, start_token=token)
        else:
            config = dataclasses.replace(config, begin_tokens=(token,))
        lm = _network_of(model, config)
    return model._replace(lm=lm, tokenizer=tokenizer, config=config)


def first_tokens(model: Model, target: str) -> tuple[int, ...]:
    """Returns the first ids of a row whose text is in a language, as `with_languages` sets them.

    Raises:
        ValueError: the model has no such language, or is decoder-only.
    """
    token = language_id(model, target)
    limits = model.lm.limits
    if limits.start_token is None:
        raise ValueError(
            f"{_name(model)} is decoder-only, and its rows begin with the prompt: leave {target!r} "
            "out"
        )
    if limits.start_token in languages(model.tokenizer).values():
        return (token, *limits.begin)
    return (limits.start_token, token)


def language_id(model: Model, name: str) -> int:
    """Returns the token of a language.

    Raises:
        ValueError: the model has no such language; the message lists similar names.
    """
    tokens = languages(model.tokenizer)
    if name in tokens:
        return tokens[name]
    vocabulary = {} if model.tokenizer is None else model.tokenizer.get_vocab()
    if f">>{name}<<" in vocabulary:  # Marian
        raise ValueError(
            f'{_name(model)} reads its target language in the prompt: write ">>{name}<< " before '
            "each"
        )
    if not tokens:
        raise ValueError(f"{_name(model)} has no languages in its tokenizer: leave {name!r} out")
    close = difflib.get_close_matches(name, tokens, n=5, cutoff=0.3) or sorted(tokens)[:5]
    expected = f"one of the tokenizer's {len(tokens)}, such as {', '.join(close)}"
    raise ValueError(f"the language is {name!r}: expected {expected}")


def languages(tokenizer: Any) -> dict[str, int]:
    """Returns a tokenizer's languages and their ids.

    Language tokens are added tokens. The ids in its files do not help with M2M-100: its tokenizer
    counts languages on from its vocabulary, and files may list them in another order, or not at
    all.

    >>> languages(None)
    {}
    """
    if not hasattr(tokenizer, "src_lang"):
        return {}
    named = getattr(tokenizer, "lang_code_to_id", None) or {}
    if hasattr(tokenizer, "get_lang_id"):
        return {name: tokenizer.get_lang_id(name) for name in named}
    special = [
        getattr(tokenizer, f"{name}_token", None)
        for name in ("eos", "bos", "pad", "unk", "mask", "cls", "sep")
    ]
    tokens = {word for word in (*named, *tokenizer.get_added_vocab()) if word not in special}
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in sorted(tokens)}
    # Some spell the token of "de" as "__de__".
    return {
        word.removeprefix("__").removesuffix("__"): index
        for word, index in ids.items()
        if index is not None and index != tokenizer.unk_token_id
    }


def _network_of(model: Model, config: Any) -> LanguageModel:
    """Makes the network of a configuration, with a model's taps and its shared encoder."""
    inside = model.lm.inside
    lm = net_of(config).language_model(config, () if inside is None else inside.taps)
    is_shared = model.lm.encoder is not None and model.lm.encoder.is_shared
    if lm.inside is None or lm.encoder is None or not is_shared:
        return lm
    return lm._replace(inside=lm.inside._replace(encoder=lm.encoder._replace(is_shared=True)))


def _name(model: Model) -> str:
    return model.name or "this model"
