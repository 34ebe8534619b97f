"""Models and prompts made ready, and decoded: at once, or round by round."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec import trace
from jaxspec.cli import named, prices
from jaxspec.cli.counts import Counts
from jaxspec.cli.prompts import as_chat, heldout_for
from jaxspec.trace import Round

if TYPE_CHECKING:
    import numpy as np

    from jaxspec.base import Drafter, Model, Policy, Prompt, Stats
    from jaxspec.decode import Generation
    from jaxspec.decode.request import Job

TARGET, DRAFT = "debian-t5-base", "debian-t5-small"
PRICED = 9  # timings of each pass, for a policy: they are waited for
WARPING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
           "draft_temperature", "banned")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to decode with; `generate`'s options describe the fields."""

    target: str
    draft: str | None
    gamma: int
    temperature: float
    top_k: int | None
    top_p: float | None
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...]
    dtype: str
    draft_dtype: str
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    draft_temperature: float | None = None
    banned: tuple[int, ...] = ()
    policy: str | None = None
    mesh: str | None = None
    chat: bool = False


class Session(NamedTuple):
    """Models and prompts, ready to decode; prompts are padded alike, and so share compiled programs.

    Attributes:
        settings, target, drafter, texts: what was asked for.
        prompt: the texts as token ids, on the host.
        keys: the data of one random key per prompt.
        policy: what chooses the guesses of a round.
    """

    settings: Settings
    target: Model
    drafter: Model | Drafter | None
    texts: list[str]
    prompt: Prompt
    keys: np.ndarray
    policy: Policy | None = None

    def options(self) -> dict[str, Any]:
        """The arguments of `jaxspec.generate` that are the same for every prompt."""
        s = self.settings
        own = dict(drafter=self.drafter, gamma=s.gamma, policy=self.policy, max_new_tokens=s.max_new_tokens)
        return own | self.warping()

    def warping(self) -> dict[str, Any]:
        """Those of `options` that shape the laws: what `jaxspec.analysis.acceptance` takes, too."""
        return {name: getattr(self.settings, name) for name in WARPING}

    def rows(self, start: int, stop: int) -> tuple[Prompt, Any]:
        """Some of the prompts, and their keys: a row's text is the same in any batch."""
        import jax

        prompt = jax.tree.map(lambda x: x[start:stop], self.prompt)
        return prompt, jax.random.wrap_key_data(jax.numpy.asarray(self.keys[start:stop]))

    def job(self, start: int, stop: int, **changed: Any) -> Job:
        """Some of the prompts as what `jaxspec.decode.loop` runs.

        Args:
            start, stop: which prompts.
            changed: arguments of `jaxspec.generate` that differ from `options`.
        """
        from jaxspec.decode import request

        prompt, keys = self.rows(start, stop)
        rest: dict[str, Any] = dict(accept=None, key=keys, eos_ids=None)
        return request.prepare(self.target, prompt, **(self.options() | rest | changed))


class Decoded(NamedTuple):
    """What became of one prompt."""

    text: str
    tokens: list[int]
    rounds: list[Round]
    counts: Counts


def open_session(settings: Settings, given: list[str], count: int) -> Session:
    """Loads the models, and the held-out prompts if none are given."""
    import jax
    import numpy as np

    from jaxspec import model, noise, sharding
    from jaxspec.decode import request

    mesh = None if settings.mesh is None else sharding.mesh(settings.mesh)
    target = model.load(settings.target, dtype=settings.dtype, mesh=mesh)
    drafter = named.drafter(settings.draft, settings.draft_dtype, mesh, target) if settings.draft else None
    texts = given or heldout_for(target, count)
    keys = jax.random.key_data(noise.row_keys(jax.random.key(settings.seed), len(texts)))
    prompt = as_chat(target, texts) if settings.chat else request.encode(target, texts)
    prompt, keys = jax.tree.map(np.asarray, (prompt, keys))
    policy = named.policy(settings.policy) if settings.policy else None
    session = Session(settings, target, drafter, texts, prompt, keys, policy)
    session.job(0, len(texts))  # refuses bad settings before anything is compiled
    return session


def priced(session: Session, rows: int) -> Session:
    """Tells the policy `estimated` what passes over `rows` prompts at a time cost here; other policies do not ask."""
    s, drafter = session.settings, session.drafter
    if not s.policy or s.policy.partition("=")[0] != "estimated" or not s.draft or drafter is None or s.gamma == 0:
        return session
    asked: dict[str, Any] = dict(gamma=s.gamma, max_new_tokens=s.max_new_tokens, sampled=s.temperature > 0)
    prompt, _ = session.rows(0, rows)
    costs = prices.of_policy(drafter, s.draft, s.draft_dtype, session.target, prompt, repeats=PRICED, **asked)
    return session._replace(policy=named.policy(s.policy, **costs))


def warm_up(session: Session, rows: int, by_rounds: bool) -> None:
    """Compiles what decoding `rows` prompts at a time will run; decodes next to nothing."""
    import jax
    import jax.numpy as jnp

    from jaxspec.decode import loop

    job = session.job(0, rows)
    if by_rounds:
        state = loop.start(*job)
        jax.block_until_ready(loop.advance(job.decoder, job.keys, job.weights, state))
    else:
        one_round = job.request._replace(limit=jnp.minimum(job.request.limit, 2))  # the first is prefill's
        jax.block_until_ready(loop.run(*job._replace(request=one_round)))


def decode_all(session: Session, rows: int) -> list[Decoded]:
    """Decodes `rows` prompts at a time, without showing anything."""
    starts = range(0, len(session.texts), rows)
    return [decoded for start in starts for decoded in _decode(session, start, start + rows)]


def _decode(session: Session, start: int, stop: int) -> list[Decoded]:
    """Some of the prompts as one batch; its seconds are shared out by tokens."""
    import jaxspec

    prompt, keys = session.rows(start, stop)
    began = time.perf_counter()
    out = jaxspec.generate(session.target, prompt, key=keys, stop=session.settings.stop, **session.options())
    seconds = time.perf_counter() - began
    share = seconds / max(1, int(out.lengths.sum()))
    return [_decoded(out, row, share * int(out.lengths[row])) for row in range(len(out.texts))]


def _decoded(out: Generation, row: int, seconds: float) -> Decoded:
    tokens = out.tokens[row, : out.lengths[row]].tolist()
    rounds = trace.of_row(tokens, out.trace, row)
    return Decoded(out.texts[row], tokens, rounds, _counts(out.stats, row, seconds))


def stream(session: Session, index: int, show: Callable[[Any, Round], None]) -> Decoded:
    """Decodes one prompt round by round; the time that `show` takes is not counted."""
    import jaxspec

    prompt, key = session.rows(index, index + 1)
    pieces = jaxspec.stream(session.target, prompt, key=key, stop=session.settings.stop, **session.options())
    text, tokens, rounds, seconds = "", [], [], 0.0
    while True:
        began = time.perf_counter()
        piece = next(pieces, None)
        seconds += time.perf_counter() - began
        if piece is None:
            break
        rounds.append(Round(list(tokens), piece.tokens, piece.draft, piece.num_accepted))
        text, stats = text + piece.text, piece.stats
        tokens += piece.tokens
        show(piece, rounds[-1])
    return Decoded(text, tokens, rounds, _counts(stats, 0, seconds))


def _counts(stats: Stats, row: int, seconds: float) -> Counts:
    return Counts(prompts=1, seconds=seconds, **{name: int(x[row]) for name, x in stats._asdict().items()})
