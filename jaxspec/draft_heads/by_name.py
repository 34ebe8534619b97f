"""Drafters by name: the Python call that makes one, as text.

    prompt_lookup
    debian-t5-draft                                   a model, or a head: a name, folder or hub id
    tree('debian-t5-draft', (4, 2), draw='mixed')     a model's name inside of a call has quotes
    fallback(prompt_lookup(3, 2), early_exit(4))      early_exit(target, 4) is the same

`parse` reads the syntax tree: calls of the factories in `jaxspec.drafters`, names and constants.
Nothing is evaluated. `by_name` then makes the drafter.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jaxspec import drafters, nets, sharding
from jaxspec.core import BoundDrafter, Model
from jaxspec.core.checks import suggest
from jaxspec.draft_heads.load import is_head, load_drafter
from jaxspec.drafters.share_encoder import with_shared_encoder
from jaxspec.vocab.cross_tokenizer import share_vocabulary
from jaxspec.vocab.trim import trim_vocabulary
from jaxspec.weights import loading

BESIDE: dict[str, Callable[..., Any]] = {  # what a name may call beside the drafters
    "load_drafter": load_drafter,
    "share_vocabulary": share_vocabulary,
    "trim_vocabulary": trim_vocabulary,
}


class Implied(enum.Enum):
    """An argument that a call may leave out."""

    TARGET = "target"  # for a parameter `target`
    REFERENCES = "references"  # held-out texts, for a parameter annotated `CountedTexts`


@dataclasses.dataclass(frozen=True)
class Named:
    """The name, folder or hub id of a model or a head, or a path that the factory itself reads."""

    name: str
    kind: Literal["model", "head", "datastore"] = "model"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call as it is written."""

    factory: str
    bound: inspect.BoundArguments


def load_by_name(
    name: str, target: Model, load: Callable[[str], Model] | None = None
) -> Model | BoundDrafter:
    """Loads a model or a head that drafts for `target`; its files say which of them it is.

    `load` loads models. By default they get the dtype of the target's computation and its mesh.
    """
    if is_head(name):
        return load_drafter(name, target=target)
    if load is not None:
        return load(name)
    mesh = sharding.mesh_of(target.params)
    return loading.load(name, dtype=nets.dtype_of(target.config), mesh=mesh)


def by_name(
    written: str,
    target: Model,
    *,
    load: Callable[[str, Model], Model | BoundDrafter] = load_by_name,
    references: Callable[[], Sequence[str]] | None = None,
) -> Model | BoundDrafter:
    """Makes the drafter that a string names; `generate(..., drafter="...")` calls this.

    Args:
        written: a call of one of `jaxspec.drafters`, `load_drafter`, `trim_vocabulary` or
            `share_vocabulary`; or the name, folder or hub id of a model or a head. Inside a call
            `target` is the model to draft for (for the inner drafter of a `cascade`, the cascade's
            model), and may be left out.
        target: the model to draft for.
        load: called with the name of a model or a head, and the model to draft for.
        references: returns texts such as the target writes, for `ngram` and `retrieval`.

    Returns:
        The drafter. A drafter that only samples from a model is returned as the model.

    Raises:
        ValueError: the text is not such a call, with the position and what was expected.
        CheckpointError: there is no model, head or folder of that name.

    Example:
        >>> import jax
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=5)
        >>> by_name("fallback(prompt_lookup(2), cascade(target, uniform))", target).name
        'prompt_lookup+cascade(table-5, uniform)'
    """
    return _Maker(target, load, references).make(parse(written))


def factories() -> set[str]:
    """Returns the names that a drafter's name may call."""
    return {*drafters.__all__, *BESIDE} - {by_name.__name__}


def is_call(written: str) -> bool:
    """Tells whether a drafter's name calls a factory, rather than being a model's or a head's name.

    >>> is_call("prompt_lookup"), is_call("tree('a', (4, 2))"), is_call("debian-t5-draft")
    (True, True, False)
    """
    text = written.strip()
    return text in factories() or bool(re.match(r"\w+\s*\(", text) and not os.path.exists(text))


def parse(written: str) -> Call | Named:
    """Reads a drafter's name: a call, or the name of a model or a head. Loads nothing.

    >>> parse("prompt_lookup(2)").bound.arguments, parse("debian-t5-draft").name
    ({'longest': 2}, 'debian-t5-draft')
    >>> parse("prompt_lookp")
    Traceback (most recent call last):
    ValueError: there is no drafter 'prompt_lookp': did you mean 'prompt_lookup'?
    """
    text = written.strip()
    if is_call(text):
        try:
            return _Reader(text).value(ast.parse(text, mode="eval").body)
        except SyntaxError as error:
            message = f"{error.msg} (column {error.offset})"
            raise ValueError(f"the drafter is {text!r}: {message}") from None
    if not text:
        raise ValueError("the drafter is '': expected the name of a model, or of another drafter")
    advice = suggest(text, factories(), cutoff=0.75)
    if advice and not os.path.exists(text):
        raise ValueError(f"there is no drafter {text!r}{advice}")
    return Named(text)


def parts(parsed: Any) -> Iterator[Named]:
    """Yields the models, heads and datastores in a drafter's name, as `parse` returns it.

    >>> parsed = parse("fallback(retrieval('a'), tree(['b', 'c'], draw='mixed'))")
    >>> [part.name for part in parts(parsed)]
    ['a', 'b', 'c']
    """
    match parsed:
        case Named():
            yield parsed
        case Call():
            yield from parts([*parsed.bound.arguments.values()])
        case tuple() | list():
            for element in parsed:
                yield from parts(element)


def _factory(name: str) -> Callable[..., Any]:
    return BESIDE.get(name) or getattr(drafters, name)


def _shown(name: str) -> str:
    """Returns a factory's signature without types.

    >>> _shown("windowed")
    'windowed(target, window=512, sinks=4)'
    """
    signature = inspect.signature(_factory(name))
    bare = [x.replace(annotation=inspect.Parameter.empty) for x in signature.parameters.values()]
    return f"{name}{inspect.Signature(bare)}"


class _Reader(NamedTuple):
    """Reads the syntax tree of a drafter's name."""

    text: str

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Call(func=ast.Name(id=name)):
                return self.call(node, name, node.args, node.keywords)
            case ast.Name(id="target" | "references"):
                return Implied(node.id)
            case ast.Name(id=name):
                return self.call(node, name)
            case ast.Tuple():
                return tuple(map(self.value, node.elts))
            case ast.List():
                return list(map(self.value, node.elts))
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            raise self.error(
                node,
                f"got {ast.unparse(node)}: expected a drafter, a number, a tuple, or text in "
                "quotes, such as the name of a model",
            ) from None

    def call(
        self,
        node: ast.expr,
        name: str,
        arguments: Sequence[ast.expr] = (),
        keywords: Sequence[ast.keyword] = (),
    ) -> Call:
        if name not in factories():
            advice = suggest(name, factories()) or ": expected one of jaxspec.drafters"
            raise self.error(node, f"there is no drafter {name!r}{advice}")
        signature = inspect.signature(_factory(name))
        positional = [self.value(argument) for argument in arguments]
        if any(keyword.arg is None for keyword in keywords):
            raise self.error(node, f"{name} has **: expected each keyword by its name")
        named = {str(keyword.arg): self.value(keyword.value) for keyword in keywords}
        if len(named) < len(keywords):
            raise self.error(node, f"{name} has an argument twice")
        for index, parameter in enumerate(signature.parameters.values()):
            implied = _implied(parameter)
            is_there = index < len(positional) and isinstance(
                positional[index], str | Call | Implied
            )
            if implied is None or is_there or parameter.name in named:
                continue
            if parameter.kind is parameter.KEYWORD_ONLY or index > len(positional):
                named[parameter.name] = implied
            else:
                positional.insert(index, implied)
        try:
            bound = signature.bind(*positional, **named)
        except TypeError as error:
            raise self.error(node, f"{error}: expected {_shown(name)}") from None
        for argument, value in bound.arguments.items():
            annotation = _annotation(signature.parameters[argument])
            if "DraftHead" in annotation:
                advice = "load_drafter('NAME') loads a head of any kind, with its drafter"
                raise self.error(node, f"{argument} of {name} has no name: {advice}")
            bound.arguments[argument] = _named(value, annotation)
        return Call(name, bound)

    def error(self, node: ast.expr, message: str) -> ValueError:
        column = node.col_offset + 1
        return ValueError(f"the drafter is {self.text!r}, and at column {column} {message}")


def _annotation(parameter: inspect.Parameter) -> str:
    return inspect.formatannotation(parameter.annotation)


def _implied(parameter: inspect.Parameter) -> Implied | None:
    """Returns the argument that a call may leave out for this parameter."""
    if parameter.name == "target":
        return Implied.TARGET
    return Implied.REFERENCES if "CountedTexts" in _annotation(parameter) else None


def _named(value: Any, annotation: str) -> Any:
    """Marks the strings that name a model, a head or a datastore, by the parameter's annotation."""
    if isinstance(value, tuple | list):
        return type(value)(_named(element, annotation) for element in value)
    if isinstance(value, str) and re.search(r"\b(Model|Drafter|BoundDrafter)\b", annotation):
        return Named(value)
    if isinstance(value, str) and "Path" in annotation:
        return Named(value, "datastore" if "Datastore" in annotation else "head")
    return value


class _Maker(NamedTuple):
    """Makes the values of a parsed name."""

    target: Model
    load: Callable[[str, Model], Model | BoundDrafter]
    references: Callable[[], Sequence[str]] | None

    def make(self, value: Any) -> Any:
        match value:
            case Implied.TARGET:
                return self.target
            case Named(name, "model"):
                drafter = self.load(name, self.target)
                is_model = isinstance(drafter, Model)
                return with_shared_encoder(drafter, self.target) if is_model else drafter
            case Named(name):
                return name
            case Call():
                return self.called(value)
            case tuple() | list():
                return type(value)(map(self.make, value))
        return value

    def called(self, call: Call) -> Model | BoundDrafter:
        arguments: dict[str, Any] = {}
        for name, value in call.bound.arguments.items():
            maker = self
            if name == "inner" and "draft" in arguments:  # it drafts for this model
                maker = self._replace(target=arguments["draft"])
            if value is Implied.REFERENCES:
                arguments[name] = self.texts(call.factory)
            else:
                arguments[name] = maker.make(value)
        bound = inspect.BoundArguments(call.bound.signature, arguments)  # type: ignore[arg-type]
        try:
            return _as_model(_factory(call.factory)(*bound.args, **bound.kwargs))
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{error}: expected {_shown(call.factory)}") from error

    def texts(self, factory: str) -> Sequence[str]:
        if self.references is None:
            raise ValueError(
                f"{factory} is made of held-out texts in `jaxspec bench` only: expected the "
                "folder of a table that `jaxspec train debian-t5-bigram` wrote, or "
                "retrieval('FOLDER') of one that `jaxspec datastore` wrote"
            )
        texts = self.references()
        if not texts:
            raise ValueError(
                f"no held-out texts are left to make a {factory} of: take fewer prompts"
            )
        return texts


def _as_model(drafter: Any) -> Any:
    """Returns the model of a drafter that only samples from it; any other drafter as it is."""
    if isinstance(drafter, BoundDrafter) and len(drafter.models) == 1:
        (draft,) = drafter.models
        if drafter.functions == drafters.model(draft).functions:
            return draft
    return drafter
