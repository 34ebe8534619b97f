"""The cost of a draft token of each drafter on hidden states, in passes of its target, and what a
trimmed head saves.

    python -m benchmarks.head_costs --vocab 32768 --few 4096

Any machine, some minutes.

The target is a decoder of the given sizes with random weights, on which costs do not depend; batch
1, float32.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp

import jaxspec
from jaxspec import DraftHead, Model, Prompt, nets
from jaxspec.analysis import cost
from jaxspec.decode.request import prepare
from jaxspec.draft_heads import block, eagle, kangaroo, kind_of, lookahead_embeddings, medusa, mtp
from jaxspec.nets import decoder
from jaxspec.weights import quantisation


def kinds(shape, gamma):
    """Configurations of networks by name."""
    layer, dim, taps = (
        nets.replace(shape, layers=1),
        shape.dim,
        (0, len(shape.layers) // 2, len(shape.layers) - 1),
    )
    three = dict(layer=layer, hidden_size=dim, taps=taps)
    heads = medusa.HeadsConfig(shape.vocab_size, dim, heads=gamma)
    flash = block.BlockConfig(**three, block=gamma + 1, mask_token=0)
    return {
        "EAGLE": eagle.EagleConfig(layer, dim),
        "EAGLE-3": eagle.EagleConfig(**three, own_head=True),
        "MTP": mtp.MTPConfig(layer),
        "blockwise heads": dataclasses.replace(
            heads, block="feed_forward", ff_dim=2 * dim, own_head=False
        ),
        "Medusa": heads,
        "Hydra": dataclasses.replace(heads, reads_tokens=True),
        "DFlash": flash,
        "DSpark": dataclasses.replace(flash, from_anchor=True, block=gamma, markov_rank=64),
        "Kangaroo, after 2 layers": kangaroo.ExitAdapterConfig(layer, exit=2),
        "PaSS": lookahead_embeddings.LookAheadConfig(shape.vocab_size, dim, gamma - 1),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in dict(vocab=32768, few=4096, dim=512, layers=8, gamma=4, repeats=9).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="drafters whose names have this in them")
    options = parser.parse_args()
    sizes = dict(
        ff_dim=4 * options.dim,
        layers=options.layers,
        heads=8,
        kv_heads=4,
        head_dim=options.dim // 8,
    )
    shape = decoder.decoder_config(options.vocab, options.dim, **sizes)
    plain = Model(
        decoder.language_model(shape), decoder.init(shape, jax.random.key(0)), None, shape, "random"
    )
    few = jaxspec.trim_vocabulary(plain, size=options.few)
    prompt = Prompt(jnp.arange(32)[None], jnp.array([32]))

    def costs(drafter):
        costs = []
        for temperature in (0.0, 1.0):
            how = dict(
                gamma=options.gamma,
                max_new_tokens=32,
                temperature=temperature,
                key=jax.random.key(0),
            )
            prepared = prepare(plain, prompt, drafter=drafter, **how)
            costs.append(cost.draft_cost(prepared, options.repeats) / options.gamma)
        return ", ".join(f"{c:.3f}" for c in costs)

    print(
        f"target of {quantisation.count(plain.params):,} parameters, γ = {options.gamma}; c at T = "
        "0 and 1\n"
    )
    print(
        f"| drafter | its own parameters | c | c, {options.few:,} of {options.vocab:,} tokens "
        "|\n|---|---|---|---|",
        flush=True,
    )
    every = {
        name: config for name, config in kinds(shape, options.gamma).items() if options.only in name
    }
    for name, config in every.items():
        kind = kind_of(config)
        network = DraftHead(kind.head(config), kind.init(config, jax.random.key(1)))
        requirements = network.network.requirements
        target = jaxspec.with_taps(plain, requirements.taps) if requirements.taps else plain
        if requirements.head:
            trimmed = kind.drafter(network, target, few)
        else:
            small = dataclasses.replace(config, draft_vocab=options.few)
            trimmed = kind.drafter(
                DraftHead(kind.head(small), kind.init(small, jax.random.key(1))), target, None
            )
        parameters, untrimmed = (
            quantisation.count(network.params),
            kind.drafter(network, target, None),
        )
        print(f"| {name} | {parameters:,} | {costs(untrimmed)} | {costs(trimmed)} |", flush=True)


if __name__ == "__main__":
    main()
