"""Drafters with another tokenizer, which draft the shared tokens (token-level intersection)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from jaxspec.core import Model, token_ids
from jaxspec.core.checks import at_least
from jaxspec.vocab.remap import NONE, check_model, map_vocabulary

LONGEST = 4  # default of the most drafter tokens per target token
ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def share_vocabulary(draft: Model, target: Model, *, longest: int = LONGEST) -> Model:
    """Makes a model draft for a target that has another tokenizer.

    It drafts the tokens that spell the same bytes in both vocabularies, and special tokens with the
    same role or name. All others have probability 0 in its distributions, and the acceptance rule
    sees these. So the text keeps the target's distribution exactly; the target's probability of the
    shared tokens bounds the acceptance rate. The drafter reads the target's text in its vocabulary.
    It spells a token that it lacks with several others, the longest first.

    Args:
        draft: the model that is to draft, with its tokenizer.
        target: the model to draft for, with its tokenizer.
        longest: most drafter tokens per target token; longer spellings lose their beginning. Caches
            are this many times as long, and so are passes with a token that must be spelled.

    Returns:
        A model with the target's vocabulary and tokenizer, for any drafter that takes one; without
        token trees, unless it has every token of the target's.

    Raises:
        ValueError: a model without a tokenizer, or no token in common.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model, word_tokenizer
        >>> words = (
        ...     ["<unk>", "</s>", "the", "old", "dog"],
        ...     ["</s>", "<unk>", "dog", "cat", "old", "d", "o"],
        ... )
        >>> target, draft = (
        ...     table_model(jax.random.key(6), vocab=len(w))._replace(tokenizer=word_tokenizer(w))
        ...     for w in words
        ... )
        >>> shared = share_vocabulary(draft, target)
        >>> shared.params.to_target.tolist()  # 5 stands for none
        [1, 0, 4, 5, 3, 5, 5]
        >>> text = jaxspec.generate(
        ...     target, "the old", drafter=shared, gamma=2, max_new_tokens=4
        ... ).texts
        >>> text == jaxspec.generate(target, "the old", max_new_tokens=4).texts
        True

    Reference: Timor et al., token-level intersection, ICML 2025, arXiv 2502.05202.
    """
    for role, model in (("the drafter", draft), ("the target", target)):
        check_model(model, "share_vocabulary")
        if model.tokenizer is None:
            raise ValueError(
                f"{role} ({model.name}) has no tokenizer: expected one, to compare what token ids "
                "spell"
            )
    at_least(1, longest=longest)
    start = target.lm.limits.start_token
    draft_start = draft.lm.limits.start_token
    if (start is None) != (draft_start is None):
        raise ValueError(
            "one of target and drafter is an encoder-decoder, the other is not: both must be of "
            "one kind"
        )
    vocab_size = target.lm.vocab_size
    maps = _maps(
        _Vocabulary(draft.tokenizer, draft.lm.vocab_size, draft_start),
        _Vocabulary(target.tokenizer, vocab_size, start),
        longest,
    )
    first = maps.first if start is None else ()
    mapped = map_vocabulary(draft, maps.to_target, vocab_size, maps.to_draft, first=first)
    return mapped._replace(tokenizer=target.tokenizer)


class _Vocabulary(NamedTuple):
    tokenizer: Any
    size: int
    start: int | None  # the start token of an encoder-decoder


class _Maps(NamedTuple):
    to_target: list[int]  # arguments of `map_vocabulary`, and the next
    to_draft: list[list[int]]
    first: list[int]  # drafter tokens before every text of a decoder-only model


@functools.lru_cache(maxsize=16)  # vocabularies of 256k take seconds
def _maps(draft: _Vocabulary, target: _Vocabulary, longest: int) -> _Maps:
    """Maps the ids of two vocabularies by what they spell."""
    target_texts = dict(token_ids.spelled(target.tokenizer, target.size))
    draft_texts = dict(token_ids.spelled(draft.tokenizer, draft.size))
    by_text: dict[bytes, int] = {}
    for index, text in draft_texts.items():
        by_text.setdefault(text, index)  # the lower of two ids with one text
    # The drafter's id of each shared token. Among several ids with one text, prefer the same one.
    shared = {
        index: index if draft_texts.get(index) == text else by_text[text]
        for index, text in target_texts.items()
        if text in by_text
    }
    if not shared:
        raise ValueError(
            "the tokenizers of drafter and target share only special tokens: expected others, too"
        )
    shared |= _special(draft, target)
    if target.start is not None and draft.start is not None:
        shared[target.start] = draft.start
    to_target = [NONE] * draft.size
    for index, draft_id in shared.items():
        if to_target[draft_id] == NONE:
            to_target[draft_id] = index
    # stands for tokens that cannot be spelled
    candidates = (draft.tokenizer.unk_token_id, draft.tokenizer.eos_token_id)
    unknown = next((token for token in candidates if token is not None and token < draft.size), 0)
    widest = max(map(len, by_text), default=1)
    to_draft = list[list[int]]()
    for index in range(target.size):
        spelled = []
        if index in shared:
            spelled = [shared[index]]
        elif index in target_texts:
            spelled = _spell(by_text, widest, longest, target_texts[index])
        to_draft.append(spelled or [unknown])
    return _Maps(to_target, to_draft, _beginning(draft.tokenizer, target.tokenizer))


def _spell(tokens: dict[bytes, int], widest: int, longest: int, text: bytes) -> list[int]:
    """Spells a text as tokens, the longest first; bytes that no token has are left out.

    >>> _spell({b"a": 0, b"ab": 1, b"b": 2}, 2, 3, b"abb?a")
    [1, 2, 0]
    """
    spelled = []
    start = 0
    while start < len(text):
        for size in range(min(widest, len(text) - start), 0, -1):
            piece = text[start : start + size]
            if piece in tokens:
                spelled.append(tokens[piece])
                start += size
                break
        else:  # no token begins with this byte
            start += 1
    return spelled[-longest:]


def _special(draft: _Vocabulary, target: _Vocabulary) -> dict[int, int]:
    """Pairs the target's special tokens with the drafter's, by name or by role."""

    def by_name(tokenizer: Any) -> dict[str, int]:
        return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))

    draft_ids = by_name(draft.tokenizer)
    pairs = {
        target_id: draft_ids[name]
        for name, target_id in by_name(target.tokenizer).items()
        if name in draft_ids
    }
    for role in ROLES:
        target_id = getattr(target.tokenizer, role)
        draft_id = getattr(draft.tokenizer, role)
        if target_id is not None and draft_id is not None:
            pairs.setdefault(target_id, draft_id)
    return {
        target_id: draft_id
        for target_id, draft_id in pairs.items()
        if target_id < target.size and draft_id < draft.size
    }


def _beginning(draft: Any, target: Any) -> list[int]:
    """Returns the drafter's beginning of sequence, if only the drafter's tokenizer adds one."""
    bos = draft.bos_token_id
    if bos is None or draft("a")["input_ids"][:1] != [bos]:
        return []
    if target.bos_token_id is not None and target("a")["input_ids"][:1] == [target.bos_token_id]:
        return []
    return [bos]
