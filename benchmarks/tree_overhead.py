"""The time of accepting and committing a tree of 32 nodes beside the target's pass over it, by
stage of a real round.

    python -m benchmarks.tree_overhead --repeats 5

Any machine, some minutes.

T5 v1.1 small's shape (60M parameters, V = 32,128) with random weights, batch 1. Drafted by the
target itself (draft tokens are accepted as often as can be) and by another model of that shape
(they hardly ever are). Milliseconds of a round by jax's profiler, as medians with their least and
largest.
"""

import argparse

import jax
import numpy as np

from benchmarks import profile
from jaxspec import drafters, rules
from jaxspec.analysis import random_model as synthetic
from jaxspec.decode.request import prepare

SHAPE, BRANCHING, STAGES = "t5-v1_1-small", (8, 1, 1, 1), ("target", "accept", "commit")
RULES = [
    rules.rejection(),
    rules.traversal(),
    rules.k_seq(),
    rules.coupled(),
    rules.typical(0.09, 0.3),
]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rule", nargs="*", default=[rule.name for rule in RULES], help="names; all by default"
    )
    parser.add_argument("--shape", default=SHAPE)
    options = parser.parse_args()
    chosen = [rule for rule in RULES if rule.name in options.rule]
    target, other = (synthetic.random_model(options.shape, "float32", seed) for seed in (0, 1))
    prompt = synthetic.random_prompt(target, 1, 64)
    print(
        "| drafted by | temperature | rule | "
        + " | ".join(STAGES)
        + " | accept and commit of the pass |"
    )
    print("|---|---|---|" + "---|" * (len(STAGES) + 1), flush=True)
    for name, draft in (("the target", target), ("another model", other)):
        for temperature, all_rules in ((0.0, chosen[:1]), (1.0, chosen)):
            for rule in all_rules:
                sampling = dict(
                    temperature=temperature, key=jax.random.key(0), max_new_tokens=128, eos_ids=()
                )
                prepared = prepare(
                    target, prompt, drafter=drafters.tree(draft, BRANCHING), rule=rule, **sampling
                )
                rounds = [profile.stages(prepared) for _ in range(options.repeats)]
                by_stage = {
                    stage: np.array([times.get(stage, 0.0) for times in rounds]) for stage in STAGES
                }
                cells = [
                    f"{np.median(x):.2f} ({x.min():.2f} to {x.max():.2f})"
                    for x in by_stage.values()
                ]
                share = np.median((by_stage["accept"] + by_stage["commit"]) / by_stage["target"])
                print(
                    f"| {name} | {temperature:g} | {rule.name} | {' | '.join(cells)} | "
                    f"{share:.1%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
