"""Tables that draft nothing where they would back off: against counts in lists, and in front of
another drafter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.core import Caches, Distribution, DraftContext, DraftStart, Prompt, Room, Weights
from jaxspec.drafters import fallback, greedy, without_backoff
from jaxspec.testing import table_model
from jaxspec.weights import orbax

VOCAB = 6
TARGET = table_model(jax.random.key(3), VOCAB, sharpness=2.0)
TEXTS = [[1, 2, 3, 1, 2, 3, 4, 1], [4, 1, 2, 0, 4, 1], [3, 3, 1]]
TABLES = drafters.ngram(TEXTS, TARGET, order=3)
ROWS = [[5, 1, 2], [0, 3, 3], [2, 0], [4], [5, 4], [1, 5], [2, 1]]


def by_counting(row, gamma, least, texts=TEXTS, order=3):
    """The most frequent continuation, as long as a context of `least` tokens has one."""
    row, draft_tokens = list(row), []
    for _ in range(gamma):
        for size in range(order - 1, least - 1, -1):
            after = [
                t[i + size]
                for t in texts
                for i in range(len(t) - size)
                if t[i : i + size] == row[-size:]
            ]
            if after and len(row) >= size:
                break
        else:
            break
        draft_tokens.append(min(set(after), key=lambda token: (-after.count(token), token)))
        row.append(draft_tokens[-1])
    return draft_tokens


@pytest.mark.parametrize("least", [1, 2])
def test_only_tokens_after_known_contexts_are_proposed(least):
    drafter, gamma = greedy(without_backoff(TABLES, least)), 4
    prompt = Prompt(
        jnp.array([row + [0] * (3 - len(row)) for row in ROWS]),
        jnp.array([len(row) for row in ROWS]),
    )
    row = Prompt(jnp.pad(prompt.tokens, ((0, 0), (0, gamma))), prompt.length)
    keys, limit = jax.random.split(jax.random.key(0), len(ROWS)), jnp.full(len(ROWS), gamma)
    context = DraftContext(
        keys, row, limit, gamma, False, lambda logits, *_: Distribution(log_probs=logits)
    )

    @jax.jit
    def propose(params):
        weights = Weights(None, params)
        caches = Caches(
            None,
            drafter.functions.init(
                DraftStart(weights, prompt, Room(prompt.tokens.shape[1] + gamma, gamma), None)
            ),
        )
        return drafter.functions.propose(weights, caches, context)[0]

    draft = propose(drafter.params)
    got = [row[:n].tolist() for row, n in zip(draft.tokens, draft.length, strict=True)]
    assert got == [by_counting(row, gamma, least) for row in ROWS]
    assert {len(draft) for draft in got} >= {0, 4}


@pytest.mark.slow
@pytest.mark.parametrize("front", [[], [drafters.prompt_lookup(4, 4)]], ids=["first", "second"])
def test_tables_read_what_others_drafted(front):
    """In every round the draft is that of the whole row: contexts of three tokens go back after
    what is fed anew.
    """
    prompts = Prompt(
        jnp.array([[i, j] for i in range(VOCAB) for j in range(2)]), jnp.full(2 * VOCAB, 2)
    )
    plain = jaxspec.generate(TARGET, prompts, max_new_tokens=30)
    texts = [
        [*prompt, *new]
        for prompt, new in zip(prompts.tokens.tolist(), plain.tokens.tolist(), strict=True)
    ]
    continuations = [text[at : at + 5] for at, text in enumerate(texts)]
    tables = greedy(without_backoff(drafters.ngram(continuations, TARGET, order=4)))
    drafter = fallback(*front, tables, TARGET)
    out = jaxspec.generate(TARGET, prompts, drafter=drafter, gamma=3, max_new_tokens=30)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    seen = set()
    rows = zip(texts, out.stats.rounds, out.trace.draft_length, out.trace.num_accepted, strict=True)
    for text, rounds, length, accepted in rows:
        emitted = 1
        for i in range(int(rounds)):
            row, most = text[: 2 + emitted], min(3, 30 - emitted - 1)
            repeated = bool(front) and any(
                row[at : at + 4] == row[-4:] for at in range(len(row) - 4)
            )
            expected = len(by_counting(row, most, 3, continuations, 4)) or most
            if not repeated:  # what the look-up copies is of no interest here
                assert length[i] == expected
                seen.add(expected)
            emitted += int(accepted[i]) + 1
    assert seen >= {1, 2, 3}


def test_tables_of_a_checkpoint_and_the_command_line(tmp_path):
    words = [f"w{i}" for i in range(VOCAB - 2)]
    tokenizer = jaxspec.testing.word_tokenizer(["</s>", "<unk>", *words])
    tokenizer.save_pretrained(tmp_path / "words")
    manifest = dict(name="tri", dtype="float32", description={})
    orbax.save(tmp_path / "tri", TABLES.params, TABLES.config, tmp_path / "words", **manifest)
    folder = tmp_path / "tri"
    loaded = without_backoff(jaxspec.load(str(folder)))
    assert loaded.functions is without_backoff(TABLES).functions
    for name, built in (
        (f"without_backoff('{folder}')", without_backoff(TABLES)),
        (f"without_backoff('{folder}', 1)", without_backoff(TABLES, 1)),
    ):
        assert drafters.by_name(name, TARGET).functions is built.functions
        certain = drafters.by_name(
            f"fallback(prompt_lookup, greedy({name}), prompt_lookup)", TARGET
        )
        expected = fallback(drafters.prompt_lookup(), greedy(built), drafters.prompt_lookup())
        assert certain.functions is expected.functions


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: without_backoff(TARGET), "table-6 is no n-gram tables"),
        (
            lambda: without_backoff(TABLES, 3),
            "min_context is 3 and the longest context counted has 2 tokens",
        ),
        (lambda: without_backoff(TABLES, 0), "min_context is 0"),
        (
            lambda: without_backoff(drafters.unigram(TEXTS, TARGET)),
            "the longest context counted has 0 tokens",
        ),
        (lambda: greedy(drafters.prompt_lookup()), "greedy got a drafter without a model"),
        (lambda: fallback(TABLES, TARGET), "drafters.without_backoff around it"),
    ],
)
def test_models_that_are_no_tables_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
