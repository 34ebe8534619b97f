"""From the user's arguments to arrays: one list of checks, in one order, whichever function is
called.

`generate`, `stream`, `chat`, `prefix` and `beam_search` begin with `prepare`, and check further
options after it. `rollout` repeats what concerns the arrays that it is given anew.

1. Names of options: `options.check_names`.
2. The target is a model: `check_model`.
3. Arrays have values: `check_untraced`.
4. Prompts are text, chats or ids: `prompts.encode`.
5. Options have their types and ranges: `options.Options.read`.
6. Each row has its values: `sampling_of`.
7. The drafter fits the target: `bind`.
8. Rows fit the models' positions: `check_positions`.
9. Nothing depends on later tokens: `causality.check`.
10. These models have read the prefix: `SharedPrefix.before`.
11. The memory is large enough: `loop.check_fits`, when the generation is run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import core, drafters, sharding
from jaxspec.core import noise, programs, round, token_ids, token_rows
from jaxspec.core.checks import are_shapes, check_ids, check_model, check_untraced
from jaxspec.decode import causality, device_memory, shared_prefix
from jaxspec.decode.autoregressive import autoregressive
from jaxspec.decode.options import NEW_TOKENS, OPTIONS, Options, check_names, gathered, shown
from jaxspec.decode.prompts import Prompts, encode, ids_by_name
from jaxspec.decode.speculative import speculative
from jaxspec.drafters.common import with_taps_of
from jaxspec.drafters.share_encoder import difference, with_shared_encoder
from jaxspec.sampling.params import sampling_of, sizes_of, values_per_row


class Prepared(NamedTuple):
    """A generation, checked and ready to run; `prepare` makes it, `loop.run` and all of measuring
    take it whole.

    Attributes:
        target: the model whose distribution the text has.
        drafter: None for plain decoding.
        decoder: how to generate.
        sampler: makes distributions of the target's logits, with `request.sampling_params`.
        weights, prompt, request: the decoder's arguments; several rows of the request continue each
            prompt if several samples of it are asked for.
        max_new_tokens: size of the output: a bucket at least as large as any row's limit.
        options: the options it was prepared with.
        before: the prefix of all prompts that was read before; None: nothing.
    """

    target: core.Model
    drafter: core.BoundDrafter | None
    decoder: core.Decoder
    sampler: core.Sampler
    weights: core.Weights
    prompt: core.Prompt
    request: core.Request
    max_new_tokens: int
    options: Options
    before: core.Before | None = None

    def replace(self, **options: Any) -> Prepared:
        """The same prompts for the same target, with some of `generate`'s options changed.

        >>> import jaxspec
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prepared = prepare(model, [[3, 1]], drafter=model, gamma=3)
        >>> (
        ...     prepared.decoder.gamma,
        ...     prepared.replace(gamma=7).decoder.gamma,
        ...     prepared.plain().decoder.gamma,
        ... )
        (3, 7, 0)
        """
        _check_names(options)
        for name in ("prefix", "chat_template_kwargs"):
            if options.get(name) is not None:
                raise ValueError(
                    f"the prompts of a prepared generation have their {name} already: give it to "
                    "prepare"
                )
        return _prepared(self.target, self.prompt, gathered(self.options.keywords() | options))

    def widths(self, length: int) -> tuple[int, int]:
        """Returns the padded width of prompts of at most `length` tokens, and the most tokens that
        are read of them.
        """
        prefix = self.options.prefix
        width = token_rows.bucket(length)
        if prefix is None:
            return (width, width)
        return shared_prefix.widths(len(prefix) - 1, length)

    @property
    def is_sampled(self) -> bool:
        """Says whether tokens of some row are drawn, and not the most probable ones."""
        return bool(np.any(np.asarray(self.request.sampling_params.temperature) > 0))

    def plain(self) -> Prepared:
        """The same without a drafter."""
        return self.replace(drafter=None, policy=None)


@shown(name for name in OPTIONS if name != "stop")
@programs.outside_context_mesh
def prepare(target: core.Model, prompts: Prompts, **options: Any) -> Prepared:
    """A checked generation, ready to run: `generate` runs it at once, `rollout` inside a program of
    your own.

    See `generate` for the options, their defaults and the errors. It takes all but `stop`. Only
    memory is checked later, when the generation is run.
    """
    _check_names(options)
    check_model(target, "target")
    template = options.pop("chat_template_kwargs", None)
    values = gathered(options)
    arrays = options | {"drafter": getattr(values.drafter, "params", None)}
    check_untraced(target.params, prompts, arrays)
    return _prepared(target, encode(target, prompts, values.prefix, template), values)


def _prepared(target: core.Model, prompt: core.Prompt, unread: Options) -> Prepared:
    unread = unread._replace(drafter=named(unread.drafter, target))
    # 5. Types and ranges.
    prompts = prompt.tokens.shape[0]
    samples = OPTIONS["num_samples"].read(unread.num_samples, "num_samples", sizes_of(target, 1))
    batch = prompts * samples
    _check_rows(target, samples, batch)
    o = unread.read(sizes_of(target, batch))
    positions = positions_left(target, o.drafter, prompt, batch)
    limit = _default_limit(batch, positions) if o.max_new_tokens is None else o.max_new_tokens
    size = token_rows.bucket(int(limit.max()))
    # a row can use no more, and each draft token makes programs larger
    gamma = min(o.gamma, max(1, size - 1))
    # 6. Values of each row.
    ends = end_ids(target, o.eos_ids)
    sampler, params, draft_params = sampling_of(target, batch, o.sampling, limit, ends)
    key = _key(o.key, samples, is_sampled=bool(np.any(np.asarray(params.temperature) > 0)))
    # 7 to 10. Target and drafter, with each other, with the rows and with the prefix.
    target, bound = bind(target, o.drafter, o.rule, gamma)
    if bound is not None:
        check_judges(o.rule, params.temperature)
    if o.policy is not None and bound is None:
        if o.drafter is None:
            cause = "no drafter"
        else:
            cause = f"gamma={gamma}, of which nothing is drafted"
        raise ValueError(
            f"got a policy and {cause}: a policy chooses how many tokens a drafter drafts, at most "
            "gamma"
        )
    check_positions(target, bound, prompt, limit)
    causality.check(target)
    if o.prefix is None:
        before = None
    else:
        before = o.prefix.before(target, bound, prompt.tokens.shape[1])
    if bound is None:
        weights = core.Weights(target.params)
        decoder = autoregressive(target.lm, sampler, o.reported)
    else:
        decoder = speculative(
            target.lm,
            bound.functions,
            o.rule,
            sampler,
            gamma,
            None if o.policy is None else o.policy.functions,
            o.reported,
            o.trace_numbers,
        )
        weights = core.Weights(target.params, bound.params)
    request = core.Request(
        keys=noise.row_keys(key, batch),
        sampling_params=params,
        max_new_tokens=token_rows.on_device(limit),
        eos=token_rows.on_device(np.tile(np.array(ends or [-1], np.int32), (batch, 1))),
        draft_sampling_params=draft_params,
        policy=None if o.policy is None else values_per_row(o.policy.params, batch, "the policy"),
    )
    weights = programs.automatic(weights)
    mesh = sharding.mesh_of(weights)
    if mesh is not None:
        weights = sharding.place(weights, None, mesh)
        prompt = sharding.place(prompt, prompts, mesh)
        request = sharding.place(request, batch, mesh)
    # The options say what the limits are, also where the caller did not.
    limits = unread.max_new_tokens
    if limits is None:
        limits = int(limit[0]) if np.ptp(limit) == 0 else limit
    o = o._replace(max_new_tokens=limits)
    return Prepared(target, bound, decoder, sampler, weights, prompt, request, size, o, before)


def named(drafter: Any, target: core.Model) -> Any:
    """Returns the drafter that a string names, and any other drafter as it is.

    >>> import jaxspec
    >>> from jaxspec.testing import table_model
    >>> named("prompt_lookup(2)", table_model(jax.random.key(1), vocab=5)).name
    'prompt_lookup'
    """
    if not isinstance(drafter, str):
        return drafter
    if drafter == "none":
        raise ValueError("drafter is 'none': for plain decoding, give None or leave it out")
    return drafters.by_name(drafter, target)


def _check_rows(target: core.Model, samples: int, batch: int) -> None:
    """Raises NotEnoughMemory for so many samples that not even their rows of logits and tokens fit
    the memory.
    """
    if samples > 1 and not are_shapes(target.params):
        least = 4 * batch * (target.lm.vocab_size + 64)
        device_memory.check_memory(
            {"rows": least},
            f"num_samples={samples}",
            "num_samples",
            device_memory.devices(target.params),
        )


def _default_limit(batch: int, positions: np.ndarray | None) -> np.ndarray:
    """Returns the most new tokens of each row where the caller has not said it: `NEW_TOKENS`, or as
    many as fit into `positions`.
    """
    limit = np.full(batch, NEW_TOKENS, np.int32)
    if positions is None:
        return limit
    return np.clip(positions, 1, limit).astype(np.int32)


def positions_left(
    target: core.Model, drafter: Any, prompt: core.Prompt, rows: int
) -> np.ndarray | None:
    """Counts the positions that the models have for new tokens in each row; None if nothing limits
    them.

    `drafter` is as callers give it. `rows` may be several for each prompt.
    """
    lms = [target.lm]
    if isinstance(drafter, core.Model):
        lms.append(drafter.lm)
    elif isinstance(drafter, core.BoundDrafter):
        lms += [model.lm for model in drafter.models if isinstance(model.lm, core.LanguageModel)]
        lms += [] if drafter.functions.lm is None else [drafter.functions.lm]
    counts = [
        lm.limits.max_positions
        - _positions_read(target, lm, prompt, np.asarray(prompt.length), rows)
        for lm in lms
        if isinstance(lm, core.LanguageModel) and lm.limits.max_positions is not None
    ]
    if counts:
        return np.min(counts, axis=0)
    return None


def _positions_read(
    target: core.Model, lm: core.LanguageModel, prompt: core.Prompt, lengths: np.ndarray, rows: int
) -> np.ndarray:
    """Counts the positions that each of a model's rows takes before its first new token; `lengths`
    are the prompts'.
    """
    read = lengths
    if lm.limits.start_token is not None and prompt.encoder is None:
        read = np.full_like(read, len(target.lm.limits.first_tokens))
    return np.repeat(read, rows // len(read))  # a row for each sample


def _key(key: Any, samples: int, *, is_sampled: bool) -> jax.Array:
    if samples > 1 and not is_sampled:
        raise ValueError(
            f"num_samples is {samples} at temperature 0: the texts would be the same. Set a "
            "temperature"
        )
    if key is None and is_sampled:
        raise ValueError(
            "key is required when temperature is not 0: pass key=jax.random.key(0), for example"
        )
    # nothing is drawn at temperature 0
    return jax.random.key(0) if key is None else key


def check_judges(rule: core.Rule, temperature: Any) -> None:
    """Checks that no row is at temperature 0 if the rule needs sampling.

    >>> from jaxspec import rules
    >>> check_judges(rules.trusting(0.9), np.array([1.0, 0.0]))
    Traceback (most recent call last):
    ValueError: the rule trusting(0.9) reads the probabilities of draft tokens, which they lack ...
    """
    if rule.needs_sampling and not np.all(np.asarray(temperature) > 0):
        raise ValueError(
            f"the rule {rule.name} reads the probabilities of draft tokens, which they lack at "
            "temperature 0: set a temperature above 0, or use rules.rejection(), or "
            "rules.lenient(), which has a form for temperature 0"
        )


def _check_names(options: Iterable[str]) -> None:
    if "stop" in options:
        raise TypeError(
            "a prepared generation has no stop strings, which are looked for in text, round by "
            "round: give stop to jaxspec.generate or jaxspec.stream, or end rows at tokens with "
            "eos_ids"
        )
    check_names(options)


def bind(
    target: core.Model,
    drafter: core.Model | core.BoundDrafter | None,
    rule: core.Rule,
    gamma: int,
) -> tuple[core.Model, core.BoundDrafter | None]:
    """Checks target and drafter against each other; returns the target with the taps that the
    drafter reads, and it.

    None: no drafter, or one that drafts nothing with this gamma.
    """
    if drafter is None:
        return target, None
    if isinstance(drafter, core.Model):
        drafter = drafters.model(with_shared_encoder(drafter, target), coupled=rule.shares_noise)
    for model in drafter.models:
        _check_pair(target, model)
    if not round.size_of(drafter.functions, gamma).nodes:
        return target, None
    return target if drafter.target is None else with_taps_of(target, drafter.target), drafter


def readers(
    target: core.Model, drafter: core.BoundDrafter | None
) -> list[tuple[str, core.LanguageModel]]:
    """Lists the language models that read the prompts, with their names in errors: the target, then
    the drafter's.
    """
    drafting = []
    if drafter is not None:
        drafting = [drafter.functions.lm, *(model.lm for model in drafter.models)]
    return [("the target", target.lm), *(("the drafter", lm) for lm in drafting if lm is not None)]


def _check_pair(target: core.Model, draft: core.Model) -> None:
    target_name = causality.called(target, "the target")
    draft_name = causality.called(draft, "the drafter")
    starts = [model.lm.limits.start_token for model in (target, draft)]
    kinds = ["decoder-only" if start is None else "an encoder-decoder" for start in starts]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{target_name} is {kinds[0]} and {draft_name} {kinds[1]}: both must be of one kind"
        )
    if (
        draft.lm.encoder is not None
        and draft.lm.encoder.is_shared
        and (wrong := difference(draft, target)) is not None
    ):
        raise ValueError(
            f"{draft_name} was given the encoder of another target (drafters.share_encoder): "
            f"{wrong}"
        )
    if target.tokenizer is None or draft.tokenizer is None:
        if target.lm.vocab_size != draft.lm.vocab_size:
            raise ValueError(
                f"{target_name} has {target.lm.vocab_size} token ids and {draft_name} "
                f"{draft.lm.vocab_size}, and without two tokenizers there is no telling whether "
                "the ids they share mean the same: if you know, make the drafter's ids the "
                "target's with jaxspec.map_vocabulary"
            )
        return
    first = first_difference(target.tokenizer, draft.tokenizer)
    if first is not None:
        index, target_word, draft_word = first
        raise ValueError(
            f"{target_name} and {draft_name} have different tokenizers: id {index} is "
            f"{target_word!r} for the target and {draft_word!r} for the drafter. "
            "jaxspec.share_vocabulary(draft, target) lets it draft the tokens that both have"
        )


# a vocabulary of 256k takes a second, and every call of `generate` compares
@functools.lru_cache(maxsize=16)
def first_difference(first: Any, second: Any) -> tuple[int, str, str] | None:
    """Returns the first token id that both of two tokenizers have and do not agree on, and what
    each calls it.
    """
    if first is second:
        return None
    pairs = zip(token_ids.words(first), token_ids.words(second), strict=False)
    return next(
        ((i, a, b) for i, (a, b) in enumerate(pairs) if a is not None and b is not None and a != b),
        None,
    )


def check_positions(
    target: core.Model,
    drafter: core.BoundDrafter | None,
    prompt: core.Prompt,
    limit: np.ndarray,
    *,
    padded: bool = False,
) -> None:
    """Raises ValueError if a model has too few positions for a row.

    `limit` has the most new tokens of each row; a prompt may have several rows. Of `padded` prompts
    the width counts, since their lengths may not be known.
    """

    def lengths_of(prompt: core.Prompt) -> np.ndarray:
        rows, width = prompt.tokens.shape
        if padded:
            return np.full(rows, width)
        return np.asarray(prompt.length)

    for name, lm in readers(target, drafter):
        limits = lm.limits
        if limits.start_token is not None:
            longest = lengths_of(prompt.text).max()
            if limits.max_prompt is not None and not padded and longest > limits.max_prompt:
                raise ValueError(
                    f"a prompt has {longest} tokens, but {name} reads at most {limits.max_prompt}"
                )
        read = _positions_read(target, lm, prompt, lengths_of(prompt), len(limit))
        row = int(np.argmax(read + limit))
        old = int(read[row])
        new = int(limit[row])
        if limits.max_positions is not None and old + new > limits.max_positions:
            padding = ", padding included," if padded else ""
            raise ValueError(
                f"a prompt of {old} tokens{padding} and {new} new ones need {old + new} positions, "
                f"but {name} has {limits.max_positions}: shorten the "
                f"prompt{' or its padding' * padded} or lower max_new_tokens"
            )


def end_ids(target: core.Model, eos_ids: Any) -> list[int]:
    """Returns the tokens that end a row: the caller's, or by default the model's own."""
    eos_ids = ids_by_name(token_ids.ends(target) if eos_ids is None else eos_ids, target.tokenizer)
    return check_ids(eos_ids, "eos_ids", target.lm.vocab_size)
