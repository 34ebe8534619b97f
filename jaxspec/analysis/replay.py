"""Offline replay: p and q along the target's texts, stored once; then any rule, gamma and temperature, without models.

Let a round begin somewhere in a text x1 x2 ... of the target's. Only the text's own prefixes have known laws, and for
an exact rule that is enough:

    P(at least k guesses are kept | the text) = S_k(x) = P(the guesses begin x1..xk, and are kept) / p(x1..xk).

For the tokens of a round, continued by plain sampling, have the law p. They begin x1..xk in two ways: those are kept
guesses, or a token of the target's own is among them; given the text, the first has the probability S_k. It falls as
k grows, and is the product of `Rule.kept_ratio` over the prefix: of min(1, q / p) for the rejection rule. Under the
block rule it is the least so far of the products of q / p. So the number of rounds that a text takes is a Markov chain
whose mean is computed, not sampled.

The text of an inexact rule is not the target's. S_k (which may exceed 1) still is the importance weight whose mean
over the target's texts is the probability that a round which begins there keeps k guesses, but where the next one
begins is not known. The same holds at another temperature than the text's, where S_k is multiplied by the ratio of
the two laws of x1..xk: such weights grow with gamma and with the distance, and the standard error with them.

Shapes: N positions of all texts in a row, V vocabulary, G gamma.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, appendix A.1 (the rejection rule).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import buffers
from jaxspec import warp as warps
from jaxspec.accept import Rule
from jaxspec.accept.common import KeptRatio
from jaxspec.analysis import acceptance, chain, divergence, environment
from jaxspec.analysis.estimate import Ratio
from jaxspec.base import LanguageModel, Model, Params, Prompt

MANIFEST = "manifest.json"
CHUNK = 256  # positions at a time


class Store(NamedTuple):
    """The laws of a pair along texts of the target's, one text after the other.

    Attributes:
        manifest: what it was made from: names, temperature, digest of the prompts, environment.
        counts: how many tokens each text has [rows].
        tokens: the texts.
        target, draft: float32 logits of each of their tokens, given those before it, memory-mapped.
    """

    manifest: dict[str, Any]
    counts: Int[np.ndarray, " rows"]
    tokens: Int[np.ndarray, " N"]
    target: Float[np.ndarray, "N V"]
    draft: Float[np.ndarray, "N V"]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a rule makes of a store.

    Attributes:
        rule, gamma, temperature: what was asked.
        own_text: whether the texts are what decoding with this rule says: it is exact, and the temperature theirs.
        alpha: probability that a round's first guess is kept, over all positions.
        accepted: guesses that a round keeps and emits if it is as likely to begin at any position but a text's first.
        tokens_per_round: as `Stats.tokens_per_round` over all rows; with texts that are not its own, 1 + accepted.
    """

    rule: str
    gamma: int
    temperature: float
    own_text: bool
    alpha: Ratio
    accepted: Ratio
    tokens_per_round: Ratio

    def improvement(self, c: float, v: float = 1.0) -> float:
        """Predicted speed over plain decoding, as in Theorem 3.8: tokens per round / (gamma c + v)."""
        return self.tokens_per_round.value / (self.gamma * c + v)


def record(
    folder: str | Path,
    target: Model,
    drafter: Model,
    prompts: Sequence[str] | str | Prompt,
    *,
    temperature: float,
    max_new_tokens: int = 64,
    key: Any = None,
    batch: int = 16,
    advance: Callable[[int], object] = lambda rows: None,
) -> Store:
    """Lets the target decode plainly, feeds the texts to both models, and stores the logits: 8 V bytes a position.

    Args:
        folder: where to; written whole or not at all.
        target, drafter: two models with one vocabulary.
        prompts: text, or token ids [rows, prompt]; rows are the unit of the standard errors.
        temperature: of the texts. Texts at 0 serve temperature 0 only, so take a store for each that matters.
        max_new_tokens, key: as in `jaxspec.generate`.
        batch: rows at a time.
        advance: called with the number of rows done, for a progress bar.

    Raises:
        FileExistsError: there is something at `folder`.
        TypeError, ValueError: as `acceptance.measure`.

    Example:
        >>> import tempfile
        >>> from jaxspec import accept
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     options = dict(temperature=1.0, key=jax.random.key(0), max_new_tokens=20)
        ...     store = record(f"{folder}/store", target, target, prompt, **options)
        ...     evaluate(store, accept.rejection(), gamma=3).tokens_per_round.value  # 19 tokens in 5 rounds
        3.8
    """
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: give the name of a new folder")
    options: dict[str, Any] = dict(temperature=temperature, top_k=None, top_p=None, max_new_tokens=max_new_tokens)
    texts = list(acceptance.texts(target, drafter, prompts, key=key, batch=batch, **options))
    counts = np.concatenate([text.lengths[: text.group.real] for text in texts])
    vocab = target.lm.vocab_size if target.tokenizer is None else len(target.tokenizer)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    unfinished.mkdir(parents=True)
    try:
        shape, made = (int(counts.sum()), vocab), np.lib.format.open_memmap
        sides = [made(unfinished / f"{side}.npy", "w+", np.float32, shape) for side in ("target", "draft")]
        tokens, at = np.zeros(shape[0], np.int32), 0
        for text in texts:
            real = np.arange(text.tokens.shape[1])[None, :] < text.lengths[:, None]
            real[text.group.real :] = False
            rows = slice(at, at := at + int(real.sum()))
            tokens[rows] = np.asarray(text.tokens)[real]
            for side, model in zip(sides, (target, drafter), strict=True):
                side[rows] = np.asarray(_logits(model.lm, vocab, model.params, text.group.prompt, text.tokens))[real]
            advance(text.group.real)
        for side in sides:
            side.flush()
        np.save(unfinished / "counts.npy", counts)
        np.save(unfinished / "tokens.npy", tokens)
        about = {"target": target.name, "draft": drafter.name, "temperature": float(temperature)}
        about |= {"max_new_tokens": max_new_tokens, "rows": len(counts), "positions": shape[0], "vocab": vocab}
        about |= {"prompts_sha256": _digest(texts), "environment": environment.current()}
        (unfinished / MANIFEST).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return open_store(folder)


def open_store(folder: str | Path) -> Store:
    """A store that `record` has written; its logits stay on disk until they are read.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = Path(folder)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    counts, tokens = (np.load(folder / f"{name}.npy") for name in ("counts", "tokens"))
    return Store(manifest, counts, tokens, *(np.load(folder / f"{s}.npy", mmap_mode="r") for s in ("target", "draft")))


def first(store: Store, rows: int) -> Store:
    """The first texts of a store, or all if there are no more than `rows`."""
    counts = store.counts[:rows]
    here = slice(int(counts.sum()))
    return Store(store.manifest, counts, store.tokens[here], store.target[here], store.draft[here])


def evaluate(store: Store, rule: Rule, *, gamma: int, temperature: float | None = None) -> Evaluation:
    """What decoding with a rule, gamma guesses a round and the store's drafter would yield.

    Args:
        store: see `record`.
        rule: any that states its `kept_ratio`.
        gamma: guesses a round, at least 1.
        temperature: of both models; that of the texts unless told.

    Raises:
        ValueError: gamma < 1; a rule whose ratio is unknown; another temperature, and the texts are at 0; a rule that
            at temperature 0 keeps guesses which differ from the text, so that the next law is not known.
    """
    own: float = store.manifest["temperature"]
    temperature = own if temperature is None else float(temperature)
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}: expected at least 1 guess a round")
    if rule.kept_ratio is None:
        raise ValueError(f"the rule {rule.name} does not say how it keeps guesses: expected a `kept_ratio`")
    if temperature != own and own == 0:
        raise ValueError(f"the texts are greedy, and say nothing of temperature {temperature:g}: record some at it")
    if temperature == 0 and rule.reads_soft:
        raise ValueError(f"at temperature 0 {rule.name} keeps guesses that are not in the text: decode to measure it")
    ratio, shift = _along(store, rule.kept_ratio, own, temperature)
    alpha, accepted, rounds = np.zeros((3, len(store.counts)))
    for row, (end, count) in enumerate(zip(np.cumsum(store.counts), store.counts, strict=True)):
        weights = chain.survival(ratio[end - count : end], shift[end - count : end], gamma, rule.exact)
        alpha[row] = weights[:, 0].sum()
        accepted[row] = weights[1:].sum()
        rounds[row] = chain.expected_rounds(weights[1:])
    later, own_text = store.counts - 1, rule.exact and temperature == own
    tokens_per_round = Ratio(later, rounds) if own_text else Ratio(later + accepted, later)
    found = (Ratio(alpha, store.counts, probability=True), Ratio(accepted, later), tokens_per_round)
    return Evaluation(rule.name, gamma, temperature, own_text, *found)


def alpha_of_several(store: Store, count: int) -> list[Ratio]:
    """Probability that one of the first 1, 2, ... K independent guesses of a token is kept, over all positions.

    The exact probability at each position (`divergence.beta_of_several`), with the laws at the texts' own temperature;
    the texts only say which positions there are. The first is the rejection rule's alpha, without the noise of which
    token the text has; at temperature 0 all guesses are one, and so are the ratios.

    Args:
        store: see `record`.
        count: K, at least 1.

    Raises:
        ValueError: count < 1.
    """
    own, kept = jnp.float32(store.manifest["temperature"]), []
    for index in _chunks(len(store.tokens)):
        p, q = (np.exp(np.asarray(_jitted_law(side[index], own), np.float64)) for side in (store.target, store.draft))
        kept.append(divergence.beta_of_several(p[:, 0], q[:, 0], count))
    whole = np.concatenate(kept)[: len(store.tokens)]
    sums = np.add.reduceat(whole, np.cumsum(store.counts) - store.counts, axis=0)
    return [Ratio(sums[:, k], store.counts, probability=True) for k in range(count)]


def _along(store: Store, kept_ratio: KeptRatio, own: float, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """The rule's ratio at every token, and the probability that it has now over the one that it was drawn with."""
    found = np.zeros((2, len(store.tokens)))
    for index in _chunks(len(store.tokens)):
        part = store.tokens[index], store.target[index], store.draft[index]
        both = _of_chunk(kept_ratio, jnp.float32(own), jnp.float32(temperature), *part)
        found[:, index] = np.asarray(both)
    return found[0], found[1]


def _chunks(count: int) -> Iterator[Int[np.ndarray, " chunk"]]:
    """Positions in chunks of one size; the last position fills the last chunk."""
    for start in range(0, count, CHUNK):
        yield np.minimum(np.arange(start, start + CHUNK), count - 1)


@functools.partial(jax.jit, static_argnames=("kept_ratio",))
def _of_chunk(
    kept_ratio: KeptRatio,
    own: Float[Array, ""],
    temperature: Float[Array, ""],
    tokens: Int[Array, " N"],
    target: Float[Array, "N V"],
    draft: Float[Array, "N V"],
) -> Float[Array, "2 N"]:
    drawn, p, q = (_law(*side) for side in ((target, own), (target, temperature), (draft, temperature)))
    text = tokens[:, None]
    then, now = (jnp.take_along_axis(law, text[..., None], axis=-1)[:, 0, 0] for law in (drawn, p))
    return jnp.stack([kept_ratio(p, q, text)[:, 0], jnp.exp(now - then)])


def _law(logits: Float[Array, "N V"], temperature: Float[Array, ""]) -> Float[Array, "N 1 V"]:
    count, vocab = logits.shape
    controls = warps.Controls(jnp.full(count, temperature), jnp.full(count, vocab), jnp.ones(count))
    law = warps.sampling()(controls, logits[:, None]).log_probs
    assert law is not None
    return law


_jitted_law = jax.jit(_law)


@functools.partial(jax.jit, static_argnames=("lm", "vocab"))
def _logits(
    lm: LanguageModel, vocab: int, params: Params, prompt: Prompt, tokens: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
    """Teacher-forced logits over the target's real ids."""
    return warps.fit(acceptance.teacher_forced(lm, params, prompt, tokens), vocab)


def _digest(texts: Sequence[acceptance.Text]) -> str:
    rows = [row for t in texts for row in buffers.to_lists(*t.group.prompt)[: t.group.real]]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
