"""`jaxspec generate`: prompts in, text and statistics out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli import compare as comparing
from jaxspec.cli import console, counts, prompts
from jaxspec.cli.counts import Counts
from jaxspec.cli.options import DRAFT, TARGET, Dtype, Json, Target, sampling_options
from jaxspec.cli.session import Decoded, Session, Settings, decode_all, open_session, warm_up, with_costs
from jaxspec.cli.show import show
from jaxspec.trace import Round

if TYPE_CHECKING:
    from jaxspec.analysis.bench import Row


@sampling_options
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to generate from; - reads standard input, one prompt a line.")
    ] = None,
    target: Target = TARGET,
    draft: Annotated[
        str | None,
        typer.Option(
            help="What drafts: a model, prompt_lookup, prompt_lookup=2, online_ngram, retrieval:DIR, greedy:MODEL, "
            "without_backoff:TABLES, trim=4096:MODEL (a head over 4096 tokens), share:MODEL (another tokenizer's), "
            "head:DIR (what reads hidden states: EAGLE, Medusa), "
            "prompt_lookup+MODEL, or none. By default the small sibling of a shipped target."
        ),
    ] = None,
    gamma: Annotated[int, typer.Option("--gamma", "-g", help="Draft tokens a round; with a --policy, at most.")] = 3,
    policy: Annotated[
        str | None,
        typer.Option(help="What chooses the draft tokens of a round: adaptive, confidence=0.4, heuristic, entropy."),
    ] = None,
    ban: Annotated[
        list[int] | None, typer.Option(help="The id of a token that is never generated; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens per prompt.")] = 96,
    seed: Annotated[int, typer.Option(help="Of sampling; the same seed gives the same text.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A string that ends the text and is cut from it; may be repeated."),
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="A file of prompts, one a line; - is standard input.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many held-out prompts to take where none are given.")] = 8,
    dtype: Dtype = "float32",
    draft_dtype: Annotated[str | None, typer.Option(help="The drafter's, if it is another.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Devices to split parameters, and the rows of a --batch, over: data=2,model=4, or either."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="A prompt is a user's message: put it in the tokenizer's chat template.")
    ] = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="All prompts in one batch, instead of one after the other.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Show each round: draft tokens, the rejected one, its correction.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly, too; compare texts and speeds, and theory.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Of a head: first measure its α on a few texts, and warn if it is too low.")
    ] = False,
    as_json: Json = False,
    *,
    sampling: dict[str, Any],
) -> None:
    """Generate text with speculative decoding, and show what it took.

    Without a prompt it decodes held-out ones that come with jaxspec: translations for an encoder-decoder
    (by default the shipped T5 pair), beginnings of texts for a decoder-only model. A T5's task prefix is
    part of the prompt:

        jaxspec generate "translate English to German: A fast editor."

        jaxspec generate --target debian-gpt-base --temperature 1 --trace
    """
    draft = _draft_name(target, draft)
    settings = Settings(
        target=target,
        draft=draft,
        gamma=gamma,
        max_new_tokens=max_new_tokens,
        seed=seed,
        dtype=dtype,
        draft_dtype=draft_dtype or dtype,
        sampling=sampling | ({"banned": tuple(ban)} if ban else {}),
        stop=tuple(stop or ()),
        policy=policy,
        mesh=mesh,
        chat=chat,
    )
    if compare and (draft is None or gamma == 0):
        raise ValueError("--compare is of speculative with plain decoding: it needs a --draft and a --gamma")
    given = prompts.given(prompt, file)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    with err.status("loading the models"):
        session = open_session(settings, given, count)
    rows = len(session.texts) if batch else 1
    if check:
        _check(session, err)
    with err.status("measuring what passes cost"):
        session = with_costs(session, rows)
    with err.status("compiling (stored for the next call)"):
        warm_up(session, rows, by_rounds=bool(stop) or not (batch or as_json))
    if as_json:
        decoded = decode_all(session, rows)
    else:
        out.print(_headline(session), *_whole_axes(session), "", sep="\n")
        decoded = show(session, out, batch, trace)
        _print_counts(session, decoded, out)
    found = None
    if compare:
        with err.status("comparing with plain decoding"):
            found = comparing.compare(session, rows)
    if as_json:
        print(json.dumps(_report(session, decoded, found, trace), ensure_ascii=False))
    elif found is not None:
        comparing.show(*found, session, out)


def _check(session: Session, err: Console) -> None:
    """Measures a head's acceptance rate, and says what it is."""
    from jaxspec import heads
    from jaxspec.base import Model

    made, name = session.job.options["drafter"], session.settings.draft
    if made is None or isinstance(made, Model) or made.target is None:
        raise ValueError(f"--check is of drafters that read hidden states, as head:DIR: --draft is {name}")
    with err.status("checking the head"):
        rate = heads.check_acceptance(made, name=str(name))
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


def _headline(session: Session) -> Text:
    import jax

    from jaxspec.base import Model
    from jaxspec.weights import int8

    def name(model: Model) -> str:
        return f"{model.name} ({console.count(int8.count(model.params))})"

    s, drafter, drafted = session.settings, session.job.options["drafter"], "plain decoding"
    if drafter is not None:
        who = name(drafter) if isinstance(drafter, Model) else s.draft
        drafted = f"{'up to ' if s.policy else ''}{s.gamma} draft tokens a round from {who}"
        drafted += f", {s.policy}" if s.policy else ""
        drafted += f", in {s.draft_dtype}" if s.draft_dtype != s.dtype else ""
    distribution = "greedy" if s.temperature == 0 else f"temperature {s.temperature:g}, seed {s.seed}"
    device = jax.devices()[0].device_kind + (f" ({s.mesh})" if s.mesh else "")
    return Text(f"{name(session.job.target)} · {drafted} · {distribution} · {s.dtype} on {device}", "bold")


def _whole_axes(session: Session) -> list[str]:
    """A line for each model that a mesh cannot split as it should."""
    from jaxspec import sharding
    from jaxspec.base import Model

    job = session.job
    mesh = sharding.mesh_of(job.target.params)
    if mesh is None:
        return []
    models = [m for m in (job.target, job.options["drafter"]) if isinstance(m, Model) and m.config is not None]
    found = [(model.name, sharding.kept_whole(model.config, mesh)) for model in models]
    return [f"{name}: whole on every device: {', '.join(axes)}" for name, axes in found if axes]


def _print_counts(session: Session, decoded: Sequence[Decoded], out: Console) -> None:
    total = counts.total([row.counts for row in decoded])
    out.print(counts.table(total))
    draft = session.settings.draft if session.job.drafter is not None else None
    out.print(Text(counts.sentence(total, session.job.target.name, draft)))


def _report(session: Session, decoded: list[Decoded], found: tuple[Row, Row] | None, trace: bool) -> dict[str, Any]:
    """What --json prints."""
    from jaxspec.analysis.measure import environment

    each = [row.counts for row in decoded]
    about = environment.current()
    report: dict[str, Any] = {
        "prompts": session.texts,
        "texts": [row.text for row in decoded],
        "tokens": [row.tokens for row in decoded],
        "stats": {
            **{field: [getattr(c, field) for c in each] for field in ("rounds", "drafted", "accepted", "emitted")},
            "total": _with_rates(counts.total(each)),
        },
        "settings": session.settings.to_dict(),
        "versions": {name: about[name] for name in ("jaxspec", "jax", "jaxlib", "python")},
        "device": {name: about[name] for name in ("device", "devices", "cpu", "cpus", "platform")},
    }
    if trace:
        report["rounds"] = [[_round(step) for step in row.rounds] for row in decoded]
    if found is not None:
        from jaxspec.analysis.bench import to_json

        report["compare"] = dict(zip(("plain", "speculative"), map(to_json, found), strict=True))
    return report


def _with_rates(total: Counts) -> dict[str, float]:
    rates = {name: getattr(total, name) for name in ("acceptance_rate", "tokens_per_round", "tokens_per_second")}
    return {**total._asdict(), **rates}


def _round(step: Round) -> dict[str, Any]:
    return {"tokens": step.new, "draft": step.draft, "accepted": step.num_accepted}
