"""The tokenizer that a GGUF file holds: a vocabulary, its merges or scores, and which tokens are special.

How text is cut before merges are applied is named only (`tokenizer.ggml.pre`); the patterns are those that the models'
own tokenizers were trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec import quiet
from jaxspec.weights.orbax import CheckpointError

CONTROL, USER_DEFINED = 3, 4  # types of tokens
SPACE = "▁"  # for a space, in vocabularies of sentencepiece
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SLASHED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # None: as GPT-2 does
    "default": None,
    "gpt-2": None,
    "llama-bpe": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "llama3": rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_WORDS}|\p{{N}}|{_REST}",
    "deepseek-r1-qwen": rf"{_WORDS}|\p{{N}}|{_REST}",
    "tekken": rf"{_CASED}|\p{{N}}|{_SLASHED}",
}
EXTRA_IDS = 100  # sentinels of a T5


def tokenizer(path: Path, metadata: Mapping[str, Any]) -> Any:
    """The tokenizer of a file, as one of transformers'; None if the file holds none.

    Args:
        path: of the file, for messages.
        metadata: of the file, by key.

    Raises:
        CheckpointError: it is of a kind that is not known.
    """
    kind = metadata.get("tokenizer.ggml.model", "no_vocab")
    if kind == "no_vocab":
        return None
    if kind not in KINDS:
        raise CheckpointError(f"{path}: its tokenizer is of the kind {kind!r}, expected one of {', '.join(KINDS)}")
    quiet.import_transformers()
    try:
        return _with_special(KINDS[kind](metadata, _options(metadata, kind)), metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # tokenizers raises anything
        raise CheckpointError(f"the tokenizer in {path} cannot be made: {type(error).__name__}: {error}") from error


def _options(metadata: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Names of special tokens, and whether each text begins and ends with one."""
    tokens = metadata["tokenizer.ggml.tokens"]
    found: dict[str, Any] = {}
    for role, key in ROLES.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        found[role] = None if index is None else tokens[index]
    if found["unk_token"] is None:
        found["unk_token"] = "<unk>" if "<unk>" in tokens else found["eos_token"]
    for side, otherwise in (("bos", kind == "llama"), ("eos", kind == "t5")):
        found[f"add_{side}_token"] = metadata.get(f"tokenizer.ggml.add_{side}_token", otherwise)
    return found | {"chat_template": metadata.get("tokenizer.chat_template")}


def _sentencepiece(metadata: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """Llama 2's and Mistral's, or Gemma's, whose merges are ordered as its tokens are and whose spaces are spaces."""
    from transformers import GemmaTokenizer, LlamaTokenizer

    tokens = metadata["tokenizer.ggml.tokens"]
    if str(metadata.get("general.architecture")).startswith("gemma"):
        tokens = [SPACE * len(token) if token.isspace() and set(token) == {" "} else token for token in tokens]
        rank: Sequence[float] = range(len(tokens))
        made, options = GemmaTokenizer, {name: value for name, value in options.items() if value is not None}
    else:
        rank, made = [-score for score in metadata["tokenizer.ggml.scores"]], LlamaTokenizer
        options = options | {"add_prefix_space": metadata.get("tokenizer.ggml.add_space_prefix")}
    merges: Any = [tuple(pair.split(" ")) for pair in metadata.get("tokenizer.ggml.merges", ())]
    merges = merges or merges_of(tokens, rank)
    return made(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, **options)


def merges_of(tokens: Sequence[str], rank: Sequence[float]) -> list[tuple[str, str]]:
    """Merges that build each token from two others, the lowest rank first.

    >>> merges_of(["a", "b", "ab", "ba", "aba"], range(5))
    [('a', 'b'), ('b', 'a'), ('ab', 'a'), ('a', 'ba')]
    """
    known = set(tokens)
    found = [
        (order, -i, i - len(token), token)
        for token, order in zip(tokens, rank, strict=True)
        for i in range(1, len(token))
        if token[:i] in known and token[i:] in known
    ]
    found.sort(key=lambda merge: merge[:3])
    return [(token[:-i], token[-i:]) for _, i, _, token in found]


def _bytes(metadata: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """GPT-2's and those of its kind: Llama 3's, Qwen's, Mistral's newer ones."""
    from tokenizers import Regex, pre_tokenizers
    from transformers import GPT2Tokenizer

    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise CheckpointError(f"its tokenizer cuts text as {name!r}, expected one of {', '.join(SPLITS)}")
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges: Any = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    made = GPT2Tokenizer(vocab=vocab, merges=merges, **options)
    if (pattern := SPLITS[name]) is not None:
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return made


def _unigram(metadata: Mapping[str, Any], options: dict[str, Any]) -> Any:
    """A T5's, whose sentinels llama.cpp calls [PAD32000] and on."""
    from transformers import T5Tokenizer

    tokens = list(metadata["tokenizer.ggml.tokens"])
    padding = [i for i, token in enumerate(tokens) if token.startswith("[PAD") and token.endswith("]")]
    for n, i in enumerate(padding[:EXTRA_IDS]):
        tokens[i] = f"<extra_id_{EXTRA_IDS - 1 - n}>"
    vocab = list(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    names = {role: options[role] for role in ("eos_token", "unk_token", "pad_token") if options[role] is not None}
    return T5Tokenizer(vocab=vocab, **names)


def _with_special(made: Any, metadata: Mapping[str, Any]) -> Any:
    """Adds tokens that are matched whole in text: those that control, which are not shown, and those of the user."""
    from tokenizers import AddedToken

    kinds = metadata.get("tokenizer.ggml.token_type", ())
    known = made.get_vocab()
    typed = [(x, kind) for x, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=False) if x in known]
    special = [AddedToken(token, normalized=False, special=True) for token, kind in typed if kind == CONTROL]
    own = [AddedToken(token, normalized=False, special=False) for token, kind in typed if kind == USER_DEFINED]
    if special:
        made.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    if own:
        made.add_tokens(own)
    return made


KINDS = {"llama": _sentencepiece, "gpt2": _bytes, "t5": _unigram}
