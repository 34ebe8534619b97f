"""Vocabularies of our own: a SentencePiece-style Unigram for T5, a byte-level BPE for GPT-2.

Each is saved as a folder that `transformers.AutoTokenizer.from_pretrained` loads without a network.
"""

import json
import string
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from jaxspec.files import read_jsonl, write_text

VOCABULARY = 8192

PAD, EOS, UNK = "<pad>", "</s>", "<unk>"  # ids 0, 1, 2: T5's order
END_OF_TEXT = "<|endoftext|>"

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Byte pieces are for falling back: where a text spells "<0x41>", its six characters must win over
# the piece.
_BYTE_SCORE = -100.0
# Rarer characters are left to byte fallback: the trainer would otherwise give every one of them a
# piece.
_RARE_CHARACTER = 50


def train_tokenizers(
    data_dir: str | Path, t5_dir: str | Path, gpt_dir: str | Path, vocabulary: int = VOCABULARY
) -> tuple[Tokenizer, Tokenizer]:
    """Trains both tokenizers on the training files that `examples.build` wrote, and saves them.

    Args:
        data_dir: holds ``t5.train.jsonl`` and ``gpt.train.jsonl``.
        t5_dir: folder for the Unigram tokenizer; created if missing.
        gpt_dir: folder for the byte-level BPE tokenizer; created if missing.
        vocabulary: number of ids of each.

    Returns:
        The T5 and the GPT tokenizer.
    """
    data_dir = Path(data_dir)
    pairs = list(read_jsonl(data_dir / "t5.train.jsonl"))
    t5 = train_unigram(
        (text for row in pairs for text in (row["input"], row["output"])), vocabulary
    )
    save_tokenizer(t5, t5_dir, {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK})
    gpt = train_byte_bpe(
        (row["text"] for row in read_jsonl(data_dir / "gpt.train.jsonl")), vocabulary
    )
    save_tokenizer(
        gpt, gpt_dir, dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    )
    return t5, gpt


def train_unigram(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Trains T5's kind of tokenizer: Unigram over pieces that mark a word's start with ``▁``.

    Unlike T5's own it has a piece for each of the 256 bytes, so that no text is ever unknown.
    Encoding appends ``</s>``; runs of spaces become one, and characters take their NFKC form.

    The trainer sums its floats in no fixed order: a second run can score pieces differently in the
    fifth digit and so swap ids. Keep the tokenizer beside the checkpoint trained with it.

    Args:
        texts: every text of the training split, task prefixes included.
        vocabulary: number of ids, with ``<pad>``, ``</s>``, ``<unk>`` (0, 1, 2) and the bytes (3 to
            258).

    Raises:
        ValueError: the texts are too few for a vocabulary of this size.
    """
    texts = _without_rare_characters(list(texts))
    learned = vocabulary - 3 - len(_BYTES)
    tokenizer = _unigram_pipeline(Tokenizer(models.Unigram()))
    # The trainer stops near the size asked for, not at it: ask for more and drop the least likely
    # pieces.
    trainer = trainers.UnigramTrainer(
        vocab_size=learned + 200,
        unk_token=UNK,
        special_tokens=[UNK],
        initial_alphabet=[char for char in string.printable if char.isprintable() and char != " "],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    pieces = _most_likely(json.loads(tokenizer.to_str())["model"]["vocab"], learned)
    special = [(PAD, 0.0), (EOS, 0.0), (UNK, 0.0)]
    entries = [*special, *((piece, _BYTE_SCORE) for piece in _BYTES), *pieces]
    tokenizer = _unigram_pipeline(Tokenizer(models.Unigram(entries, unk_id=2, byte_fallback=True)))
    tokenizer.add_special_tokens([PAD, EOS, UNK])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, 1)]
    )
    return tokenizer


def _unigram_pipeline(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _without_rare_characters(texts: list[str]) -> list[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    rare = {ord(char): " " for char, count in counts.items() if count < _RARE_CHARACTER}
    return [text.translate(rare) for text in texts]


def _most_likely(vocab: list[tuple[str, float]], size: int) -> list[tuple[str, float]]:
    """Keeps single characters and the likeliest longer pieces, in the order of their scores."""
    vocab = [(piece, score) for piece, score in vocab if piece != UNK]
    if len(vocab) < size:
        raise ValueError(
            f"only {len(vocab)} pieces could be learned, {size} are needed: more text, or fewer ids"
        )
    ranked = sorted(vocab, key=lambda entry: (len(entry[0]) > 1, -entry[1]))[:size]
    return sorted(ranked, key=lambda entry: -entry[1])


def train_byte_bpe(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Trains GPT-2's kind of tokenizer: byte-pair merges over bytes, lossless for every text.

    Args:
        texts: every document of the training split.
        vocabulary: number of ids, ``<|endoftext|>`` being 0.

    Raises:
        ValueError: the texts are too few for a vocabulary of this size.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        learned = tokenizer.get_vocab_size()
        raise ValueError(
            f"only {learned} of {vocabulary} ids could be learned: more text, or fewer ids"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path, special: dict[str, str]) -> None:
    """Saves a tokenizer as ``tokenizer.json`` and ``tokenizer_config.json``, each complete or not
    at all.

    Args:
        tokenizer: the tokenizer to save.
        folder: created if missing.
        special: roles of the special tokens by the names of transformers, such as ``{"eos_token":
            "</s>"}``.
    """
    folder = Path(folder)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
        **special,
    }
    write_text(folder / "tokenizer.json", [tokenizer.to_str(pretty=True)])
    write_text(folder / "tokenizer_config.json", [json.dumps(config, indent=2, ensure_ascii=False)])
