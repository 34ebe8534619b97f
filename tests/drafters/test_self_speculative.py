"""Targets that draft for themselves: early exit and layer skipping, as chains and trees, with tiny
networks.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import DraftHead, Model, drafters, nets, policies
from jaxspec.core import Caches, Parts, Prompt, token_rows
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.draft_heads import kangaroo
from jaxspec.drafters import self_speculative
from jaxspec.nets import decoder, t5
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import certify, table_model
from tests.marks import marked
from tests.small import random_params, tiny_gpt

V, D = 3, 8
LLAMA = decoder.decoder_config(V, D, ff_dim=8, layers=2, heads=2, kv_heads=1, head_dim=4)
TARGETS = {
    "decoder": (decoder, LLAMA),
    "gpt": (decoder, decoder.gpt_config(V, D, 8, layers=2, heads=2, max_positions=64)),
    "t5": (
        t5,
        t5.T5Config(V, D, 8, 2, 4, encoder_layers=1, decoder_layers=2, buckets=4, max_distance=6),
    ),
}
# with which texts vary, and some drafts are accepted and some are not
SEEDS = {"decoder": 1, "gpt": 8, "t5": 9}


@functools.cache
def target_of(name):
    net, config = TARGETS[name]
    return Model(
        net.language_model(config),
        random_params(net.init, config, SEEDS[name], 0.6),
        None,
        config,
        name,
    )


def early(name="decoder", **options):
    return drafters.early_exit(target_of(name), layers=1, **options)


def skipping(name="decoder"):
    return drafters.skip_layers(target_of(name), attention=[1])


TREE = [(0,), (1,), (0, 0), (1, 0)]  # two nodes that are fed, and two that are not
MAKE = {
    "early exit": early,
    "early exit, trimmed": lambda name="decoder": early(
        name, head=jaxspec.trim_vocabulary(target_of(name), ids=[0, 2])
    ),
    "layers skipped": skipping,
    "early exit, a tree": lambda name="decoder": drafters.tree(early(name), shape=TREE),
    "layers skipped, a tree": lambda name="decoder": drafters.tree(
        skipping(name), (2, 1), draw="mixed"
    ),
    "early exit, sequences": lambda name="decoder": drafters.sequences(early(name), k=2, length=2),
    "early exit, a dynamic tree": lambda name="decoder": drafters.dynamic_tree(
        early(name), nodes=3, depth=2, width=2
    ),
    "early exit and a model, a tree": lambda name="decoder": drafters.tree(
        [SMALL, early(name)], (2, 1)
    ),
    "early exit, then a model": lambda name="decoder": drafters.horizontal_cascade(
        early(name), SMALL, tokens=1
    ),
    "a look-up, or early exit": lambda name="decoder": drafters.fallback(
        drafters.prompt_lookup(2, 2), early(name)
    ),
}
SMALL = table_model(jax.random.key(4), 3, order=1)
POLICIES = {
    "early exit": policies.confidence(0.45),
    "early exit, a tree": policies.adaptive(0.1, 0.1, pause=1),
}
PLAIN = SamplingParams(jnp.ones(1), jnp.array([3]), jnp.ones(1))
COLD = PLAIN._replace(temperature=jnp.zeros(1))
# as the others
SELDOM = ("layers skipped, a tree", "early exit, sequences", "early exit, a dynamic tree")
LONG = ("early exit, trimmed", "layers skipped", "early exit, a tree", "early exit, then a model")
LONG += ("a look-up, or early exit", "early exit and a model, a tree")


@pytest.mark.parametrize("name", marked(MAKE, slow=LONG, exhaustive=SELDOM))
def test_the_distribution_of_the_text_is_the_targets(name):
    """At temperatures 1 and 0; of some with a policy."""
    prompt = Prompt(jnp.array([[1, 0]]), jnp.array([2]))
    options = dict(
        drafter=MAKE[name](), gamma=2, steps=3, sampler=at_temperature(3, True), prompt=prompt
    )
    options["policy"] = POLICIES.get(name)
    off = [
        certify(target_of("decoder"), sampling_params=params, **options) for params in (PLAIN, COLD)
    ]
    assert max(off) < 1e-5, off


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target", "policy"), [
    ("early exit", "t5", None),
    ("early exit, trimmed", "gpt", policies.adaptive(0.1, 0.1, pause=1)),
    ("layers skipped", "gpt", policies.heuristic(start=1, grow=1)),
    ("early exit, a tree", "t5", policies.adaptive(0.1, 0.1, pause=1)),
    ("early exit, sequences", "gpt", None),
])  # fmt: skip
def test_greedy_text_is_plain_decodings(name, target, policy):
    """Rows that accept, end and stop by themselves."""
    rows, options = (
        token_rows.pad([[1, 2], [0], [2, 2, 1]], 4),
        dict(max_new_tokens=np.array([9, 4, 11])),
    )
    plain = jaxspec.generate(target_of(target), rows, **options)
    out = jaxspec.generate(
        target_of(target), rows, drafter=MAKE[name](target), gamma=3, policy=policy, **options
    )
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert (np.asarray(out.stats.accepted) > 0).any()


# --- the first layers, once


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_greedy_rounds_are_those_of_a_model_of_the_first_layers(name):
    """With a cache and a pass of its own; so the shared cache is right after every number of
    accepted tokens.
    """
    target, (net, config) = target_of(name), TARGETS[name]
    depth = {"decoder_layers": 1} if name == "t5" else {"layers": 1}
    params = {
        part: x
        for part, x in target.params.items()
        if not re.fullmatch(r"(decoder|layers)_[1-9]", part)
    }
    small = target._replace(lm=net.language_model(nets.replace(config, **depth)), params=params)
    rows, options = (
        token_rows.pad([[1, 2], [0], [2, 2, 1]], 4),
        dict(max_new_tokens=np.array([9, 4, 11]), gamma=3),
    )
    apart = jaxspec.generate(target, rows, drafter=small, **options).stats
    stats = jaxspec.generate(target, rows, drafter=early(name), **options).stats
    for field in ("rounds", "drafted", "accepted"):
        np.testing.assert_array_equal(getattr(stats, field), getattr(apart, field))


@pytest.mark.slow
@pytest.mark.parametrize("tree", [False, True])
def test_an_adapter_is_one_more_layer(tree):
    """Greedy rounds are those of a model of the first layer, the adapter's attention and its
    norm.
    """
    target, config = (
        target_of("decoder"),
        kangaroo.ExitAdapterConfig(nets.replace(LLAMA, layers=1), exit=1),
    )
    random, adapter = np.random.default_rng(5), kangaroo.init(config, jax.random.key(2))
    adapter = jax.tree.map(lambda x: x + 0.5 * random.standard_normal(x.shape, np.float32), adapter)
    silent = jax.tree.map(
        jnp.zeros_like, {part: target.params["layers_1"][part] for part in ("ff_norm", "ff")}
    )
    small = target._replace(
        params=target.params | {"layers_1": adapter["layers_0"] | silent, "norm": adapter["norm"]}
    )
    tapped = jaxspec.with_taps(target, (0,))
    exiting = drafters.early_exit(tapped, 1, adapter=DraftHead(kangaroo.head(config), adapter))
    rows, options = (
        token_rows.pad([[1, 2], [0], [2, 2, 1]], 4),
        dict(max_new_tokens=np.array([9, 4, 11]), gamma=3),
    )
    both = (drafters.tree(x, shape=TREE) for x in (small, exiting)) if tree else (small, exiting)
    apart, exits = (
        jaxspec.generate(target, rows, drafter=drafter, **options).stats for drafter in both
    )
    for field in ("rounds", "drafted", "accepted"):
        np.testing.assert_array_equal(getattr(exits, field), getattr(apart, field))
    assert np.asarray(exits.accepted).sum() > 0


def temporaries(prepared, room):
    """Bytes that rounds need beside their arguments and results."""
    state = jax.eval_shape(
        lambda: loop.start(
            prepared.decoder, prepared.weights, prepared.prompt, prepared.request, room
        )
    )
    return (
        loop.advance.lower(prepared.decoder, prepared.weights, state)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


@pytest.mark.slow
def test_no_layer_is_computed_twice_and_there_is_no_second_cache():
    """Counted in the compiled programs: the operations of verification, and the memory of a
    round.
    """
    config, exit_layer, gamma = nets.replace(LLAMA, dim=32, ff_dim=64, head_dim=16, layers=4), 3, 3
    target = Model(
        decoder.language_model(config), decoder.init(config, jax.random.key(0)), config=config
    )
    prompt, options = (
        Prompt(jnp.ones((1, 16), jnp.int32), jnp.array([9])),
        dict(max_new_tokens=960, gamma=gamma),
    )
    prepared = prepare(target, prompt, drafter=drafters.early_exit(target, exit_layer), **options)
    state = jax.eval_shape(
        lambda: loop.start(
            prepared.decoder, prepared.weights, prepared.prompt, prepared.request, 960
        )
    )
    assert jax.tree.leaves(state.caches.draft) == []
    cache, tokens = state.caches.target, jnp.zeros((1, gamma + 1), jnp.int32)
    drafted = self_speculative.Nodes(jnp.zeros((1, gamma + 1, 32)), jnp.zeros(1, jnp.int32), None)
    lm, finish = target.lm, prepared.drafter.functions.complete_target_pass
    first = Parts(*[tuple(range(exit_layer))] * 2)

    def run_first(params, cache, stream):
        return lm.inside.layers.run(params, cache, stream, first)[0]

    def verify(weights, cache, drafted, tokens):
        return finish(weights, Caches(cache, drafted), tokens)[0].logits

    def plain(params, cache, tokens):
        return lm.extend(params, cache, tokens)[0].logits

    def flops(function, *arguments):
        return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]

    all_flops, rest = (
        flops(plain, target.params, cache, tokens),
        flops(verify, prepared.weights, cache, drafted, tokens),
    )
    once = flops(run_first, target.params, cache, drafted.stream)
    assert once > 0.6 * all_flops and once + rest < 1.02 * all_flops
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    # XLA copies parts of a cache on a CPU, in plain decoding, too: a second cache would come on top
    # of those.
    assert (
        temporaries(prepared, 960)
        < temporaries(prepare(target, prompt, **options), 960) + 0.1 * held
    )


# --- bad input

ONE = tiny_gpt(6)
ONE_LAYER = Model(decoder.language_model(ONE), random_params(decoder.init, ONE), config=ONE)
FEWER_IDS = target_of("gpt").lm._replace(vocab_size=2)
FIRST, ADAPTER = (
    DraftHead(kangaroo.head(kangaroo.ExitAdapterConfig(LLAMA, exit)), {}) for exit in (1, 2)
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: drafters.early_exit(target_of("gpt"), layers=2),
            "layers is 2 and gpt has 2: .* at most 1",
        ),
        (lambda: drafters.early_exit(target_of("gpt"), layers=0), "layers is 0"),
        (
            lambda: drafters.early_exit(table_model(jax.random.key(0), 3), layers=1),
            "cannot be run in part",
        ),
        (
            lambda: drafters.early_exit(
                target_of("gpt"), 1, head=table_model(jax.random.key(0), 4)
            ),
            r"reads hidden states, and table-4 gives none \(its LanguageModel.inside is None\)",
        ),
        (
            lambda: drafters.early_exit(
                target_of("gpt"), 1, head=jaxspec.Model(FEWER_IDS, {}, name="few")
            ),
            r"and few has \d+ and 2: expected jaxspec.trim_vocabulary",
        ),
        (
            lambda: drafters.early_exit(target_of("gpt"), 1, adapter=ADAPTER),
            "made for an exit after 2: expected that",
        ),
        (
            lambda: drafters.early_exit(target_of("t5"), 1, adapter=FIRST),
            r"layers \[0\], and t5 was built without",
        ),
        (lambda: drafters.skip_layers(target_of("gpt"), range(2), range(2)), "skip all 2 layers"),
        (lambda: drafters.skip_layers(target_of("gpt")), "skip nothing"),
        (
            lambda: drafters.tree([early(), skipping()], (2,)),
            "do a part of the target's pass, each its own: expected one",
        ),
        (
            lambda: drafters.skip_layers(target_of("gpt"), [2]),
            "skips layer 2: gpt has layers 0 to 1",
        ),
        (lambda: drafters.skip_layers(target_of("gpt"), [], [1, 1]), "expected each layer once"),
        (
            lambda: drafters.skip_layers(target_of("gpt"), [1.7]),
            "a layer of attention is 1.7: expected an integer",
        ),
        (
            lambda: drafters.skip_layers(target_of("gpt"), [True]),
            "a layer of attention is True: expected an integer",
        ),
        (
            lambda: drafters.skip_layers(target_of("gpt"), [], "1"),
            "mlp is '1': expected the layers, from 0",
        ),
        (
            lambda: drafters.skip_layers(target_of("gpt"), 1),
            "attention is 1: expected the layers, from 0",
        ),
        (
            lambda: drafters.early_exit(ONE_LAYER, 1),
            "the target has one layer, and so no exit before the last",
        ),
        (
            lambda: drafters.dynamic_tree(early("gpt"), nodes=3, depth=3, width=2),
            "feed 4 tokens .* room for 3",
        ),
    ],
)
def test_what_cannot_draft_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drafters.early_exit("name", 2), "target is 'name': expected a jaxspec.Model"),
        (
            lambda: drafters.early_exit(drafters.suffix(), 2),
            "target is of type BoundDrafter: expected a jaxspec.Model",
        ),
        (lambda: drafters.skip_layers(None, [1]), "target is None: expected a jaxspec.Model"),
        (
            lambda: drafters.early_exit(target_of("gpt"), 1, head="x"),
            "head is 'x': expected a jaxspec.Model",
        ),
        (
            lambda: drafters.skip_layers(target_of("gpt"), [1], head=FIRST),
            "head is of type DraftHead: expected a jaxspec",
        ),
        (
            lambda: drafters.early_exit(target_of("gpt"), 1, adapter="x"),
            "adapter is 'x': expected a DraftHead of",
        ),
        (
            lambda: drafters.early_exit(target_of("gpt"), 1, adapter=drafters.suffix()),
            "adapter is of type BoundDrafter: exp",
        ),
    ],
)
def test_what_is_no_model_or_adapter_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.slow
def test_a_drafter_is_of_its_own_target():
    with pytest.raises(
        ValueError,
        match="the hidden states of gpt or uses its layers, and drafts for decoder: make",
    ):
        jaxspec.generate(
            target_of("decoder"), token_rows.pad([[1]]), drafter=early("gpt"), max_new_tokens=2
        )
    config = nets.replace(ONE, layers=2)
    two = Model(decoder.language_model(config), None, config=config)
    with pytest.raises(
        ValueError, match=r"name \(2 layers\) or uses .* a model without a name \(1 layers\): make"
    ):
        jaxspec.generate(
            ONE_LAYER, token_rows.pad([[1]]), drafter=drafters.early_exit(two, 1), max_new_tokens=2
        )
