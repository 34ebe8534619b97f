"""Drafters with another tokenizer, which draft the shared tokens (token-level intersection)."""

from __future__ import annotations

import functools
from typing import Any

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
    starts = target.lm.limits.start_token, draft.lm.limits.start_token
    if (starts[0] is None) != (starts[1] is None):
        raise ValueError(
            "one of target and drafter is an encoder-decoder, the other is not: both must be of "
            "one kind"
        )
    sizes = target.lm.vocab_size, draft.lm.vocab_size
    to_target, to_draft, first = _maps(draft.tokenizer, target.tokenizer, sizes, starts, longest)
    mapped = map_vocabulary(
        draft, to_target, sizes[0], to_draft, first=first if starts[0] is None else ()
    )
    return mapped._replace(tokenizer=target.tokenizer)


@functools.lru_cache(maxsize=16)  # vocabularies of 256k take seconds
def _maps(
    draft: Any,
    target: Any,
    sizes: tuple[int, int],
    starts: tuple[int | None, int | None],
    longest: int,
) -> tuple[list[int], list[list[int]], list[int]]:
    (target_size, draft_size), (start, own_start) = sizes, starts
    target_texts = dict(token_ids.spelled(target, target_size))
    draft_texts = dict(token_ids.spelled(draft, draft_size))
    by_text: dict[bytes, int] = {}
    for index, text in draft_texts.items():
        by_text.setdefault(text, index)  # the lower of two ids with one text
    # Among several tokens with one text, prefer the one with the same id.
    direct = {
        i: i if draft_texts.get(i) == text else by_text[text]
        for i, text in target_texts.items()
        if text in by_text
    }
    if not direct:
        raise ValueError(
            "the tokenizers of drafter and target share only special tokens: expected others, too"
        )
    direct |= _special(draft, target, draft_size, target_size)
    if start is not None and own_start is not None:
        direct[start] = own_start
    to_target = [NONE] * draft_size
    for index, draft_id in direct.items():
        if to_target[draft_id] == NONE:
            to_target[draft_id] = index
    unknown = next(
        (x for x in (draft.unk_token_id, draft.eos_token_id) if x is not None and x < draft_size), 0
    )
    spell = functools.partial(_spell, by_text, max(map(len, by_text), default=1), longest)
    to_draft = [
        [direct[i]]
        if i in direct
        else (spell(target_texts[i]) if i in target_texts else []) or [unknown]
        for i in range(target_size)
    ]
    return to_target, to_draft, _beginning(draft, target)


def _spell(tokens: dict[bytes, int], widest: int, longest: int, text: bytes) -> list[int]:
    """Spells a text as tokens, the longest first; bytes that no token has are left out.

    >>> _spell({b"a": 0, b"ab": 1, b"b": 2}, 2, 3, b"abb?a")
    [1, 2, 0]
    """
    spelled = []
    start = 0
    while start < len(text):
        size = next(
            (
                n
                for n in range(min(widest, len(text) - start), 0, -1)
                if text[start : start + n] in tokens
            ),
            0,
        )
        spelled += [tokens[text[start : start + size]]] if size else []
        start += size or 1
    return spelled[-longest:]


def _special(draft: Any, target: Any, draft_size: int, target_size: int) -> dict[int, int]:
    """Pairs the target's special tokens with the drafter's, by name or by role."""
    draft_ids = dict(zip(draft.all_special_tokens, draft.all_special_ids, strict=True))
    pairs = {
        i: draft_ids[name]
        for name, i in zip(target.all_special_tokens, target.all_special_ids, strict=True)
        if name in draft_ids
    }
    for role in ROLES:
        target_id = getattr(target, role)
        draft_id = getattr(draft, role)
        if target_id is not None and draft_id is not None:
            pairs.setdefault(target_id, draft_id)
    return {
        i: draft_id for i, draft_id in pairs.items() if i < target_size and draft_id < draft_size
    }


def _beginning(draft: Any, target: Any) -> list[int]:
    """Returns the drafter's beginning of sequence, if only the drafter's tokenizer adds one."""
    bos = draft.bos_token_id
    if bos is None or draft("a")["input_ids"][:1] != [bos]:
        return []
    if target.bos_token_id is not None and target("a")["input_ids"][:1] == [target.bos_token_id]:
        return []
    return [bos]
