"""How near a model's distributions stay in other dtypes, or those of another model are: a table.

    python -m benchmarks.overlap debian-t5-base --dtype bfloat16 int8/float32 int8/bfloat16 python
    -m benchmarks.overlap unrounded/debian-t5-base --dtype bfloat16 int8/float32 int8/bfloat16
    python -m benchmarks.overlap debian-t5-base --others unrounded/debian-t5-base

A minute or two of two cores. The overlap is E[sum min(p, q)] at temperature 1, over all positions
of the first one's own texts on held-out prompts: 1 if both are the same. The others are over
held-out references (of a language model, continuations), teacher-forced: the loss in nats per
token, and the root mean square of how far a token's log probability is from the first one's.
`benchmarks.synthetic` writes what a model may have been before it was rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from benchmarks.options import parser_of
from jaxspec.analysis import acceptance
from jaxspec.analysis.table import words
from jaxspec.cli import names
from jaxspec.cli.prompts import heldout_for
from jaxspec.core import Model
from jaxspec.decode.request import prepare
from jaxspec.files import corpus


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures."""
    parser = parser_of(__doc__)
    parser.add_argument("model", help="the first, in float32")
    parser.add_argument("--dtype", nargs="*", default=[], help="the same model in these")
    parser.add_argument("--others", nargs="*", default=[], help="other models, in float32")
    parser.add_argument("--count", type=int, default=16, help="held-out prompts")
    parser.add_argument(
        "--references", type=int, default=64, help="held-out references, of the first task"
    )
    parser.add_argument("--max-new-tokens", type=int, default=48)
    options = parser.parse_args(arguments)
    first = names.model(options.model)
    sampling = {
        "temperature": 1.0,
        "key": jax.random.key(0),
        "max_new_tokens": options.max_new_tokens,
    }
    others = [(dtype, options.model, dtype) for dtype in options.dtype] + [
        (x, x, "float32") for x in options.others
    ]
    exact = reference_log_probs(first, options.references, options.max_new_tokens)
    print("| | overlap | loss | off by |\n|---|---|---|---|")
    print(f"| {first.name}, float32 | | {-exact.mean():.4f} | |", flush=True)
    for label, name, dtype in others:
        other = names.model(name, dtype)
        rate = acceptance.measure(
            prepare(first, heldout_for(first, options.count), drafter=other, **sampling)
        ).rate
        log_probs = reference_log_probs(other, options.references, options.max_new_tokens)
        off = np.sqrt(np.square(log_probs - exact).mean())
        print(f"| {label} | {words(rate, 4)} | {-log_probs.mean():.4f} | {off:.4f} |", flush=True)


def reference_log_probs(model: Model, count: int, longest: int) -> Float[np.ndarray, " tokens"]:
    """Computes the log probability of each token of the first held-out references, longer ones
    cut.
    """
    rows = corpus.heldout(corpus.tasks_of(model)[0])[:count]
    continuations = [
        ids[:longest]
        for ids in corpus.token_rows([row["reference"] for row in rows], model.tokenizer)
    ]
    lengths = np.array([len(ids) for ids in continuations])
    tokens = jnp.array([np.pad(ids, (0, longest - len(ids))) for ids in continuations])
    prompt = prepare(model, [row["input"] for row in rows]).prompt
    logits = jax.jit(functools.partial(acceptance.teacher_forced, model.lm))(
        model.params, prompt, tokens
    )
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]
    return np.asarray(picked, np.float64)[np.arange(longest) < lengths[:, None]]


if __name__ == "__main__":
    main()
