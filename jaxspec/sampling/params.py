"""The sampling options of `generate`, each turned into a part of the sampler and its traced
values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxspec.core import (
    BoundProcessor,
    LogitsProcessor,
    Model,
    Preceding,
    Processor,
    Prompt,
    Sampler,
    token_ids,
    token_rows,
)
from jaxspec.core.checks import check_ids
from jaxspec.core.options import Flag, Option, Sizes, declared
from jaxspec.sampling import penalties
from jaxspec.sampling.samplers import (
    SamplingParams,
    at_temperature,
    chain,
    greedy,
    mask_padding_ids,
)
from jaxspec.structured import patterns, processor, tables

ALL = 2**31 - 1  # as top_k: every token is kept
# begins the field of an option of the drafter alone; the rest is its field of `SamplingParams`
DRAFT = "draft_"


def per_row(value: Any, batch: int, name: str, dtype: Any) -> np.ndarray:
    """A number, or one per prompt, as an array [batch]."""
    if np.issubdtype(dtype, np.floating):
        expected = "a number, or one per prompt"
    else:
        expected = "an integer, or one per prompt"
    array = _array(value, name, expected)
    if array.dtype.kind not in ("iuf" if np.issubdtype(dtype, np.floating) else "iu"):
        raise ValueError(f"{name} is {value!r}: expected {expected}")
    if array.shape not in ((), (batch,)):
        raise ValueError(f"{name} has shape {array.shape} for {batch} prompts: expected {expected}")
    if (
        array.dtype.kind in "iu"
        and array.size
        and np.max(np.abs(array.astype(np.float64))) >= 2**31
    ):
        raise ValueError(f"{name} is {value!r}: expected a number below 2**31")
    return np.broadcast_to(array.astype(dtype), (batch,))


def values_per_row(values: Any, batch: int, owner: str) -> Any:
    """The values of a policy or a processor with an entry for each row.

    >>> values_per_row({"limit": 3, "best": np.array([[1, 2]])}, 2, "the policy")["best"].tolist()
    [[1, 2], [1, 2]]
    """

    def rows(value: Any) -> Any:
        array = np.asarray(value)
        if array.ndim and array.shape[0] not in (1, batch):
            raise ValueError(
                f"{owner} has a value for each of {array.shape[0]} rows, but there are {batch} "
                "prompts"
            )
        return token_rows.on_device(np.broadcast_to(array, (batch, *array.shape[1:])))

    return jax.tree.map(rows, values)


def as_list(values: Any) -> list[Any]:
    """Lists one value or several; any library's arrays become Python numbers.

    >>> as_list(3), as_list({3}), as_list("end"), as_list(np.array([3, 4]))
    ([3], [3], ['end'], [3, 4])
    """
    if hasattr(values, "tolist"):
        values = values.tolist()
    try:
        if isinstance(values, str):
            return [values]
        return list(values)
    except TypeError:
        return [values]


def _array(value: Any, name: str, expected: str) -> np.ndarray:
    """A value as an array."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError):  # rows of several lengths
        raise ValueError(f"{name} is {value!r}: expected {expected}") from None


def _numbers(allowed: Callable[[np.ndarray], Any], expected: str, dtype: Any = np.float32):
    def convert(value: Any, name: str, sizes: Sizes) -> np.ndarray:
        numbers = per_row(value, sizes.batch, name, dtype)
        if not np.all(allowed(numbers)):
            raise ValueError(f"{name} is {value!r}: expected {expected}")
        return numbers

    return convert


def _bias(bias: Any, name: str, sizes: Sizes) -> np.ndarray:
    biases = np.zeros((sizes.batch, sizes.vocab), np.float32)
    expected = (
        f"{{id: bias}}, or an array of shape ({sizes.vocab},) or ({sizes.batch}, {sizes.vocab})"
    )
    if isinstance(bias, Mapping):
        ids = check_ids(bias, name, sizes.vocab)
        for token, value in zip(ids, bias.values(), strict=True):
            number = _array(value, name, expected)
            if number.shape or number.dtype.kind not in "iuf":
                raise ValueError(f"{name} has {value!r} for token {token}: expected a number")
            biases[:, token] = number
    else:
        array = _array(bias, name, expected)
        if array.dtype.kind not in "iuf":
            raise ValueError(f"{name} is {bias!r}: expected {expected}")
        if array.shape not in ((sizes.vocab,), (sizes.batch, sizes.vocab)):
            raise ValueError(f"{name} has shape {array.shape}: expected {expected}")
        biases[:] = array
    bad = biases[np.isnan(biases) | np.isposinf(biases)]
    if bad.size:
        raise ValueError(f"{name} has {bad[0]}: expected finite numbers, or -inf to ban a token")
    return biases


def _banned(banned: Sequence[int] | int, name: str, sizes: Sizes) -> np.ndarray:
    banned = check_ids(as_list(banned), name, sizes.vocab)
    biases = np.zeros((sizes.batch, sizes.vocab), np.float32)
    biases[:, banned] = -np.inf
    return biases


def bound_processors(processors: Any, name: str) -> tuple[BoundProcessor, ...]:
    """The caller's own logits processors, each with its values; of one alone a tuple of one."""
    expected = (
        "core.Processor, core.BoundProcessor or functions (values, logits, preceding) -> logits"
    )
    if isinstance(processors, Processor | BoundProcessor) or callable(processors):
        processors = [processors]  # a named tuple is a sequence, too
    if isinstance(processors, str | Mapping) or not isinstance(processors, Iterable):
        raise TypeError(f"{name} is {processors!r}: expected a tuple of {expected}")
    return tuple(
        _bound(processor, f"{name}[{index}]", expected)
        for index, processor in enumerate(processors)
    )


def _bound(processor: Any, name: str, expected: str) -> BoundProcessor:
    if isinstance(processor, BoundProcessor):
        bound = processor
    else:
        bound = BoundProcessor(processor)
    if isinstance(bound.functions, type) or not callable(bound.functions):
        raise TypeError(f"{name} is {processor!r}: expected {expected}")
    if not isinstance(bound.functions, Processor):
        bound = bound._replace(functions=Processor(cast(LogitsProcessor, bound.functions)))
    return bound._replace(name=bound.name or name)


def _own_processors(processors: Any, name: str, sizes: Sizes) -> tuple[BoundProcessor, ...]:
    """The caller's own logits processors, checked, with values for each row."""
    checked = []
    for bound in bound_processors(processors, name):
        checked.append(bound._replace(params=values_per_row(bound.params, sizes.batch, bound.name)))
        _check_processor(checked[-1], sizes)
    return tuple(checked)


def _check_processor(bound: BoundProcessor, sizes: Sizes) -> None:
    """Raises ValueError for a processor whose memory or logits change their shape, before a program
    is made of it.
    """
    process, values, owner = bound
    if (process.init is None) != (process.advance is None):
        raise ValueError(
            f"{owner} has one of init and advance: expected both, or neither for one without a "
            "memory"
        )
    count = jnp.zeros(sizes.batch, jnp.int32)
    preceding = Preceding(Prompt(jnp.zeros((sizes.batch, 1), jnp.int32), count + 1), count + 1)
    if process.init is not None and process.advance is not None:
        init = process.init
        memory = jax.eval_shape(
            lambda values, row, start: init(values, row, start, sizes.vocab), values, *preceding[:2]
        )
        advanced = jax.eval_shape(process.advance, values, memory, count)
        makes = f"{owner} makes a memory of {_shapes(memory)}"
        if any(leaf.shape[:1] != (sizes.batch,) for leaf in jax.tree.leaves(memory)):
            raise ValueError(
                f"{makes}: expected {sizes.batch} rows as the first axis of each array"
            )
        if _shapes(advanced) != _shapes(memory):
            raise ValueError(
                f"{makes}, and advance returns {_shapes(advanced)}: expected the same shapes and "
                "dtypes"
            )
    logits = jax.ShapeDtypeStruct((sizes.batch, 1, sizes.vocab), jnp.float32)
    processed = jax.eval_shape(process, values, logits, preceding)
    if _shapes(processed) != _shapes(logits):
        raise ValueError(
            f"{owner} returns logits of {_shapes(processed)}: expected {_shapes(logits)}, as it "
            "was given"
        )


def _shapes(tree: Any) -> str:
    """Spells the shapes and dtypes of a tree's leaves.

    >>> _shapes((jnp.ones((2, 3)), jnp.ones(2, bool)))
    "('float32[2, 3]', 'bool[2]')"
    """
    return str(jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree))


@functools.lru_cache
def _with_own_values(process: Processor, index: int) -> Processor:
    """The processor as a part of `chain`, with the values that `SamplingParams` has at its
    index.
    """

    def of_own(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda sampling_params, *arguments: function(
            sampling_params.processors[index], *arguments
        )

    if process.init is None or process.advance is None:
        return Processor(of_own(process.apply))
    further = None
    if process.ahead is not None:
        further = of_own(process.ahead)
    return Processor(
        of_own(process.apply), of_own(process.init), of_own(process.advance), process.wide, further
    )


_positive = _numbers(lambda x: (x > 0) & np.isfinite(x), "a positive number (1 changes nothing)")
_finite = _numbers(np.isfinite, "a finite number (0 changes nothing)")
_temperature = _numbers(lambda x: (x >= 0) & ~np.isinf(x), "0 (greedy) or a positive number")
_share = _numbers(
    lambda x: (x >= 0) & (x <= 1), "a number in [0, 1]; without it every token is kept"
)
_mass = _numbers(lambda x: (x > 0) & (x <= 1), "a number in (0, 1]; without it every token is kept")
_count = _numbers(lambda x: x >= 1, "at least 1; without it every token is kept", np.int32)

_GENERATED = penalties.presence_and_frequency_penalties
_option = functools.partial(Option, per="prompt")
_pattern = functools.partial(_option, page="structured.md")
_number = functools.partial(_option, ndim=0, flag=Flag(float, "X"))
_integer = functools.partial(_option, ndim=0, flag=Flag(int, "N"))


class SamplingOptions(TypedDict, total=False):
    """Options that shape the distribution tokens are drawn from, in the order of their application.

    Each is a number for all rows or one per row, unless noted. The program leaves out options at
    their default, None.

    Attributes:
        logit_bias: added to the logits: {id: bias}, or an array [vocab] or [batch, vocab].
        banned: ids that are never generated.
        repetition_penalty: divides positive logits of tokens in prompt or text, and multiplies
            negative ones (encoder-decoder: in the text).
        presence_penalty: subtracted from the logit of a token in the text, once.
        frequency_penalty: subtracted from the logit of a token each time it is in the text.
        logits_processors: your own, a tuple of functions `(values, logits, preceding) -> logits`,
            of `core.Processor`, which remember the text, or of `core.BoundProcessor`, with values.
        choices: a list of strings that the text is chosen from, or such a list for each row.
        regex: a regular expression that the whole text matches (Python's `re`), or one for each
            row. A row has at most one of choices, regex and json_schema; None leaves its text free.
        json_schema: a schema that the text, JSON, is valid for: a dict, JSON text or a class of
            pydantic; or one for each row.
        temperature: 0, the default, is greedy.
        top_k: keep the k most probable tokens.
        top_p: keep the most probable tokens with this mass.
        min_p: keep tokens at least this many times as probable as the most probable.
        typical_p: keep the most typical tokens with this mass, those whose information content is
            nearest to the entropy.
        draft_temperature: the drafter's temperature, by default the target's. It changes how many
            draft tokens are accepted, not the distribution of the text. It has no effect where the
            temperature is 0.
        draft_top_k, draft_top_p: likewise the drafter's top_k and top_p.
    """

    logit_bias: Annotated[
        Any,
        _option(
            "Added to the logits: {id: bias}, or an array [vocab].",
            _bias,
            field="bias",
            processor=penalties.logit_bias,
            ndim=1,
        ),
    ]
    banned: Annotated[
        Sequence[int],
        _option(
            "Ids of tokens that are never generated.",
            _banned,
            field="bias",
            processor=penalties.logit_bias,
            ndim=1,
        ),
    ]
    repetition_penalty: Annotated[
        Any,
        _number(
            "Makes tokens that occurred less likely: divides their logits.",
            _positive,
            field="repetition",
            processor=penalties.repetition_penalty,
            neutral=1.0,
        ),
    ]
    presence_penalty: Annotated[
        Any,
        _number(
            "Subtracted from the logits of generated tokens.",
            _finite,
            field="presence",
            processor=_GENERATED,
        ),
    ]
    frequency_penalty: Annotated[
        Any,
        _number(
            "Subtracted once for each time a token was generated.",
            _finite,
            field="frequency",
            processor=_GENERATED,
        ),
    ]
    logits_processors: Annotated[
        Any,
        Option(
            "Logits processors of your own, which come after the penalties.",
            page="#logits-processors-of-your-own",
        ),
    ]
    choices: Annotated[Any, _pattern("The text is one of these.", flag=Flag(str, "A,B"))]
    regex: Annotated[Any, _pattern("The whole text matches it.", flag=Flag(str, "REGEX"))]
    json_schema: Annotated[
        Any,
        _pattern(
            "A JSON schema that the text is valid for; on the command line also its file.",
            flag=Flag(str, "FILE"),
        ),
    ]
    temperature: Annotated[
        Any,
        _number(
            "0 is greedy; 1 is the model's own distribution.",
            _temperature,
            flag=Flag(float, "X", "-t"),
        ),
    ]
    top_k: Annotated[
        Any,
        _integer(
            "Keep the k most probable tokens.",
            _count,
            truncates=True,
            neutral=ALL,
        ),
    ]
    top_p: Annotated[
        Any,
        _number(
            "Keep the most probable tokens of this mass.",
            _mass,
            truncates=True,
            neutral=1.0,
        ),
    ]
    min_p: Annotated[
        Any,
        _number(
            "Keep tokens at least this many times as probable as the best.",
            _share,
            truncates=True,
        ),
    ]
    typical_p: Annotated[
        Any,
        _number(
            "Keep the most typical tokens of this mass: of information nearest to the entropy.",
            _mass,
            truncates=True,
            neutral=1.0,
        ),
    ]
    draft_temperature: Annotated[
        Any,
        _number(
            "The drafter's temperature; by default the target's.",
            _temperature,
            group="Drafting",
            neutral=None,
        ),
    ]
    draft_top_k: Annotated[
        Any,
        _integer(
            "The drafter's top_k; by default the target's.",
            _count,
            group="Drafting",
            neutral=None,
        ),
    ]
    draft_top_p: Annotated[
        Any,
        _number(
            "The drafter's top_p; by default the target's.",
            _mass,
            group="Drafting",
            neutral=None,
        ),
    ]


DECLARED: Mapping[str, Option] = declared(SamplingOptions)
"""All sampling options, in the order of their application."""

OPTIONS: Mapping[str, Option] = {
    name: option._replace(field=option.field or name)
    for name, option in DECLARED.items()
    if option.ndim is not None
}
"""The sampling options that are numbers or arrays; the others are functions and patterns."""

KEEPS_ALL = {option.field: option.neutral for option in OPTIONS.values() if option.truncates}
"""The values of truncations that keep every token, by field of `SamplingParams`."""

# Truncations of other libraries that jaxspec lacks, with the values that keep every token.
LACKING: Mapping[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_a": (0.0,),
    "top_h": (),
    "top_n_sigma": (0.0, -1.0),
    "tfs_z": (1.0,),
    "min_keep": (0, 1),
    "min_tokens_to_keep": (1,),
    "xtc_probability": (0.0,),
    "xtc_threshold": (0.0, 0.1),
    "mirostat": (0,),
    "mirostat_tau": (5.0,),
    "mirostat_eta": (0.1,),
}


class Sampling(NamedTuple):
    """A sampler and its parameters.

    Attributes:
        sampler: with the processors that the options need and no others.
        params: its values.
        draft_params: the drafter's own; None if they are the same.
    """

    sampler: Sampler
    params: SamplingParams
    draft_params: SamplingParams | None


def sampling_of(
    target: Model,
    batch: int,
    options: Mapping[str, Any],
    limit: Int[np.ndarray, " batch"],
    ends: Sequence[int],
) -> Sampling:
    """Checks and converts `SamplingOptions`. None counts as not given; ids past the tokenizer's are
    banned.

    `limit`: most new tokens of each row; `ends`: the tokens that end a row.
    """
    sizes = sizes_of(target, batch)
    # A schema without keywords, and choices without a string, say something: they are read apart.
    set_options = {
        name: value
        for name, value in options.items()
        if is_set(value) and name not in patterns.NAMES
    }
    added = _own_processors(set_options.pop("logits_processors", ()), "logits_processors", sizes)
    values = values_of(set_options, sizes)
    structured = None
    if any(options.get(name) is not None for name in patterns.NAMES):
        rows = pattern_rows(patterns.patterns_of(options, batch), values.get("bias"), limit)
        structured = token_rows.on_device(tables.values(pool_of(target, ends), rows))
    temperature = values.setdefault("temperature", np.zeros(batch, np.float32))
    of_draft = {
        name.removeprefix(DRAFT): values.pop(name) for name in [*values] if name.startswith(DRAFT)
    }
    # Both distributions are made by one sampler: where only the drafter's is cut, the target's
    # keeps every token.
    values = {
        name: np.full_like(value, KEEPS_ALL[name])
        for name, value in of_draft.items()
        if name in KEEPS_ALL
    } | values
    own_values = tuple(bound.params for bound in added) or None
    params = SamplingParams(
        **token_rows.on_device(values), processors=own_values, structured=structured
    )
    is_greedy = np.ndim(set_options.get("temperature", 0.0)) == 0 and temperature[0] == 0
    bound = _top_k_bound(values, values | of_draft, sizes.vocab)
    if is_greedy:
        end = greedy()
    else:
        cuts = {name: name in values for name in KEEPS_ALL if name != "top_k"}
        end = at_temperature(bound, **cuts)
    processors = _processors_of(set_options)
    processors += [_with_own_values(bound.functions, index) for index, bound in enumerate(added)]
    if structured is not None:  # last: nothing after it may allow what it rules out
        processors.append(processor.structured)
    sampler = chain(*processors, to=end)
    if sizes.ids < sizes.vocab:
        sampler = mask_padding_ids(sampler, sizes.ids)
    if not of_draft or is_greedy:
        return Sampling(sampler, params, None)
    return Sampling(
        sampler, params, params._replace(**token_rows.on_device(draft_values(values, of_draft)))
    )


def _processors_of(set_options: Container[str]) -> list[LogitsProcessor | Processor]:
    """Lists the processors of some options in the order of the table, each once."""
    processors = dict.fromkeys(OPTIONS[name].processor for name in OPTIONS if name in set_options)
    return [process for process in processors if process is not None]


def draft_values(
    target: Mapping[str, np.ndarray], of_draft: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the drafter's own values, by field of `SamplingParams`: the target's in rows that
    have none (NaN).

    A greedy row has a greedy drafter.

    >>> heat = {"temperature": np.array([0.0, 1.0, 2.0], np.float32)}
    >>> draft_values(heat, {"temperature": np.array([0.5, 0.5, np.nan])})["temperature"].tolist()
    [0.0, 0.5, 2.0]
    """
    has_none = {name: np.isnan(values.astype(np.float64)) for name, values in of_draft.items()}
    if "temperature" in of_draft:
        has_none["temperature"] = has_none["temperature"] | (target["temperature"] <= 0)
    return {
        name: np.where(has_none[name], target[name], values).astype(target[name].dtype)
        for name, values in of_draft.items()
    }


def pattern_rows(
    rows: Sequence[patterns.Pattern | None],
    bias: Float[np.ndarray, "batch vocab"] | None,
    limit: Int[np.ndarray, " batch"],
) -> list[tuple[patterns.Pattern | None, tuple[int, ...], int]]:
    """Returns the arguments of `structured.tables.Pool.add` for each row; its text contains no
    banned tokens.
    """
    if bias is None:
        return [
            (pattern, (), int(limit_of_row))
            for pattern, limit_of_row in zip(rows, limit, strict=True)
        ]
    banned = [
        () if pattern is None else tuple(np.flatnonzero(np.isneginf(row)).tolist())
        for pattern, row in zip(rows, bias, strict=True)
    ]
    return [
        (pattern, ids, int(limit_of_row))
        for pattern, ids, limit_of_row in zip(rows, banned, limit, strict=True)
    ]


def pool_of(target: Model, ends: Sequence[int]) -> tables.Pool:
    """Makes an empty pool of automata for a target, which needs a tokenizer and tokens that end its
    texts.
    """
    if target.tokenizer is None:
        raise ValueError(
            "structured output needs a tokenizer, which this model lacks: add one, or use banned"
        )
    if not ends:
        raise ValueError(
            "structured output needs a token that ends a text, and there is none: give eos_ids"
        )
    return tables.Pool(target.tokenizer, target.lm.vocab_size, tuple(ends))


def sizes_of(target: Model, batch: int) -> Sizes:
    """Returns the bounds of options for so many prompts of a target."""
    vocab = target.lm.vocab_size
    return Sizes(
        batch,
        vocab,
        vocab if target.tokenizer is None else min(token_ids.size(target.tokenizer), vocab),
    )


def values_of(options: Mapping[str, Any], sizes: Sizes) -> dict[str, np.ndarray]:
    """Converts options that are set to values, by field of `SamplingParams`; the drafter's begin
    with `DRAFT`.

    >>> values_of({"banned": [1], "logit_bias": {0: 2.0}}, Sizes(1, 3, 3))["bias"].tolist()
    [[2.0, -inf, 0.0]]
    """
    values: dict[str, np.ndarray] = {}
    for name, option in OPTIONS.items():
        if name in options:
            array = option.read(options[name], name, sizes)
            if option.field in values:
                values[option.field] = values[option.field] + array
            else:
                values[option.field] = array
    if "bias" in values:
        silent = np.flatnonzero(np.isneginf(values["bias"][:, : sizes.ids]).all(axis=1))
        if silent.size:
            raise ValueError(
                f"logit_bias and banned rule out all {sizes.ids} tokens for prompt {silent[0]}: "
                "leave one"
            )
    return values


def is_set(value: Any) -> bool:
    """Says whether an option has a value: neither None nor an empty collection."""
    return value is not None and not (isinstance(value, Sequence | Mapping) and len(value) == 0)


def _top_k_bound(
    target: Mapping[str, np.ndarray], draft: Mapping[str, np.ndarray], vocab: int
) -> int | None:
    """Returns how many of the largest logits a program finds for top_k, a power of two; None
    without that option.

    Rows that keep every token need none of them, unless top_p then looks for its mass among all.
    """
    if "top_k" not in target:
        return None
    limits = np.concatenate([target["top_k"], draft["top_k"]])
    counts = limits[limits < vocab]
    if not counts.size or ("top_p" in target and counts.size < limits.size):
        return vocab
    return min(vocab, 1 << (int(counts.max()) - 1).bit_length())
