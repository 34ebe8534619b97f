"""The record of a network, with all that loading, training, placing and estimating ask of it.

A file of `jaxspec.nets` ends in its record, `NETWORK`; the table of all is `jaxspec.nets.NETWORKS`.
Nothing outside of `jaxspec.nets` asks a configuration for its type.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from jaxspec.core import Cache, LanguageModel, Params, Room, kv_cache
from jaxspec.sharding import Axes

BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}  # of a weight; the scales of int8 ones are few
# Kernels on a GPU besides products, as XLA compiles for an H100: of a decoder's layer; of all else
# in a pass.
KERNELS_OF_LAYER = 12
KERNELS_AROUND_LAYERS = 10


class Load(NamedTuple):
    """The load of one pass of a model on a machine.

    Attributes:
        parameters: weights that a pass reads, and multiplies with each token (an encoder's, or an
            embedding that is only looked up, are not among them).
        cache_bytes: keys, values and states that a pass reads for each row, at the length in
            question.
        state_bytes: states of recurrent layers among these.
        dtype: the weights' and the arithmetic's.
        experts: (share, numbers) of weights that each token uses a share of: 1/16 for 8 experts of
            128.
        matrices: (numbers, count) of the matrices that make up `parameters`; empty where they are
            not known.
        small_kernels: kernels of a pass on a GPU besides the products (norms, rotation, attention,
            ...).

    >>> Load(11e9).weight_bytes
    22000000000.0
    """

    parameters: float
    cache_bytes: float = 0.0
    dtype: str = "bfloat16"
    experts: tuple[tuple[float, float], ...] = ()
    state_bytes: float = 0.0
    matrices: tuple[tuple[int, int], ...] = ()
    small_kernels: int = 0

    @property
    def numbers(self) -> float:
        """Counts all weights."""
        return self.parameters + sum(numbers for _, numbers in self.experts)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights: 11e9 in bfloat16 are 22e9."""
        return self.numbers * BYTES[self.dtype]

    @property
    def per_token(self) -> float:
        """Weights that one token is multiplied with."""
        return self.parameters + sum(share * numbers for share, numbers in self.experts)

    def bytes_read(self, tokens: Any) -> Any:
        """Returns the bytes of weights that a pass over so many tokens reads, all rows together;
        arrays broadcast.

        Of experts it is the expected union: each is left out by a token with probability 1 - share.

        >>> (
        ...     Load(10, experts=((0.25, 100),)).bytes_read(1),
        ...     Load(10, experts=((0.5, 100),)).bytes_read(2),
        ... )
        (70.0, 170.0)
        """
        union = sum(numbers * (1 - (1 - share) ** tokens) for share, numbers in self.experts)
        return (self.parameters + union) * BYTES[self.dtype]

    def row_bytes(self, tokens: Any, undone: Any = None) -> Any:
        """Returns the bytes of a row's cache that a pass over so many tokens reads and writes;
        arrays broadcast.

        A pass begins by doing tokens again in recurrent layers: as many as a round may take back
        (`core.token_rows.room`). Each of these tokens, and each token of the pass, reads a state
        and writes it.

        Args:
            tokens: tokens that the pass is fed.
            undone: tokens that it does again; by default one more than it is fed, as a round of the
                target does.

        >>> (
        ...     Load(10, cache_bytes=100.0).row_bytes(5),
        ...     Load(10, cache_bytes=100.0, state_bytes=8.0).row_bytes(5),
        ... )
        (100.0, 268.0)
        >>> Load(10, cache_bytes=100.0, state_bytes=8.0).row_bytes(
        ...     1, undone=6
        ... )  # a drafter's, of four draft tokens
        204.0
        """
        if undone is None:
            undone = tokens + 1
        return self.cache_bytes + self.state_bytes * (2 * (tokens + undone) - 1)


class Network(NamedTuple):
    """A kind of network, for all configurations of a type.

    Attributes:
        name: its family in manifests.
        config: the configuration's type, a frozen dataclass with `vocab_size` and `dtype`.
        init: (configuration, key) -> random parameters.
        language_model: (configuration, taps) -> the pure functions; the same object for the same
            arguments.
        teach: configuration -> the Linen module, for teacher forcing: called with whole rows it
            gives logits; `streams` gives the stream after each layer, which `features` and `logits`
            read. None: it is not trained by gradients.
        stacks: configuration -> number of layers by the name that their parameters begin with;
            those that generate are last.
        pieces: configuration -> smaller ones, and how many of each add up to it: see `total`. The
            first has a layer of each shape.
        cache: (configuration, rows, room, width of the prompts) -> a cache of the sizes that
            prefill makes.
        axes: configuration -> how its parameters may be split over devices.
        share: (configuration, path) -> the share of a matrix that each token of a decoding pass is
            multiplied with: 0 for tables that are looked up, and for weights that prefill alone
            uses.
        spread: (configuration, path) -> a factor of a random matrix, beside the inverse root of its
            columns' number.
        embedding_scale: configuration -> the factor between rows of its embedding and its first
            layer's input.
        logits_cap: configuration -> the soft cap that its head ends with.
        trimmed: (configuration, tokens) -> the configuration with a head for so many tokens, and
            the names of the head's parameters, "head" or "embedding". None: it has no head.
        source: (configuration, rows) -> an encoder's input for so many prompts, if it is not text;
            else None.
        small_kernels: kernels of a layer on a GPU besides its products.
        alike: configuration -> by the name of a stack, the layers of the first piece that have the
            shapes of its layers, by number; {} if each stack has one shape.
    """

    name: str
    config: type
    init: Callable[[Any, Key[Array, ""]], Params]
    language_model: Callable[..., LanguageModel]
    teach: Callable[[Any], Any] | None
    stacks: Callable[[Any], Mapping[str, int]]
    pieces: Callable[[Any], list[tuple[Any, int]]]
    cache: Callable[[Any, int, Room, int], Cache]
    axes: Callable[[Any], Axes]
    share: Callable[[Any, str], float]
    spread: Callable[[Any, str], float] = lambda config, path: 1.0
    embedding_scale: Callable[[Any], float] = lambda config: 1.0
    logits_cap: Callable[[Any], float | None] = lambda config: None
    trimmed: Callable[[Any, int], tuple[Any, tuple[str, ...]]] | None = None
    source: Callable[[Any, int], Any] = lambda config, rows: None
    small_kernels: int = KERNELS_OF_LAYER
    alike: Callable[[Any], Mapping[str, Sequence[int]]] = lambda config: {}

    def depth(self, config: Any) -> int:
        """Counts the layers that generate: a T5's decoder's."""
        return ([0, *self.stacks(config).values()])[-1]

    def shapes(self, config: Any) -> Params:
        """Returns shapes and dtypes of the parameters; nothing is computed."""
        return _shapes(self, config)

    def paths(self, config: Any) -> list[str]:
        """Lists the paths of the parameters, layer by layer; each shape of layer is traced once.

        >>> from jaxspec.nets import decoder
        >>> decoder.NETWORK.paths(decoder.gpt_config(32, dim=8, ff_dim=8, layers=99, heads=2))[-1]
        'layers_98/ff_norm/scale'
        """
        modules: dict[str, list[str]] = {}
        for path, _ in jax.tree_util.tree_leaves_with_path(self.shapes(self.pieces(config)[0][0])):
            module, slash, below = jax.tree_util.keystr(path, simple=True, separator="/").partition(
                "/"
            )
            modules.setdefault(module, []).append(slash + below)
        # Layers of a deep network have the parameters of those of the first piece.
        alike = {stack: [0] * depth for stack, depth in self.stacks(config).items()} | dict(
            self.alike(config)
        )
        layers = {
            f"{name}_{i}": f"{name}_{number}"
            for name, numbers in alike.items()
            for i, number in enumerate(numbers)
        }
        outer = {module: module for module in modules if module not in layers.values()}
        return [
            name + below for name, module in (outer | layers).items() for below in modules[module]
        ]

    def total(self, config: Any, measure: Callable[[Any], int]) -> int:
        """Adds up an amount over all layers, from small networks that have each shape of layer
        once.

        >>> from jaxspec.nets import decoder
        >>> config = decoder.gpt_config(32, dim=8, ff_dim=8, layers=12, heads=2)
        >>> decoder.NETWORK.total(
        ...     config, lambda small: len(jax.tree.leaves(decoder.NETWORK.shapes(small)))
        ... )
        196
        """
        return sum(times * measure(piece) for piece, times in self.pieces(config) if times)

    def cache_bytes(
        self, config: Any, row: int, prompt: int = 1, *, dtypes: Any = jnp.generic
    ) -> int:
        """Counts the bytes of the cache of one row; nothing is made.

        Args:
            config: the network's.
            row: tokens that it holds.
            prompt: tokens that an encoder has read.
            dtypes: only leaves of such a dtype are counted.
        """
        cache = jax.eval_shape(lambda: self.cache(config, 1, Room(row, rewind=0), prompt))
        leaves = [x for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, dtypes)]
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)

    def load(self, config: Any, *, row: int = 0, prompt: int = 0) -> Load:
        """Computes the load of a decoding pass.

        It leaves out the weights that prefill alone uses: an encoder, a position table, an
        embedding that does not serve as the head, keys and values of cross-attention. It also
        leaves out norms and biases, which are small.

        Args:
            config: the network's, with its dtype.
            row: tokens in the cache.
            prompt: tokens that an encoder has read.
        """
        matrices = collections.Counter[tuple[float, int]]()
        numbers = collections.Counter[float]()
        for piece, times in self.pieces(config):
            for matrix, count in _matrices(self, piece).items():
                matrices[matrix] += times * count
        for (share, size), count in matrices.items():
            numbers[share] += size * count
        dense = sorted(
            (size, count) for (share, size), count in matrices.items() if share == 1 and count
        )
        kernels = self.depth(config) * self.small_kernels + KERNELS_AROUND_LAYERS
        cache = self.cache_bytes(config, row, prompt, dtypes=jnp.floating)
        states = kv_cache.states(
            jax.eval_shape(lambda: self.cache(config, 1, Room(1, rewind=0), 1))
        )
        state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
        experts = tuple(
            sorted((share, count) for share, count in numbers.items() if share not in (0, 1))
        )
        return Load(numbers[1.0], cache, config.dtype, experts, state_bytes, tuple(dense), kernels)


@functools.lru_cache(maxsize=256)
def _shapes(network: Network, config: Any) -> Params:
    return jax.eval_shape(lambda: network.init(config, jax.random.key(0)))


def _matrices(network: Network, config: Any) -> collections.Counter[tuple[float, int]]:
    """Counts a network's matrices, by the share of them that a token is multiplied with and by
    their size.
    """
    matrices = collections.Counter[tuple[float, int]]()
    for path, x in jax.tree_util.tree_leaves_with_path(network.shapes(config)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if len(x.shape) > 1 and not name.endswith("bias"):  # biases of experts are a stack, too
            matrices[float(network.share(config, name)), math.prod(x.shape)] += 1
    return matrices
