"""The tiny networks and tables of the tests, by name. The same sizes are the same programs,
compiled once a process.

A test with a shape of its own to prove makes its own: odd head counts, published sizes, layers that
differ.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core import Model, Prompt, Room
from jaxspec.nets.decoder import decoder_config, gpt_config
from jaxspec.nets.shapes import DecoderConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.testing import table_model_from


def module_at(path: Path) -> ModuleType:
    """Imports a file that is not part of a package, such as docs/nano.py."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_gpt(vocab: int = 32, layers: int = 1, **options: Any) -> DecoderConfig:
    """A GPT-2: learned positions, 64 of them unless `max_positions` is given."""
    return gpt_config(
        vocab, dim=16, ff_dim=24, layers=layers, heads=2, **({"max_positions": 64} | options)
    )


def tiny_llama(vocab: int = 32, layers: int = 1, **options: Any) -> DecoderConfig:
    """A Llama: rotary positions, two queries to a key."""
    return decoder_config(
        vocab, dim=16, ff_dim=24, layers=layers, heads=4, kv_heads=2, head_dim=4, **options
    )


def tiny_t5(vocab: int = 32, layers: int = 1, **options: Any) -> T5Config:
    """A T5 whose encoder has one layer, its decoder `layers`."""
    sizes = {"encoder_layers": 1, "decoder_layers": layers} | options
    return T5Config(vocab, dim=16, ff_dim=24, heads=2, head_dim=8, **sizes)


def random_params(init: Callable, config: Any, seed: int = 0, noise: float = 0.0) -> Any:
    """Random parameters in the shapes of `init(config, key)`, norms and biases with noise, ids in
    order.

    NumPy draws them: outside of a program `init` compiles one for each operation at each shape.
    """
    random = np.random.default_rng(seed)

    def drawn(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(np.arange(x.size).reshape(x.shape), x.dtype)
        mean = 1.0 if "scal" in str(path[-1]) else 0.0
        # the last axis is the input
        deviation = noise if len(x.shape) < 2 else np.hypot(noise, x.shape[-1] ** -0.5)
        return jnp.asarray(mean + deviation * random.standard_normal(x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(
        drawn, jax.eval_shape(lambda: init(config, jax.random.key(0)))
    )


def prefill(model: Model, prompt: Prompt, room: Room) -> Any:
    """Reads prompts in one program: operation by operation, a network is dozens of them."""
    return jax.jit(model.lm.prefill, static_argnums=2)(model.params, prompt, room)


def between(target: Model, other: Model, share: float) -> Model:
    """A table model that is `share` of the target and the rest of the other: a drafter that is
    often right.
    """
    return table_model_from(share * target.params + (1 - share) * other.params)


def near(target: Model, other: Model, share: float) -> Model:
    """The target's network with parameters that are `share` of its own and the rest the other's: as
    `between`.
    """

    def mixed(own: jax.Array, others: jax.Array) -> jax.Array:
        return jnp.asarray(share * np.asarray(own) + (1 - share) * np.asarray(others), own.dtype)

    return target._replace(params=jax.tree.map(mixed, target.params, other.params))


CHARACTERS = ["<unk>", "</s>", *'{}[]",:0123456789.eE+-truefalsnx \\']
CHARACTERS = [*dict.fromkeys(CHARACTERS), '":', ' "', "true", "null", '{"', "é"]


@functools.cache
def characters():
    """A tokenizer whose tokens are characters and some longer strings, decoded without anything
    between them.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(CHARACTERS)}, unk_token="<unk>")
    )
    raw.decoder = decoders.Fuse()
    special = dict(eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False)
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


def slow_tokenizers(folder: Path) -> dict[str, Any]:
    """Tokenizers of Marian and M2M-100 with the same pieces, whose first one is a space; and
    M2M-100's in other orders.

    M2M-100 counts its languages on from its vocabulary. Files may list them in another order, or
    not at all.
    """
    import sentencepiece
    from transformers import M2M100Tokenizer, MarianTokenizer

    model = io.BytesIO()
    text = [
        "the old dog sees the cat",
        "a cat and a dog",
        "dogs bark at night",
        '{"a": 1, "b": 22}',
        "12 345 yes no.",
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 30),
        model_writer=model,
        vocab_size=36,
        character_coverage=1.0,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    spelt = [pieces.id_to_piece(i) for i in range(3, pieces.get_piece_size())]
    assert spelt[0] == "▁"
    vocabularies = {
        "m2m": ["<s>", "<pad>", "</s>", "<unk>", *spelt],
        "marian": ["</s>", "<unk>", *spelt, "<pad>"],
    }
    (folder / "pieces.model").write_bytes(model.getvalue())
    for name, words in vocabularies.items():
        (folder / f"{name}.json").write_text(
            json.dumps({word: index for index, word in enumerate(words)})
        )
    spm, m2m, marian = (str(folder / name) for name in ("pieces.model", "m2m.json", "marian.json"))
    unlisted = M2M100Tokenizer(m2m, spm)
    languages = [unlisted.get_lang_token(name) for name in unlisted.lang_code_to_id]
    with warnings.catch_warnings():  # it recommends sacremoses
        warnings.simplefilter("ignore")
        translator = MarianTokenizer(spm, spm, marian, source_lang="en", target_lang="de")
    return {
        "marian": translator,
        "m2m": M2M100Tokenizer(m2m, spm, additional_special_tokens=languages),
        "m2m, unlisted": unlisted,
        "m2m, reversed": M2M100Tokenizer(m2m, spm, additional_special_tokens=languages[::-1]),
    }
