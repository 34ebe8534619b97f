"""What a smaller head saves a drafter of the shape of Gemma 3 270M (262,144 tokens), with random
weights.

    python docs/drafters/trimmed_head.py

Times a pass over one token, the part of a draft step that costs: sizes interleaved, medians with
the fastest and the slowest; and prints what the compiled program computes. Needs 3 GB.
"""

import statistics
import time

import jax
import jax.numpy as jnp

from jaxspec import Model, Prompt, trim_vocabulary
from jaxspec.core import Room
from jaxspec.nets import decoder
from jaxspec.weights.hf_families import gemma

SIZES, REPEATS, CAPACITY = (None, 65536, 32768, 8192), 15, 256


def main():
    config = gemma.SIZES_3["gemma-3-270m"]
    model = Model(
        decoder.language_model(config), decoder.init(config, jax.random.key(0)), config=config
    )
    prompt, token = (
        Prompt(jnp.ones((1, 16), jnp.int32), jnp.array([16])),
        jnp.ones((1, 1), jnp.int32),
    )
    steps = {}
    for size in SIZES:
        used = model if size is None else trim_vocabulary(model, size=size)
        _, cache = jax.jit(used.lm.prefill)(used.params, prompt, Room(CAPACITY))

        def step(params, cache, lm=used.lm):
            return jnp.argmax(lm.extend(params, cache, token)[0].logits, axis=-1)

        compiled = jax.jit(step).lower(used.params, cache).compile()
        steps[size or config.vocab_size] = compiled, used.params, cache
    seconds = {size: [] for size in steps}
    for _ in range(REPEATS):
        for size, (compiled, params, cache) in steps.items():
            began = time.perf_counter()
            compiled(params, cache).block_until_ready()
            seconds[size].append(1000 * (time.perf_counter() - began))
    whole = statistics.median(seconds[config.vocab_size])
    for size, (compiled, _, _) in steps.items():
        taken, cost = seconds[size], compiled.cost_analysis()
        print(
            f"{size:7,} tokens: {statistics.median(taken):6.1f} ms ({min(taken):.1f} to "
            f"{max(taken):.1f}), {statistics.median(taken) / whole:.2f} of the whole; "
            f"{cost['flops'] / 1e6:.0f} MFLOP"
        )


if __name__ == "__main__":
    main()
