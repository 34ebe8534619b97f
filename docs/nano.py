"""Exact speculative decoding in one file, to be read from top to bottom.

    python docs/nano.py

A language model writes one token a pass, and every pass reads all of its weights. Speculative
decoding lets a cheap drafter guess some tokens. The model then checks all guesses in one pass, and
a rule keeps as many as leave the distribution of the text what it was (Leviathan et al. 2023, arXiv
2211.17192; trees of guesses: Miao et al. 2023, arXiv 2305.09781).

The file has five parts: a small transformer with a cache, the tree of guesses, the source of random
choices, a round (draft, check, accept), and a proof by enumeration that the text is right. It
imports JAX and NumPy and nothing else.

Letters in shapes: B rows of a batch, T tokens of a pass, N nodes of a tree, V tokens of the
vocabulary, E entries of a cache, L layers, H heads, D numbers of a head, W = H * D, P tokens of a
prompt, F nodes of a tree that were read so far, K outcomes of a choice.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# ------------------------------------------------------------------------------ 1. A transformer

Params = dict[str, jax.Array]


class Cache(NamedTuple):
    """The keys and values of tokens that were read, [L, B, E, H, D] each.

    A cache does not know how many of its entries are valid. Its user does, and says so in every
    pass. To take tokens back, the user counts fewer: entries past the valid ones are never looked
    at, and are overwritten later. So a rejected guess costs nothing but its own computation.
    """

    keys: jax.Array
    values: jax.Array


def init(key: jax.Array, vocab: int, layers=1, heads=2, head_dim=8, positions=64) -> Params:
    """Draws the parameters of a network."""
    width = heads * head_dim
    shapes = {
        "embedding": (vocab, width),
        "position": (positions, width),
        "query": (layers, width, heads, head_dim),
        "key": (layers, width, heads, head_dim),
        "value": (layers, width, heads, head_dim),
        "out": (layers, heads, head_dim, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
        "head": (width, vocab),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    params = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
    # 1 / sqrt(summands) keeps sizes near 1. A doubled head makes the distributions less flat.
    scales = {"embedding": 1.0, "position": 1.0, "head": 2 * width**-0.5, "down": 0.5 * width**-0.5}
    return {name: x * scales.get(name, width**-0.5) for name, x in params.items()}


def empty_cache(params: Params, rows: int, entries: int) -> Cache:
    """Makes a cache for some rows, without valid entries."""
    layers, _, heads, head_dim = params["query"].shape
    shape = layers, rows, entries, heads, head_dim
    return Cache(jnp.zeros(shape), jnp.zeros(shape))


def normalised(x: jax.Array) -> jax.Array:
    """Scales vectors to a mean square of 1 (RMSNorm)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def read(params: Params, cache: Cache, tokens, start, sees, depth) -> tuple[jax.Array, Cache]:
    """Reads T tokens of every row in one pass.

    The tokens need not follow each other: they can be nodes of a tree, whose first F - T nodes were
    read by earlier passes with the same `start`.

    Args:
        tokens: [B, T].
        start: the valid entries of each row [B]. It differs from row to row, and that is all that a
            batch needs in which one row keeps five guesses and another row none.
        sees: which of the F nodes each token attends to [T, F]. All valid entries are visible.
        depth: each token's distance from the end of the valid entries [T]; 0 for the root.

    Returns:
        The logits after each token [B, T, V], and the cache. Node i is in entry start + i.
    """
    nodes = sees.shape[1]
    row = jnp.arange(len(tokens))[:, None]
    entry = start[:, None] + jnp.arange(nodes - tokens.shape[1], nodes)  # to be written [B, T]
    x = params["embedding"][tokens] + params["position"][start[:, None] + depth]

    # A token looks at entry e if e is valid, or if e holds one of the nodes that it sees.
    node = jnp.arange(cache.keys.shape[2]) - start[:, None]  # of each entry; below 0: valid [B, E]
    is_seen = jnp.moveaxis(jnp.asarray(sees)[:, jnp.clip(node, 0, nodes - 1)], 0, 1)  # [B, T, E]
    is_visible = (node < 0)[:, None] | (is_seen & (node < nodes)[:, None])

    keys, values = cache
    for layer in range(len(params["query"])):
        y = normalised(x)
        query = jnp.einsum("btw,whd->bthd", y, params["query"][layer])
        new_keys = jnp.einsum("btw,whd->bthd", y, params["key"][layer])
        new_values = jnp.einsum("btw,whd->bthd", y, params["value"][layer])
        keys = keys.at[layer, row, entry].set(new_keys)
        values = values.at[layer, row, entry].set(new_values)
        scores = jnp.einsum("bthd,behd->bhte", query, keys[layer]) * query.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(is_visible[:, None], scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bhte,behd->bthd", weights, values[layer])
        x = x + jnp.einsum("bthd,hdw->btw", mixed, params["out"][layer])
        x = x + jax.nn.gelu(normalised(x) @ params["up"][layer]) @ params["down"][layer]
    return normalised(x) @ params["head"], Cache(keys, values)


def read_text(params: Params, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
    """Reads texts [B, T] from their beginning: every token sees those before it."""
    rows, width = tokens.shape
    start = jnp.zeros(rows, jnp.int32)
    return read(params, cache, tokens, start, np.tri(width, dtype=bool), np.arange(width))


# -------------------------------------------------------------------------- 2. A tree of guesses


class Tree:
    """The shape of a token tree. Node 0 is the last token of the text, the others are guesses.

    `Tree([0, 1])` is a chain: node 1 follows node 0, node 2 follows node 1. `Tree([0, 0])` has two
    guesses for the same place. `Tree([])` has none, and decodes without speculation.
    """

    def __init__(self, parents: list[int]):
        nodes = len(parents) + 1
        self.sees = np.eye(nodes, dtype=bool)  # a node sees itself and its ancestors [N, N]
        self.depth = np.zeros(nodes, int)
        children: list[list[int]] = [[] for _ in range(nodes)]
        for node, parent in enumerate(parents, start=1):
            if parent >= node or (node > 1 and parent < parents[node - 2]):
                raise ValueError(f"got {parents}: expected parents in order, before children")
            self.sees[node] |= self.sees[parent]
            self.depth[node] = self.depth[parent] + 1
            children[parent].append(node)
        most = max(map(len, children))  # the others are padded with -1: [N, most]
        self.children = np.array([c + [-1] * (most - len(c)) for c in children])
        self.levels = [np.flatnonzero(self.depth == d) for d in range(self.depth.max() + 1)]
        # The most children that a node of each level has: `accept` makes so many trials there.
        self.tries = [max(len(children[node]) for node in level) for level in self.levels[:-1]]


# ----------------------------------------------------------------- 3. The source of random choices

# All that is random goes through `choose`: the guesses, whether a guess is accepted, and the token
# after them. The same code therefore runs with random keys, and with all outcomes at once.


class Keys(NamedTuple):
    """Choices by random keys. Each row has its own, so its text does not depend on other rows."""

    keys: jax.Array  # [B]

    def choose(self, probabilities: jax.Array) -> tuple[jax.Array, Keys]:
        """Chooses an index for each row from its probabilities [B, K]."""
        keys = jax.vmap(jax.random.split)(self.keys)
        chosen = jax.vmap(jax.random.categorical)(keys[:, 0], jnp.log(probabilities))
        return chosen, Keys(keys[:, 1])


class Best(NamedTuple):
    """What is most probable is chosen, at temperature 0."""

    def choose(self, probabilities: jax.Array) -> tuple[jax.Array, Best]:
        """Chooses the index of the largest probability."""
        return jnp.argmax(probabilities, axis=-1), self


class Worlds(NamedTuple):
    """All outcomes at once: each row of the batch is a possible world."""

    script: jax.Array  # what is chosen in each world, in order [B, choices]
    count: jax.Array  # how many choices were made
    probability: jax.Array  # how probable the choices of a world were, all together [B]

    def choose(self, probabilities: jax.Array) -> tuple[jax.Array, Worlds]:
        """Chooses what is in the script."""
        chosen = self.script[:, self.count]
        chance = jnp.take_along_axis(probabilities, chosen[:, None], axis=1)[:, 0]
        return chosen, Worlds(self.script, self.count + 1, self.probability * chance)


def scaled(weights: jax.Array) -> jax.Array:
    """Divides weights [B, V] by their sum. Nothing stays nothing."""
    return weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)


def without(probabilities: jax.Array, token: jax.Array) -> jax.Array:
    """Takes one token out of a distribution, and scales the others up."""
    is_token = jnp.arange(probabilities.shape[-1]) == token[:, None]
    return scaled(jnp.where(is_token, 0.0, probabilities))


# ------------------------------------------------------------------------------------ 4. A round


def draft(params, cache, tree, last, start, dice, temperature):
    """Guesses the tokens of a tree, with one pass of the drafter for each level.

    Args:
        last: the last token of each row, which no cache has yet [B]. It is the root.

    Returns:
        The tokens of the nodes [B, N], the distribution q that the children of each node were drawn
        from [B, N, V], the drafter's cache, and the dice.
    """
    tokens, q = [last], []
    for level in tree.levels:
        # The leaves are read, too, though nothing is drawn after them: if they are accepted, the
        # cache has them. (Faster: read the last two tokens of the text in the next round.)
        guesses = jnp.stack(tokens[level[0] :], axis=1)
        sees = tree.sees[level, : level[-1] + 1]
        logits, cache = read(params, cache, guesses, start, sees, tree.depth[level])
        for place, node in enumerate(level):
            # At temperature 0 the best guesses are taken, in order. Any temperature ranks them.
            q.append(jax.nn.softmax(logits[:, place] / (temperature or 1.0), axis=-1))
            left = q[-1]
            for _ in tree.children[node][tree.children[node] >= 0]:
                guess, dice = dice.choose(left)
                tokens.append(guess)
                left = without(left, guess)  # what was guessed once is not guessed again
    return jnp.stack(tokens, axis=1), jnp.stack(q, axis=1), cache, dice


def accept(dice, tree, guesses, p, q):
    """Walks down the tree from guess to guess, as long as they are accepted.

    At a node the target wants its next token to have the distribution `wanted`, and the drafter has
    drawn a guess x from `offered`. It is accepted with probability min(1, wanted(x) / offered(x)).
    Thereby a token y comes out with probability min(wanted(y), offered(y)), never too often. What
    is missing is max(wanted - offered, 0). Its sum is the probability of a rejection. So after one,
    the next sibling or a token of the target is to have it divided by that sum, as distribution:
    the residual. In all, y comes out with min + max = wanted(y), however bad the drafter is.

    Args:
        guesses: the tokens of the nodes [B, N].
        p, q: the target's and the drafter's distribution after each node [B, N, V].

    Returns:
        The node at each depth of the accepted path, the last one repeated after its end
        [B, depths], the number of accepted guesses [B], the token after them [B], and the dice.
    """
    row = jnp.arange(len(guesses))
    node = jnp.zeros(len(guesses), jnp.int32)
    goes_on = jnp.ones(len(guesses), bool)
    wanted = p[:, 0]
    path = [node]
    for tries in tree.tries:
        offered = q[row, node]
        is_found = jnp.zeros(len(guesses), bool)
        for number in range(tries):
            child = jnp.asarray(tree.children)[node, number]
            guess = guesses[row, child]
            is_tried = goes_on & ~is_found & (child >= 0)
            ratio = wanted[row, guess] / jnp.maximum(offered[row, guess], 1e-30)
            chance = jnp.where(is_tried & (offered[row, guess] > 0), jnp.minimum(ratio, 1.0), 0.0)
            # What is not tried has chance 0: a world that accepts it all the same has weight 0.
            coin, dice = dice.choose(jnp.stack([1 - chance, chance], axis=-1))
            is_accepted = coin == 1
            is_rejected = (is_tried & ~is_accepted)[:, None]
            wanted = jnp.where(is_rejected, scaled(jnp.maximum(wanted - offered, 0.0)), wanted)
            offered = jnp.where(is_rejected, without(offered, guess), offered)
            node = jnp.where(is_accepted, child, node)
            is_found = is_found | is_accepted
        goes_on = goes_on & is_found
        wanted = jnp.where(goes_on[:, None], p[row, node], wanted)
        path.append(node)
    token, dice = dice.choose(wanted)
    return jnp.stack(path, axis=1), jnp.asarray(tree.depth)[node], token, dice


def keep_path(cache: Cache, start: jax.Array, path: jax.Array) -> Cache:
    """Moves the entries of accepted nodes to where a text has them. Those of a chain are there."""
    row = jnp.arange(len(start))[:, None]
    source = start[:, None] + path
    goal = start[:, None] + jnp.arange(path.shape[1])
    return Cache(*(x.at[:, row, goal].set(x[:, row, source]) for x in cache))


class State(NamedTuple):
    """What goes from round to round."""

    tokens: jax.Array  # the texts, padded [B, E]
    length: jax.Array  # of each text [B]
    cache: Cache  # the target's; its first length - 1 entries are valid
    draft_cache: Cache  # the drafter's, likewise
    dice: Any
    rounds: jax.Array  # that each row needed [B]


def one_round(target, drafter, tree: Tree, temperature, goal, state: State) -> State:
    """Drafts, checks all guesses in one pass of the target, and keeps those that are accepted."""
    row = jnp.arange(len(state.length))
    start = state.length - 1
    last = state.tokens[row, start]
    drafts = draft(drafter, state.draft_cache, tree, last, start, state.dice, temperature)
    guesses, q, draft_cache, dice = drafts
    logits, cache = read(target, state.cache, guesses, start, tree.sees, tree.depth)
    p = jax.nn.softmax(logits / (temperature or 1.0), axis=-1)
    if temperature == 0:
        p = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1])
    path, accepted, token, dice = accept(dice, tree, guesses, p, q)

    # The accepted guesses and one more token follow the text. What is written after them is
    # overwritten by the next round. A row that has reached its goal stays as it is.
    new = jnp.concatenate([guesses[row[:, None], path[:, 1:]], token[:, None]], axis=1)
    new = new.at[row, accepted].set(token)
    places = state.length[:, None] + jnp.arange(new.shape[1])
    return State(
        state.tokens.at[row[:, None], places].set(new),
        jnp.minimum(state.length + accepted + 1, goal),
        keep_path(cache, start, path),
        keep_path(draft_cache, start, path),
        dice,
        state.rounds + (state.length < goal),
    )


@functools.partial(jax.jit, static_argnames=("new_tokens", "tree", "temperature"))
def generate(target, drafter, prompts, lengths, dice, *, new_tokens, tree, temperature=1.0):
    """Continues prompts [B, P] of the given lengths [B] until P + new_tokens tokens are there."""
    rows, width = prompts.shape
    goal = width + new_tokens
    entries = goal + len(tree.depth)
    cache = read_text(target, empty_cache(target, rows, entries), prompts)[1]
    draft_cache = read_text(drafter, empty_cache(drafter, rows, entries), prompts)[1]
    tokens = jnp.pad(prompts, ((0, 0), (0, entries - width)))
    dice = Best() if temperature == 0 else dice
    state = State(tokens, lengths, cache, draft_cache, dice, jnp.zeros(rows, jnp.int32))
    round_of = functools.partial(one_round, target, drafter, tree, temperature, goal)
    return jax.lax.while_loop(lambda state: jnp.any(state.length < goal), round_of, state)


# ------------------------------------------------------------------------------------ 5. A proof


def certify(target, drafter, prompt, tree: Tree, new_tokens=2, temperature=1.0) -> float:
    """Compares the distribution of speculative texts with that of plain sampling, by enumeration.

    Every combination of choices is one row of a batch. The weights of the rows with the same text
    add up to the probability of that text. A row that is done goes on choosing, without effect. No
    sampling error is left. The result is the largest difference between two probabilities.
    """
    vocab = target["head"].shape[1]
    choices_of_round = [vocab] * (len(tree.depth) - 1) + [2] * sum(tree.tries) + [vocab]
    sizes = choices_of_round * new_tokens  # a round adds a token at least
    script = np.indices(sizes, np.int32).reshape(len(sizes), -1).T
    dice = Worlds(jnp.asarray(script), jnp.asarray(0), jnp.ones(len(script)))
    prompts = jnp.tile(jnp.asarray(prompt), (len(script), 1))
    lengths = jnp.full(len(script), len(prompt))
    options = {"new_tokens": new_tokens, "tree": tree, "temperature": temperature}
    state = generate(target, drafter, prompts, lengths, dice, **options)
    assert state.dice.count == len(sizes), "every world must make the same number of choices"
    places = [vocab**i for i in range(new_tokens)]
    texts = np.asarray(state.tokens)[:, len(prompt) : len(prompt) + new_tokens] @ places
    speculative = np.bincount(texts, state.dice.probability, minlength=vocab**new_tokens)

    # Plain sampling: a pass over every text, and the product of its tokens' probabilities.
    every = np.indices([vocab] * new_tokens).reshape(new_tokens, -1).T
    rows = jnp.concatenate([jnp.tile(jnp.asarray(prompt), (len(every), 1)), every], axis=1)
    logits, _ = read_text(target, empty_cache(target, *rows.shape), rows)
    after = jax.nn.softmax(logits[:, len(prompt) - 1 : -1] / temperature, axis=-1)
    plain = np.zeros(vocab**new_tokens)
    plain[every @ places] = np.prod(np.take_along_axis(after, every[..., None], 2), (1, 2))
    return float(np.abs(speculative - plain).max())


def main() -> None:
    """Prints the proof, and tokens a round, for chains and trees and better and worse drafters."""
    target, stranger = init(jax.random.key(0), vocab=3), init(jax.random.key(1), vocab=3)
    trees = {"chain of 2": Tree([0, 1]), "two guesses": Tree([0, 0]), "tree of 3": Tree([0, 0, 1])}
    for name, tree in trees.items():
        print(f"{name}: off by {certify(target, stranger, [0, 2, 1], tree):.0e} with a stranger")

    target, stranger = init(jax.random.key(2), vocab=64), init(jax.random.key(3), vocab=64)
    prompts, lengths = jnp.ones((64, 4), jnp.int32), jnp.full(64, 4)
    shapes = {"chain of 4": Tree([0, 1, 2, 3]), "tree of 10": Tree([0, 0, 0, 1, 1, 2, 3, 4, 4, 7])}
    for share in (0.0, 0.1, 0.3):
        drafter = {name: (1 - share) * target[name] + share * stranger[name] for name in target}
        for name, tree in shapes.items():
            dice = Keys(jax.random.split(jax.random.key(4), len(prompts)))
            state = generate(target, drafter, prompts, lengths, dice, new_tokens=40, tree=tree)
            tokens = 40 / state.rounds.mean()
            print(f"{share:.0%} of a stranger, {name}: {tokens:.2f} tokens a round")


if __name__ == "__main__":
    main()
