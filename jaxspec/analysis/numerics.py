"""The places where two greedy texts differ, and how near a tie it was there.

`mismatches` compares speculative with plain decoding. A pass over several tokens rounds in another
way than several passes over one token, so greedy texts can differ where the two best tokens are
(nearly) equally likely. A difference anywhere else is an error. float32 texts should not differ.
bfloat16 texts do, and the margin tells whether it was a near tie.

`compare` compares two models of one vocabulary, such as a model with its int8 copy.

Shapes: B prompts, T new tokens, V vocabulary, L layers, M model dimension.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxspec import nets, sharding
from jaxspec.analysis.result import dtype_of
from jaxspec.core import Forward, LanguageModel, Model, Params, Prompt, chunks, programs, token_rows
from jaxspec.core.checks import check_model
from jaxspec.decode import batches, request
from jaxspec.decode.generate import complete, generate
from jaxspec.decode.prompts import Prompts, encode
from jaxspec.decode.request import Prepared

TABLE_WIDTH = 100  # characters of a comparison's tables


class Mismatch(NamedTuple):
    """The first new token that differs between two texts of a prompt."""

    row: int  # the prompt
    position: int  # the new token, counted from 0
    # these two: the token that each has there
    plain: int
    speculative: int
    # the logit of plain decoding's token minus that of the other, in plain decoding's own pass
    # (nats)
    margin: float
    # by how much the largest logit there exceeds the second largest (nats): the same, unless the
    # other token is not even the second best
    top_two_margin: float


class Summary(NamedTuple):
    """The greedy texts of some prompts beside plain decoding's."""

    # these two: how many there are, and how many texts are the same
    prompts: int
    same: int
    # the mismatch that is earliest in its text, of the first prompt if there are several
    first: Mismatch | None
    largest_top_two_margin: float | None  # nats; None if all texts are the same
    mismatches: tuple[Mismatch, ...]  # one for each other text


def mismatches(prepared: Prepared) -> list[Mismatch]:
    """Decodes with and without the drafter and compares; an empty list means identical texts.

    Args:
        prepared: greedy, with a drafter; its prompts are decoded as one batch.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> mismatches(prepared_table(max_new_tokens=12))
        []
    """
    outs = [complete(prepared.plain()), complete(prepared)]
    texts = (
        [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)] for out in outs
    )
    differences = []
    for row, (plain, speculative) in enumerate(zip(*texts, strict=True)):
        index = first_difference(plain, speculative)
        if index is not None and index < min(len(plain), len(speculative)):
            tokens = plain[index], speculative[index]
            margins = _margins(batches.take(prepared, [row]), plain[:index], *tokens)
            differences.append(Mismatch(row, index, *tokens, *margins))
    return differences


def summary(prepared: Prepared) -> Summary:
    """Decodes with and without the drafter as `mismatches` does, and sums up."""
    differences = mismatches(prepared)
    prompts = len(prepared.prompt.length)
    first = min(differences, key=lambda mismatch: (mismatch.position, mismatch.row), default=None)
    largest = max((mismatch.top_two_margin for mismatch in differences), default=None)
    return Summary(prompts, prompts - len(differences), first, largest, tuple(differences))


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Finds where two texts differ: at the shorter one's end if it is the beginning of the other;
    None if nowhere.

    >>> (
    ...     first_difference([1, 2, 3], [1, 4]),
    ...     first_difference([1], [1, 2]),
    ...     first_difference([1], [1]),
    ... )
    (1, 1, None)
    """
    if list(first) == list(second):
        return None
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _margins(
    prepared: Prepared, before: Sequence[int], plain: int, differing: int
) -> tuple[float, float]:
    """Computes how far two logits after `before` lie apart, and the top two; fed one by one, as
    plain decoding does.
    """
    target = prepared.target
    prompt = prepared.prompt
    prefill = jax.jit(target.lm.prefill)
    extend = jax.jit(target.lm.extend)
    room = token_rows.room(target.lm, prompt, token_rows.bucket(len(before) + 1), nodes=0)
    forward, cache = prefill(target.params, prompt, room)
    for token in before:
        forward, cache = extend(target.params, cache, jnp.full((1, 1), token, jnp.int32))
    logits = np.asarray(forward.logits[0, -1])
    second, largest = np.partition(logits, -2)[-2:]
    return float(logits[plain] - logits[differing]), float(largest - second)


class Parting(NamedTuple):
    """The first new token that differs between two models' greedy texts of a prompt."""

    position: int  # the new token, counted from 0
    tokens: tuple[int, int]  # a's token, b's token
    words: tuple[str, str] | None  # these tokens as the tokenizer writes them; None without one
    # each model's logit of its token minus its logit of the other's token (nats); small at a near
    # tie
    margins: tuple[float, float]


class PromptComparison(NamedTuple):
    """Two models on one prompt.

    Attributes:
        texts: the new tokens of a and of b.
        parting: the first token that differs; None: the texts are the same.
        logits_error: the largest difference of two logits (nats), wherever the next token of the
            shared text is chosen, and where the texts part.
        layer_errors: the relative error of each entry of `Comparison.layers` at these places:
            |a - b| / |a|, in the Euclidean norm.
    """

    texts: tuple[list[int], list[int]]
    parting: Parting | None
    logits_error: float
    layer_errors: tuple[float, ...]


class Comparison(NamedTuple):
    """Two models on some prompts, as `compare` returns them; `str` makes tables of it.

    Attributes:
        names: the names of a and b, each with the dtype of its matrices.
        layers: the hidden states that `PromptComparison.layer_errors` compares, in the order in
            which they are computed: the encoder's output, the embedding, the states after each
            decoder layer (counted from 0), and after the final norm. Empty if the two are not
            networks of jaxspec with the same layers.
        prompts: an entry for each prompt.
    """

    names: tuple[str, str]
    layers: tuple[str, ...]
    prompts: tuple[PromptComparison, ...]

    @property
    def num_same(self) -> int:
        """Counts the prompts whose two texts are the same."""
        return sum(prompt.parting is None for prompt in self.prompts)

    @property
    def layer_errors(self) -> dict[str, float]:
        """Returns the largest relative error of each layer over all prompts."""
        errors = np.max([prompt.layer_errors for prompt in self.prompts], axis=0)
        return dict(zip(self.layers, errors.tolist(), strict=True))

    def tables(self) -> list[Table]:
        """Returns a table of the prompts, and a table of the layers if they were compared."""
        title = f"Greedy texts of a ({self.names[0]}) and b ({self.names[1]})"
        texts = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
        for head in ("prompt", "tokens", "differs\nat", "a", "b"):
            texts.add_column(head)
        for head in ("margin\nin a", "margin\nin b", "error of\nlogits"):
            texts.add_column(head, justify="right")
        for index, prompt in enumerate(self.prompts):
            cells = ["–"] * 5
            if prompt.parting is not None:
                shown = prompt.parting.words or map(str, prompt.parting.tokens)
                margins = (f"{margin:.3g}" for margin in prompt.parting.margins)
                cells = [str(prompt.parting.position), *shown, *margins]
            length = str(len(prompt.texts[0]))
            texts.add_row(str(index), length, *map(escape, cells), f"{prompt.logits_error:.2g}")
        if not self.layers:
            return [texts]
        layers = Table("hidden state after", "largest relative error", box=box.ROUNDED)
        for name, error in self.layer_errors.items():
            layers.add_row(name, f"{error:.2g}")
        return [texts, layers]

    @property
    def summary(self) -> str:
        """Says in a sentence how many texts are the same."""
        summary = f"{self.num_same} of {len(self.prompts)} texts are the same."
        if self.layers:
            return summary
        return f"{summary} The layers differ, or are not jaxspec's: only logits were compared."

    def __str__(self) -> str:
        text = io.StringIO()
        out = Console(file=text, width=TABLE_WIDTH, color_system=None)
        out.print(*self.tables(), sep="\n")
        out.print(self.summary)
        return text.getvalue().rstrip()


@programs.outside_context_mesh
def compare(
    a: Model,
    b: Model,
    prompts: Prompts,
    *,
    max_new_tokens: int = 64,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Comparison:
    """Finds where the greedy texts of two models part, and which layer the error begins in.

    Both models read the shared beginning of their texts token by token, as plain decoding does. A
    margin far below the logits' error is a near tie, which rounding decides. The first layer with a
    much larger error than the layer before is the place to look.

    Args:
        a: the model that errors are relative to, such as a target in float32.
        b: a model with the same vocabulary: the target in int8 or bfloat16, or the same weights
            from another folder.
        prompts: the prompts, as `jaxspec.generate` takes them. They are decoded as one batch.
        max_new_tokens: most new tokens of each text.
        chat_template_kwargs: values for the template of conversations.

    Raises:
        ValueError, TypeError: the models have other vocabularies or kinds, or a prompt is unusable.
        FloatingPointError: a model's logits are not finite.

    Example:
        >>> from jaxspec.testing import table_model_from
        >>> a = table_model_from(jnp.array([1.0, 0.5, 0.0]))
        >>> b = table_model_from(jnp.array([1.0, 1.25, 0.0]))
        >>> (prompt,) = compare(a, b, [[2]], max_new_tokens=4).prompts
        >>> prompt.parting.position, prompt.parting.tokens, prompt.parting.margins
        (0, (0, 1), (0.5, 0.25))
        >>> prompt.logits_error
        0.75
    """
    check_model(a, "a")
    check_model(b, "b")
    _check_same_vocabulary(a, b)
    prompt = encode(a, prompts, chat_template_kwargs=chat_template_kwargs)
    ends = request.end_ids(a, None)
    outs = [
        generate(model, prompt, max_new_tokens=max_new_tokens, eos_ids=ends) for model in (a, b)
    ]
    texts = [
        [row[:length].tolist() for row, length in zip(out.tokens, out.lengths, strict=True)]
        for out in outs
    ]
    pairs = list(zip(*texts, strict=True))
    positions = [first_difference(*pair) for pair in pairs]
    # How many tokens to read: up to where the texts part, or all of a text that is the same.
    counts = [
        len(pair[0]) if position is None else position + 1
        for pair, position in zip(pairs, positions, strict=True)
    ]
    tokens = np.zeros((len(pairs), token_rows.bucket(max(counts)), 2), np.int32)
    for row, (pair, count) in enumerate(zip(pairs, counts, strict=True)):
        tokens[row, :count] = np.transpose([text[:count] for text in pair])
    lms, layers = _tapped(a, b)
    params = (a.params, b.params)
    errors, encoder = sharding.fetch(
        _read(lms, params, prompt, token_rows.on_device(tokens), bool(layers))
    )
    results = []
    for row, (pair, position, count) in enumerate(zip(pairs, positions, counts, strict=True)):
        of_decoder = errors.squares[:count, row].sum(axis=0)
        difference, size = np.concatenate([encoder[row], of_decoder]).T
        layer_errors = np.sqrt(difference / np.where(difference == 0, 1, size)).tolist()
        logits_error = float(errors.logits[:count, row].max())
        parting = None
        if position is not None:
            parting = _parting(a.tokenizer, position, pair, errors.margins[position, row])
        results.append(PromptComparison(pair, parting, logits_error, tuple(layer_errors)))
    names = (f"{a.name or 'a'}, {dtype_of(a)}", f"{b.name or 'b'}, {dtype_of(b)}")
    return Comparison(names, layers, tuple(results))


def _check_same_vocabulary(a: Model, b: Model) -> None:
    """Raises ValueError if a token id of a is not the same token of b, or if rows begin otherwise.

    >>> from jaxspec.testing import table_model_from
    >>> _check_same_vocabulary(table_model_from(jnp.zeros(3)), table_model_from(jnp.zeros(4)))
    Traceback (most recent call last):
    ValueError: the number of token ids is 3 for a and 4 for b: expected two models of one vocabulary
    """
    kinds = [
        "decoder-only" if model.lm.encoder is None else "an encoder-decoder" for model in (a, b)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(f"a is {kinds[0]} and b {kinds[1]}: expected two models of one kind")
    for noun, of_a, of_b in (
        ("the number of token ids", a.lm.vocab_size, b.lm.vocab_size),
        ("the number of ids in prompts", a.lm.prompt_vocab, b.lm.prompt_vocab),
        ("the beginning of a row", a.lm.limits.first_tokens, b.lm.limits.first_tokens),
    ):
        if of_a != of_b:
            raise ValueError(
                f"{noun} is {of_a} for a and {of_b} for b: expected two models of one vocabulary"
            )
    if a.tokenizer is None or b.tokenizer is None:
        return
    difference = request.first_difference(a.tokenizer, b.tokenizer)
    if difference is not None:
        index, word_of_a, word_of_b = difference
        raise ValueError(
            f"token id {index} is {word_of_a!r} for a and {word_of_b!r} for b: expected two models "
            "of one vocabulary"
        )


def _parting(
    tokenizer: Any,
    position: int,
    texts: tuple[list[int], list[int]],
    margins: Float[np.ndarray, " pair"],
) -> Parting:
    """Describes the place where two texts differ."""
    in_a = texts[0][position]
    in_b = texts[1][position]
    words = None
    if tokenizer is not None:
        word_of_a, word_of_b = tokenizer.convert_ids_to_tokens([in_a, in_b])
        words = (word_of_a, word_of_b)
    margin_of_a, margin_of_b = margins.tolist()
    return Parting(position, (in_a, in_b), words, (margin_of_a, margin_of_b))


def _tapped(a: Model, b: Model) -> tuple[tuple[LanguageModel, LanguageModel], tuple[str, ...]]:
    """Returns both language models with a tap after each layer, and the names of their hidden
    states.

    The models themselves, and no names, if they are not networks of jaxspec with the same layers.
    """
    lm_of_a = _with_all_taps(a)
    lm_of_b = _with_all_taps(b)
    if lm_of_a is None or lm_of_b is None:
        return (a.lm, b.lm), ()
    of_a = lm_of_a.inside
    of_b = lm_of_b.inside
    assert of_a is not None and of_b is not None
    if (of_a.taps, of_a.width) != (of_b.taps, of_b.width):
        return (a.lm, b.lm), ()
    names = ["embedding", *(f"layer {layer}" for layer in of_a.taps), "final norm"]
    if of_a.encoder is not None:
        names.insert(0, "encoder")
    return (lm_of_a, lm_of_b), tuple(names)


def _with_all_taps(model: Model) -> LanguageModel | None:
    """Returns a model's language model with a tap after each layer; None if it is not a
    network of jaxspec, or if its functions were wrapped.
    """
    network = nets.find(model.config)
    inside = model.lm.inside
    if network is None or inside is None:
        return None
    if model.lm != network.language_model(model.config, inside.taps):
        return None
    return network.language_model(model.config, tuple(range(network.depth(model.config))))


class _Errors(NamedTuple):
    """The differences of two models at one place of the shared text.

    Attributes:
        logits: the largest difference of two logits.
        margins: how much each model prefers its token to the other's; 0 where they are the same.
        squares: |a - b|^2 and |a|^2 of each hidden state of the decoder.
    """

    logits: Float[Array, " B"]
    margins: Float[Array, "B 2"]
    squares: Float[Array, "B L 2"]


@programs.jit(static_argnames=("lms", "has_layers"))
def _read(
    lms: tuple[LanguageModel, LanguageModel],
    params: tuple[Params, Params],
    prompt: Prompt,
    tokens: Int[Array, "B T 2"],
    has_layers: bool,
) -> tuple[_Errors, Float[Array, "B L 2"]]:
    """Feeds the first model's tokens to both, one by one, and compares the models at each place.

    Args:
        lms, params: the two models.
        prompt: the prompts.
        tokens: the new tokens of either model.
        has_layers: whether hidden states are compared, too.

    Returns:
        The errors of T places, the first axis, and the squares of the encoder's output.
    """
    models = list(zip(lms, params, strict=True))
    row = token_rows.decoder_prompt(lms[0], prompt)
    last = row.length - 1
    rooms = [token_rows.reading_room(lm, prompt, tokens.shape[1]) for lm in lms]
    read = [
        lm.prefill(weights, prompt, room) for (lm, weights), room in zip(models, rooms, strict=True)
    ]
    none = jnp.zeros((tokens.shape[0], 0, 2), jnp.float32)

    def compared(forwards: Sequence[Forward], fed: Int[Array, "B 1"], pair: Any) -> _Errors:
        of_a, of_b = (forward.logits[:, 0] for forward in forwards)
        # Two logits of -inf do not differ.
        differences = jnp.where(of_a == of_b, 0.0, jnp.abs(of_a - of_b))
        chosen_a, chosen_b = (jnp.take_along_axis(x, pair, axis=-1) for x in (of_a, of_b))
        margins = (chosen_a[:, 0] - chosen_a[:, 1], chosen_b[:, 1] - chosen_b[:, 0])
        squares = none
        if has_layers:
            squares = _squares(*(_states(*x, fed) for x in zip(lms, params, forwards, strict=True)))
        return _Errors(differences.max(axis=-1), jnp.stack(margins, axis=-1), squares)

    def step(caches: Any, entries: tuple[Array, Array]) -> tuple[Any, _Errors]:
        fed, pair = entries
        read = [
            lm.extend(weights, cache, fed)
            for (lm, weights), cache in zip(models, caches, strict=True)
        ]
        return [cache for _, cache in read], compared([forward for forward, _ in read], fed, pair)

    # Prefill returns hidden states of the whole prompt; its last token chooses the first new one.
    forwards = [
        forward._replace(
            features=chunks.at(forward.features, last), taps=chunks.at(forward.taps, last)
        )
        for forward, _ in read
    ]
    pairs = jnp.moveaxis(tokens, 1, 0)  # [T, B, 2]
    first = compared(forwards, chunks.at(row.tokens, last), pairs[0])
    caches = [cache for _, cache in read]
    later = jax.lax.scan(step, caches, (pairs[:-1, :, :1], pairs[1:]))[1]
    errors = jax.tree.map(lambda x, more: jnp.concatenate([x[None], more]), first, later)
    if not has_layers or lms[0].encoder is None:
        return errors, none
    source, _ = token_rows.encoder_and_row(prompt, lms[0].limits.first_tokens)
    return errors, _squares(*(_encoded(source, forward) for forward, _ in read))


def _states(
    lm: LanguageModel, params: Params, forward: Forward, fed: Int[Array, "B 1"]
) -> Float[Array, "B L M"]:
    """Stacks the embedding of the token that was fed, the taps of a pass over it, and its
    features.
    """
    assert lm.inside is not None and forward.taps is not None
    embedded = lm.inside.embed(params, fed)
    after_layers = forward.taps.reshape(len(fed), -1, embedded.shape[-1])
    states = (embedded, after_layers, forward.features)
    return jnp.concatenate([x.astype(jnp.float32) for x in states], axis=1)


def _encoded(source: Any, forward: Forward) -> Float[Array, "B 1 PM"]:
    """Returns the encoder's output as one vector for each prompt, with zeros at padding."""
    assert forward.encoded is not None
    encoded = forward.encoded.astype(jnp.float32)
    if isinstance(source, Prompt):
        is_real = jnp.arange(encoded.shape[1])[None, :] < source.length[:, None]
        encoded = jnp.where(is_real[..., None], encoded, 0.0)
    return encoded.reshape(len(encoded), 1, -1)


def _squares(of_a: Float[Array, "B L M"], of_b: Float[Array, "B L M"]) -> Float[Array, "B L 2"]:
    """Computes |a - b|^2 and |a|^2 of each state."""
    return jnp.stack([jnp.sum((of_a - of_b) ** 2, axis=-1), jnp.sum(of_a**2, axis=-1)], axis=-1)
