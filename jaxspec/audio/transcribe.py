"""`transcribe`: sound in, text out."""

from __future__ import annotations

import itertools
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import optional_imports
from jaxspec.audio import features, rules, sound_files, windows
from jaxspec.audio.windows import Segment
from jaxspec.core import (
    LanguageModel,
    Model,
    Params,
    Prompt,
    Room,
    programs,
    token_ids,
)
from jaxspec.core.checks import check_model, check_type, integers, key_of, one_of
from jaxspec.decode import option_names
from jaxspec.decode.generate import generate
from jaxspec.decode.options import check_shared, shown
from jaxspec.decode.request import named
from jaxspec.nets.whisper import Speech, WhisperConfig, speech_of
from jaxspec.sampling.params import OPTIONS

# options of `generate` that `transcribe` takes
TAKEN = ("drafter", "gamma", "rule", "policy", "key", "logits_processors", *OPTIONS)
Sound = str | os.PathLike[str] | Float[np.ndarray, " N"]
"""The path of a .wav file, or a waveform: 16,000 samples for each second, from -1 to 1."""


class Transcript(NamedTuple):
    """The text of a sound."""

    text: str  # the whole text; empty if the model has no tokenizer
    language: str | None  # a code such as "en"; None of an English-only model
    segments: list[Segment]  # its parts, with their times
    seconds: float  # length of the sound
    rounds: int  # passes of the target, except each window's first

    @property
    def tokens(self) -> list[int]:
        """The ids of all segments, timestamps included."""
        return [token for segment in self.segments for token in segment.tokens]


@shown(TAKEN)
def transcribe(
    target: Model,
    audio: Sound | Sequence[Sound],
    *,
    language: str | None = None,
    task: str | None = None,
    timestamps: bool = True,
    batch_size: int = 16,
    max_new_tokens: int | None = None,
    **options: Any,
) -> list[Transcript]:
    """Transcribes sound with a Whisper model, faster with a `drafter`; the text stays the same.

    Sound of more than 30 seconds is read in windows, one after the other: each begins where the
    last complete segment of the one before it ends. Windows of several sounds are decoded together.
    The text matches transformers' `generate` on the same features, with the same task. No fallback
    to other temperatures, no conditioning on the previous window's text.

    Args:
        target: a Whisper model.
        audio: a path or a waveform, or several.
        language: a code such as "de", or a name such as "german". None: the one that the model's
            files name, or each sound's own, as its first window tells.
        task: "transcribe" or "translate" (to English). None: the one that the model's files name,
            or "transcribe". English-only models have no language and no task.
        timestamps: whether the text has timestamps, as longer sound needs. Without them a sound of
            at most 30 seconds is one segment, if the model keeps to it.
        batch_size: windows decoded at a time.
        max_new_tokens: most tokens of a window; None for as many as the model has positions.
        **options: options of `jaxspec.generate`, each for all sounds: drafter, gamma, rule, policy,
            key, and the `sampling.SamplingOptions` apart from patterns. A drafter that is a Model
            reads the target's encoder where their encoders are equal (distil-whisper). Each window
            of each sound has a different key.

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
    is_waveform = isinstance(audio, list | tuple) and audio and isinstance(audio[0], numbers.Real)
    is_list = isinstance(audio, list | tuple) and not is_waveform
    if not (isinstance(audio, str | os.PathLike | list | tuple) or hasattr(audio, "__array__")):
        raise TypeError(
            f"audio is of type {type(audio).__name__}: expected a path, a waveform, or a list of "
            "these"
        )
    option_names.check_names(options, [*(transcribe.__kwdefaults__ or ()), *TAKEN])
    check_shared(options, "expected one for all sounds")
    check_type(language, str | None, "language", "a code such as 'de', the same for all sounds")
    all_sounds: Any = audio if is_list else [audio]
    sounds = [Recording(number, sound) for number, sound in enumerate(all_sounds)]
    if not sounds:
        raise ValueError("got no sounds: expected at least one path or waveform")
    options["drafter"] = named(options.get("drafter"), target)
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
    decoder = _WindowDecoder(target, shared, batch_size, options)
    waiting = iter(recordings)
    active = list[_Sound]()
    while True:
        while len(active) < batch_size:
            recording = next(waiting, None)
            if recording is None:
                break
            try:
                active.append(decoder.opened(recording))
            except (ValueError, TypeError, OSError) as error:
                yield recording.number, error
        if not active:
            return
        for sound, window in zip(active, decoder.decoded(active), strict=True):
            frames_before = sound.left
            decoder.take(sound, window)
            advance((frames_before - max(0, sound.left)) * features.HOP / features.RATE)
        for sound in [sound for sound in active if sound.left <= 0]:
            active.remove(sound)
            yield sound.number, decoder.transcript(sound)


class _Window(NamedTuple):
    """A window that was decoded."""

    tokens: list[int]  # its new tokens
    rounds: int  # passes of the target after the first


class _WindowDecoder:
    """Decodes one window of several sounds at a time.

    Args:
        target: a Whisper model.
        shared: the options of transcribing.
        batch_size: windows decoded at a time.
        options: options of `generate`.
    """

    def __init__(
        self, target: Model, shared: Transcribing, batch_size: int, options: Mapping[str, Any]
    ):
        self._config, self._speech, self._language, self._task = checked(target, shared)
        self._target = target
        self._shared = shared
        self._batch_size = batch_size
        (self._end, *_) = token_ids.ends(target) or (self._config.vocab_size,)
        extra = options.get("logits_processors", ())
        if not isinstance(extra, list | tuple):
            extra = (extra,)
        processor = rules.text_rules(self._speech, self._end, shared.timestamps)
        self._processors = (processor, *extra)
        self._key = options.get("key")
        self._options = {
            name: value
            for name, value in options.items()
            if name not in ("logits_processors", "key")
        }
        # `generate` bans ids that a tokenizer lacks, as padding, and older tokenizers lack the
        # timestamps. Without a tokenizer it bans nothing.
        self._writer = target
        tokenizer = target.tokenizer
        if tokenizer is not None and token_ids.size(tokenizer) < target.lm.vocab_size:
            self._writer = target._replace(tokenizer=None)

    def opened(self, recording: Recording) -> _Sound:
        """Reads a sound and computes its features."""
        language = self._language
        if recording.language is not None:
            language = _language(self._target, self._speech, recording.language)
        return _opened(recording, self._config, language, self._shared.timestamps)

    def decoded(self, active: Sequence[_Sound]) -> list[_Window]:
        """Decodes the next window of each sound, with its language detected if it has none."""
        # If fewer sounds are left, repeat the first one's window, so that all batches have one
        # shape.
        padding = self._batch_size - len(active)
        sounds = [*active, *[active[0]] * padding]
        frames = jnp.asarray(
            np.stack([windows.window(row.features, row.first, row.width) for row in sounds])
        )  # [B, C, F]
        if self._speech.languages and any(row.language is None for row in active):
            _detect(self._target, self._speech, sounds, frames)
        beginnings = jnp.asarray(
            [
                _beginning(self._config, row.language, self._task, self._shared.timestamps)
                for row in sounds
            ],
            jnp.int32,
        )  # [B, P]
        width = beginnings.shape[1]
        limit = self._shared.max_new_tokens
        if limit is None:
            limit = self._config.max_positions - width
        generation = generate(
            self._writer,
            Prompt(beginnings, jnp.full(len(sounds), width, jnp.int32), frames),
            max_new_tokens=[limit] * len(active) + [1] * padding,
            eos_ids=self._end if self._end < self._config.vocab_size else (),
            logits_processors=self._processors,
            key=None if self._key is None else _keys(self._key, sounds),
            **self._options,
        )
        rows = zip(generation.tokens, generation.lengths, generation.stats.rounds, strict=True)
        return [
            _Window(tokens[:length].tolist(), int(rounds))
            for tokens, length, rounds in itertools.islice(rows, len(active))
        ]

    def take(self, sound: _Sound, window: _Window) -> None:
        """Adds a window's text to its sound, and moves on to the next window."""
        tokens = window.tokens
        if tokens[-1:] == [self._end]:
            tokens = tokens[:-1]
        first = None  # the timestamp of 0 s
        if self._speech.no_timestamps is not None:
            first = self._speech.no_timestamps + 1
        frames = min(sound.left, sound.width)
        segments, moved = windows.split(tokens, first, sound.first, frames)
        for segment in segments:
            sound.segments.append(segment._replace(text=self._text(segment.tokens)))
        sound.first += moved
        sound.windows += 1
        sound.rounds += window.rounds

    def transcript(self, sound: _Sound) -> Transcript:
        """Joins the segments of a sound, except those without words."""
        tokens = [token for segment in sound.segments for token in segment.tokens]
        segments = [
            segment
            for segment in sound.segments
            if any(token < self._end for token in segment.tokens)
        ]
        text = self._text(tokens)
        return Transcript(text, sound.language, segments, sound.seconds, sound.rounds)

    def _text(self, tokens: Sequence[int]) -> str:
        """Writes the words among tokens; "" without a tokenizer."""
        if self._target.tokenizer is None:
            return ""
        return self._target.tokenizer.decode([token for token in tokens if token < self._end])


def checked(
    target: Model, shared: Transcribing
) -> tuple[WhisperConfig, Speech, str | None, str | None]:
    """Checks the target and the options of transcribing.

    Returns the target's configuration and speech tokens, and the language and the task of all
    sounds. Without a language, each sound's is detected; English-only models have no task.
    """
    check_model(target, "target")
    speech = speech_of(target.config)
    if speech is None:
        raise ValueError(f"{target.name or 'the target'} reads text: expected a Whisper model")
    if shared.timestamps and speech.no_timestamps is None:
        raise ValueError(
            f"{target.name or 'the target'} has no timestamps, since its generation_config.json "
            "has no no_timestamps_token_id: put the published file there, or pass timestamps=False"
        )
    language = shared.language or (speech.language if speech.languages else None)
    if language is not None:
        language = _language(target, speech, language)
    return target.config, speech, language, _task(target, speech, shared)


def _opened(
    recording: Recording, config: WhisperConfig, language: str | None, timestamps: bool
) -> _Sound:
    """Reads a sound. Raises ValueError, TypeError or OSError with its name if that fails."""
    number = recording.number
    audio = recording.audio
    is_path = isinstance(audio, str | os.PathLike)
    name = str(audio) if is_path else f"sound {number}"
    try:
        waveform = sound_files.read(Path(audio)) if is_path else audio
        sound = _Sound(number, features.checked(waveform), config, language)
    except (ValueError, TypeError) as error:
        message = str(error)
        if name not in message:
            message = f"{name}: {message}"
        raise type(error)(message) from error
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
    key = key_of(key)

    def folded(numbers: Int[Array, " 2"]) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, numbers[0]), numbers[1])

    return jax.vmap(folded)(jnp.asarray([[row.number, row.windows] for row in rows]))
