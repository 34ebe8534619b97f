"""`jaxspec.transcribe` against transformers' `generate`, plain and drafted."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from scipy.io import wavfile

import jaxspec
from jaxspec import drafters
from jaxspec.audio import features, transcribe
from jaxspec.draft_heads import block, eagle, kind_of, medusa
from jaxspec.drafters.hidden_states import DraftHead
from jaxspec.drafters.share_encoder import difference
from jaxspec.nets import decoder
from jaxspec.nets import whisper as network
from jaxspec.weights.hf_families import whisper as hf_whisper
from tests.audio.conftest import SPECIAL, WIDTH, WORDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target(whisper):
    return jaxspec.load(whisper[1])


@pytest.fixture(scope="module")
def draft(whisper):
    return jaxspec.load(whisper[2])


@pytest.fixture(scope="module")
def plain(target, sound):
    return jaxspec.transcribe(target, sound, language="en")[0]


def theirs(peer, waveform, **options):
    """Runs transformers' long-form decoding on our features; returns its tokens and segments of
    words.
    """
    import torch

    sound = torch.tensor(features.log_mel(waveform, least=WIDTH))[None]
    with torch.no_grad():
        result = peer.generate(sound, return_segments=True, **options)
    segments = [
        (float(x["start"]), float(x["end"]), x["tokens"].tolist()) for x in result["segments"][0]
    ]
    return [segment for segment in segments if any(token < WORDS for token in segment[2])]


def check(transcript, segments):
    assert [segment.tokens for segment in transcript.segments] == [
        tokens for _, _, tokens in segments
    ]
    times = [(segment.start, segment.end) for segment in transcript.segments]
    np.testing.assert_allclose(times, [segment[:2] for segment in segments], atol=1e-6)


@pytest.mark.needs_torch
def test_many_windows_are_transcribed_as_transformers_does(whisper, plain, sound):
    check(
        plain, theirs(whisper[0], sound, return_timestamps=True, language="en", task="transcribe")
    )
    assert plain.language == "en" and plain.seconds == 24.0
    words = [token for token in plain.tokens if token < WORDS]
    assert (
        plain.text
        == "".join(chr(ord("A") + word) for word in words)
        == "".join(x.text for x in plain.segments)
    )
    assert len(plain.segments) > 8 and len(set(words)) > 4


@pytest.mark.needs_torch
@pytest.mark.parametrize("name", ["shared encoder", "prompt lookup", "tree", "the target itself"])
def test_drafts_change_rounds_and_no_text(name, target, draft, plain, sound):
    if name == "shared encoder":
        assert difference(draft, target) is None
    drafter = {
        "shared encoder": draft,
        "prompt lookup": drafters.prompt_lookup(),
        "tree": drafters.tree(draft, (2, 1)),
        "the target itself": target,
    }[name]
    drafted = jaxspec.transcribe(target, sound, drafter=drafter, gamma=3, language="en")[0]
    assert drafted._replace(rounds=0) == plain._replace(rounds=0)
    assert drafted.rounds < plain.rounds or name == "prompt lookup"


def head(name, target):
    """Makes a head of random weights: of hidden states, of two layers, or of those and the
    encoder's output.
    """
    vocab, width = target.lm.vocab_size, target.lm.inside.width
    layer = decoder.decoder_config(vocab, width, 32, layers=1, heads=2, kv_heads=1, head_dim=8)
    config = {
        "medusa": medusa.HeadsConfig(
            vocab, width, heads=3, block="feed_forward", ff_dim=16, own_head=False
        ),
        "eagle 3": eagle.EagleConfig(
            layer, width, (0, 1), own_head=True, norm_before_residual=True
        ),
        "dflash": block.BlockConfig(
            layer, width, (0, 1), block=4, mask_token=2, from_anchor=True, reads_source=True
        ),
    }[name]
    kind = kind_of(config)
    network = DraftHead(kind.head(config), kind.init(config, jax.random.key(3)))
    return kind.drafter(network, jaxspec.with_taps(target, network.network.requirements.taps), None)


@pytest.mark.needs_torch
@pytest.mark.parametrize("name", ["medusa", "eagle 3", "dflash", "early exit", "tree"])
def test_heads_draft_and_change_no_text(name, target, sound):
    if name == "early exit":
        drafter = drafters.early_exit(target, layers=1)
    elif name == "tree":
        drafter = drafters.tree(head("eagle 3", target), (2, 1))
    else:
        drafter = head(name, target)
    part = sound[: 12 * features.RATE]
    drafted, alone = (
        jaxspec.transcribe(target, part, drafter=x, gamma=3, language="en")[0]
        for x in (drafter, None)
    )
    assert drafted._replace(rounds=0) == alone._replace(rounds=0)


@pytest.mark.needs_torch
def test_several_sounds_are_each_as_by_itself(whisper, target, draft, sound, tmp_path):
    """More sounds than rows, of several lengths and one from a file; each language is detected."""
    parts = [sound[:40_000], sound[100_000:220_000], sound[50_000:60_000]]
    wavfile.write(tmp_path / "a.wav", features.RATE, parts[1])
    sounds = [parts[0], tmp_path / "a.wav", parts[2]]
    together = jaxspec.transcribe(target, sounds, drafter=draft, batch_size=2)
    for transcript, part in zip(together, parts, strict=True):
        check(transcript, theirs(whisper[0], part, return_timestamps=True, task="transcribe"))
        (alone,) = jaxspec.transcribe(target, part, batch_size=2)
        assert transcript._replace(rounds=0) == alone._replace(rounds=0) and alone.language in (
            "en",
            "de",
            "fr",
        )


@pytest.mark.needs_torch
def test_text_without_timestamps_is_that_of_transformers(whisper, target, draft, sound):
    part = sound[:40_000]
    options: dict[str, Any] = {"language": "german", "task": "translate"}
    (transcript,) = jaxspec.transcribe(target, part, timestamps=False, **options)
    segments = theirs(whisper[0], part, return_timestamps=False, **options)
    assert transcript.tokens == [token for segment in segments for token in segment[2]]
    (drafted,) = jaxspec.transcribe(target, part, timestamps=False, drafter=draft, **options)
    assert drafted.tokens == transcript.tokens and transcript.language == "de"


@pytest.mark.needs_torch
def test_sampled_text_has_a_key_for_each_window(target, sound):
    part, key = sound[: 9 * features.RATE], jax.random.key(0)
    sampled = [
        jaxspec.transcribe(target, [part, part], temperature=1.0, key=key, language="fr")
        for _ in range(2)
    ]
    assert sampled[0] == sampled[1] and sampled[0][0].tokens != sampled[0][1].tokens


@pytest.mark.needs_torch
def test_what_cannot_be_transcribed_is_refused(target, sound):
    with pytest.raises(ValueError, match="reads text: expected a Whisper"):
        jaxspec.transcribe(jaxspec.testing.table_model(jax.random.key(0), vocab=5), sound)
    with pytest.raises(ValueError, match="language is 'klingon': expected one of de, en, fr"):
        jaxspec.transcribe(target, sound, language="klingon")
    with pytest.raises(ValueError, match="task is 'sing': expected one of transcribe, translate"):
        jaxspec.transcribe(target, sound, task="sing")
    with pytest.raises(
        ValueError, match=r"sound 0 has 24\.0 s: expected at most 3 s where there are no timestamps"
    ):
        jaxspec.transcribe(target, sound, language="en", timestamps=False)
    with pytest.raises(ValueError, match="sound 1: the waveform has values that are not finite"):
        jaxspec.transcribe(target, [sound[:10], np.array([np.inf])], language="en")
    with pytest.raises(ValueError, match="batch_size is 0"):
        jaxspec.transcribe(target, sound, batch_size=0)
    with pytest.raises(ValueError, match="got no sounds"):
        jaxspec.transcribe(target, [])
    english = dataclasses.replace(target.config, speech=network.Speech(no_timestamps=47))
    english = target._replace(config=english)
    refused: list[dict[str, Any]] = [{"language": "en"}, {"task": "transcribe"}]
    for option in refused:
        with pytest.raises(ValueError, match="is English-only: leave it out"):
            jaxspec.transcribe(english, sound, **option)


def test_an_english_only_model_has_neither_language_nor_task():
    config = network.WhisperConfig(
        60, 8, 8, 1, 1, 1, start_token=5, speech=network.Speech(no_timestamps=7)
    )
    assert transcribe._beginning(config, None, None, timestamps=True) == [5]
    assert transcribe._beginning(config, None, None, timestamps=False) == [5, 7]


@pytest.mark.needs_torch
def test_text_prompts_are_refused_by_the_encoder(target):
    for refused in (
        lambda: jaxspec.generate(target, [[1, 2]], max_new_tokens=3),
        lambda: jaxspec.generate_many(target, [[1, 2]]),
        lambda: list(jaxspec.score(target, [([1], [2])])),
    ):
        with pytest.raises(
            ValueError, match=r"reads sound: call jaxspec.transcribe, or give jaxspec.generate a"
        ):
            refused()


@pytest.mark.needs_torch
def test_options_that_hold_for_no_sound_are_refused(target, sound):
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"temperature": [1.0, 0.0]},
            "temperature has a value for each of several rows: expected one for all sounds",
        ),
        ({"num_samples": 2}, "there is no option 'num_samples': expected one of"),
        ({"regex": "a"}, "there is no option 'regex'"),
        ({"language": ["en"]}, "language is of type list: expected a code such as 'de'"),
    ]
    for options, message in wrong:
        with pytest.raises((ValueError, TypeError), match=message):
            jaxspec.transcribe(target, [sound, sound], **options)
    for audio, message in (
        (None, "audio is of type NoneType: expected a path, a waveform, or a list"),
        ([None], "sound 0: the waveform is no array of numbers"),
        ([[1, 2]], "sound 0: the waveform's dtype is int64: expected floats"),
    ):
        with pytest.raises(TypeError, match=message):
            jaxspec.transcribe(target, audio, language="en")
    speech = dataclasses.replace(target.config.speech, no_timestamps=None)
    with pytest.raises(ValueError, match="has no timestamps, since its generation_config"):
        jaxspec.transcribe(
            target._replace(config=dataclasses.replace(target.config, speech=speech)), sound
        )


@pytest.mark.needs_torch
def test_files_may_name_a_language_and_a_task(target):
    """As published ones do: under their names, or as tokens of a row's beginning."""
    for table in (
        {"language": "<|de|>", "task": "translate"},
        {"forced_decoder_ids": [[1, 43], [2, 46]]},
    ):
        config = hf_whisper.read_generation(target.config, {**SPECIAL, **table})
        named = target._replace(config=config)
        assert transcribe._language(named, config.speech, config.speech.language) == "de"
        assert transcribe._task(named, config.speech, transcribe.Transcribing()) == "translate"
        again = hf_whisper.read_generation(target.config, hf_whisper.write_generation(config))
        assert again.speech == config.speech
