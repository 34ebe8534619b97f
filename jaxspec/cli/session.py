"""Models and prompts, made ready to decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from jaxspec.cli import drafter_names, names
from jaxspec.cli.options import TARGET, Target, number, seed_number, text
from jaxspec.cli.prompts import as_chat, heldout_for

if TYPE_CHECKING:
    from jaxspec.core import Model
    from jaxspec.decode.request import Prepared

COST_REPEATS = 9  # timings of each pass, for a policy: they are waited for
DRAFTS = (
    "What drafts: a model, prompt_lookup, online_ngram, retrieval:DIR, trim=4096:MODEL, greedy:MODEL, tree:MODEL, .."
)


class Settings(NamedTuple):
    """What to decode with: the options of `generate`, but for those of sampling."""

    target: Target = TARGET
    draft: Annotated[str | None, text("NAME", DRAFTS, "--draft", "-d")] = None
    gamma: Annotated[int, text("N", "Draft tokens a round; with a --policy, at most.", "--gamma", "-g")] = 3
    policy: Annotated[str, text("NAME", "How many to draft: adaptive, confidence=0.4, heuristic, entropy.")] = ""
    rule: Annotated[str, text("NAME", "Which are accepted: rejection, block, lenient=0.3, ...")] = ""
    max_new_tokens: Annotated[int, text("N", "Most new tokens of each prompt.", "--max-new-tokens", "-n")] = 96
    batch: Annotated[int, number("Prompts decoded at a time.")] = 1
    stop: Annotated[list[str] | None, text("TEXT", "Ends the text; may be repeated.")] = None
    ban: Annotated[list[int] | None, text("ID", "A token id to never generate; repeatable.")] = None
    seed: Annotated[int, seed_number("Of sampling; the same seed gives the same text.")] = 0
    dtype: Annotated[str, text("DTYPE", "float32, bfloat16, or int8 matrices in float32.")] = "float32"
    draft_dtype: Annotated[str, text("DTYPE", "The drafter's, if it is another.")] = ""
    mesh: Annotated[str | None, text("MESH", "Devices to split models and batches over: data=2,model=4.")] = None


class Session(NamedTuple):
    """Models and prompts, ready to decode; prompts are padded alike, and so share compiled programs.

    Attributes:
        settings, texts: what was asked for.
        prepared: all prompts; a row's text is the same in any batch.
    """

    settings: Settings
    texts: list[str]
    prepared: Prepared

    @property
    def sizes(self) -> list[int]:
        """Where a batch of each size begins: all are alike, but for a shorter last one."""
        short = len(self.texts) % self.settings.batch
        return [0, len(self.texts) - short] if 0 < short < len(self.texts) else [0]

    def rows(self, start: int, count: int) -> Prepared:
        """Some of the prompts."""
        from jaxspec.decode import batches

        return batches.take(self.prepared, range(start, min(start + count, len(self.texts))))


def check(settings: Settings, sampling: dict[str, Any]) -> None:
    """Refuses what is wrong whatever the models hold, before these are loaded.

    Raises:
        ValueError: there is such an option.
    """
    if settings.draft is not None:
        drafter_names.check(settings.draft, settings.draft_dtype or settings.dtype)
    names.check_options(settings.draft is not None, **_options(settings, sampling))


def _options(settings: Settings, sampling: dict[str, Any]) -> dict[str, Any]:
    """Options of `jaxspec.generate`, but for the drafter, and for token ids."""
    import jax

    return {
        "gamma": settings.gamma,
        "rule": names.rule(settings.rule) if settings.rule else None,
        "policy": names.policy(settings.policy) if settings.policy else None,
        "max_new_tokens": settings.max_new_tokens,
        "key": jax.random.key(settings.seed),
        **sampling,
    }


def open_session(settings: Settings, sampling: dict[str, Any], given: list[str], count: int, chat: bool) -> Session:
    """Loads the models, and the held-out prompts if none are given."""
    from jaxspec import sharding
    from jaxspec.decode.request import prepare

    mesh = None if settings.mesh is None else sharding.mesh(settings.mesh)

    def draft(name: str) -> Model:
        return names.model(name, settings.draft_dtype or settings.dtype, mesh)

    target = names.model(settings.target, settings.dtype, mesh)
    texts = given or heldout_for(target, count)
    prepared = prepare(
        target,
        as_chat(target, texts) if chat else texts,
        drafter=drafter_names.drafter(settings.draft, draft, target) if settings.draft is not None else None,
        banned=tuple(settings.ban or ()),
        **_options(settings, sampling),
    )
    return Session(settings, texts, prepared)


def with_costs(session: Session) -> Session:
    """Gives the policy `adaptive` the measured costs of passes over a batch of prompts; others need none."""
    settings = session.settings
    if settings.policy.partition("=")[0] != "adaptive" or session.prepared.drafter is None:
        return session
    from jaxspec.analysis import cost

    costs = cost.policy_costs(session.rows(0, settings.batch), repeats=COST_REPEATS)
    return session._replace(prepared=session.prepared.replace(policy=names.policy(settings.policy, **costs._asdict())))


def warm_up(session: Session, by_rounds: bool) -> None:
    """Compiles what decoding will run, by two rounds of a batch of each size: speeds are of programs that are there."""
    import jax.numpy as jnp

    from jaxspec.decode.generate import complete, pieces

    stop = session.settings.stop or ()
    for start in session.sizes:
        prepared = session.rows(start, session.settings.batch)
        prepared = prepared._replace(
            request=prepared.request._replace(
                max_new_tokens=jnp.minimum(prepared.request.max_new_tokens, 2 + prepared.decoder.gamma)
            )
        )
        if by_rounds:
            list(pieces(prepared, stop))
        else:
            complete(prepared, stop)
