"""The tokenizer that a GGUF file holds, made to read and end text as llama.cpp does.

The file has a vocabulary, merges or scores, and types of tokens. How text is cut before merges are
applied is named only (`tokenizer.ggml.pre`); the patterns are those that the models' own tokenizers
were trained with.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec import optional_imports
from jaxspec.weights.hf_families.common import need
from jaxspec.weights.tensors import CheckpointError

UNKNOWN = 2  # types of tokens
CONTROL = 3  # types of tokens
USER_DEFINED = 4  # types of tokens
SPACE = "▁"  # for a space, in vocabularies of sentencepiece
EXTRA_IDS = 100  # sentinels of a T5
KEY = "tokenizer.ggml."
# transformers'
NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
ASSUMED = {  # ids of a file that does not say them
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}
END_TEXTS = {
    *(
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
    ),
    *(
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<eos>",
    ),
    *("<end_of_utterance>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
}
# roles whose tokens end a text, and the texts of tokens that have the role where no key names one
END_ROLES = {
    **{"eos": (), "eot": (), "eom": ()},
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
NOT_ENDS = (  # where all of the first end a text, the second does not
    *((marks, "<|end|>") for marks in ({"<|return|>", "<|call|>"}, {"<|return|>", "<|calls|>"})),
    *((marks, "<|end|>") for marks in ({"<|flush|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})),
    *((marks, "</s>") for marks in ({"<|tool_response>"}, {"<|plamo:eos|>"})),
)


class Cut(NamedTuple):
    """The splitting of text into words by a byte-level tokenizer."""

    patterns: tuple[str, ...]  # each cuts what those before it left
    # whether a word that is in the vocabulary is its token, whatever the merges
    whole_words: bool = False
    add_bos: bool = False  # whether a text begins with BOS in a file that does not say


# The parts that patterns share: words, what is between them, and cased words.
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# gpt-oss: "it's" is one word
_WITH_SHORT = "|".join(rf"(?:{cased}){_SHORT}?" for cased in _CASED.split("|"))
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"""|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
)
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
CUTS = {
    "default": Cut((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "mellum", "exaone4"), Cut((_GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "minerva-7b", "command-r"), Cut((r"\p{N}", _GPT2))
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), Cut((_LLAMA3,), True, True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Cut((_LLAMA3,))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"),
        Cut((rf"{_WORDS}|\p{{N}}|{_REST}",)),
    ),
    "seed-coder": Cut((rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    "hunyuan-dense": Cut(
        (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATED + r"|\s*[\r\n]+|\s+(?!\S)|\s+")
    ),
    "gpt-4o": Cut((rf"{_WITH_SHORT}|\p{{N}}{{1,3}}|{_SLASHED}",)),
    "tekken": Cut((rf"{_CASED}|\p{{N}}|{_SLASHED}",), True, True),
}


def tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any:
    """Makes a file's tokenizer, as a class of transformers; None if the file has no tokenizer.

    Args:
        path: the file's path, for messages.
        metadata: the file's metadata, by key.
    """
    model = metadata.get(f"{KEY}model", "no_vocab")
    if model in ("no_vocab", "none"):
        return None
    if model not in KINDS:
        raise CheckpointError(
            f"{path}: its tokenizer is of the kind {model!r}: expected one of {', '.join(KINDS)}"
        )
    if model == "gpt2" and f"{KEY}pre" not in metadata:
        logging.getLogger(__name__).warning(
            "%s does not say how its tokenizer cuts text (tokenizer.ggml.pre): 'default' is "
            "assumed, as by llama.cpp, which may be wrong. Convert the model again with a newer "
            "llama.cpp",
            path,
        )
    optional_imports.import_transformers()
    try:
        return _tokenizer(model, metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # tokenizers raises anything
        raise CheckpointError(
            f"the tokenizer in {path} cannot be made: {type(error).__name__}: {error}"
        ) from error


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Lists the tokens that end a text in llama.cpp, by their keys or texts; the end-of-sequence
    token is first.

    >>> end_ids(
    ...     {
    ...         "tokenizer.ggml.model": "llama",
    ...         "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<|im_end|>"],
    ...     }
    ... )
    (2, 3)
    """
    if metadata.get(f"{KEY}model") not in KINDS:
        return ()
    tokens = need(metadata, f"{KEY}tokens")
    ids = _ids(metadata)
    # llama.cpp takes a token for an end by its key, or by its text where no key names one of that
    # role.
    by_role = [ids[role] for role in END_ROLES if role in ids]
    texts = _end_texts(ids)
    ends = dict.fromkeys([*by_role, *(i for i, token in enumerate(tokens) if token in texts)])
    ending = {tokens[i] for i in ends}
    removed = {text for marks, text in NOT_ENDS if marks <= ending}
    return tuple(i for i in ends if tokens[i] not in removed)


def _end_texts(ids: Mapping[str, int]) -> set[str]:
    return END_TEXTS.union(*(texts for role, texts in END_ROLES.items() if role not in ids))


def _named(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Returns the token of each role that a key names; none past the vocabulary."""
    keys = {role: metadata.get(f"{KEY}{role}_token_id") for role in {**NAMES, **END_ROLES}}
    return {
        role: i
        for role, i in keys.items()
        if isinstance(i, int) and 0 <= i < len(metadata[f"{KEY}tokens"])
    }


def _ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Returns the token of each role: the one that a key names, else the one that is assumed."""
    assumed = ASSUMED[metadata[f"{KEY}model"]]
    return {role: i for role, i in assumed.items() if i < len(metadata[f"{KEY}tokens"])} | _named(
        metadata
    )


def _tokenizer(model: str, metadata: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    tokens = need(metadata, f"{KEY}tokens")
    ids = _ids(metadata)
    backend, adds = KINDS[model](metadata, ids)
    special, defined = _added_tokens(metadata, ids)
    # Both are matched whole, before anything else is done to a text.
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token in defined])
    # A file that does not say gets what models of its kind were trained with.
    added = [
        side
        for side in ("bos", "eos")
        if side in ids and metadata.get(f"{KEY}add_{side}_token", side in adds)
    ]
    if added:
        backend.post_processor = processors.TemplateProcessing(
            single=sorted([*added, "$A"], key=("bos", "$A", "eos").index),
            special_tokens=[
                {"id": side, "ids": [ids[side]], "tokens": [tokens[ids[side]]]} for side in added
            ],
        )
    # A token that is assumed to have a role is special only if its type says so.
    names = {
        name: tokens[ids[role]]
        for role, name in NAMES.items()
        if role in ids and tokens[ids[role]] in special
    }
    special_texts = [
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    ]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=[token for token in special_texts if token not in names.values()],
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template"),
        **names,
    )


def _added_tokens(
    metadata: Mapping[str, Any], ids: Mapping[str, int]
) -> tuple[list[str], list[str]]:
    """Returns the special tokens, and other tokens that are matched whole."""
    tokens = metadata[f"{KEY}tokens"]
    types = dict(enumerate(metadata.get(f"{KEY}token_type", ())))
    named = set(_named(metadata).values())
    ending = _end_texts(ids)
    special = dict.fromkeys(
        token
        for i, token in enumerate(tokens)
        if types.get(i) in (UNKNOWN, CONTROL) or token in ending or i in named
    )
    defined = [
        token
        for i, token in enumerate(tokens)
        if types.get(i) == USER_DEFINED and token not in special
    ]
    return list(special), defined


def _sentencepiece(
    metadata: Mapping[str, Any], ids: Mapping[str, int]
) -> tuple[Any, Sequence[str]]:
    """Makes a tokenizer like Llama 2's, Mistral's or Gemma's: pairs are merged by the scores of the
    merged tokens.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata[f"{KEY}tokens"]
    scores = need(metadata, f"{KEY}scores")
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges_of(tokens, [-score for score in scores]),
            unk_token=tokens[ids["unknown"]] if "unknown" in ids else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get(f"{KEY}add_space_prefix", True))
    steps = [normalizers.Prepend(SPACE)] if prefix else []  # to an indented text, too
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    shown = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*shown, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return backend, ("bos",)


def merges_of(tokens: Sequence[str], rank: Sequence[float]) -> list[tuple[str, str]]:
    """Lists merges that build each token from two others, the lowest rank first.

    >>> merges_of(["a", "b", "ab", "ba", "aba"], range(5))
    [('a', 'b'), ('b', 'a'), ('ab', 'a'), ('a', 'ba')]
    """
    vocabulary = set(tokens)
    # Any cut into two tokens is a merge: those of sentencepiece are not stored, only scores are.
    merges = [
        (order, -i, i - len(token), token)
        for token, order in zip(tokens, rank, strict=True)
        for i in range(1, len(token))
        if token[:i] in vocabulary and token[i:] in vocabulary
    ]
    merges.sort(key=lambda merge: merge[:3])
    return [(token[:-i], token[-i:]) for _, i, _, token in merges]


def _byte_level(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> tuple[Any, Sequence[str]]:
    """Makes a tokenizer like GPT-2's: Llama 3's, Qwen's, Mistral's newer ones."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = metadata.get(f"{KEY}pre", "default")
    if name not in CUTS:
        raise CheckpointError(
            f"its tokenizer cuts text as {name!r}: expected one of {', '.join(CUTS)}"
        )
    cut = CUTS[name]
    vocab = {token: i for i, token in enumerate(metadata[f"{KEY}tokens"])}
    merges: Any = [tuple(pair.split(" ")) for pair in need(metadata, f"{KEY}merges")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.whole_words))
    words: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cut.patterns
    ]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, letters])
    backend.decoder = decoders.ByteLevel()
    return backend, ("bos",) if cut.add_bos else ()


def _unigram(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> tuple[Any, Sequence[str]]:
    """Makes a T5's, whose sentinels llama.cpp calls [PAD32000] and on."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

    tokens = metadata[f"{KEY}tokens"]
    # llama.cpp pads the vocabulary to the width of the logits, which a T5 uses for its sentinels.
    padding = [
        i for i, token in enumerate(tokens) if token.startswith("[PAD") and token.endswith("]")
    ]
    sentinels = {i: f"<extra_id_{EXTRA_IDS - 1 - n}>" for n, i in enumerate(padding[:EXTRA_IDS])}
    tokens = [sentinels.get(i, token) for i, token in enumerate(tokens)]
    vocab: list[Any] = list(zip(tokens, need(metadata, f"{KEY}scores"), strict=True))
    for name, expected in (("treat_whitespace_as_suffix", False), ("escape_whitespaces", True)):
        if bool(metadata.get(f"{KEY}{name}", expected)) != expected:
            raise CheckpointError(
                f"{KEY}{name} is {not expected}: expected {expected}, or no such key"
            )
    backend = Tokenizer(models.Unigram(vocab, ids.get("unknown"), byte_fallback=False))
    # Signed bytes in the file; tokenizers takes unsigned ones.
    charsmap = bytes(x % 256 for x in metadata.get(f"{KEY}precompiled_charsmap", ()))
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    merged = metadata.get(f"{KEY}remove_extra_whitespaces", False)
    if merged:
        steps += [
            normalizers.Replace(Regex(pattern), to)
            for pattern, to in ((r"\A +| +\z", ""), (" +", " "))
        ]
    if merged or metadata.get(f"{KEY}add_space_prefix", False):
        steps += [normalizers.Replace(Regex(r"\A(?= *[^ ])"), " ")]  # none in white space only
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Metaspace(SPACE, "always")
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in sentinels.values()]
    )
    return backend, ("eos",)


KINDS = {"llama": _sentencepiece, "gpt2": _byte_level, "t5": _unigram}
