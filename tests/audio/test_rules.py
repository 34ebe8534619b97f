"""The rules of Whisper's text against transformers' logits processors."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.audio.rules import text_rules
from jaxspec.core import Preceding, Prompt
from jaxspec.nets.whisper import Speech

# words 0 to 7, the end, timestamps from 13 on; rows begin with 3 tokens
VOCAB, END, BEGIN = 24, 8, 3
SPEECH = Speech(no_timestamps=12, suppressed=(1, 9), suppressed_first=(2, END), latest_start=4)


def texts():
    """New tokens as a model may write them: words, single timestamps, pairs, at every place."""
    rng = np.random.RandomState(0)
    rows = [
        [13, 2, 3, 15, 15, 4],
        [14, 5, 16],
        [13, 4, 20, 20, 7, 22],
        [6, 7],
        [15, 15],
        [13, 23, 23],
        [],
    ]
    return [rng.randint(10, 13, BEGIN).tolist() + row for row in rows]


def expected(row, scores, timestamps):
    """What transformers makes of the scores after a whole row."""
    import torch
    import transformers

    process = transformers.generation.logits_process
    config = transformers.GenerationConfig(eos_token_id=END)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = 12, SPEECH.latest_start
    chain = [
        process.SuppressTokensAtBeginLogitsProcessor(list(SPEECH.suppressed_first), BEGIN),
        process.SuppressTokensLogitsProcessor(list(SPEECH.suppressed)),
        *([process.WhisperTimeStampLogitsProcessor(config, BEGIN)] if timestamps else []),
    ]
    ids, scores = torch.tensor([row]), torch.tensor(np.asarray(scores)[None])
    for step in chain:
        scores = step(ids, scores)
    return scores[0].numpy()


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("timestamps", [True, False])
@pytest.mark.parametrize("spread", [0.5, 4.0])  # timestamps together beat any word, or rarely
def test_logits_are_those_of_transformers(timestamps, spread):
    rules, rng = text_rules(SPEECH, END, timestamps), np.random.RandomState(1)
    rows = texts()
    width = max(map(len, rows))
    tokens = np.array([row + [0] * (width - len(row)) for row in rows])
    prompt = Prompt(jnp.asarray(tokens), jnp.array([len(row) for row in rows]))
    scores = rng.normal(0, spread, (len(rows), 1, VOCAB)).astype(np.float32)
    ours = rules(None, jnp.asarray(scores), Preceding(prompt, jnp.full(len(rows), BEGIN)))
    theirs = np.stack(
        [expected(row, x[0], timestamps) for row, x in zip(rows, scores, strict=True)]
    )
    np.testing.assert_array_equal(ours[:, 0], theirs)


@pytest.mark.needs_torch
@pytest.mark.slow
def test_each_draft_token_is_processed_after_those_before_it():
    """Drafted after the row [begin 13 2]: timestamps, a pair of them and words, in one pass of four
    positions.
    """
    rules, rng = text_rules(SPEECH, END, True), np.random.RandomState(2)
    committed = [10, 11, 10, 13, 2]
    for drafted in ([15, 15, 4], [3, 16, 8], [14, 9, 14]):
        scores = rng.normal(size=(1, 4, VOCAB)).astype(np.float32)
        preceding = Preceding(
            Prompt(jnp.array([committed]), jnp.array([5])),
            jnp.array([BEGIN]),
            jnp.array([drafted]),
            jnp.tri(4, 3, -1)[None] > 0,
        )
        ours = rules(None, jnp.asarray(scores), preceding)
        theirs = [expected(committed + drafted[:n], scores[0, n], True) for n in range(4)]
        np.testing.assert_array_equal(ours[0], np.stack(theirs))


def test_memory_of_the_committed_row_is_that_of_the_row_read_anew():
    rules = text_rules(SPEECH, END, True)
    assert rules.init is not None
    row, start = jnp.array([[10, 13, 2, 15, 15, 4]]), jnp.array([1])
    memory = rules.init(None, Prompt(row, jnp.array([1])), start, VOCAB)
    carried = rules.commit(None, memory, row[:, 1:], jnp.array([4]))
    anew = rules.init(None, Prompt(row, jnp.array([5])), start, VOCAB)
    assert [x.tolist() for x in carried] == [x.tolist() for x in anew]
    assert [x.dtype for x in carried] == [x.dtype for x in memory]
