"""Models of a few kilobytes, to be saved as Hugging Face folders."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxspec import Model
from jaxspec.nets import net_of
from jaxspec.weights.source import CONFIG, configured
from tests.small import tiny_gpt, tiny_llama, tiny_t5

LLAMA = tiny_llama(24, layers=2, epsilon=1e-5, max_positions=32)
T5 = tiny_t5(24, layers=2)
GPT = tiny_gpt(24, layers=2)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
)


def tokenizer():
    words = ["<pad>", "</s>", "<unk>", "the", "old", "dog"]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, chat_template=TEMPLATE, **special
    )


def model_of(config, seed=0, words=None) -> Model:
    net = net_of(config)
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.array(rng.standard_normal(x.shape, np.float32)), shapes)
    return Model(net.language_model(config), params, words, config, "it")


def model_from(table: dict, seed=0) -> Model:
    """A model of a config.json, which most families do not write."""
    source = {CONFIG: table}
    return model_of(configured(source)[1], seed)._replace(source=source)


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def replace_weights(folder: Path) -> dict[str, np.ndarray]:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return weights
