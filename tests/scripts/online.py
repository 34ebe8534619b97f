"""A shipped draft model on text that it was not trained on, with and without learning in the job: alpha by batch.

    python tests/scripts/online.py

The GPT pair has read English package descriptions. Here it continues the German ones of `heldout/translation.jsonl`,
batch by batch, each prompt once. Every batch is generated twice, with the draft as shipped and with one that learns
(`jaxspec.training.online`), from the same keys. Printed are, for each part of the job: alpha (accepted of tested draft
tokens) of both, with the standard error over rows of their difference; tokens a round; and seconds of an update over
seconds of the batch's generation, as the quartiles of the batches after the first, which compiles. At the end both
continue the English prompts: what learning has cost there.
"""

import argparse
import time

import jax
import numpy as np
import optax

import jaxspec
from jaxspec import buffers, corpus
from jaxspec.training import online

PROMPT = 24  # tokens


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="debian-gpt-base")
    parser.add_argument("--draft", default="debian-gpt-small")
    parser.add_argument("--batches", type=int, default=36)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--parts", type=int, default=4, help="lines of the table")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--rate", type=float, default=2e-3, help="Adam's learning rate")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps after a batch")
    parser.add_argument("--positions", default="rejected")
    parser.add_argument("--divergence", default="kl")
    return parser.parse_args()


def batches_of(target, texts, given):
    """Prompts of equal length, so that all batches share a program."""
    rows = [row[:PROMPT] for row in target.tokenizer(texts)["input_ids"] if len(row) >= PROMPT]
    count = min(given.batches, len(rows) // given.rows)
    return [buffers.pad(rows[i * given.rows : (i + 1) * given.rows]) for i in range(count)]


def counts_of(out):
    """Of each row: accepted and tested draft tokens, rounds and the tokens that they committed."""
    trace = out.trace
    tested, committed = np.sum(trace.num_tested, axis=1), np.sum(trace.num_committed, axis=1)
    return np.stack([np.sum(trace.num_accepted, axis=1), tested, out.stats.rounds, committed], axis=1)


def rates(counts):
    accepted, tested, rounds, committed = np.sum(counts, axis=0)
    return accepted / tested, committed / rounds


def error_of_difference(one, other):
    """The standard error over rows of how far alpha of the second is above that of the first."""
    each = [c[:, 0] / c[:, 1].mean() - rates(c)[0] * c[:, 1] / c[:, 1].mean() for c in (one, other)]
    return np.std(each[1] - each[0], ddof=1) / np.sqrt(len(one))


def run(target, draft, batches, given, temperature, learner, state):
    """Counts of both drafts for each batch, and seconds of generating and of learning; `state` None: no learning."""
    found, seconds = [], []
    for number, prompts in enumerate(batches):
        options = dict(gamma=given.gamma, max_new_tokens=given.new, temperature=temperature)
        options |= dict(eos_ids=[], key=jax.random.key(number))
        frozen = jaxspec.generate(target, prompts, drafter=draft, **options)
        began = time.perf_counter()
        out = jaxspec.generate(target, prompts, drafter=learner.drafter(state), **options)
        middle = time.perf_counter()
        if given.learns:
            state, _ = learner.update(state, target, prompts, out)
        seconds.append((middle - began, time.perf_counter() - middle))
        found.append([counts_of(frozen), counts_of(out)])
        if temperature == 0:
            assert (out.tokens == frozen.tokens).all(), "greedy text is the target's, whatever drafts it"
    return np.array(found), np.array(seconds), state


def line(name, counts):
    (alpha, tokens), (learnt, more) = rates(np.concatenate(counts[:, 0])), rates(np.concatenate(counts[:, 1]))
    error = error_of_difference(np.concatenate(counts[:, 0]), np.concatenate(counts[:, 1]))
    print(
        f"| {name} | {alpha:.3f} | {learnt:.3f} | {learnt - alpha:+.3f} ± {error:.3f} | {tokens:.2f} | {more:.2f} |",
        flush=True,
    )


def main():
    given = arguments()
    target, draft = jaxspec.load(given.target), jaxspec.load(given.draft)
    german = batches_of(target, [row["reference"] for row in corpus.heldout("translation")], given)
    english = batches_of(target, [row["input"] + row["reference"] for row in corpus.heldout("text")], given)
    for temperature in given.temperature:
        learner = online(
            draft,
            optimizer=optax.adam(given.rate),
            max_prompt=PROMPT,
            max_new_tokens=given.new,
            steps=given.steps,
            positions=given.positions,
            divergence=given.divergence,
        )
        print(
            f"\n**T = {temperature:g}**, {len(german)} batches of {given.rows} prompts, {given.new} new tokens each\n"
        )
        print("| batches | α as shipped | α learning | difference | tokens a round | learning |")
        print("|---|---|---|---|---|---|")
        given.learns = True
        counts, seconds, state = run(target, draft, german, given, temperature, learner, learner.init())
        for part in np.array_split(np.arange(len(german)), given.parts):
            line(f"{part[0] + 1} to {part[-1] + 1}", counts[part])
        given.learns = False
        line("English, afterwards", run(target, draft, english[:8], given, temperature, learner, state)[0])
        share = np.quantile(seconds[1:, 1] / seconds[1:, 0], (0.25, 0.5, 0.75))
        print(
            f"\nAn update takes {share[1]:.2f} of the time of generating its batch ({share[0]:.2f} to {share[2]:.2f})."
        )


if __name__ == "__main__":
    main()
