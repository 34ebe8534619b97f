"""A tiny Whisper of transformers with random weights, its folder, and a drafter with its
encoder.
"""

import numpy as np
import pytest

from jaxspec.audio.features import HOP, RATE

WIDTH = 300  # frames of a window: 3 seconds
WORDS, STAMPS = 40, 48  # ids of words are below the first; the first timestamp
SPECIAL = {
    "lang_to_id": {"<|en|>": 42, "<|de|>": 43, "<|fr|>": 44},
    "task_to_id": {"transcribe": 45, "translate": 46},
    "no_timestamps_token_id": STAMPS - 1,
    "max_initial_timestamp_index": 20,
    "suppress_tokens": [3, 5],
    "begin_suppress_tokens": [7, WORDS],
    "is_multilingual": True,
    "max_length": 40,
    "decoder_start_token_id": 41,
}


def peer(seed: int, decoder_layers: int):
    """Makes a model: words, their end, the start, languages, tasks, and timestamps of 3 seconds."""
    import torch
    import transformers

    sizes = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")}
    tokens = {
        "decoder_start_token_id": 41,
        "pad_token_id": WORDS,
        "bos_token_id": WORDS,
        "eos_token_id": WORDS,
    }
    config = transformers.WhisperConfig(
        vocab_size=STAMPS + WIDTH // 2 + 1,
        d_model=32,
        encoder_layers=1,
        decoder_layers=decoder_layers,
        max_source_positions=WIDTH // 2,
        max_target_positions=SPECIAL["max_length"],
        **sizes,
        **tokens,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Cross-attention is strong, so that the text depends on the sound; norms stay as they
            # are.
            scale = 0.6 if "encoder_attn" in name else 0.3
            if parameter.ndim > 1:
                parameter.normal_(0, scale, generator=generator)
    for name, value in SPECIAL.items():
        setattr(model.generation_config, name, value)
    return model


def tokenizer(words: int = WORDS):
    """Makes a tokenizer of one letter a word."""
    import tokenizers
    import transformers

    letters = [chr(ord("A") + i) for i in range(words)]
    made_of_letters = tokenizers.Tokenizer(
        tokenizers.models.BPE({x: i for i, x in enumerate(letters)}, [])
    )
    made_of_letters.decoder = tokenizers.decoders.ByteLevel()
    more = [
        "<|endoftext|>",
        "<|startoftranscript|>",
        "<|en|>",
        "<|de|>",
        "<|fr|>",
        "<|transcribe|>",
        "<|translate|>",
    ]
    made_of_letters.add_special_tokens([*more, "<|notimestamps|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made_of_letters, eos_token="<|endoftext|>"
    )


@pytest.fixture(scope="session")
def whisper(tmp_path_factory):
    """The model in transformers, and the folders of it and of a drafter with one decoder layer and
    its encoder.
    """
    import torch

    target, draft = peer(0, decoder_layers=2), peer(1, decoder_layers=1)
    folders = [tmp_path_factory.mktemp(name) for name in ("target", "draft")]
    with torch.no_grad():
        draft.model.encoder.load_state_dict(target.model.encoder.state_dict())
        # Its own decoder is the target's first layer, so that some of its draft tokens are right.
        theirs = {
            k: v
            for k, v in target.model.decoder.state_dict().items()
            if k in draft.model.decoder.state_dict()
        }
        draft.model.decoder.load_state_dict(theirs)
    for model, folder in zip((target, draft), folders, strict=True):
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return target, *folders


@pytest.fixture(scope="session")
def sound():
    """24 seconds of noise whose loudness and colour change."""
    rng, time = np.random.RandomState(0), np.arange(24 * RATE) / RATE
    noise = rng.uniform(-0.5, 0.5, len(time)) * np.abs(np.sin(1.7 * time))
    tones = np.sin(2 * np.pi * (200 + 150 * np.floor(2 * time)) * time) * (np.sin(5 * time) > 0)
    return (noise + 0.4 * tones).astype(np.float32)[: 24 * RATE // HOP * HOP]
