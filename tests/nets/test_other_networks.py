"""The adapters of docs/other_networks.md for networks of other packages, as the page has them.

A stand-in with the packages' way of calling always runs. The packages run where they are installed.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxspec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "other_networks.md"
VOCAB, LAYERS, HEADS, HEAD_DIM = 64, 2, 2, 8
WIDTH = HEADS * HEAD_DIM
PROMPTS = [[2, 7, 1, 8], [2, 30]]

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="not in a checkout")


class StandIn(nnx.Module):
    """Attention layers that are called as Tunix calls its own: (tokens, positions, cache, mask).

    A cache's layer has `k` and `v` [1, S, HEADS, HEAD_DIM], and the entries in it, `end_index` [1].
    """

    def __init__(self, rngs: nnx.Rngs):
        def matrix(*shape: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5)

        self.config = SimpleNamespace(
            vocab_size=VOCAB, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM
        )
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, WIDTH)))
        self.place = nnx.Param(jax.random.normal(rngs.params(), (64, WIDTH)))
        self.query, self.key = matrix(LAYERS, WIDTH, WIDTH), matrix(LAYERS, WIDTH, WIDTH)
        self.value, self.head = matrix(LAYERS, WIDTH, WIDTH), matrix(WIDTH, VOCAB)

    def __call__(self, tokens: Any, positions: Any, cache: Any, mask: Any) -> tuple[Any, Any]:
        x = self.embedding[...][tokens] + self.place[...][positions]
        shape = (*tokens.shape, HEADS, HEAD_DIM)
        new_cache = {}
        for i in range(LAYERS):
            name = f"layer_{i}"
            query = (x @ self.query[...][i]).reshape(shape)
            k, v = (x @ self.key[...][i]).reshape(shape), (x @ self.value[...][i]).reshape(shape)
            if cache is not None:
                end = cache[name]["end_index"][0]
                k = jax.lax.dynamic_update_slice(cache[name]["k"], k, (0, end, 0, 0))
                v = jax.lax.dynamic_update_slice(cache[name]["v"], v, (0, end, 0, 0))
                new_cache[name] = {"k": k, "v": v, "end_index": end[None] + tokens.shape[1]}
            scores = jnp.einsum("bthd,bshd->bhts", query, k)
            weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
            x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
        return x @ self.head[...], new_cache


def tunix_llama(seed: int) -> nnx.Module:
    """A Llama 3 of Tunix with random weights; its MLPs begin with zeros."""
    llama3 = pytest.importorskip(
        "tunix.models.llama3.model", reason="pip install google-tunix==0.1.7"
    )
    sizes = {"embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
    more = {"rope_theta": 10_000, "norm_eps": 1e-5}
    config = llama3.ModelConfig(num_layers=2, vocab_size=VOCAB, **sizes, **more)
    graph, params = nnx.split(llama3.Llama3(config, rngs=nnx.Rngs(seed)))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [0.5 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    return nnx.merge(graph, tree.unflatten(drawn))


class Library(NamedTuple):
    """A package's network."""

    module: Callable[[int], nnx.Module]  # seed -> a small one with random weights
    adapter: str  # the page's function


LIBRARIES = {
    "a stand-in": Library(lambda seed: StandIn(nnx.Rngs(seed)), "from_tunix"),
    "Tunix, Llama 3": Library(tunix_llama, "from_tunix"),
}


def greedy(module: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """The module's own greedy text, without a cache: the whole row again for each token."""
    row = list(prompt)
    for _ in range(new_tokens):
        mask = jnp.tril(jnp.ones((len(row), len(row)), bool))[None]
        logits, _ = module(jnp.array([row]), jnp.arange(len(row))[None], None, mask)
        row.append(int(logits[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # theirs
@pytest.mark.parametrize("name", LIBRARIES)
def test_speculative_text_is_that_of_its_own_greedy_decoding(name: str):
    library = LIBRARIES[name]
    (code,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    page: dict[str, Any] = {}
    # Their code and the page's promote ranks and dtypes.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exec(compile(code, PAGE.name, "exec"), page)
        module = library.module(0)
        target = page[library.adapter](module)
        draft = page[library.adapter](library.module(1))
        options = {"gamma": 3, "max_new_tokens": 12, "temperature": 0.0}
        out = jaxspec.generate(target, PROMPTS, drafter=draft, **options)
        itself = jaxspec.generate(target, PROMPTS, drafter=target, **options)
        own = [greedy(module, prompt, 12) for prompt in PROMPTS]
    assert [row.tolist() for row in out.tokens] == own
    assert itself.stats.rounds.tolist() == [3, 3]  # prefill's token, then 4 + 4 + 3
