"""Tables that say nothing where they would back off: against counts in lists, and in front of another drafter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.base import Law, Prompt
from jaxspec.cli import named
from jaxspec.drafters import abstaining, argmax, first_of
from jaxspec.testing import table_model
from jaxspec.weights import orbax

VOCAB = 6
TARGET = table_model(jax.random.key(3), VOCAB, sharpness=2.0)
TEXTS = [[1, 2, 3, 1, 2, 3, 4, 1], [4, 1, 2, 0, 4, 1], [3, 3, 1]]
TABLES = drafters.ngram(TEXTS, TARGET, order=3)
ROWS = [[5, 1, 2], [0, 3, 3], [2, 0], [4], [5, 4], [1, 5], [2, 1]]


def by_counting(row, gamma, least, texts=TEXTS, order=3):
    """The most frequent continuation, as long as a context of `least` tokens has one."""
    row, guesses = list(row), []
    for _ in range(gamma):
        for size in range(order - 1, least - 1, -1):
            behind = [t[i + size] for t in texts for i in range(len(t) - size) if t[i : i + size] == row[-size:]]
            if behind and len(row) >= size:
                break
        else:
            break
        guesses.append(min(set(behind), key=lambda token: (-behind.count(token), token)))
        row.append(guesses[-1])
    return guesses


@pytest.mark.parametrize("least", [1, 2])
def test_what_is_proposed(least):
    drafter, gamma = argmax(abstaining(TABLES, least)), 4
    prompt = Prompt(jnp.array([row + [0] * (3 - len(row)) for row in ROWS]), jnp.array([len(row) for row in ROWS]))
    context = Prompt(jnp.pad(prompt.tokens, ((0, 0), (0, gamma))), prompt.length)
    keys = jax.random.split(jax.random.key(0), len(ROWS))

    @jax.jit
    def propose(params):
        state = drafter.init(params, prompt, gamma, None)
        return drafter.propose(keys, params, state, context, gamma, lambda logits, *_: Law(log_probs=logits))[0]

    draft = propose(drafter.params)
    got = [row[:n].tolist() for row, n in zip(draft.tokens, draft.length, strict=True)]
    assert got == [by_counting(row, gamma, least) for row in ROWS]
    assert {len(guess) for guess in got} >= {0, 4}


@pytest.mark.parametrize("front", [[], [drafters.lookup(4, 4)]], ids=["first", "second"])
def test_tables_read_what_others_drafted(front):
    """In every round the draft is that of the whole row: contexts of three tokens go back behind what is fed anew."""
    prompts = Prompt(jnp.array([[i, j] for i in range(VOCAB) for j in range(2)]), jnp.full(2 * VOCAB, 2))
    plain = jaxspec.generate(TARGET, prompts, max_new_tokens=30)
    texts = [[*prompt, *new] for prompt, new in zip(prompts.tokens.tolist(), plain.tokens.tolist(), strict=True)]
    known = [text[at : at + 5] for at, text in enumerate(texts)]
    tables = argmax(abstaining(drafters.ngram(known, TARGET, order=4)))
    drafter = first_of(*front, tables, TARGET)
    out = jaxspec.generate(TARGET, prompts, drafter=drafter, gamma=3, max_new_tokens=30)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    seen = set()
    each = zip(texts, out.stats.rounds, out.trace.draft_length, out.trace.num_accepted, strict=True)
    for text, rounds, length, accepted in each:
        said = 1
        for i in range(int(rounds)):
            row, most = text[: 2 + said], min(3, 30 - said - 1)
            repeated = bool(front) and any(row[at : at + 4] == row[-4:] for at in range(len(row) - 4))
            expected = len(by_counting(row, most, 3, known, 4)) or most
            if not repeated:  # what the look-up copies is of no interest here
                assert length[i] == expected
                seen.add(expected)
            said += int(accepted[i]) + 1
    assert seen >= {1, 2, 3}


def test_tables_of_a_checkpoint_and_the_command_line(tmp_path):
    words = [f"w{i}" for i in range(VOCAB - 2)]
    tokenizer = jaxspec.testing.word_tokenizer(["</s>", "<unk>", *words])
    tokenizer.save_pretrained(tmp_path / "words")
    about = dict(name="tri", family="ngram", dtype="float32", about={})
    orbax.save(tmp_path / "tri", TABLES.params, TABLES.config, tmp_path / "words", **about)
    folder = tmp_path / "tri"
    loaded = abstaining(jaxspec.load(str(folder)))
    assert loaded._replace(params=None, models=()) == abstaining(TABLES)._replace(params=None, models=())
    for name, made in (("abstaining", abstaining(TABLES)), ("abstaining=1", abstaining(TABLES, 1))):
        assert named.drafter(f"{name}:{folder}", "float32").propose is made.propose
        certain = named.drafter(f"lookup+argmax:{name}:{folder}+lookup", "float32")
        assert certain.propose is first_of(drafters.lookup(), argmax(made), drafters.lookup()).propose
    with pytest.raises(ValueError, match=r"'abstaining=x:tri': expected abstaining:NAME or abstaining=NUMBER:NAME"):
        named.drafter("abstaining=x:tri", "float32")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: abstaining(TARGET), "table-6 is no n-gram tables"),
        (lambda: abstaining(TABLES, 3), "least_context is 3 and the longest context counted has 2 tokens"),
        (lambda: abstaining(TABLES, 0), "least_context is 0"),
        (lambda: abstaining(drafters.unigram(TEXTS, TARGET)), "the longest context counted has 0 tokens"),
        (lambda: argmax(drafters.lookup()), "argmax got a drafter without a model"),
        (lambda: first_of(TABLES, TARGET), "drafters.abstaining around it"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
