"""`transcribe`: sound in, text out."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import optional_imports
from jaxspec.audio import features, files, rules, windows
from jaxspec.audio.windows import Segment
from jaxspec.core import (
    BoundDrafter,
    BoundPolicy,
    Drafter,
    LanguageModel,
    Model,
    Params,
    Policy,
    Prompt,
    Room,
    Rule,
    programs,
    token_ids,
)
from jaxspec.core.checks import integers, one_of
from jaxspec.decode import inputs, option_names
from jaxspec.decode.generate import generate
from jaxspec.nets.whisper import Speech, WhisperConfig, speech_of
from jaxspec.sampling import SamplingOptions
from jaxspec.sampling.params import OPTIONS

Sound = str | os.PathLike[str] | Float[np.ndarray, " N"]
"""The path of a .wav file, or a waveform: 16,000 samples for each second, from -1 to 1."""


class Transcript(NamedTuple):
    """The text of a sound."""

    text: str  # the whole text; empty if the model has no tokenizer
    language: str | None  # a code such as "en"; None of an English-only model
    segments: list[Segment]  # its parts, with their times
    seconds: float  # length of the sound
    rounds: int  # passes of the target, except the first one of each window

    @property
    def tokens(self) -> list[int]:
        """The ids of all segments, timestamps included."""
        return [token for segment in self.segments for token in segment.tokens]


def transcribe(
    target: Model,
    audio: Sound | Sequence[Sound],
    *,
    drafter: Model | Drafter | BoundDrafter | None = None,
    language: str | None = None,
    task: str | None = None,
    timestamps: bool = True,
    batch_size: int = 16,
    gamma: int = 5,
    rule: Rule | None = None,
    policy: BoundPolicy | Policy | None = None,
    max_new_tokens: int | None = None,
    key: Any = None,
    **sampling: Unpack[SamplingOptions],
) -> list[Transcript]:
    """Transcribes sound with a Whisper model, faster with a `drafter`; the text stays the same.

    Sound of more than 30 seconds is read in windows, one after the other: each begins where the
    last complete segment of the one before it ends. Windows of several sounds are decoded together.
    The text matches transformers' `generate` on the same features, with the same task. No fallback
    to other temperatures, no conditioning on the previous window's text.

    Args:
        target: a Whisper model.
        audio: a path or a waveform, or several.
        drafter: a Model, which reads the target's encoder where their encoders are equal
            (distil-whisper), or any of `jaxspec.drafters`. None for plain decoding.
        language: a code such as "de", or a name such as "german". None: the one that the model's
            files name, or each sound's own, as its first window tells.
        task: "transcribe" or "translate" (to English). None: the one that the model's files name,
            or "transcribe". English-only models have no language and no task.
        timestamps: whether the text has timestamps, as longer sound needs. Without them a sound of
            at most 30 seconds is one segment, if the model keeps to it.
        batch_size: windows decoded at a time.
        gamma, rule, policy, key: options of `jaxspec.generate`. Each window of each sound has a
            different key.
        max_new_tokens: most tokens of a window; None for as many as the model has positions.
        **sampling: temperature and the other numbers of `sampling.SamplingOptions`, each for all
            sounds; logit_bias, banned, logits_processors.

    Returns:
        A transcript for each sound, in their order.

    Raises:
        ValueError, TypeError: a target other than Whisper, or without timestamps; an unreadable
            sound; a wrong option.
        FloatingPointError: the target's logits are not finite.

    Example:
        >>> import jaxspec
        >>> from jaxspec.nets import whisper
        >>> options = dict(start_token=3, end_tokens=(19,), speech=whisper.Speech(no_timestamps=20))
        >>> config = whisper.WhisperConfig(32, 8, 8, 1, 1, 1, 4, 50, max_positions=6, **options)
        >>> model = Model(
        ...     whisper.language_model(config),
        ...     whisper.init(config, jax.random.key(0)),
        ...     config=config,
        ... )
        >>> (transcript,) = jaxspec.transcribe(
        ...     model, np.zeros(16_000), drafter=jaxspec.drafters.prompt_lookup()
        ... )
        >>> transcript.seconds, transcript.language, len(transcript.segments) > 0
        (1.0, None, True)

    Reference: Radford et al., arXiv 2212.04356; Gandhi et al., Distil-Whisper, arXiv 2311.00430.
    """
    (batch_size,) = integers(1, batch_size=batch_size)
    several = isinstance(audio, list | tuple) and not (audio and isinstance(audio[0], numbers.Real))
    if not (isinstance(audio, str | os.PathLike | list | tuple) or hasattr(audio, "__array__")):
        raise TypeError(
            f"audio is of type {type(audio).__name__}: expected a path, a waveform, or a list of "
            "these"
        )
    option_names.check_names(sampling, [*OPTIONS, "logits_processors"])
    inputs.check_shared(sampling, "expected one for all sounds")
    inputs.check_type(
        language, str | None, "language", "a code such as 'de', the same for all sounds"
    )
    all_sounds: Any = audio if several else [audio]
    sounds = [Recording(number, sound) for number, sound in enumerate(all_sounds)]
    if not sounds:
        raise ValueError("got no sounds: expected at least one path or waveform")
    options = dict(drafter=drafter, gamma=gamma, rule=rule, policy=policy, key=key) | sampling
    shared = Transcribing(language, task, timestamps, max_new_tokens)
    transcripts = dict[int, Transcript]()
    for number, result in iterate(target, sounds, min(batch_size, len(sounds)), shared, options):
        if isinstance(result, Exception):
            raise result
        transcripts[number] = result
    return [transcripts[number] for number in range(len(sounds))]


class Transcribing(NamedTuple):
    """The options of `transcribe` that `generate` does not have."""

    language: str | None = None
    task: str | None = None
    timestamps: bool = True
    max_new_tokens: int | None = None


class Recording(NamedTuple):
    """A sound to transcribe."""

    number: int  # its place in the call or the job; random keys are folded from it
    audio: Sound
    language: str | None = None  # the language spoken in it; None for the default


class _Sound:
    """A sound that is being transcribed."""

    def __init__(
        self,
        number: int,
        waveform: Float[np.ndarray, " N"],
        config: WhisperConfig,
        language: str | None,
    ):
        self.number = number
        self.seconds = len(waveform) / features.RATE
        self.language = language
        self.width = 2 * config.source_positions  # frames of a window
        self.features = features.log_mel(waveform, config.mels, self.width)
        self.first = 0  # first frame of the next window
        self.segments = list[Segment]()
        self.windows = 0
        self.rounds = 0

    @property
    def left(self) -> int:
        """Frames not read yet."""
        return self.features.shape[1] - self.first


def iterate(
    target: Model,
    recordings: Iterable[Recording],
    batch_size: int,
    shared: Transcribing,
    options: Mapping[str, Any],
    advance: Callable[[float], Any] = lambda seconds: None,
) -> Iterator[tuple[int, Transcript | Exception]]:
    """Yields the number of each sound and its transcript as soon as it is done.

    Yields the exception of a sound that cannot be read. See `transcribe`.

    Args:
        target: a Whisper model.
        recordings: paths or waveforms, with their numbers.
        batch_size: windows decoded at a time.
        shared: the options of transcribing.
        options: options of `generate`.
        advance: called with the seconds of sound that each window completed.
    """
    config, speech, language, task = checked(target, shared)
    (end, *_) = token_ids.ends(target) or (config.vocab_size,)
    processor = rules.text_rules(speech, end, shared.timestamps)
    shared_options = {
        name: value for name, value in options.items() if name not in ("logits_processors", "key")
    }
    extra = options.get("logits_processors", ())
    if not isinstance(extra, list | tuple):
        extra = (extra,)
    key = options.get("key")
    # `generate` bans ids that a tokenizer lacks, as padding, and older tokenizers lack the
    # timestamps. Without a tokenizer it bans nothing.
    has_all_ids = (
        target.tokenizer is None or token_ids.size(target.tokenizer) >= target.lm.vocab_size
    )
    if has_all_ids:
        writer = target
    else:
        writer = target._replace(tokenizer=None)
    waiting = iter(recordings)
    active = list[_Sound]()
    while True:
        while len(active) < batch_size and (recording := next(waiting, None)) is not None:
            try:
                if recording.language is None:
                    spoken = language
                else:
                    spoken = _language(target, speech, recording.language)
                active.append(_opened(recording, config, spoken, shared.timestamps))
            except (ValueError, TypeError, OSError) as error:
                yield recording.number, error
        if not active:
            return
        # If fewer sounds are left, repeat the first one's window, so that all batches have one
        # shape.
        rows = [*active, *active[:1] * (batch_size - len(active))]
        sound = jnp.asarray(
            np.stack([windows.window(row.features, row.first, row.width) for row in rows])
        )
        if speech.languages and any(row.language is None for row in active):
            _detect(target, speech, rows, sound)
        begin = jnp.asarray(
            [_beginning(config, row.language, task, shared.timestamps) for row in rows], jnp.int32
        )
        if shared.max_new_tokens is None:
            limit = config.max_positions - begin.shape[1]
        else:
            limit = shared.max_new_tokens
        generation = generate(
            writer,
            Prompt(begin, jnp.full(len(rows), begin.shape[1], jnp.int32), sound),
            max_new_tokens=[limit] * len(active) + [1] * (len(rows) - len(active)),
            eos_ids=end if end < config.vocab_size else (),
            logits_processors=(processor, *extra),
            key=key if key is None else _keys(key, rows),
            **shared_options,
        )
        for row, length, tokens, rounds in zip(
            active, generation.lengths, generation.tokens, generation.stats.rounds, strict=False
        ):
            before = row.left
            _take(row, tokens[:length].tolist(), int(rounds), end, speech, target.tokenizer)
            advance((before - max(0, row.left)) * features.HOP / features.RATE)
        for row in [row for row in active if row.left <= 0]:
            active.remove(row)
            words = [token for segment in row.segments for token in segment.tokens if token < end]
            segments = [
                segment for segment in row.segments if any(token < end for token in segment.tokens)
            ]
            text = _text(target.tokenizer, words)
            yield row.number, Transcript(text, row.language, segments, row.seconds, row.rounds)


def checked(
    target: Model, shared: Transcribing
) -> tuple[WhisperConfig, Speech, str | None, str | None]:
    """Checks the target and the options of transcribing.

    Returns the target's configuration and speech tokens, and the language and the task of all
    sounds. A language of None is detected in each sound; English-only models have no task.
    """
    inputs.check_model(target, "target")
    speech = speech_of(target.config)
    if speech is None:
        raise ValueError(f"{target.name or 'the target'} reads text: expected a Whisper model")
    if shared.timestamps and speech.no_timestamps is None:
        raise ValueError(
            f"{target.name or 'the target'} has no timestamps, since its generation_config.json "
            "has no no_timestamps_token_id: put the published file there, or pass timestamps=False"
        )
    language = shared.language or (speech.language if speech.languages else None)
    if language is None:
        language = None
    else:
        language = _language(target, speech, language)
    return target.config, speech, language, _task(target, speech, shared)


def _opened(
    recording: Recording, config: WhisperConfig, language: str | None, timestamps: bool
) -> _Sound:
    number, audio, _ = recording
    if isinstance(audio, str | os.PathLike):
        name = str(audio)
    else:
        name = f"sound {number}"
    try:
        if isinstance(audio, str | os.PathLike):
            waveform = files.read(Path(audio))
        else:
            waveform = audio
        sound = _Sound(number, features.checked(waveform), config, language)
    except (ValueError, TypeError) as error:
        raise type(error)(str(error) if name in str(error) else f"{name}: {error}") from error
    if not timestamps and sound.left > sound.width:
        longest = sound.width * features.HOP / features.RATE
        raise ValueError(
            f"{name} has {sound.seconds:.1f} s: expected at most {longest:g} s where there are no "
            "timestamps"
        )
    return sound


def _language(target: Model, speech: Speech, language: str) -> str:
    """Returns the code of a language, given as a code or an English name."""
    if not speech.languages:
        raise ValueError(
            f"language is {language!r}, and {target.name or 'the target'} is English-only: leave "
            "it out"
        )
    code = language.lower().removeprefix("<|").removesuffix("|>")
    if code not in speech.languages:
        optional_imports.import_transformers()
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        code = TO_LANGUAGE_CODE.get(code, code)
    one_of(code, "language", speech.languages)
    return code


def _task(target: Model, speech: Speech, shared: Transcribing) -> str | None:
    if speech.tasks:
        task = shared.task or speech.task or "transcribe"
        one_of(task, "task", speech.tasks)
        return task
    if shared.task is not None:
        raise ValueError(
            f"task is {shared.task!r}, and {target.name or 'the target'} is English-only: leave it "
            "out"
        )
    return None


def _beginning(
    config: WhisperConfig, language: str | None, task: str | None, timestamps: bool
) -> list[int]:
    """Returns the first tokens of a window's row: start token, language, task, no timestamps."""
    speech = config.speech
    tokens = [config.start_token]
    if language is not None:
        tokens.append(speech.language_tokens[speech.languages.index(language)])
    if task is not None:
        tokens.append(speech.task_tokens[speech.tasks.index(task)])
    if not timestamps and speech.no_timestamps is not None:
        tokens.append(speech.no_timestamps)
    return tokens


def _detect(
    target: Model, speech: Speech, rows: list[_Sound], sound: Float[Array, "B C F"]
) -> None:
    """Detects the language of sounds without one: the most probable after the start token."""
    ids = jnp.asarray(speech.language_tokens, jnp.int32)
    likely = np.asarray(_likely(target.lm, target.params, target.config.start_token, sound, ids))
    for row, index in zip(rows, likely, strict=True):
        if row.language is None:
            row.language = speech.languages[index]


@programs.jit(static_argnames=("lm", "start"))
def _likely(
    lm: LanguageModel,
    params: Params,
    start: int,
    sound: Float[Array, "B C F"],
    ids: Int[Array, " L"],
) -> Int[Array, " B"]:
    batch = sound.shape[0]
    prompt = Prompt(jnp.full((batch, 1), start, jnp.int32), jnp.ones((batch,), jnp.int32), sound)
    forward, _ = lm.prefill(params, prompt, Room(1, rewind=0))  # [B, 1, V]
    return jnp.argmax(forward.logits[:, -1, ids], axis=-1)


def _keys(key: Any, rows: list[_Sound]) -> Array:
    """Folds a key for each row from the numbers of its sound and window."""
    key = inputs.key_of(key)
    numbers = jnp.asarray([[row.number, row.windows] for row in rows])
    return jax.vmap(lambda pair: jax.random.fold_in(jax.random.fold_in(key, pair[0]), pair[1]))(
        numbers
    )


def _take(
    row: _Sound, tokens: list[int], rounds: int, end: int, speech: Speech, tokenizer: Any
) -> None:
    """Adds a window's text to its sound, and moves on to the next window."""
    if tokens[-1:] == [end]:
        tokens = tokens[:-1]
    first = None
    if speech.no_timestamps is not None:
        first = speech.no_timestamps + 1
    segments, moved = windows.split(tokens, first, row.first, min(row.left, row.width))
    for segment in segments:
        text = _text(tokenizer, [token for token in segment.tokens if token < end])
        row.segments.append(segment._replace(text=text))
    row.first += moved
    row.windows += 1
    row.rounds += rounds


def _text(tokenizer: Any, words: list[int]) -> str:
    if tokenizer is None:
        return ""
    return tokenizer.decode(words)
