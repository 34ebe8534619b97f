"""Windows and segments against transformers' long-form `generate`."""

import numpy as np
import pytest

from jaxspec.audio import windows

FIRST = 100


def random_text(rng):
    """Words, single timestamps and pairs of them, in order."""
    tokens, latest = [], FIRST
    for _ in range(rng.randint(1, 9)):
        latest += rng.randint(1, 20)
        tokens += [[latest] * rng.randint(1, 3), rng.randint(0, 50, rng.randint(1, 4)).tolist()][
            rng.randint(2)
        ]
    return tokens


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("frames", [3000, 1234])
def test_segments_are_those_of_transformers(frames):
    import torch
    from transformers.models.whisper import generation_whisper as generation

    rng = np.random.RandomState(0)
    for tokens in [random_text(rng) for _ in range(60)] + [
        [7, 8],
        [FIRST, 3, 4],
        [FIRST + 9],
        [1, 150, 150],
    ]:
        theirs, moved = generation.WhisperGenerationMixin._retrieve_segment(
            seek_sequence=torch.tensor(tokens),
            seek_outputs=[None],
            time_offset=torch.tensor([12.0], dtype=torch.float64),
            timestamp_begin=FIRST,
            seek_num_frames=torch.tensor([frames]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros((1, 3)),
        )
        segments, frames_moved = windows.split(tokens, FIRST, 1200, frames)
        assert frames_moved == int(moved)
        assert [segment.tokens for segment in segments] == [
            segment["tokens"].tolist() for segment in theirs
        ]
        times = [(float(segment["start"]), float(segment["end"])) for segment in theirs]
        np.testing.assert_allclose(
            [(segment.start, segment.end) for segment in segments], times, atol=1e-6
        )


def test_a_text_without_timestamps_is_one_segment():
    segments, moved = windows.split([5, 6, 7], None, 0, 400)
    assert [(x.start, x.end, x.tokens) for x in segments] == [
        (0.0, 4.0, [5, 6, 7])
    ] and moved == 400
    assert windows.split([], FIRST, 0, 400)[0][0].tokens == []


def test_a_text_that_breaks_the_rules_ends_its_window():
    assert windows.split([48, 48], first=48, begin=0, frames=300)[1] == 300
