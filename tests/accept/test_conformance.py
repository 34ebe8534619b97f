"""Every rule × drafter × gamma × warping goes through the same properties.

Programs are what costs time here. So a rule's program is enumerated for many tables and warpings, which are traced,
and where rules are called by themselves one program calls all of them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import accept, noise
from jaxspec.base import Draft, Drafter, Law, Prompt
from jaxspec.drafters import model
from jaxspec.testing import certify, table_model, table_model_from
from jaxspec.warp import Controls, greedy, sampling

EXACT = 1e-5
RULES = {
    rule.name: rule
    for rule in [
        accept.rejection(),
        accept.block(),
        accept.exact_match(),
        accept.coupled(),
        accept.rejection_sampling(),
        accept.lenient(0.5),
        accept.typical(0.3, 0.5),
    ]
}
INEXACT = {"lenient(0.5)", "typical(0.3, 0.5)"}

TARGET, RANDOM = table_model(jax.random.key(1), 3), table_model(jax.random.key(2), 3, sharpness=1.5)
GOOD = table_model_from(0.7 * TARGET.params + 0.3 * RANDOM.params)
NO_TWO = table_model_from(TARGET.params.at[..., 2].set(-jnp.inf))
ONLY_TWO = table_model_from(jnp.zeros((3, 3, 3)).at[..., :2].set(-jnp.inf))
PLAIN = Controls(jnp.ones(1), jnp.array([3]), jnp.ones(1))
TIGHT = Controls(jnp.array([1.3]), jnp.array([2]), jnp.array([0.9]))
COLD = PLAIN._replace(temperature=jnp.zeros(1))
CASES = {  # of one program
    "a good model": (TARGET, GOOD, PLAIN),
    "a random one": (TARGET, RANDOM, PLAIN),
    "warped": (TARGET, RANDOM, TIGHT),
    "temperature 0": (TARGET, RANDOM, COLD),
    "p is q": (TARGET, TARGET, PLAIN),
    "disjoint": (NO_TWO, ONLY_TWO, PLAIN),
    "one-token support": (ONLY_TWO, RANDOM, PLAIN),
}
CERTAIN = {"temperature 0", "disjoint", "one-token support"}  # where no rule has a choice


def table_drafter(ragged):
    """Proposes, with certainty, successors of the last token; all gamma of them, or any number up to it."""

    def propose(keys, params, state, context, gamma, to_law, budget=None):
        last = jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)
        full = jnp.full_like(context.length, gamma)
        length = (context.length + last[:, 0]) % (gamma + 1) if ragged else full
        return Draft((last + 1 + jnp.arange(gamma, dtype=last.dtype)[None, :]) % 3, None, length), state

    return Drafter(lambda *_: (), propose, lambda params, state, *_: state)


DRAFTERS = {"model": model(TARGET.lm), "point mass": table_drafter(True)}
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))
EVERYTHING = sampling(3, True)


def off_by(rule, drafter, gamma, case, **options):
    target, draft, controls = CASES[case]
    options = dict(prompt=PROMPT, warp=EVERYTHING, steps=3, draft_params=draft.params) | options
    return certify(target, drafter=drafter, accept=rule, gamma=gamma, controls=controls, **options)


def programs():
    """(rule, drafter, gamma); what is enumerated elsewhere, or differs from a neighbour in little, only at leisure."""
    for name in RULES:
        for kind, gamma in [("model", 1), ("model", 3), ("point mass", 3)]:
            slow = gamma == 1 and name not in ("block", "coupled")
            yield pytest.param(name, kind, gamma, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("name", "kind", "gamma"), list(programs()))
def test_the_law_of_the_text(name, kind, gamma):
    """Exact rules are exact on every pair; each inexact one is not, on those where it has any room."""
    rule = RULES[name]
    cases = CASES if (kind, gamma) == ("model", 3) else ["a random one", "warped"]
    off = {case: off_by(rule, DRAFTERS[kind], gamma, case) for case in cases}
    assert rule.exact == (name not in INEXACT)
    if rule.exact:
        assert max(off.values()) < EXACT, off
    else:
        assert off["a random one"] > 1e-2, off
        assert all(off[case] < EXACT for case in CERTAIN.intersection(cases)), off


@pytest.mark.parametrize("name", ["block"])
def test_the_law_of_all_tokens_of_a_round(name):
    """One from prefill, three guesses at most, and the token after two."""
    assert off_by(RULES[name], DRAFTERS["model"], 3, "a random one", steps=4) < EXACT


# --- one program for all rules


def judge(keys, position, draft, target):
    return {name: rule(keys, position, draft, target) for name, rule in RULES.items()}


QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # to compile, not to run
JUDGE = jax.jit(judge, compiler_options=QUICKLY)
ROWS, GAMMA, VOCAB = 24, 3, 5


def laws(key, shape, zeros=0.3):
    """Random laws, some probabilities of which are 0."""
    first, second = jax.random.split(key)
    keep = jax.random.bernoulli(first, 1 - zeros, shape).at[..., 0].set(True)
    logits = 2 * jax.random.normal(second, shape)
    return jax.nn.log_softmax(jnp.where(keep, logits, -jnp.inf), axis=-1)


@functools.partial(jax.jit, static_argnames=("rows", "gamma", "vocab", "zeros"))
def round_of(seed, rows=ROWS, gamma=GAMMA, vocab=VOCAB, zeros=0.3):
    """keys, positions, a draft that was drawn from its law, and a target."""
    p, q, x, n, k = jax.random.split(jax.random.key(seed), 5)
    log_q = laws(q, (rows, gamma, vocab), zeros)
    tokens = jax.random.categorical(x, log_q).astype(jnp.int32)
    length = jax.random.randint(n, (rows,), 0, gamma + 1)
    draft, target = Draft(tokens, log_q, length), Law(log_probs=laws(p, (rows, gamma + 1, vocab), zeros))
    return noise.row_keys(k, rows), 3 + jnp.arange(rows, dtype=jnp.int32), draft, target


def rows_of(tree, index):
    return jax.tree.map(lambda leaf: leaf[jnp.asarray(index)], tree)


def outcome(verdicts):
    return {name: np.stack([v.num_accepted, v.next_token], axis=1).tolist() for name, v in verdicts.items()}


@pytest.mark.parametrize("certain", [False, True], ids=["model", "point mass"])
def test_rows_do_not_depend_on_mates_padding_or_order(certain):
    """A shuffled batch; and rows alone, with drafts padded by two garbage guesses."""
    keys, position, draft, target = round_of(0)
    wide = Draft(
        jnp.pad(draft.tokens, ((0, 0), (0, 2)), constant_values=1),
        jnp.pad(draft.log_probs, ((0, 0), (0, 2), (0, 0)), constant_values=jnp.nan),
        draft.length,
    )
    padded = Law(jnp.pad(target.log_probs, ((0, 0), (0, 2), (0, 0)), constant_values=jnp.nan))
    if certain:
        draft, wide = draft._replace(log_probs=None), wide._replace(log_probs=None)
    together = outcome(JUDGE(keys, position, draft, target))
    order = [(7 * i + 3) % ROWS for i in range(ROWS)]
    moved = outcome(JUDGE(*rows_of((keys, position, draft, target), order)))
    alone = [outcome(JUDGE(*rows_of((keys, position, wide, padded), [i]))) for i in range(0, ROWS, 2)]
    for name in RULES:
        assert [moved[name][order.index(i)] for i in range(ROWS)] == together[name], name
        assert [one[name][0] for one in alone] == together[name][::2], name
    assert len({tuple(map(tuple, rows)) for rows in together.values()}) >= 3  # rules do differ here


def test_vmap():
    rounds = [round_of(seed) for seed in range(3)]
    stacked = jax.jit(jax.vmap(judge), compiler_options=QUICKLY)(*jax.tree.map(lambda *x: jnp.stack(x), *rounds))
    for i, each in enumerate(rounds):
        assert outcome(rows_of(stacked, i)) == outcome(JUDGE(*each))


@settings(max_examples=30)
@given(st.integers(0, 2**31 - 1), st.booleans())
def test_what_the_target_never_says_is_never_said(seed, certain):
    """Kept guesses and the token after them have a probability, and no more guesses are kept than there are."""
    keys, position, draft, target = round_of(seed, zeros=0.6)
    if certain:
        draft = draft._replace(log_probs=None)
    p, guesses, length = (np.asarray(x) for x in (target.log_probs, draft.tokens, draft.length))
    slot = np.arange(GAMMA + 1)[None, :]
    for name, verdict in JUDGE(keys, position, draft, target).items():
        count, after = (np.asarray(x)[:, None] for x in verdict)
        assert ((count[:, 0] >= 0) & (count[:, 0] <= length)).all(), name
        said = np.where(slot < count, np.pad(guesses, ((0, 0), (0, 1))), after)
        allowed = np.isfinite(np.take_along_axis(p, said[..., None], axis=-1)[..., 0])
        assert allowed[slot <= count].all(), name


def test_equal_laws_accept_everything():
    """In float32, and after logits in bfloat16."""
    keys, position, draft, _ = round_of(0, zeros=0.0)
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = (3 * jax.random.normal(jax.random.key(5), (ROWS, GAMMA + 1, VOCAB))).astype(dtype)
        controls = Controls(jnp.ones(ROWS), jnp.full(ROWS, VOCAB), jnp.ones(ROWS))
        law = sampling()(controls, logits)
        assert law.log_probs.dtype == jnp.float32
        equal = Draft(
            jax.random.categorical(jax.random.key(6), law.log_probs[:, :-1]), law.log_probs[:, :-1], draft.length
        )
        verdicts = JUDGE(keys, position, equal._replace(tokens=equal.tokens.astype(jnp.int32)), law)
        for name in ("rejection", "block", "rejection_sampling", "lenient(0.5)"):
            assert (verdicts[name].num_accepted == draft.length).all(), name


def test_a_law_of_nan_is_never_accepted():
    keys, position, draft, target = round_of(1)
    broken = draft._replace(log_probs=draft.log_probs.at[:, 1].set(jnp.nan))
    verdicts = JUDGE(keys, position, broken, target)
    for name in ("rejection", "block", "rejection_sampling", "lenient(0.5)"):
        assert (verdicts[name].num_accepted <= 1).all(), name
        p = jnp.take_along_axis(target.log_probs, verdicts[name].num_accepted[:, None, None], axis=1)[:, 0]
        assert jnp.isfinite(jnp.take_along_axis(p, verdicts[name].next_token[:, None], axis=1)).all(), name


def test_a_vocabulary_of_one():
    """Whatever is said is right, so everything is kept."""
    keys, position, draft, target = round_of(2, vocab=1)
    for name, verdict in JUDGE(keys, position, draft, target).items():
        assert (verdict.num_accepted == draft.length).all() and (verdict.next_token == 0).all(), name


def test_a_draft_of_no_guesses_is_a_draw_from_p(monkeypatch):
    """The token is drawn once, from p itself."""
    keys, position, draft, target = round_of(3, gamma=0)
    for certain in (False, True):
        for name, rule in RULES.items():
            asked = []
            monkeypatch.setattr(noise, "categorical", lambda keys, law, *_, asked=asked: asked.append(law) or position)
            with jax.disable_jit():
                verdict = rule(keys, position, draft._replace(log_probs=None) if certain else draft, target)
            monkeypatch.undo()
            assert len(asked) == 1 and verdict.next_token.tolist() == position.tolist(), name
            np.testing.assert_allclose(jax.nn.softmax(asked[0]), jnp.exp(target.log_probs[:, 0]), atol=1e-6)
            assert verdict.num_accepted.tolist() == [0] * ROWS, name


def test_greedy_is_exact_match_without_a_softmax_or_a_sort():
    draft = Draft(jnp.array([[4, 9], [4, 5], [4, 5], [9, 5]]), None, jnp.array([2, 2, 1, 2]))
    target = greedy()(None, 5.0 * jax.nn.one_hot(jnp.array([[4, 5, 6]] * 4), 10))
    keys, position = noise.row_keys(jax.random.key(0), 4), jnp.zeros(4, jnp.int32)
    for proposed in (draft, draft._replace(log_probs=jnp.zeros((4, 2, 10)))):
        for name, verdict in JUDGE(keys, position, proposed, target).items():
            assert verdict.num_accepted.tolist() == [1, 2, 1, 0], name
            assert verdict.next_token.tolist() == [5, 6, 5, 4], name
    program = str(jax.make_jaxpr(judge)(keys, position, draft, target))
    assert not any(word in program for word in ("exp ", "log ", "sort[", "top_k", "f32"))  # nothing floats at all


def test_rules_are_made_once_so_that_programs_are_shared():
    for make in (accept.rejection, accept.block, accept.exact_match, accept.coupled, accept.rejection_sampling):
        assert make() is make()
    assert accept.lenient(0.5) is accept.lenient(0.5) and accept.typical(0.3, 0.5) is accept.typical(0.3, 0.5)
