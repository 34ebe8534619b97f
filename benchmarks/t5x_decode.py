"""Beside T5X's own decode loop, which the paper's 2 to 3 times are measured against: the same
network in both.

    python -m benchmarks.t5x_decode PATH_TO_T5X --target debian-t5-base --draft debian-t5-small
    --gamma 7

Fetches nothing: PATH_TO_T5X is a checkout of github.com/google-research/t5x. Only its
`t5x/decoding.py` runs, which needs jax and flax. Its `temperature_sample` calls our network for
each token, as it calls T5X's own: what is compared is the loop and speculation, not the layers.
Greedy, batch 1, from token ids to token ids, all sides interleaved. Ends with 1 if a text differs.
Two cores, some minutes.

Reference: Roberts et al., "Scaling Up Models and Data with t5x and seqio", arXiv 2203.17189.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.analysis.cost import interleave
from jaxspec.analysis.result import Spread
from jaxspec.cli.prompts import heldout
from jaxspec.core import Model, Room


def decoding_of(checkout: Path) -> Any:
    """Imports t5x/decoding.py without t5x/__init__.py, whose imports need TensorFlow.

    Raises:
        FileNotFoundError: there is no such file in the checkout.
    """
    folder = checkout / "t5x"
    if not (folder / "decoding.py").is_file():
        raise FileNotFoundError(
            f"there is no {folder / 'decoding.py'}: expected the path of a checkout of "
            "github.com/google-research/t5x"
        )
    package = types.ModuleType("t5x")
    package.__path__ = [str(folder)]
    sys.modules["t5x"] = package
    return importlib.import_module("t5x.decoding")


def t5x_decoder(
    decoding: Any, target: Model, eos: int, new_tokens: int
) -> Callable[[jaxspec.Prompt], jax.Array]:
    """Makes T5X's greedy decoding of an encoder-decoder: from a prompt to its tokens [B,
    new_tokens].
    """
    lm, start = target.lm, target.lm.limits.start_token
    if start is None:
        raise ValueError(
            f"{target.name} is no encoder-decoder, which T5X's loop begins with a start token: "
            "take a T5"
        )

    @jax.jit
    def decode(params: Any, prompt: jaxspec.Prompt) -> jax.Array:
        rows = len(prompt.tokens)
        _, cache = lm.prefill(params, prompt, Room(new_tokens + 2))
        # T5X's loop reads the start token itself
        cache = lm.rewind(cache, jnp.zeros(rows, jnp.int32))

        def tokens_to_logits(state: Any) -> tuple[jax.Array, Any]:
            forward, cache = lm.extend(params, state.cache, state.cur_token.astype(jnp.int32))
            return forward.logits[:, 0], cache

        inputs = jnp.full((rows, new_tokens), 0, jnp.int32)  # T5X's start token is 0, as ours
        tokens, _ = decoding.temperature_sample(
            inputs,
            cache,
            tokens_to_logits,
            eos,
            temperature=jnp.asarray(0.0, jnp.float32),
            topk=0,
            max_decode_steps=new_tokens,
        )
        return tokens[:, 0]

    return functools.partial(decode, target.params)


def main() -> None:
    """Prints each side's tokens a second, and how many times T5X's speed that is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("t5x", type=Path, help="a checkout of T5X")
    parser.add_argument("--target", default="debian-t5-base")
    parser.add_argument("--draft", default="debian-t5-small")
    parser.add_argument("--gamma", type=int, default=7)
    parser.add_argument("--count", type=int, default=4, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    try:
        decoding = decoding_of(options.t5x)
    except FileNotFoundError as error:
        parser.error(str(error))
    target, draft = jaxspec.load(options.target), jaxspec.load(options.draft)
    limits = {"max_new_tokens": options.max_new_tokens}
    parts = [
        jaxspec.prepare(target, text, **limits) for text in heldout("translation", options.count)
    ]
    prompts = [prepared.prompt for prepared in parts]
    theirs = t5x_decoder(decoding, target, int(parts[0].request.eos[0, 0]), options.max_new_tokens)

    def run_theirs() -> list[list[int]]:
        return [np.asarray(theirs(prompt))[0].tolist() for prompt in prompts]

    def run_ours(**drafting: Any) -> list[list[int]]:
        outs = [jaxspec.generate(target, prompt, **limits, **drafting) for prompt in prompts]
        return [out.tokens[0, : out.lengths[0]].tolist() for out in outs]

    drafted = functools.partial(run_ours, drafter=draft, gamma=options.gamma)
    sides = {
        "T5X": run_theirs,
        "jaxspec, plain": run_ours,
        f"jaxspec, {options.draft} drafts": drafted,
    }
    texts = [run() for run in sides.values()]  # which also compiles
    ours = texts[1]
    same = [
        all(row[: len(text)] == text for row, text in zip(side, ours, strict=True))
        for side in texts
    ]
    seconds = interleave(list(sides.values()), options.repeats)
    print(f"{len(prompts)} prompts, {sum(map(len, ours))} tokens, one prompt at a time")
    print("| | tokens/s | times T5X's speed | min..max |\n|---|---|---|---|")
    for name, times in zip(sides, seconds, strict=True):
        speed = Spread.of(seconds[0] / times)
        rate = sum(map(len, ours)) / np.median(times)
        print(f"| {name} | {rate:.0f} | {speed.median:.2f} | {speed.min:.2f}..{speed.max:.2f} |")
    print(f"same texts: {'yes' if all(same) else 'no'}")
    sys.exit(not all(same))


if __name__ == "__main__":
    main()
