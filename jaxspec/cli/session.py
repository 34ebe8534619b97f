"""Models and prompts made ready, and decoded: at once, or round by round."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec import trace
from jaxspec.cli import options
from jaxspec.cli.counts import Counts
from jaxspec.cli.prompts import as_chat, heldout_for
from jaxspec.trace import Round

if TYPE_CHECKING:
    from jaxspec.base import Stats
    from jaxspec.decode import Generation
    from jaxspec.decode.request import Job

PRICED = 9  # timings of each pass, for a policy: they are waited for


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to decode with; `generate`'s options describe the fields."""

    target: str
    draft: str | None
    gamma: int
    max_new_tokens: int
    seed: int
    dtype: str
    draft_dtype: str
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    stop: tuple[str, ...] = ()
    policy: str | None = None
    mesh: str | None = None
    chat: bool = False

    @property
    def temperature(self) -> float:
        """0 is greedy."""
        return self.sampling.get("temperature", 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Flat, for a report: every sampling option by its name."""
        own = dataclasses.asdict(self)
        sampling = own.pop("sampling")
        return own | options.sampling_settings(sampling) | sampling | {"temperature": self.temperature}


class Session(NamedTuple):
    """Models and prompts, ready to decode; prompts are padded alike, and so share compiled programs.

    Attributes:
        settings, texts: what was asked for.
        job: all prompts; a row's text is the same in any batch.
    """

    settings: Settings
    texts: list[str]
    job: Job

    def rows(self, start: int, count: int) -> Job:
        """Some of the prompts."""
        from jaxspec.analysis import jobs

        return jobs.take(self.job, range(start, min(start + count, len(self.texts))))


class Decoded(NamedTuple):
    """What became of one prompt."""

    text: str
    tokens: list[int]
    rounds: list[Round]
    counts: Counts


def open_session(settings: Settings, given: list[str], count: int) -> Session:
    """Loads the models, and the held-out prompts if none are given."""
    import jax

    from jaxspec import model, sharding
    from jaxspec.decode.request import prepare

    mesh = None if settings.mesh is None else sharding.mesh(settings.mesh)
    target = model.load(settings.target, dtype=settings.dtype, mesh=mesh)
    drafter = options.drafter(settings.draft, settings.draft_dtype, mesh, target) if settings.draft else None
    texts = given or heldout_for(target, count)
    job = prepare(
        target,
        as_chat(target, texts) if settings.chat else texts,
        drafter=drafter,
        gamma=settings.gamma,
        policy=options.policy(settings.policy) if settings.policy else None,
        max_new_tokens=settings.max_new_tokens,
        key=jax.random.key(settings.seed),
        **settings.sampling,
    )
    return Session(settings, texts, job)


def with_costs(session: Session, rows: int) -> Session:
    """Gives the policy `adaptive` the measured costs of passes over `rows` prompts at a time; others need none."""
    policy = session.settings.policy
    if not policy or policy.partition("=")[0] != "adaptive" or session.job.drafter is None:
        return session
    from jaxspec.analysis import cost

    costs = cost.policy_costs(session.rows(0, rows), repeats=PRICED)
    return session._replace(job=session.job.replace(policy=options.policy(policy, **costs)))


def warm_up(session: Session, rows: int, by_rounds: bool) -> None:
    """Compiles what decoding `rows` prompts at a time will run; decodes next to nothing."""
    import jax
    import jax.numpy as jnp

    from jaxspec.decode import loop

    job = session.rows(0, rows)
    if by_rounds:
        jax.block_until_ready([state.length for state, _ in itertools.islice(loop.rounds(job), 2)][-1])
    else:
        one_round = job.request._replace(limit=jnp.minimum(job.request.limit, 2))  # the first is prefill's
        jax.block_until_ready(loop.run(job._replace(request=one_round)))


def decode_all(session: Session, rows: int) -> list[Decoded]:
    """Decodes `rows` prompts at a time, without showing anything."""
    starts = range(0, len(session.texts), rows)
    return [decoded for start in starts for decoded in _decode(session, session.rows(start, rows))]


def _decode(session: Session, job: Job) -> list[Decoded]:
    """Some of the prompts as one batch; its seconds are divided among them in proportion to their tokens."""
    from jaxspec.decode.generate import complete

    began = time.perf_counter()
    out = complete(job, session.settings.stop)
    seconds = time.perf_counter() - began
    share = seconds / max(1, int(out.lengths.sum()))
    return [_decoded(out, row, share * int(out.lengths[row])) for row in range(len(out.texts))]


def _decoded(out: Generation, row: int, seconds: float) -> Decoded:
    tokens = out.tokens[row, : out.lengths[row]].tolist()
    rounds = trace.of_row(tokens, out.trace, row)
    return Decoded(out.texts[row], tokens, rounds, _counts(out.stats, row, seconds))


def stream(session: Session, index: int, show: Callable[[Any, Round], None]) -> Decoded:
    """Decodes one prompt round by round; the time that `show` takes is not counted."""
    from jaxspec.decode.generate import pieces

    running = pieces(session.rows(index, 1), session.settings.stop)
    text, tokens, rounds, seconds = "", [], [], 0.0
    while True:
        began = time.perf_counter()
        piece = next(running, None)
        seconds += time.perf_counter() - began
        if piece is None:
            break
        rounds.append(Round(list(tokens), piece.tokens, piece.draft, piece.num_accepted, piece.parent, piece.path))
        text, stats = text + piece.text, piece.stats
        tokens += piece.tokens
        show(piece, rounds[-1])
    return Decoded(text, tokens, rounds, _counts(stats, 0, seconds))


def _counts(stats: Stats, row: int, seconds: float) -> Counts:
    return Counts(prompts=1, seconds=seconds, **{name: int(x[row]) for name, x in stats._asdict().items()})
