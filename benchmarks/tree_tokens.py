"""Tokens a round of chains and trees of 4, 8, 16 and 32 nodes, with each draw and rule, measured
and predicted.

    python -m benchmarks.tree_tokens debian-t5-base debian-t5-small --temperature 1 --count 64

Two cores, tens of minutes.

*Uniform* trees have several first tokens and one continuation of each, the *hand-made* one is of
token recycling's kind; *Sequoia's* are made by the dynamic program for the pair's acceptance by
rank and depth, as if all passes cost the same. Acceptance is measured on other prompts than tokens
a round. *Program*: what the dynamic program's model promises, in which siblings are accepted as
often as those of any other node of that depth; *replayed*: along the texts.
"""

import argparse

import jax
import numpy as np

import jaxspec
from jaxspec import drafters, rules
from jaxspec.analysis import replay
from jaxspec.analysis.plan import best_trees
from jaxspec.cli.prompts import heldout_for
from jaxspec.decode.request import prepare
from jaxspec.drafters.lookups.token_recycling import ACCEPTANCE
from jaxspec.drafters.trees.shape import branching, by_rank

NEW, CHILDREN, DEEPEST = 32, 8, 6
UNIFORM = {4: (2, 1), 8: (4, 1), 16: (4, 1, 1, 1), 32: (8, 1, 1, 1)}
HAND_MADE = by_rank(ACCEPTANCE, nodes=16, depth=4)
RULES = {"rejection": rules.rejection, "traversal": rules.traversal}
SAMPLED = ("without_replacement", "replacement", "top", "mixed")


def sequoia(size, ratios, counts):
    """The best tree of a size, by what rounds with it are replayed to yield."""
    acceptance, tried = ratios.mean(axis=0), []
    for _ in range(2):
        shapes = best_trees(np.clip(acceptance, 0, 1), size, [size], DEEPEST)
        tried += [
            (replay.tokens_per_round(shape, ratios, counts).value, shape) for shape, _ in shapes
        ]
        acceptance = replay.by_depth(max(tried)[1], ratios, counts)
    return max(tried)[1]


def promised(shape, ratios, counts):
    """1 and the probabilities that each node is accepted: that of its parent times its own."""
    acceptance, reached = replay.by_depth(shape, ratios, counts), {(): 1.0}
    for node in sorted(map(tuple, shape), key=len):
        siblings = sum(other[:-1] == node[:-1] for other in map(tuple, shape))
        reached[node] = reached[node[:-1]] * acceptance[len(node) - 1, siblings - 1, node[-1]]
    return sum(reached.values())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument(
        "--draw", nargs="*", choices=SAMPLED, help="all by default; at temperature 0 they are one"
    )
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=list(UNIFORM), help="sizes of trees"
    )
    options = parser.parse_args()
    target, draft = jaxspec.load(options.target), jaxspec.load(options.draft)
    # greedy text leaves them no choice
    all_rules = RULES if options.temperature else {"rejection": rules.rejection}
    sampling = dict(max_new_tokens=NEW, temperature=options.temperature, key=jax.random.key(0))
    both = heldout_for(target, 2 * options.count)
    texts, others = both[: options.count], both[options.count :]
    trace = replay.collect(prepare(target, others, drafter=draft, **sampling))

    def measured(drafter, rule, gamma):
        out = jaxspec.generate(target, texts, drafter=drafter, rule=rule(), gamma=gamma, **sampling)
        return (out.stats.emitted - 1).sum() / out.stats.rounds.sum()

    print(
        "| draft | nodes | draw | program | replayed |"
        + "".join(f" {rule} |" for rule in all_rules)
    )
    print("|---|---|---|---|---|" + "---|" * len(all_rules), flush=True)
    for draw in (options.draw or SAMPLED) if options.temperature else ("top",):
        ratios = replay.tree_ratios(trace, draw, CHILDREN)
        shapes = [("chain", branching((1,) * 4))] if draw in ("top", "without_replacement") else []
        shapes += [
            ("uniform", branching(levels))
            for size, levels in UNIFORM.items()
            if size in options.nodes
        ]
        shapes += [("hand-made", HAND_MADE)] if draw in ("top", "mixed") else []
        if draw != "replacement":
            shapes += [("Sequoia's", sequoia(size, ratios, trace.counts)) for size in options.nodes]
        for name, shape in shapes:
            drafter, depth = drafters.tree(draft, shape=shape, draw=draw), max(map(len, shape))
            expected = (
                promised(shape, ratios, trace.counts),
                replay.tokens_per_round(shape, ratios, trace.counts).value,
            )
            tokens = [measured(drafter, rule, depth) for rule in all_rules.values()]
            values = "".join(f" {value:.2f} |" for value in tokens)
            print(
                f"| {name}, {depth} deep | {len(shape)} | {draw} | {expected[0]:.2f} | "
                f"{expected[1]:.2f} |{values}",
                flush=True,
            )


if __name__ == "__main__":
    main()
