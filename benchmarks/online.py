"""A shipped draft model on text that it was not trained on, with and without learning in the
generation: alpha by batch.

    python -m benchmarks.online

Two cores, tens of minutes.

The T5 pair has read English and translated it; the draft has learnt its target's greedy texts. Here
both are given German, the references of `heldout/translation.jsonl`, batch by batch, each prompt
once. Every batch is generated with the draft as shipped and with drafts that learn
(`jaxspec.training.online`) at rejected positions or at all, from the same keys. It prints three
figures for each part of the generation:

- alpha (accepted of tested draft tokens), and its difference from that of the draft as shipped,
  with the standard error over rows;
- tokens a round;
- the seconds of an update over the seconds of its batch's generation, as quartiles of the batches
  after the first, which compiles.

At the end all drafts are given English, which shows what learning German has cost or brought.
"""

import argparse
import time

import jax
import numpy as np
import optax

import jaxspec
from jaxspec.core import token_rows
from jaxspec.files import corpus
from jaxspec.training import online

TASK = "translate English to German: "
LONGEST = 64  # tokens of a prompt


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="debian-t5-base")
    parser.add_argument("--draft", default="debian-t5-small")
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--parts", type=int, default=4, help="lines of the table")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--positions", nargs="+", default=["rejected", "all"])
    parser.add_argument(
        "--rate", type=float, default=3e-3, help="size of a step, relative to the parameters"
    )
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps after a batch")
    parser.add_argument("--divergence", default="kl")
    return parser.parse_args()


def batches_of(target, texts, options):
    """Prompts of one width, so that all batches share a program."""
    rows = [
        row
        for row in target.tokenizer([TASK + text for text in texts])["input_ids"]
        if len(row) <= LONGEST
    ]
    count = min(options.batches, len(rows) // options.rows)
    return [
        token_rows.pad(rows[i * options.rows : (i + 1) * options.rows], LONGEST)
        for i in range(count)
    ]


def counts_of(out):
    """Counts, for each row, accepted and tested draft tokens, rounds and the tokens that they
    committed.
    """
    trace = out.trace
    tested, committed = np.sum(trace.num_tested, axis=1), np.sum(trace.num_committed, axis=1)
    return np.stack(
        [np.sum(trace.num_accepted, axis=1), tested, out.stats.rounds, committed], axis=1
    )


def run(target, batches, options, temperature, drafter, update=None):
    """Counts of each row [batches, rows, 4]; texts; and seconds of generating and of learning
    [batches, 2].
    """
    counts, texts, seconds = [], [], []
    for number, prompts in enumerate(batches):
        sampling = dict(gamma=options.gamma, max_new_tokens=options.new, temperature=temperature)
        began = time.perf_counter()
        out = jaxspec.generate(
            target, prompts, drafter=drafter(), key=jax.random.key(number), **sampling
        )
        middle = time.perf_counter()
        if update is not None:
            update(target, prompts, out)
        seconds.append((middle - began, time.perf_counter() - middle))
        counts.append(counts_of(out))
        texts += [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]
    return np.array(counts), texts, np.array(seconds)


def rates(counts):
    """Alpha and tokens a round, and how much each row adds to the deviation of the former."""
    rows = counts.reshape(-1, 4)
    accepted, tested, rounds, committed = rows.sum(axis=0)
    return (
        accepted / tested,
        committed / rounds,
        (rows[:, 0] - accepted / tested * rows[:, 1]) / rows[:, 1].mean(),
    )


def line(name, frozen, *others):
    alpha, tokens, deviations = rates(frozen)
    cells = [name, f"{alpha:.3f}", f"{tokens:.2f}"]
    for counts in others:
        learnt, more, deviation = rates(counts)
        error = np.std(deviation - deviations, ddof=1) / np.sqrt(len(deviations))
        cells += [f"{learnt:.3f} ({learnt - alpha:+.3f} ± {error:.3f})", f"{more:.2f}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def learning(target, draft, german, english, options, temperature, positions):
    """Counts on the German batches and, without learning, the English ones; the texts; and
    seconds.
    """
    adam = (
        optax.scale_by_adam(),
        optax.scale_by_param_block_rms(0.02),
        optax.scale_by_learning_rate(options.rate),
    )
    learner = online(
        draft,
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), *adam),
        max_prompt=LONGEST,
        max_new_tokens=options.new,
        steps=options.steps,
        positions=positions,
        divergence=options.divergence,
    )
    held = [learner.init()]

    def update(*batch):
        held[0], _ = learner.update(held[0], *batch)

    counts, texts, seconds = run(
        target, german, options, temperature, lambda: learner.drafter(held[0]), update
    )
    afterwards, _, _ = run(target, english, options, temperature, lambda: learner.drafter(held[0]))
    return counts, afterwards, texts, seconds


def main():
    options = arguments()
    target, draft = jaxspec.load(options.target), jaxspec.load(options.draft)
    rows = corpus.heldout("translation")
    german = batches_of(target, [row["reference"] for row in rows], options)
    english = batches_of(target, [row["input"].removeprefix(TASK) for row in rows], options)[:8]
    for temperature in options.temperature:
        frozen, texts, _ = run(target, german, options, temperature, lambda: draft)
        before, _, _ = run(target, english, options, temperature, lambda: draft)
        learnt = [
            learning(target, draft, german, english, options, temperature, x)
            for x in options.positions
        ]
        if temperature == 0:
            assert all(results[2] == texts for results in learnt), (
                "greedy text is the target's, whatever drafts it"
            )
        print(f"\n**T = {temperature:g}**, {len(german)} batches of {options.rows} prompts\n")
        print(
            "| batches | α as shipped | tokens a round | "
            + " | | ".join(f"learning: {x}" for x in options.positions)
            + " | |"
        )
        print("|---" * (3 + 2 * len(learnt)) + "|")
        for part in np.array_split(np.arange(len(german)), options.parts):
            line(
                f"{part[0] + 1} to {part[-1] + 1}",
                frozen[part],
                *(results[0][part] for results in learnt),
            )
        line("English, afterwards", before, *(results[1] for results in learnt))
        for name, results in zip(options.positions, learnt, strict=True):
            share = np.quantile(results[3][1:, 1] / results[3][1:, 0], (0.25, 0.5, 0.75))
            print(
                f"\n{name}: an update takes {share[1]:.2f} of its batch's generation "
                f"({share[0]:.2f} to {share[2]:.2f})"
            )


if __name__ == "__main__":
    main()
