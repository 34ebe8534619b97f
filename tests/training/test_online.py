"""Learning between the batches of a job: the text stays the target's, nothing is compiled, and a
job can be resumed.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxspec
from jaxspec import drafters, rules
from jaxspec.core import Model, Prompt
from jaxspec.decode import loop, teacher_forcing
from jaxspec.nets import decoder, encoder_decoder, t5
from jaxspec.testing import certify, table_model
from jaxspec.training import online, top_tokens
from jaxspec.training.data import TrainingBatch
from jaxspec.training.losses import logits_and_labels
from jaxspec.training.online_distillation import to_learn
from jaxspec.weights import quantisation
from tests.marks import marked
from tests.small import tiny_gpt, tiny_t5

VOCAB, NEW = 3, 16
TARGET, DRAFT = (
    table_model(jax.random.key(seed), VOCAB, order=1, sharpness=2.0) for seed in (1, 2)
)
GPT = tiny_gpt(17, max_positions=16)
LM = decoder.language_model(GPT)
ENCDEC = tiny_t5(17)


def learner_of(drafter=DRAFT, traced=None, **options):
    adam = optax.adam(0.1)

    def update(*arguments):
        if traced is not None:
            traced.append(1)
        return adam.update(*arguments)

    settings = dict(max_prompt=2, max_new_tokens=NEW, top_k=2, size=6, rows=4, steps=3) | options
    return online(drafter, optimizer=optax.GradientTransformation(adam.init, update), **settings)


def prompts_of(number):
    tokens = np.random.default_rng(number).integers(0, VOCAB, (3, 2)).astype(np.int32)
    return Prompt(tokens, np.array([2, 1, 2], np.int32))


def batch(learner, state, number, **options):
    prompts, settings = prompts_of(number), dict(gamma=2, max_new_tokens=NEW) | options
    out = jaxspec.generate(TARGET, prompts, drafter=learner.drafter(state), **settings)
    return out, *learner.update(state, TARGET, prompts, out)


@pytest.mark.slow
def test_the_text_stays_exact_and_nothing_is_compiled_while_the_draft_learns():
    traced = []
    learner = learner_of(traced=traced)
    state, programs, losses = learner.init(), [], []
    for number in range(4):
        plain = jaxspec.generate(TARGET, prompts_of(number), max_new_tokens=NEW)
        sampling = dict(temperature=1.0, key=jax.random.key(number), max_new_tokens=NEW)
        sampled = jaxspec.generate(TARGET, prompts_of(number), **sampling)
        out, state, loss = batch(learner, state, number)
        again, state, _ = batch(learner, state, number, rule=rules.coupled(), **sampling)
        assert out.tokens.tolist() == plain.tokens.tolist()
        assert again.tokens.tolist() == sampled.tokens.tolist()
        losses.append(loss)
        programs.append((loop.generation.num_programs(), len(traced)))
    assert set(programs) == {programs[0]} and programs[0][1] == 1
    assert losses[-1] < losses[0] and int(state.rows) == 24 and int(state.step) == 24
    assert certify(TARGET, drafter=learner.drafter(state), gamma=1, steps=3) < 1e-6


@pytest.mark.slow
def test_a_resumed_job_goes_on_alike(tmp_path):
    def run(state, learner, numbers):
        texts = []
        for number in numbers:
            out, state, _ = batch(learner, state, number)
            texts.append((out.tokens.tolist(), out.stats.rounds.tolist()))
        return state, texts

    learner = learner_of()
    state, _ = run(learner.init(), learner, range(2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    uncut, texts = run(state, learner, range(2, 4))

    another = learner_of()  # as in another process
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", another.init())
    resumed, again = run(restored, another, range(2, 4))
    jax.tree.map(np.testing.assert_array_equal, uncut, resumed)
    assert again == texts


@pytest.mark.slow
@pytest.mark.parametrize("shared", marked([False, True], exhaustive=[False]))
def test_a_trimmed_head_learns_and_its_ids_stay(shared, tmp_path):
    """The default drafter has such a head: its ids are integers. Resumed, it goes on alike, bit for
    bit.
    """
    two = dataclasses.replace(ENCDEC, decoder_layers=2)
    target = Model(t5.language_model(two), t5.init(two, jax.random.key(0)), config=two)
    params = t5.init(ENCDEC, jax.random.key(1)) | (
        encoder_decoder.encoder_params(target.params) if shared else {}
    )
    draft = jaxspec.trim_vocabulary(
        Model(t5.language_model(ENCDEC), params, config=ENCDEC), ids=[1, 2, 5, 9]
    )
    draft = drafters.share_encoder(draft, target) if shared else draft
    prompts = Prompt(np.array([[3, 5], [4, 0]], np.int32), np.array([2, 1], np.int32))
    options = dict(max_new_tokens=8, positions="all", size=2, rows=2, steps=2)

    def step(learner, state):
        out = jaxspec.generate(
            target, prompts, drafter=learner.drafter(state), gamma=2, max_new_tokens=8
        )
        return learner.update(state, target, prompts, out)

    learner = learner_of(draft, **options)
    first, _ = step(learner, learner.init())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", first)
    last, loss = step(learner, first)

    drafter = learner.drafter(last)
    assert (
        drafter.params.to_target.tolist() == [1, 2, 5, 9]
        and drafter.params.to_target.dtype == jnp.int32
    )
    moved = {
        name: float(jnp.abs(x - draft.params.head[name]["weight"]).max())
        for name, x in heads_of(drafter)
    }
    assert min(moved.values()) > 1e-3 and float(loss) > 0
    still = [
        np.array_equal(a, b) for a, b in zip(*map(encoder_leaves, (drafter, draft)), strict=True)
    ]
    assert all(still) if shared else not any(still)

    another = learner_of(draft, **options)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", another.init())
    resumed, again = step(another, restored)
    assert again == loss
    jax.tree.map(np.testing.assert_array_equal, last, resumed)


def heads_of(model):
    """The matrices of a trimmed head, by name."""
    return [(name, part["weight"]) for name, part in model.params.head.items()]


def encoder_leaves(model):
    return jax.tree.leaves(model.lm.encoder.params(model.params))


@pytest.mark.slow
def test_what_is_gathered_is_what_the_target_finds_most_probable():
    learner = learner_of(positions="all", top_k=VOCAB, max_new_tokens=20)
    state, prompts = learner.init(), prompts_of(0)
    for number in (0, 1, 2):  # nine rows, of which six have room
        out, state, _ = batch(learner, state, number, num_samples=1)
    prompts, rows = prompts_of(2), (np.arange(3) + 6) % 6
    for row, slot in enumerate(rows):
        last, buffer = (
            prompts.tokens[row, prompts.length[row] - 1],
            jax.tree.map(lambda x, s=slot: x[s], state.buffer),
        )
        assert buffer.learn.tolist() == [1.0] * NEW + [0.0] * 4
        for place, token in enumerate(out.tokens[row]):
            probs = np.zeros(VOCAB)
            probs[np.asarray(buffer.top)[place]] = np.exp(np.asarray(buffer.log_p)[place])
            np.testing.assert_allclose(probs, jax.nn.softmax(TARGET.params[last]), atol=1e-6)
            last = token


def test_positions_where_a_draft_token_was_rejected():
    """Three rounds: all of 3 accepted; 1 of 2; none of 1, where the row already ended. Tokens 0 |
    1-4 | 5 6 | .
    """
    counts = dict(num_tested=[[3, 2, 1]], num_accepted=[[3, 1, 0]], num_committed=[[4, 2, 0]])
    trace = types.SimpleNamespace(**{name: np.array(x) for name, x in counts.items()})
    out = types.SimpleNamespace(
        tokens=np.zeros((1, 9), np.int32), lengths=np.array([7]), trace=trace
    )
    assert np.flatnonzero(to_learn(out, "rejected")).tolist() == [6]
    assert np.flatnonzero(to_learn(out, "all")).tolist() == list(range(7))


def test_a_jobs_rows_are_learnt_as_a_generation_is():
    learner, prompts = learner_of(positions="all"), prompts_of(0)
    out = jaxspec.generate(TARGET, prompts, max_new_tokens=[NEW, 5, NEW])
    rows = [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]
    (whole, loss), (of_rows, same) = (
        learner.update(learner.init(), TARGET, prompts, x) for x in (out, rows)
    )
    assert loss == same
    jax.tree.map(np.testing.assert_array_equal, whole, of_rows)
    with pytest.raises(ValueError, match="got 3 prompts and 2 texts"):
        learner.update(learner.init(), TARGET, prompts, rows[:2])
    with pytest.raises(ValueError, match="do not tell where a draft token was rejected"):
        learner_of().update(learner_of().init(), TARGET, prompts, rows)


@pytest.mark.slow
@pytest.mark.parametrize(("net", "config"), [(decoder, GPT), (t5, ENCDEC)], ids=["gpt", "t5"])
def test_in_parts_as_in_one_pass(net, config, monkeypatch):
    """Reading a few positions at a time, and its gradient, against the network's own pass over the
    whole text.
    """
    lm, params = net.language_model(config), net.init(config, jax.random.key(0))
    prompt = Prompt(np.array([[3, 5, 2], [4, 9, 0]], np.int32), np.array([3, 2], np.int32))
    tokens = np.random.default_rng(0).integers(2, 17, (2, 8)).astype(np.int32)
    weight, every = (
        jax.random.normal(jax.random.key(2), (2, 8, 17)),
        jnp.broadcast_to(jnp.arange(17), (2, 8, 17)),
    )
    monkeypatch.setattr(teacher_forcing, "POSITIONS", 6)  # 3 positions of each of 2 rows: 1, 3 3 1

    rows, (source, length) = tokens, prompt[:2]
    if config is GPT:
        rows = np.zeros((2, 11), np.int32)
        for row, (read, n, new) in enumerate(zip(*prompt[:2], tokens, strict=True)):
            rows[row, : n + 8] = [*read[:n], *new]
        source, length = np.zeros((2, 0), np.int32), np.zeros(2, np.int32)
    start = prompt.length - 1 if config is GPT else (0, 0)

    def in_parts(params):
        return jnp.sum(weight * top_tokens.log_probs_of(lm, params, prompt, tokens, every))

    def in_one(params):
        logits = logits_and_labels(config)(
            params, TrainingBatch(source, length, rows, np.full(2, rows.shape[1]))
        )[0]
        return jnp.stack(
            [jax.nn.log_softmax(row[at : at + 8]) for row, at in zip(logits, start, strict=True)]
        )

    if config is GPT:
        value, gradient = jax.jit(jax.value_and_grad(in_parts))(params)
        expected, gradients = jax.jit(
            jax.value_and_grad(lambda params: jnp.sum(weight * in_one(params)))
        )(params)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradient, gradients
        )
    else:
        top, log_p = jax.jit(
            lambda params: top_tokens.most_probable(lm, params, prompt, tokens, 4)
        )(params)
        expected, places = jax.jit(lambda params: jax.lax.top_k(in_one(params), 4))(params)
        np.testing.assert_allclose(log_p, expected, rtol=1e-4)
        np.testing.assert_array_equal(top, places)


@pytest.mark.slow
def test_a_drafter_keeps_its_functions_and_its_dtypes():
    draft = Model(
        LM,
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), decoder.init(GPT, jax.random.key(0))),
    )
    for drafter in (draft, drafters.model(draft), drafters.tree(draft, (2, 1))):
        learner = learner_of(drafter, max_new_tokens=8)
        state = learner.init()
        assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
        changed = jax.tree.map(lambda x: x + 1, state.params)
        current = learner.drafter(state._replace(params=changed))
        assert {x.dtype for x in jax.tree.leaves(current.params)} == {jnp.dtype(jnp.bfloat16)}
        if drafter is not draft:
            assert current.functions is drafter.functions
            current = current.models[0]
        np.testing.assert_allclose(
            jax.tree.leaves(current.params)[0], jax.tree.leaves(draft.params)[0] + 1, rtol=1e-2
        )
        assert current.lm is draft.lm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(positions="accepted"), "positions is 'accepted': expected one of rejected, all"),
        (dict(divergence="hellinger"), "divergence is 'hellinger': expected .* total_variation"),
        (dict(rows=9), "size is 6 and rows 9: expected a buffer of at least"),
        (dict(steps=0), "steps is 0: expected at least 1"),
        (dict(drafter=drafters.prompt_lookup()), "not one draft model: expected a jaxspec.Model"),
        (dict(drafter=drafters.cascade(DRAFT, DRAFT)), "not one draft model"),
        (
            dict(drafter=DRAFT._replace(params=jnp.zeros(2, jnp.int8))),
            "parameters of int8, .*: load it as float32",
        ),
        (
            dict(drafter=Model(LM, quantisation.quantise(decoder.init(GPT, jax.random.key(0))))),
            "of int8, .*32",
        ),
        (
            dict(drafter=DRAFT._replace(params=jnp.zeros(2, jnp.int32))),
            "parameters of int32, .*: load it as float32",
        ),
        (
            dict(drafter=Model(LM, {})),
            "18 tokens: expected at most the 16 positions of the draft",
        ),
    ],
)
def test_what_cannot_learn(options, message):
    with pytest.raises(ValueError, match=message):
        learner_of(**options)


def test_updates_that_are_refused():
    learner = learner_of(max_new_tokens=4)
    state = learner.init()
    with pytest.raises(
        ValueError,
        match="longest of 3 prompts has 2 tokens, and the longest text 16: expected at most",
    ):
        batch(learner, state, 0)
    broken = state._replace(params=state.params * jnp.nan)
    out = jaxspec.generate(TARGET, prompts_of(0), max_new_tokens=4)
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        learner.update(broken, TARGET, prompts_of(0), out)
