"""Beam search: against all sequences, a search spelt out in Python, and transformers; and the same
with any drafter.
"""

from __future__ import annotations

import importlib
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.decode import device_memory
from jaxspec.testing import table_model
from jaxspec.weights.loading import shipped
from tests.marks import marked
from tests.small import between

VOCAB = BEAMS = 5
NEW = 14
MODES = [False, True, "never"]
PROMPTS = [[3, 1, 4], [2], [0, 0, 2, 2]]
# Texts that go through the same contexts in another order have the same score: tables look far
# enough back for none.
TARGET, OTHER = (
    table_model(jax.random.key(seed), VOCAB, order=5, sharpness=1.5) for seed in (1, 2)
)
CLOSE = between(TARGET, OTHER, 0.8)
ENCODER, ITS_DRAFT = (
    table_model(jax.random.key(seed), VOCAB, order=4, encoder=True) for seed in (3, 4)
)
COUNTED = drafters.bigram([[3, 1, 4, 0, 2, 2, 1], [0, 0, 2, 3]], TARGET, followers=2)
DRAFTERS = {
    "none": None,
    "itself": TARGET,
    "close": CLOSE,
    "another": OTHER,
    "n-gram tables": COUNTED,
}


def log_probs(target, prompt, new):
    """Return the log probabilities of the token after `new`, read off the table."""
    row = [0] * target.config.order + [*(() if target.config.encoder else prompt), *new]
    table = np.asarray(target.params, np.float64)
    if target.config.encoder:
        table = table[sum(prompt) % VOCAB]
    logits = table[tuple(row[-target.config.order :])]
    return logits - np.log(np.exp(logits).sum())


def reference(target, prompt, most, eos=(), penalty=1.0, mode=False, beams=BEAMS):
    """One prompt's hypotheses with their scores, and how many steps they took."""
    running, finished = [(0.0, ())], []
    for length in range(1, most + 1):
        candidates = [
            (s + p, x, t) for s, x in running for t, p in enumerate(log_probs(target, prompt, x))
        ]
        candidates = sorted(candidates, key=lambda c: -c[0])[: max(2, 1 + len(eos)) * beams]
        ends = [t in eos or length == most for _, _, t in candidates]
        finished += [
            (s / length**penalty, (*x, t))
            for (s, x, t), e in zip(candidates[:beams], ends, strict=False)
            if e
        ]
        finished = sorted(finished, key=lambda c: -c[0])[:beams]
        running = [(s, (*x, t)) for (s, x, t), e in zip(candidates, ends, strict=True) if not e][
            :beams
        ]
        full = len(finished) == beams
        at_best = most if mode == "never" and penalty > 0 else length
        hopeless = not running or (full and running[0][0] / at_best**penalty <= finished[-1][0])
        if hopeless or (full and mode is True):
            break
    return finished, length


def hypotheses(out, row):
    beams = zip(out.scores[row], out.tokens[row], out.lengths[row], strict=True)
    return [(float(score), tuple(tokens[:n].tolist())) for score, tokens, n in beams if n]


def check(out, row, expected):
    assert [x for _, x in hypotheses(out, row)] == [x for _, x in expected]
    np.testing.assert_allclose(
        [s for s, _ in hypotheses(out, row)], [s for s, _ in expected], rtol=1e-5
    )


@pytest.mark.parametrize(
    "drafter", [None, pytest.param(OTHER, marks=pytest.mark.slow)], ids=["plain", "speculative"]
)
def test_no_sequence_of_all_is_better(drafter):
    """With as many beams as tokens, no first token is dropped: two tokens are searched
    exhaustively.
    """
    for eos, penalty in itertools.product([(), (2,)], [0.6, 2.0]):
        options = dict(
            beams=BEAMS,
            drafter=drafter,
            eos_ids=eos,
            length_penalty=penalty,
            early_stopping="never",
        )
        out = jaxspec.beam_search(TARGET, PROMPTS, max_new_tokens=2, **options)
        for row, prompt in enumerate(PROMPTS):
            first, sequences = log_probs(TARGET, prompt, ()), []
            for a, b in itertools.product(range(VOCAB), repeat=2):
                if a in eos:
                    sequences += [(first[a], (a,))] if b == 0 else []
                else:
                    sequences.append(
                        ((first[a] + log_probs(TARGET, prompt, (a,))[b]) / 2**penalty, (a, b))
                    )
            check(out, row, sorted(sequences, key=lambda c: -c[0])[:BEAMS])


@pytest.mark.parametrize("name", marked(DRAFTERS, slow={"itself", "n-gram tables"}))
def test_hypotheses_are_the_same_with_any_drafter(name):
    passes, steps = 0, 0
    for eos, mode, penalty in [
        ((), False, 1.0),
        *itertools.product([(2,)], MODES, [0.6, 1.0, 2.0]),
    ]:
        options = dict(
            beams=BEAMS, max_new_tokens=[NEW, 9, NEW], eos_ids=eos, length_penalty=penalty
        )
        out = jaxspec.beam_search(
            TARGET, PROMPTS, drafter=DRAFTERS[name], early_stopping=mode, **options
        )
        for row, prompt in enumerate(PROMPTS):
            expected, length = reference(TARGET, prompt, [NEW, 9, NEW][row], eos, penalty, mode)
            check(out, row, expected)
            assert out.steps[row] == length
            if name in ("none", "itself"):
                # gamma + 1 steps a pass
                assert out.passes[row] == -(-(length - 1) // (1 if name == "none" else 4))
        passes, steps = passes + out.passes.sum(), steps + out.steps.sum() - len(PROMPTS)
    assert passes <= steps and (passes < 0.8 * steps or name not in ("close", "itself"))
    assert out.steps_per_pass == pytest.approx((out.steps - 1) / out.passes)


def test_a_missing_beam_ends_a_round_only_if_it_could_matter():
    """Beams 0 and 1 become 0 0 (0.54) and 1 0 (0.04). The tree has 0 0 and 0 1, and lacks 1 0."""
    search = importlib.import_module("jaxspec.decode.beam_search")
    plan = search.SearchPlan(TARGET.lm, TARGET.lm, beams=2, draft_beams=2, gamma=1, new=4)
    goal = search.Goal(jnp.array([4]), jnp.array([[-1]]), jnp.float32(1.0), jnp.int32(0))
    state = search.bookkeeping.start(1, 2, 4, None)
    state = state._replace(scores=jnp.log(jnp.array([[0.6, 0.1]])), steps=jnp.array([1]))
    state = state._replace(tokens=state.tokens.at[0, 1, 0].set(1))
    tree = search.DraftTree(jnp.array([[0, 1]]), jnp.full((1, 2), plan.retained), None)
    best = jnp.broadcast_to(jnp.arange(4), (1, 4, 4))
    first = [[0.9, 0.05, 0.03, 0.02], [0.4, 0.3, 0.2, 0.1]]
    for after_0_0, expected in (
        (
            [0.5, 0.4, 0.06, 0.04],
            [[0, 0, 0], [0, 0, 1]],
        ),  # 0.27 and 0.216: nothing after 1 0 has more than 0.04
        (
            [0.95, 0.04, 0.006, 0.004],
            [[0, 0], [1, 0]],
        ),  # 0.513 and 0.0216: a continuation of 1 0 may have more
        ([0.9, 0.074, 0.02, 0.006], [[0, 0], [1, 0]]),  # 0.486 and 0.03996, a little less than 0.04
    ):
        log_probs = jnp.log(jnp.array([[*first, after_0_0, [0.25] * 4]]))
        beams, walk = search._steps(plan, state, log_probs, best, tree, goal)
        steps = len(expected[0])
        assert beams.steps.tolist() == [steps] and beams.tokens[0, :, :steps].tolist() == expected
        # Of the nodes both last tokens are retained, and 0 0 if the search went on after it.
        assert walk.retained.tolist() == [[True, True, steps == 3, False]]


def test_random_models_find_the_hypotheses_of_plain_search():
    """Narrow drafts often lack a beam. Tables give the same logits in every pass, so scores are
    equal bit by bit.
    """
    passes, steps = 0, 0
    options = dict(beams=2, max_new_tokens=NEW, eos_ids=[2])
    for seed in range(24):
        sharpness = (0.5, 1.5, 4.0)[seed % 3]
        target, other = (
            table_model(jax.random.key(n), VOCAB, order=3, sharpness=sharpness)
            for n in (seed, seed + 99)
        )
        draft = between(target, other, (0.0, 0.6, 0.9, 1.0)[seed % 4])
        options |= dict(
            early_stopping=MODES[seed % 3], length_penalty=(0.0, 0.6, 2.0)[seed // 3 % 3]
        )
        plain = jaxspec.beam_search(target, PROMPTS, **options)
        fast = jaxspec.beam_search(
            target, PROMPTS, drafter=draft, gamma=4, draft_beams=2, **options
        )
        for name in ("tokens", "lengths", "scores", "steps"):
            np.testing.assert_array_equal(getattr(fast, name), getattr(plain, name))
        passes, steps = passes + fast.passes.sum(), steps + plain.passes.sum()
    assert passes < 0.7 * steps


@pytest.mark.parametrize(
    "drafter", [None, pytest.param(ITS_DRAFT, marks=pytest.mark.slow)], ids=["plain", "speculative"]
)
def test_an_encoder_decoder_finds_the_beams_of_plain_search(drafter):
    out = jaxspec.beam_search(
        ENCODER, PROMPTS, beams=3, drafter=drafter, max_new_tokens=NEW, eos_ids=[4]
    )
    for row, prompt in enumerate(PROMPTS):
        check(out, row, reference(ENCODER, prompt, NEW, (4,), beams=3)[0])


def test_values_compile_nothing():
    options = dict(beams=BEAMS, max_new_tokens=NEW, eos_ids=[2])
    jaxspec.beam_search(TARGET, PROMPTS, **options)
    search = importlib.import_module("jaxspec.decode.beam_search")._search
    before = search.num_programs()
    jaxspec.beam_search(
        TARGET, [[1, 1], [2, 3], [4]], length_penalty=0.3, early_stopping=True, **options
    )
    assert search.num_programs() == before


def test_records_are_plain_values():
    out = jaxspec.beam_search(TARGET, PROMPTS, beams=BEAMS, max_new_tokens=NEW, eos_ids=[2])
    records = out.records()
    assert [r["row"] for r in records] == [0] * 5 + [1] * 5 + [2] * 5
    assert [(r["score"], tuple(r["tokens"])) for r in records[:5]] == hypotheses(out, 0)
    assert {type(value) for value in records[0].values()} <= {int, float, list, str, type(None)}
    assert {(r["finish"], r["tokens"][-1] == 2) for r in records} == {
        ("eos", True),
        ("length", False),
    }
    assert out.log_probs is None and "raw_log_probs" not in records[0]


@pytest.mark.parametrize(
    "drafter", [None, pytest.param(CLOSE, marks=pytest.mark.slow)], ids=["plain", "speculative"]
)
def test_log_probs_of_hypotheses_are_the_targets(drafter):
    options = dict(
        beams=BEAMS, drafter=drafter, max_new_tokens=[NEW, 9, NEW], eos_ids=[2], length_penalty=0.6
    )
    without = jaxspec.beam_search(TARGET, PROMPTS, **options)
    out = jaxspec.beam_search(TARGET, PROMPTS, log_probs=True, **options)
    assert (out.tokens == without.tokens).all() and out.log_probs.shape == out.tokens.shape
    for record in out.records():
        tokens, row = record["tokens"], record["row"]
        expected = [
            log_probs(TARGET, PROMPTS[row], tokens[:at])[token] for at, token in enumerate(tokens)
        ]
        np.testing.assert_allclose(record["raw_log_probs"], expected, atol=1e-5)
        assert sum(expected) / len(tokens) ** 0.6 == pytest.approx(record["score"], abs=1e-5)
        assert not out.log_probs[row, record["rank"], len(tokens) :].any()


@pytest.mark.parametrize(
    ("name", "top"),
    marked(
        itertools.product(("none", "close", "n-gram tables"), (0, 2, VOCAB)),
        slow={("close", VOCAB), ("n-gram tables", 2)},
        exhaustive={("none", VOCAB), ("close", 0), ("n-gram tables", 0), ("n-gram tables", VOCAB)},
    ),
)
def test_the_best_tokens_beside_each_are_the_targets(name, top):
    """At every place of every hypothesis, also where it ends inside a round, and of prompts that
    end before others.
    """
    options = dict(
        beams=BEAMS,
        drafter=DRAFTERS[name],
        max_new_tokens=[NEW, 9, NEW],
        eos_ids=[2],
        length_penalty=0.6,
    )
    alone = jaxspec.beam_search(TARGET, PROMPTS, log_probs=True, **options)
    out = jaxspec.beam_search(TARGET, PROMPTS, top_log_probs=top, **options)
    assert (out.tokens == alone.tokens).all() and (out.log_probs == alone.log_probs).all()
    assert (out.top_tokens is None) == (top == 0) and alone.top_log_probs is None
    for record in out.records():
        tokens, row = record["tokens"], record["row"]
        assert ("top_tokens" in record) == (top > 0)
        for at in range(len(tokens) if top else 0):
            expected = log_probs(TARGET, PROMPTS[row], tokens[:at])
            assert record["top_tokens"][at] == np.argsort(-expected)[:top].tolist()
            np.testing.assert_allclose(
                record["top_log_probs"][at], np.sort(expected)[::-1][:top], atol=1e-5
            )
        if top:
            assert not out.top_log_probs[row, record["rank"], len(tokens) :].any()


@pytest.mark.parametrize("drafter", [None, ITS_DRAFT], ids=["plain", "speculative"])
@pytest.mark.slow
def test_the_best_tokens_of_an_encoder_decoder(drafter):
    out = jaxspec.beam_search(
        ENCODER, PROMPTS, beams=3, drafter=drafter, max_new_tokens=NEW, top_log_probs=3
    )
    for record in out.records():
        for at, best in enumerate(record["top_tokens"]):
            expected = log_probs(ENCODER, PROMPTS[record["row"]], record["tokens"][:at])
            assert best == np.argsort(-expected)[:3].tolist()
            np.testing.assert_allclose(
                record["top_log_probs"][at], np.sort(expected)[::-1][:3], atol=1e-5
            )


def test_what_is_reported_is_counted_with_the_memory(monkeypatch):
    seen = list[dict[str, int]]()
    monkeypatch.setattr(device_memory, "check_memory", lambda parts, *_: seen.append(parts))
    jaxspec.beam_search(TARGET, PROMPTS, beams=2, max_new_tokens=NEW, eos_ids=[2], top_log_probs=2)
    assert seen[-1]["beams and what is reported"] > 3 * 2 * NEW * 2 * (1 + 2 * 2) * 4


CHAINS = TARGET._replace(lm=TARGET.lm._replace(select=None))
REFUSED = {
    "sampling": (dict(temperature=1.0), ValueError, "does not sample, and got temperature"),
    "a key": (dict(key=jax.random.key(0)), ValueError, "does not sample"),
    "no beams": (dict(beams=0), ValueError, "beams is 0"),
    "more than the vocabulary": (
        dict(beams=6),
        ValueError,
        "beams is 6: expected a number from 1 to 5",
    ),
    "fewer draft beams": (
        dict(drafter=OTHER, draft_beams=3),
        ValueError,
        "draft_beams is 3: expected at least 4",
    ),
    "a drafter": (dict(drafter=drafters.prompt_lookup()), TypeError, "expected a jaxspec.Model"),
    "a drafter of chains": (
        dict(drafter=OTHER._replace(lm=CHAINS.lm)),
        ValueError,
        "the drafter takes chains only",
    ),
    "another vocabulary": (
        dict(drafter=table_model(jax.random.key(0), 4)),
        ValueError,
        "5 token ids",
    ),
    "when to stop": (dict(early_stopping="always"), ValueError, "early_stopping is 'always'"),
    "a wrong name": (dict(num_beams=2), TypeError, "it is called beams, of jaxspec[.]beam_search"),
    "a penalty": (dict(length_penalty="long"), ValueError, "length_penalty is 'long'"),
    "no number": (
        dict(length_penalty=math.nan),
        ValueError,
        "length_penalty is nan: expected a finite number",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_options_are_refused(name):
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        jaxspec.beam_search(TARGET, PROMPTS, **options)


def test_refuses_a_target_of_chains_and_logits_that_are_not_finite():
    with pytest.raises(ValueError, match="the target takes chains only"):
        jaxspec.beam_search(CHAINS, PROMPTS)
    # what follows the first prompt
    broken = TARGET._replace(params=TARGET.params.at[..., 1, 4, :].set(jnp.nan))
    with pytest.raises(FloatingPointError, match=r"prompts \[0\]"):
        jaxspec.beam_search(broken, PROMPTS, beams=BEAMS, max_new_tokens=1)


# --- networks


def peer_of(kind):
    """A random network of transformers, that is sure enough of itself that no two scores are nearly
    equal.
    """
    import torch
    import transformers

    ids = dict(eos_token_id=1, pad_token_id=0, bos_token_id=2, tie_word_embeddings=False)
    if kind == "gpt":
        config = transformers.GPT2Config(
            vocab_size=24, n_embd=16, n_layer=2, n_head=2, n_positions=32, **ids
        )
        peer = transformers.GPT2LMHeadModel(config).eval()
    elif kind == "a sliding window":
        sizes = dict(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
        sizes |= dict(
            num_key_value_heads=1, head_dim=8, sliding_window=4, max_position_embeddings=32
        )
        peer = transformers.MistralForCausalLM(
            transformers.MistralConfig(vocab_size=24, **sizes, **ids)
        ).eval()
    else:
        sizes = dict(d_model=16, d_kv=8, d_ff=32, num_heads=2, decoder_start_token_id=0)
        # a second layer has biases of its own
        sizes |= dict(vocab_size=24, num_layers=2 if kind == "umt5" else 1)
        name = kind.upper()
        config = getattr(transformers, f"{name}Config")(
            feed_forward_proj="gated-gelu", **sizes, **ids
        )
        peer = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.4)
    return peer


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "beams"),
    marked(
        [
            ("t5", 4),
            ("umt5", 6),
            ("gpt", 2),
            ("gpt", 4),
            ("gpt", 8),
            ("t5", 2),
            ("t5", 8),
            ("a sliding window", 3),
        ],
        exhaustive={("gpt", 2), ("gpt", 4), ("t5", 2), ("t5", 8)},
    ),
)
def test_hypotheses_and_scores_are_transformers(kind, beams, tmp_path):
    import torch

    peer = peer_of(kind)
    peer.save_pretrained(tmp_path)
    target, prompts = jaxspec.load(tmp_path), np.array([[5, 6, 7, 8], [9, 3, 3, 11]])
    for penalty, mode in [(0.6, False), (1.0, True), (2.0, "never")]:
        options = dict(length_penalty=penalty, early_stopping=mode)
        with torch.no_grad():
            theirs = peer.generate(
                torch.tensor(prompts), attention_mask=torch.ones(prompts.shape, dtype=torch.long), num_beams=beams,
                num_return_sequences=beams, max_new_tokens=NEW, do_sample=False, output_scores=True,
                return_dict_in_generate=True, **options,
            )  # fmt: skip
        ours = jaxspec.beam_search(
            target, prompts, beams=beams, max_new_tokens=NEW, eos_ids=[1], **options
        )
        prompt_length = 1 if "t5" in kind else prompts.shape[1]
        sequences = theirs.sequences[:, prompt_length:].reshape(len(prompts), beams, -1).tolist()
        for row in range(len(prompts)):
            texts = [list(x) for _, x in hypotheses(ours, row)]
            assert texts == [x[: x.index(1) + 1] if 1 in x else x for x in sequences[row]]
        np.testing.assert_allclose(
            ours.scores.ravel(), theirs.sequences_scores.numpy(), rtol=2e-5, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.skipif("debian-t5-small" not in shipped(), reason="the checkpoints are not here")
def test_the_shipped_pair_finds_the_same_in_fewer_passes():
    target, draft = jaxspec.load("debian-t5-base"), jaxspec.load("debian-t5-small")
    prompts = [
        "translate English to German: This package contains the shared library.",
        "translate English to German: A mail client",
    ]
    options = dict(beams=4, max_new_tokens=16)
    plain = jaxspec.beam_search(target, prompts, **options)
    fast = jaxspec.beam_search(target, prompts, drafter=draft, **options)
    assert fast.texts == plain.texts
    np.testing.assert_allclose(fast.scores, plain.scores, rtol=1e-4)
    assert fast.passes.sum() < plain.passes.sum()
