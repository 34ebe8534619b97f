"""alpha against its definition, position by position, on models whose distributions are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import rules, sampling
from jaxspec.analysis import acceptance
from jaxspec.analysis.acceptance import Acceptance, conditional
from jaxspec.core import Model, Prompt
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder, t5
from jaxspec.testing import table_model, table_model_from
from jaxspec.testing.tables import plain_distribution
from tests.small import tiny_gpt, tiny_t5

VOCAB = 6
PROMPT = Prompt(
    jnp.array([[3, 1, 2], [2, 0, 0], [5, 4, 0]], jnp.int32), jnp.array([3, 1, 2], jnp.int32)
)
TARGET = table_model(jax.random.key(1), VOCAB)
DRAFT = table_model(jax.random.key(2), VOCAB)


def measure(target, drafter, prompt, *, batch=16, advance=lambda rows: None, **options):
    """alpha of a pair on prompts."""
    return acceptance.measure(
        prepare(target, prompt, drafter=drafter, **options), batch=batch, advance=advance
    )


class Words:
    """The parts of a tokenizer that decoding needs: one id ends a row, the last two ids pad the
    vocabulary.
    """

    eos_token_id, added_tokens_decoder = 3, {}

    def __len__(self) -> int:
        return VOCAB - 2

    def get_vocab(self) -> dict[str, int]:
        return {f"w{i}": i for i in range(len(self))}

    def convert_ids_to_tokens(self, ids) -> list[str]:
        return [f"w{i}" for i in ids]

    def decode(self, tokens, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


def distribution_after(
    model: Model, row: list[int], temperature: float, top_k: int | None = None
) -> np.ndarray:
    """The warped distribution of what follows a row (order 2), from the table itself, in
    float64.
    """
    logits = np.asarray(model.params, np.float64)[row[-2] if len(row) > 1 else 0, row[-1]]
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    logits = logits / temperature
    if top_k is not None:
        logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
    probs = np.exp(logits - logits.max())
    return probs / probs.sum()


def by_definition(
    temperature: float, top_k: int | None, steps: int, key
) -> tuple[list[float], int]:
    """Row sums of sum_x min(p, q) over the text that plain decoding gives, and the number of
    positions.
    """
    options = dict(temperature=temperature, top_k=top_k, max_new_tokens=steps, key=key)
    text = jaxspec.generate(TARGET, PROMPT, **options)
    sums = []
    for row, length in enumerate(PROMPT.length.tolist()):
        seen = PROMPT.tokens[row, :length].tolist()
        total = 0.0
        for token in text.tokens[row, : text.lengths[row]].tolist():
            p, q = (
                distribution_after(model, seen, temperature, top_k) for model in (TARGET, DRAFT)
            )
            total += np.minimum(p, q).sum()
            seen.append(token)
        sums.append(total)
    return sums, int(text.lengths.sum())


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, None), (1.0, None), (0.7, 3)])
def test_alpha_is_the_mean_overlap_of_the_two_distributions(temperature, top_k):
    key = jax.random.key(5)
    options = dict(temperature=temperature, top_k=top_k, max_new_tokens=20, key=key)
    measured = measure(TARGET, DRAFT, PROMPT, **options)
    sums, positions = by_definition(temperature, top_k, 20, key)
    assert measured.positions == positions == 60
    np.testing.assert_allclose(measured.overlaps.sum(axis=1), sums, rtol=1e-5)
    assert measured.alpha == pytest.approx(sum(sums) / positions, rel=1e-5)
    assert 0.05 < measured.alpha < 0.95
    low, high = measured.interval
    # Student's distribution of three rows
    ends = measured.alpha + np.array([-1, 1]) * 4.302653 * measured.stderr
    assert (low, high) == pytest.approx(tuple(np.clip(ends, 0, 1))) and low < measured.alpha < high


def test_one_token_is_measured_on_prefill_alone():
    measured = measure(
        TARGET, DRAFT, PROMPT, temperature=1.0, max_new_tokens=1, key=jax.random.key(0)
    )
    rows = [
        PROMPT.tokens[row, :length].tolist() for row, length in enumerate(PROMPT.length.tolist())
    ]
    expected = [
        np.minimum(distribution_after(TARGET, row, 1.0), distribution_after(DRAFT, row, 1.0)).sum()
        for row in rows
    ]
    np.testing.assert_allclose(measured.overlaps.sum(axis=1), expected, rtol=1e-5)


@pytest.mark.slow
def test_alpha_is_what_speculative_sampling_accepts():
    """With one draft token a round every draft token has a trial, so the share accepted is alpha,
    within the noise.
    """
    rows = 64
    prompt = Prompt(jnp.tile(PROMPT.tokens[:1], (rows, 1)), jnp.tile(PROMPT.length[:1], rows))
    options = dict(temperature=1.0, max_new_tokens=48)
    out = jaxspec.generate(TARGET, prompt, drafter=DRAFT, gamma=1, key=jax.random.key(1), **options)
    share = out.stats.accepted.sum() / out.stats.drafted.sum()
    measured = measure(TARGET, DRAFT, prompt, key=jax.random.key(2), batch=rows, **options)
    assert abs(share - measured.alpha) < 0.05
    assert measured.stderr < 0.01


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_equals_its_target(temperature):
    measured = measure(
        TARGET, TARGET, PROMPT, temperature=temperature, max_new_tokens=12, key=jax.random.key(0)
    )
    assert measured.alpha == pytest.approx(1.0, abs=1e-6)
    assert measured.stderr < 1e-6


def test_distributions_without_common_support():
    even, odd = (table_model_from(jnp.where(jnp.arange(4) % 2 == r, 0.0, -jnp.inf)) for r in (0, 1))
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    measured = measure(even, odd, prompt, temperature=1.0, max_new_tokens=4, key=jax.random.key(0))
    assert measured.alpha == 0.0


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_batch():
    options = dict(temperature=1.0, max_new_tokens=10, key=jax.random.key(3))
    all_at_once, one_by_one = (
        measure(TARGET, DRAFT, PROMPT, batch=batch, **options) for batch in (16, 2)
    )
    np.testing.assert_allclose(
        all_at_once.overlaps.sum(axis=1), one_by_one.overlaps.sum(axis=1), rtol=1e-6
    )
    np.testing.assert_array_equal(all_at_once.counts, one_by_one.counts)


def test_all_batches_share_one_program():
    target, seen = table_model(jax.random.key(1), VOCAB + 1), []
    lm = target.lm

    def prefill(params, prompt, room):
        seen.append(prompt.tokens.shape)
        return lm.prefill(params, prompt, room)

    counting = target._replace(lm=lm._replace(prefill=prefill))
    prompt = Prompt(jnp.ones((7, 2), jnp.int32), jnp.full(7, 2))
    rows_done = []
    draft = table_model(jax.random.key(2), VOCAB + 1)
    measured = measure(counting, draft, prompt, max_new_tokens=4, batch=3, advance=rows_done.append)
    assert measured.positions == 28 and rows_done == [3, 3, 1]
    assert len(seen) == 2  # generation, and the teacher-forced pass: each traced once


def test_positions_after_an_end_token_do_not_count_and_padded_ids_have_no_mass():
    target, draft = TARGET._replace(tokenizer=Words()), DRAFT._replace(tokenizer=Words())
    options = dict(temperature=1.0, max_new_tokens=16, key=jax.random.key(7))
    text = jaxspec.generate(target, PROMPT, **options)
    assert text.lengths.min() < 16  # some row ends early
    measured = measure(target, draft, PROMPT, **options)
    np.testing.assert_array_equal(measured.counts, text.lengths)
    real = slice(0, VOCAB - 2)
    for row, length in enumerate(PROMPT.length.tolist()):
        seen, total = PROMPT.tokens[row, :length].tolist(), 0.0
        for token in text.tokens[row, : text.lengths[row]].tolist():
            p, q = (distribution_after(model, seen, 1.0)[real] for model in (target, draft))
            total += np.minimum(p / p.sum(), q / q.sum()).sum()
            seen.append(token)
        assert measured.overlaps[row].sum() == pytest.approx(total, rel=1e-5)


def test_a_drafter_with_fewer_ids():
    """Ids that the drafter lacks have q = 0 and read as its last one."""
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.5, 0.5])
    target, draft = (table_model_from(jnp.log(jnp.asarray(x, jnp.float32))) for x in (p, q))

    class Two(Words):
        def __len__(self):
            return 2

    class Four(Words):
        def __len__(self):
            return 4

    target, draft = target._replace(tokenizer=Four()), draft._replace(tokenizer=Two())
    prompt = Prompt(jnp.array([[2, 3]], jnp.int32), jnp.array([2], jnp.int32))
    measured = measure(
        target, draft, prompt, temperature=1.0, max_new_tokens=3, key=jax.random.key(0)
    )
    assert measured.alpha == pytest.approx(0.1 + 0.2, rel=1e-5)


@pytest.mark.slow
def test_teacher_forcing_is_the_distribution_of_plain_sampling():
    """The product of the teacher-forced distributions along a text is the text's probability."""
    tokens = jnp.array([[4, 2, 0]], jnp.int32)
    prompt = Prompt(jnp.array([[3, 1]], jnp.int32), jnp.array([2], jnp.int32))
    logits = acceptance.teacher_forced(TARGET.lm, TARGET.params, prompt, tokens)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
    at_1 = sampling.SamplingParams(jnp.ones(1))
    distribution = plain_distribution(TARGET, prompt, sampling.at_temperature(), at_1, steps=3)
    assert float(jnp.exp(picked.sum())) == pytest.approx(distribution[4, 2, 0], rel=1e-5)


T5 = tiny_t5(11)
GPT = tiny_gpt(11)


@pytest.mark.slow
@pytest.mark.parametrize(("net", "config"), [(t5, T5), (decoder, GPT)], ids=["t5", "gpt"])
def test_alpha_of_a_network_with_itself_is_1_and_with_another_less(net, config):
    init = jax.jit(net.init, static_argnums=0)
    target, draft = (
        Model(net.language_model(config), init(config, jax.random.key(i))) for i in (0, 1)
    )
    options = dict(temperature=1.0, max_new_tokens=6, key=jax.random.key(0))
    assert measure(target, target, PROMPT, **options).alpha == pytest.approx(1.0, abs=1e-5)
    assert 0.0 < measure(target, draft, PROMPT, **options).alpha < 1.0


def test_standard_error_against_the_spread_of_repetitions():
    random, rows, alphas, errors, covered = np.random.default_rng(0), 50, [], [], 0
    for _ in range(400):
        counts = random.integers(1, 40, rows)
        overlaps = np.where(np.arange(40) < counts[:, None], random.beta(4, 2, rows)[:, None], 0.0)
        measured = Acceptance(overlaps, counts)  # positions of a row go together
        alphas.append(measured.alpha)
        errors.append(measured.stderr)
        covered += measured.interval[0] <= 4 / (4 + 2) <= measured.interval[1]
    assert np.mean(errors) == pytest.approx(np.std(alphas), rel=0.1)
    assert 0.91 < covered / 400 < 0.98  # of 95% intervals


def test_standard_error_of_a_single_row_is_unknown():
    single = Acceptance(np.array([[0.5, 1.0]]), np.array([2]))
    assert np.isnan(single.stderr) and np.isnan(single.interval).all()
    assert (single.rate.value, single.rate.count) == (0.75, 2)


@pytest.mark.slow
def test_alpha_by_position_of_the_text_is_over_the_rows_that_reach_it():
    target, draft = TARGET._replace(tokenizer=Words()), DRAFT._replace(tokenizer=Words())
    measured = measure(
        target, draft, PROMPT, temperature=1.0, max_new_tokens=16, key=jax.random.key(7), batch=1
    )
    # rows end at different positions, and batches have other widths
    assert len(set(measured.counts.tolist())) > 1
    assert len(measured.by_position) == measured.counts.max() and measured.overlaps.shape == (3, 16)
    assert [rate.count for rate in measured.by_position] == [
        (measured.counts > t).sum() for t in range(measured.counts.max())
    ]
    assert sum(rate.value * rate.count for rate in measured.by_position) == pytest.approx(
        measured.overlaps.sum()
    )
    real, rows = (
        slice(0, VOCAB - 2),
        [PROMPT.tokens[row, :n].tolist() for row, n in enumerate(PROMPT.length.tolist())],
    )
    distributions = [
        [distribution_after(model, row, 1.0)[real] for model in (TARGET, DRAFT)] for row in rows
    ]
    first = [np.minimum(p / p.sum(), q / q.sum()).sum() for p, q in distributions]
    assert measured.by_position[0].value == pytest.approx(np.mean(first), rel=1e-5)


# Draft tokens are judged with their real distributions, and a text has one distribution at every
# position: by hand, 0.2 + 0.3 + 0.2.
ALIKE = [
    table_model_from(jnp.log(jnp.array(distribution)))
    for distribution in ([0.5, 0.3, 0.2], [0.2, 0.6, 0.2])
]


@pytest.mark.slow
def test_conditional_by_draft_token_is_alpha_where_draft_tokens_are_independent():
    rows = 256
    prompt = Prompt(jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32))
    options = dict(gamma=4, temperature=1.0, max_new_tokens=32, key=jax.random.key(3))
    out = jaxspec.generate(ALIKE[0], prompt, drafter=ALIKE[1], **options)
    rates = conditional(out.trace)
    assert len(rates.by_draft_token) == 4
    for rate in (rates.overall, *rates.by_draft_token):
        assert abs(rate.value - 0.7) < 4 * rate.stderr < 0.1
    share = out.stats.accepted.sum() / out.stats.drafted.sum()
    assert share < 0.55  # draft tokens after a rejection count as drafted, and never had a trial
    tested = rates.tested.sum(axis=0)
    assert (np.diff(tested) < 0).all() and rates.accepted[:, :3].sum(axis=0) == pytest.approx(
        tested[1:], rel=0.05
    )


def test_conditional_counts_what_each_round_tested_and_no_draft_token_after_the_end_of_a_text():
    """Row 0 rejects the second of 3, accepts 3 of 3, and ends at the first of 2 accepted; row 1
    drafts none, then 1.
    """
    draft = np.zeros((2, 4, 3), np.int32)
    length = np.array([[3, 3, 3, 0], [0, 1, 0, 0]])
    accepted, emitted = (
        np.array([[1, 3, 2, 0], [0, 0, 0, 0]]),
        np.array([[2, 4, 1, 0], [1, 1, 0, 0]]),
    )
    trace = loop.Trace(
        draft, length, accepted, emitted, num_tested=np.minimum(accepted + 1, length)
    )
    rates = conditional(trace)
    assert rates.tested.tolist() == [[3, 2, 1], [1, 0, 0]] and rates.accepted.tolist() == [
        [3, 1, 1],
        [0, 0, 0],
    ]
    assert rates.overall.value == 5 / 7 and [rate.value for rate in rates.by_draft_token] == [
        3 / 4,
        1 / 2,
        1.0,
    ]
    twice = conditional(trace, trace)
    assert twice.first(2).tested.tolist() == rates.tested.tolist() and len(twice.tested) == 4


@pytest.mark.slow
def test_conditional_of_texts_that_end():
    target, draft = TARGET._replace(tokenizer=Words()), DRAFT._replace(tokenizer=Words())
    options = dict(gamma=3, temperature=1.0, max_new_tokens=32, key=jax.random.key(7))
    out = jaxspec.generate(target, PROMPT, drafter=draft, **options)
    rates = conditional(out.trace)
    assert rates.accepted.sum(axis=1).tolist() == out.stats.accepted.tolist()
    rounds = [
        jaxspec.trace.of_row(out.tokens[row, :n], out.trace, row)
        for row, n in enumerate(out.lengths)
    ]
    rejected = [sum(len(jaxspec.trace.judge(step).rejected) for step in steps) for steps in rounds]
    assert (rates.tested - rates.accepted).sum(axis=1).tolist() == rejected


def test_conditional_of_no_draft_tokens():
    out = jaxspec.generate(TARGET, PROMPT, max_new_tokens=3)
    assert conditional(out.trace).by_draft_token == [] and np.isnan(
        conditional(out.trace).overall.value
    )


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="drafter is no model: expected"):
        measure(TARGET, jaxspec.drafters.greedy(DRAFT), PROMPT)
    with pytest.raises(TypeError, match="drafter is of type NoneType"):
        measure(TARGET, None, PROMPT)
    with pytest.raises(ValueError, match="key is required"):
        measure(TARGET, DRAFT, PROMPT, temperature=1.0)
    with pytest.raises(ValueError, match="batch is 0"):
        measure(TARGET, DRAFT, PROMPT, batch=0)
    with pytest.raises(ValueError, match=r"6 token ids and the drafter \(table-5\) 5"):
        measure(TARGET, table_model(jax.random.key(0), 5), PROMPT)


def test_a_model_is_known_however_it_drafts():
    """A rule that rewards shared noise makes another drafter of the model."""
    assert (
        measure(TARGET, DRAFT, PROMPT, rule=rules.coupled()).alpha
        == measure(TARGET, DRAFT, PROMPT).alpha
    )


def test_several_samples_of_a_prompt_are_not_measured():
    model = table_model(jax.random.key(1), vocab=5)
    prompt = Prompt(jnp.array([[3, 1]]), jnp.array([2]))
    prepared = prepare(
        model, prompt, drafter=model, temperature=1.0, key=jax.random.key(0), num_samples=2
    )
    with pytest.raises(
        ValueError,
        match=r"the generation has num_samples=2: measure one .* prepared.replace\(num_samples=1\)",
    ):
        acceptance.measure(prepared)
