"""Greedy texts of held-out prompts with every drafter beside plain decoding's, and tokens a round.

    python -m benchmarks.greedy_equality debian-t5-base debian-t5-small --count 200 python -m
    benchmarks.greedy_equality debian-gpt-base debian-gpt-small --batch 16 --only tree python -m
    benchmarks.greedy_equality debian-gpt-base debian-gpt-small --heads debian-gpt-eagle --only
    debian

Two cores, tens of minutes for 200 prompts.

The n-gram tables are counted on held-out references of prompts that are not decoded. Exits with 1
if a text differs.
"""

import argparse
import sys
import time

import jaxspec
from jaxspec import drafters
from jaxspec.cli.prompts import heldout_for, references
from jaxspec.core import token_rows

NEW, GAMMA = 32, 4


def every_drafter(target, draft, tables):
    """Drafters by their names."""
    layers = target.lm.inside.layers.count
    few = jaxspec.trim_vocabulary(target, size=target.lm.vocab_size // 4)
    last = drafters.early_exit(target, layers - 1, head=few)
    return {
        "small model": draft,
        "tree (4, 2, 1, 1)": drafters.tree(draft),
        "tree (3, 2), mixed": drafters.tree(draft, (3, 2), draw="mixed"),
        "sequences": drafters.sequences(draft, k=4),
        "dynamic_tree": drafters.dynamic_tree(draft, nodes=32, depth=6, width=8),
        "dynamic_tree of n-grams": drafters.dynamic_tree(tables, nodes=12, depth=4, width=4),
        "tree of n-grams": drafters.tree(tables, (3, 1)),
        "token_recycling": drafters.token_recycling(),
        "prompt_lookup, a tree": drafters.prompt_lookup(candidates=3, length=4),
        "suffix, a tree": drafters.suffix(candidates=3, length=4),
        "online_ngram": drafters.online_ngram(),
        "trigram": tables,
        "early_exit before the last layer, trimmed": last,
        "early_exit, a tree": drafters.tree(drafters.early_exit(target, layers - 1), (2, 1)),
        "skip_layers: the last attention": drafters.skip_layers(target, attention=[layers - 1]),
        "cascade": drafters.cascade(draft, drafters.prompt_lookup()),
        "cascade of three": drafters.cascade(
            draft, drafters.cascade(draft, drafters.suffix(), gamma=2), gamma=2
        ),
        "horizontal_cascade": drafters.horizontal_cascade(draft, drafters.suffix(), tokens=2),
        "lookahead": drafters.lookahead(window=4, ngram=3, candidates=3),
        "jacobi": drafters.jacobi(),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--batch", type=int, default=0, help="prompts decoded at a time; 0: all")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="drafters whose names have one of these in them"
    )
    parser.add_argument("--heads", nargs="*", default=[], help="what jaxspec.load_drafter takes")
    options = parser.parse_args()
    target, draft = jaxspec.load(options.target), jaxspec.load(options.draft)
    texts = heldout_for(target, options.count)
    tables = drafters.ngram(references(target, options.count), target, order=3)
    plain, differ = jaxspec.generate(target, texts, max_new_tokens=NEW), 0
    size = options.batch or len(texts)
    # of all batches, so that they share programs
    width = max(map(len, target.tokenizer(texts)["input_ids"]))
    print("| drafter | same text | tokens a round |\n|---|---|---|", flush=True)
    compared = every_drafter(target, draft, tables)
    for head in options.heads:
        drafter = jaxspec.load_drafter(head, target=target)
        compared |= {head: drafter, f"{head}, a tree": drafters.tree(drafter, (3, 2, 1))}
    for name, drafter in compared.items():
        if not any(part in name for part in options.only):
            continue
        began, generated, emitted, rounds = time.perf_counter(), [], 0, 0
        for start in range(0, len(texts), size):
            prompts = token_rows.pad(
                target.tokenizer(texts[start : start + size])["input_ids"], width
            )
            out = jaxspec.generate(
                target, prompts, drafter=drafter, gamma=GAMMA, max_new_tokens=NEW
            )
            generated += out.texts
            emitted, rounds = (
                emitted + (out.stats.emitted - 1).sum(),
                rounds + out.stats.rounds.sum(),
            )
        same = sum(a == b for a, b in zip(generated, plain.texts, strict=True))
        differ += same < len(texts)
        rate = emitted / rounds
        print(f"| {name} | {same} of {len(texts)} | {rate:.2f} |", flush=True)
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
