"""`jaxspec generate`: prompts in, text and statistics out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli import beams as searching
from jaxspec.cli import compare as comparing
from jaxspec.cli import console, options, show
from jaxspec.cli import prompts as given_prompts
from jaxspec.cli import session as sessions
from jaxspec.cli.beams import Search
from jaxspec.cli.counts import report, totals
from jaxspec.cli.decoding import decode_all
from jaxspec.cli.options import DRAFT, TARGET, Json, flag, group_of, sampling_options, text
from jaxspec.cli.session import Session, Settings


@group_of("settings", Settings)
@group_of("search", Search)
@sampling_options
def generate(
    settings: Settings,
    search: Search,
    prompt: Annotated[str | None, typer.Argument(help="What to generate from; - reads standard input.")] = None,
    prompts: Annotated[str | None, text("FILE", "Prompts, one a line, or .jsonl with inputs.")] = None,
    count: Annotated[int, text("N", "Held-out prompts, where none are given.")] = 8,
    chat: Annotated[bool, flag("Use the model's chat template.", "--chat")] = False,
    trace: Annotated[bool, flag("Show each round and its draft tokens.", "--trace")] = False,
    compare: Annotated[bool, flag("Decode plainly, too; compare texts and speeds.", "--compare")] = False,
    check: Annotated[bool, flag("First measure how often a draft head is right.", "--check")] = False,
    as_json: Json = False,
    *,
    sampling: dict[str, Any],
) -> None:
    """Generate text with speculative decoding, and show what it took.

    Without a prompt it decodes held-out ones. A T5's task prefix is part of a prompt.

    \b
        jaxspec generate "translate English to German: A fast editor."
        jaxspec generate --temperature 1 --trace
        jaxspec generate --draft prompt_lookup --batch 8 --compare
    """
    unasked = "none" if search.beams else None  # a pass over the drafted beams pays on accelerators only
    settings = settings._replace(
        draft=_draft_name(settings.target, unasked if settings.draft is None else settings.draft)
    )
    if compare and (settings.draft is None or settings.gamma == 0):
        raise ValueError("--compare is of speculative with plain decoding: it needs a --draft and a --gamma")
    if compare and settings.stop:
        raise ValueError("--compare times texts to their end tokens, and a --stop would not end them: leave one out")
    if search.beams:
        searching.check(search, settings, sampling, {"--trace": trace, "--compare": compare})
    else:
        options.refuse([name for name in options.given.get() if name in Search._fields], "generate without --beams")
    texts = given_prompts.given(prompt, prompts)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    with err.status("loading the models"):
        session = sessions.open_session(settings, sampling, texts, count, chat)
    if check:
        _check(session, err)
    if search.beams:
        searching.run(session, search, as_json, show.headline(session), out)
        return
    with err.status("measuring what passes cost"):
        session = sessions.with_costs(session)
    with err.status("compiling (stored for the next call)"):
        sessions.warm_up(session, by_rounds=settings.batch == 1 and not as_json)
    if as_json:
        decoded = decode_all(session)
    else:
        out.print(show.headline(session))
        decoded = show.show(session, out, trace)
        drafter = settings.draft if session.job.drafter is not None else None
        out.print(Text(totals(decoded, session.job.target.name, drafter)))
    found = None
    if compare:
        with err.status("comparing with plain decoding"):
            found = comparing.compare(session)
    if as_json:
        console.print_json(report(session, sampling, decoded, found, trace))
    elif found is not None:
        comparing.show(*found, session, out)


def _check(session: Session, err: Console) -> None:
    """Measures a head's acceptance rate, and says what it is."""
    from jaxspec.base import Model
    from jaxspec.draft_heads import load

    made, name = session.job.options["drafter"], session.settings.draft
    if made is None or isinstance(made, Model) or made.target is None:
        raise ValueError(f"--check is of drafters that read hidden states, as head:DIR: --draft is {name}")
    with err.status("checking the head"):
        rate = load.check_acceptance(made, name=str(name))
    err.print(Text(f"{name}: {rate:.0%} of first draft tokens accepted at temperature 0", "dim"))


def _draft_name(target: str, draft: str | None) -> str | None:
    """The drafter that was given; by default that of a shipped target."""
    from jaxspec import model

    if draft is not None:
        return None if draft == "none" else draft
    if target == TARGET:
        return DRAFT
    sibling = Path(target).name.removesuffix("-base") + "-small"
    if target.endswith("-base") and sibling in model.shipped():
        return sibling
    if not model.is_hub_id(target):  # nothing is downloaded only to refuse it
        model.find(target)
    raise ValueError(f"--target {target} needs a --draft: a smaller model with its vocabulary, or none")
