"""Tokens a round of one tree of a shape, drafted by one, two and three drafters, with boost-tuned
tables and without.

    python -m benchmarks.several debian-gpt-base debian-gpt-small

About 4 minutes of processor time. Tables of n-grams are counted in texts that the target sampled
for other prompts. "boosted" ones count what the drafters before them miss (`training.boosting`).
All trees have the same number of nodes, so the target's pass costs the same. Half of the rows are
generated at temperature 0, half at 1.
"""

import argparse

import jax
import numpy as np

import jaxspec
from jaxspec import drafters
from jaxspec.cli.prompts import heldout_for
from jaxspec.training import boosting

BRANCHING = (3, 2, 1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--count", type=int, default=16, help="prompts")
    parser.add_argument(
        "--counted",
        type=int,
        default=128,
        help="prompts of the texts that the n-grams are counted in",
    )
    parser.add_argument("--samples", type=int, default=1, help="texts of each of these")
    parser.add_argument("--order", type=int, default=3, help="of the n-grams")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()
    target, draft = jaxspec.load(options.target), jaxspec.load(options.draft)
    prompts = heldout_for(target, options.count + options.counted)
    sampling = dict(max_new_tokens=options.max_new_tokens, key=jax.random.key(0))
    rows = texts_of(target, prompts[options.count :] * options.samples, temperature=1.0, **sampling)
    print(
        f"{len(rows)} texts of {sum(map(len, rows))} tokens; trees {'x'.join(map(str, BRANCHING))}",
        flush=True,
    )
    drafted_by = sets(rows, target, draft, options.order)
    print("| drafted by | T = 0 | T = 1 |\n|---|---|---|", flush=True)
    temperature = [0.0, 1.0] * options.count
    texts = [text for text in prompts[: options.count] for _ in range(2)]
    for name, members in drafted_by.items():
        tree = drafters.tree(members, BRANCHING)
        out = jaxspec.generate(target, texts, drafter=tree, temperature=temperature, **sampling)
        emitted, rounds = (
            np.asarray(x).reshape(-1, 2).sum(axis=0)
            for x in (out.stats.emitted - 1, out.stats.rounds)
        )
        cold, warm = emitted / rounds
        print(f"| {name} | {cold:.2f} | {warm:.2f} |", flush=True)


def texts_of(target, prompts, **sampling):
    """Returns prompts with the target's continuations, as token ids."""
    out = jaxspec.generate(target, prompts, **sampling)
    written = [row[:length].tolist() for row, length in zip(out.tokens, out.lengths, strict=True)]
    return [
        [*target.tokenizer.encode(text), *row] for text, row in zip(prompts, written, strict=True)
    ]


def sets(rows, target, draft, order):
    """Returns the drafters that draft a tree together, by the name of the set."""
    table = drafters.ngram(rows, target, order=order)
    boosted = boosting.boosted_ngrams(rows, target, order=order, count=2, after=[table])
    beside = boosting.boosted_ngrams(rows, target, order=order, count=2, after=[draft])
    return {
        f"{order}-grams": [table],
        "these and boosted ones": [table, *boosted[:1]],
        "these and two boosted ones": [table, *boosted],
        "the model": [draft],
        f"the model and {order}-grams": [draft, table],
        "the model and boosted ones": [draft, *beside[:1]],
        "the model and two boosted ones": [draft, *beside],
    }


if __name__ == "__main__":
    main()
