"""What several commands share: types of options, the sampling options, texts of the command line as values."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxspec.base import Bound, Model
    from jaxspec.decode.request import Job

TARGET, DRAFT = "debian-t5-base", "debian-t5-small"  # the default pair
POLICIES = {  # names on the command line, with the parameter that NAME=NUMBER sets
    "constant": "draft_tokens",
    "heuristic": "start",
    "confidence": "threshold",
    "entropy": "most",
    "adaptive": "c",
}
TREES = {"tree": "4x2x1", "dynamic_tree": "32", "sequences": "4"}  # drafters of trees that a model draws, and a size


def number(help: str, *names: str, least: int = 1) -> Any:
    """What typer should know of an option that is a whole number."""
    return typer.Option(*names, help=help, min=least, metavar="N")


def text(metavar: str, help: str, *names: str) -> Any:
    """What typer should know of any other option that takes a value."""
    return typer.Option(*names, help=help, metavar=metavar)


Target = Annotated[str, text("MODEL", "Model to decode from: a shipped one, a folder, or a hub id.")]
Draft = Annotated[str, text("MODEL", "Model that drafts.")]
Gamma = Annotated[int, number("Draft tokens a round.", "--gamma", "-g")]
Count = Annotated[int, number("Prompts to measure on.")]
NewTokens = Annotated[int, number("Most new tokens per prompt.", least=2)]
Repeats = Annotated[int, number("Timings of each pass.")]
Temperature = Annotated[float, text("T", "Of sampling; 0 is greedy.", "--temperature", "-t")]
Batches = Annotated[str, text("N,N", "Batch sizes.")]
Prompts = Annotated[Path | None, text("FILE", "Prompts, one a line, or .jsonl with inputs; else held-out ones.")]
Dtype = Annotated[str, text("DTYPE", "float32, bfloat16, or int8 matrices in float32.")]
Widen = Annotated[int, number("Widen the target's MLPs to this: the same text at more cost.", least=0)]
Seed = Annotated[int, text("N", "Of all that is drawn.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print tables for a document.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds an option to a command for each entry of `warp.options.OPTIONS` that has a place on the command line.

    Those given reach the command as one argument, `sampling`: a dict of arguments for `jaxspec.generate`.

    >>> @sampling_options
    ... def command(prompt: str, sampling: dict) -> None:
    ...     print(prompt, sampling)
    >>> command("a", top_k=5, min_p=None, temperature=None)
    a {'top_k': 5}
    """
    from jaxspec.warp.options import OPTIONS

    known = {name: option for name, option in OPTIONS.items() if option.kind is not None}
    short = {"temperature": ("--temperature", "-t")}
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[typing.Optional[option.kind], typer.Option(*short.get(name, ()), help=option.help)],  # noqa: UP045
        )
        for name, option in known.items()
    ]
    own = inspect.signature(command, eval_str=True).parameters.values()

    @functools.wraps(command)
    def wrapper(*arguments: Any, **options: Any) -> None:
        given = {name: options.pop(name, None) for name in known}
        command(*arguments, **options, sampling={name: value for name, value in given.items() if value is not None})

    del wrapper.__wrapped__  # typer reads what this one takes
    kinds = (inspect.Parameter.KEYWORD_ONLY,)
    keywords = [p.replace(kind=kinds[0]) for p in own if p.name != "sampling"]
    wrapper.__signature__ = inspect.Signature([*keywords, *added])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in [*keywords, *added]}
    return wrapper


def sampling_settings(sampling: dict[str, Any]) -> dict[str, Any]:
    """Every sampling option of the command line with its value, for a report; None where it was not given."""
    from jaxspec.warp.options import OPTIONS

    return {name: sampling.get(name) for name, option in OPTIONS.items() if option.kind is not None}


def drafter(name: str, dtype: str, mesh: Mesh | None = None, target: Model | None = None) -> Model | Bound:
    """A drafter by its name; several with + between them: the first that has a draft.

    A model by its name or folder; "prompt_lookup" or "prompt_lookup=2" (matches of at least 2 tokens);
    "online_ngram"; "token_recycling"; "tree:NAME", "tree=4x2x1:NAME" (children of each node, level by level),
    "dynamic_tree:NAME" or "dynamic_tree=32:NAME" (nodes), "sequences:NAME" or "sequences=4:NAME" (token trees of a
    model or of n-gram tables); "retrieval:FOLDER" (of a datastore); "greedy:NAME" (a model's most probable token, as a
    point mass); "without_backoff:NAME" or "without_backoff=1:NAME" (n-gram tables, where their longest context, or one
    of 1 token, was counted); "trim=4096:NAME" (a model with a head over 4096 tokens), "share:NAME" (a model with
    another tokenizer); "head:FOLDER" (what reads the target's hidden states; `jaxspec.load_drafter`). A + in a
    path that exists belongs to the path.

    Args:
        name: as above.
        dtype, mesh: of the models among them; see `jaxspec.load`.
        target: the model to draft for; if given, a datastore must have been built with its vocabulary.

    Raises:
        ValueError: no such drafter, or a datastore that was built with another vocabulary.
    """
    from jaxspec import drafters, heads, model, shared_vocabulary, trim
    from jaxspec.base import Model

    if len(names := drafter_names(name)) > 1:
        return drafters.fallback(*[drafter(part, dtype, mesh, target) for part in names])
    kind, colon, rest = name.partition(":")
    if colon and kind == "retrieval":
        return drafters.retrieval(rest, target)
    if colon and kind == "head":
        if target is None:
            raise ValueError(f"the drafter is {name!r}: it reads a target's hidden states, and there is no target here")
        return heads.load_drafter(rest, target=target)
    if colon and kind == "greedy":
        return drafters.greedy(drafter(rest, dtype, mesh, target))
    option, _, least = kind.partition("=")
    if colon and option in TREES:
        sizes = least.split("x") if least else []
        if not all(size.isdecimal() and int(size) for size in sizes) or (option != "tree" and len(sizes) > 1):
            expected = f"{option}:NAME or {option}={TREES[option]}:NAME"
            raise ValueError(f"the drafter is {name!r}: expected {expected}")
        numbers = [tuple(map(int, sizes))] if option == "tree" and sizes else map(int, sizes)
        return getattr(drafters, option)(drafter(rest, dtype, mesh, target), *numbers)
    if colon and option == "without_backoff":
        if least and not least.isdecimal():
            raise ValueError(f"the drafter is {name!r}: expected without_backoff:NAME or without_backoff=NUMBER:NAME")
        return drafters.without_backoff(model.load(rest, dtype=dtype, mesh=mesh), int(least) if least else None)
    if colon and (option == "trim" or kind == "share"):
        if option == "trim" and not least.isdecimal():
            raise ValueError(f"the drafter is {name!r}: expected trim=NUMBER:NAME, the number of tokens to draft")
        draft = drafter(rest, dtype, mesh, target)
        if not isinstance(draft, Model):
            raise ValueError(f"the drafter is {name!r}: expected a model after the colon")
        if option == "trim":
            return trim.trim_vocabulary(draft, size=int(least))
        return draft if target is None else shared_vocabulary.share_vocabulary(draft, target)
    if option == "prompt_lookup" and least:
        shortest = int(least) if least.isdecimal() else 0
        if not shortest:
            raise ValueError(f"the drafter is {name!r}: expected prompt_lookup=NUMBER, the fewest tokens to match")
        return drafters.prompt_lookup(max(3, shortest), shortest)
    if name in ("prompt_lookup", "online_ngram", "token_recycling"):
        return getattr(drafters, name)()
    return model.load(name, dtype=dtype, mesh=mesh)


def drafter_names(name: str) -> list[str]:
    """The drafters of a name, which + separates; but no + of a path that exists does.

    >>> drafter_names("prompt_lookup+greedy:debian-t5-small")
    ['prompt_lookup', 'greedy:debian-t5-small']
    """
    found, pieces = [], name.split("+")
    while pieces:
        path = pieces[0].rpartition(":")[2]  # or the beginning of one: the longest that exists counts
        ends = (n for n in range(len(pieces), 1, -1) if Path("+".join([path, *pieces[1:n]])).expanduser().exists())
        end = next(ends, 1)
        found.append("+".join(pieces[:end]))
        pieces = pieces[end:]
    return found


def policy(text: str, **costs: Any) -> Bound:
    """A policy by its name, or by its name and its first number: "adaptive", "confidence=0.5".

    Args:
        text: name, or name=number.
        **costs: c and v, for `adaptive`.

    >>> float(policy("confidence=0.5").params)
    0.5
    """
    from jaxspec import policies

    name, _, number = text.partition("=")
    if name not in POLICIES:
        raise ValueError(f"--policy is {text!r}: expected one of {', '.join(POLICIES)}, as NAME or NAME=NUMBER")
    if name == "constant" and not number:
        raise ValueError("--policy constant needs a number of draft tokens: constant=3")
    options: dict[str, Any] = costs if name == "adaptive" else {}
    if not number:
        return getattr(policies, name)(**options)
    try:
        value = int(number) if name == "constant" else float(number)
    except ValueError:
        raise ValueError(f"--policy is {text!r}: {number!r} is not a number of the right kind") from None
    return getattr(policies, name)(**options | {POLICIES[name]: value})


def parts(text: str, option: str) -> tuple[str, ...]:
    """Values separated by commas, each once.

    >>> parts("a, b,a", "--draft")
    ('a', 'b')
    """
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(found):
        raise ValueError(f"{option} is {text!r}: expected values separated by commas")
    return found


def integers(text: str, option: str) -> tuple[int, ...]:
    """Positive integers separated by commas, each once.

    >>> integers("1,4, 7,4", "--gamma")
    (1, 4, 7)
    """
    return _numbers(text, option, int, lambda number: number >= 1, "positive integers")


def floats(text: str, option: str, low: float, high: float) -> tuple[float, ...]:
    """Numbers from `low` to `high`, none of them infinite, separated by commas, each once.

    >>> floats("0,0.7", "--temperature", 0.0, float("inf"))
    (0.0, 0.7)
    """
    wanted = "numbers 0 or more," if high == float("inf") else "numbers above 0 and at most 1,"
    return _numbers(text, option, float, lambda number: low <= number <= high and number != float("inf"), wanted)


def _numbers(text: str, option: str, kind: Any, good: Callable[[Any], bool], wanted: str) -> tuple[Any, ...]:
    try:
        found = tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(map(good, found)):
        raise ValueError(f"{option} is {text!r}: expected {wanted} separated by commas")
    return found


def pair_job(target: str, draft: str, dtype: str, prompts: Path | None, count: int, seed: int = 0, **more: Any) -> Job:
    """A pair of models on the first prompts of a file, or on held-out ones.

    Args:
        target, draft, dtype: of the models.
        prompts, count: a file or None, and how many of its prompts.
        seed, **more: as `jaxspec.generate` takes them.
    """
    import jax

    from jaxspec import model
    from jaxspec.cli.prompts import from_file, heldout_for
    from jaxspec.decode.request import prepare

    big, small = (model.load(name, dtype=dtype) for name in (target, draft))
    texts = heldout_for(big, count) if prompts is None else from_file(prompts, count)
    return prepare(big, texts, drafter=small, key=jax.random.key(seed), **more)


def widened(target: Model, ff_dim: int) -> Model:
    """The same function at more cost (`jaxspec.analysis.measure.synthetic`), where `ff_dim` is not 0."""
    from jaxspec.analysis.measure import synthetic

    return synthetic.widen(target, ff_dim) if ff_dim else target
