"""Acceptance rates of one drafter trained in every way: on which texts, with which divergence, for
the same steps.

    python -m benchmarks.compare_distillation debian-gpt-small --data data --steps 300 python -m
    benchmarks.compare_distillation debian-t5-draft --data data --steps 250 --task translation

Two cores, hours; `data` is what `python -m data_prep.debian` makes.

The recipe's drafter is trained once for each line of the table, from the same start, on as many
batches. *Text* is the data's; *answers* are what the target generates, greedily and sampled; *own*
is the drafter's own samples, made in the step. Rates are over every position of the target's text
for held-out prompts, with standard errors over prompts.
"""

import argparse
import dataclasses
import shutil
from pathlib import Path

import jax

import jaxspec
from benchmarks import model_card
from jaxspec.analysis import acceptance
from jaxspec.decode.request import prepare
from jaxspec.files import corpus
from jaxspec.training import recipes, run
from jaxspec.training.divergences import DIVERGENCES

GAMMA = 4


def variants(distil, answers):
    """Yields the lines of the table: labels of the texts and of the loss, and the recipe's
    [distil].
    """
    none = dataclasses.replace(distil, answers=(), own=0.0, texts=0, weight=1.0)
    generated = dataclasses.replace(none, answers=answers, temperatures=(0.0, 1.0))
    greedy = dataclasses.replace(generated, temperatures=(0.0,))
    yield "text", "cross-entropy", dataclasses.replace(none, weight=0.0)
    for name in DIVERGENCES:
        yield "text", name, dataclasses.replace(none, divergence=name)
    yield "greedy answers", "cross-entropy", dataclasses.replace(greedy, weight=0.0)
    yield "greedy and sampled answers", "cross-entropy", dataclasses.replace(generated, weight=0.0)
    for name in ("kl", "blend"):
        yield "greedy and sampled answers", name, dataclasses.replace(generated, divergence=name)
    for share in (0.5, 1.0):
        yield (
            f"own, {share:.0%} of rows",
            "kl",
            dataclasses.replace(none, divergence="kl", own=share),
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--work", type=Path, default=Path("runs/compare"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--answers", type=int, default=2000, help="inputs of each task that the target answers"
    )
    parser.add_argument("--count", type=int, default=64, help="held-out prompts")
    parser.add_argument("--task", help="of the held-out prompts; else the target's first")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--only", nargs="+", help='lines of the table: "text kl" "own, 50%% of rows kl"'
    )
    options = parser.parse_args()
    recipe = recipes.load(options.recipe)
    assert isinstance(recipe, recipes.Recipe) and recipe.distil is not None, (
        "expected the recipe of a drafter"
    )
    target = jaxspec.load(recipe.distil.teacher)
    task = options.task or corpus.tasks_of(target)[0]
    examples = corpus.heldout(task)[: options.count]
    prompts, references = [row["input"] for row in examples], [row["reference"] for row in examples]
    metric, score = model_card.SCORES.get(task, ("", None))
    print(
        f"| text | loss | held-out loss |{f' {metric} |' if metric else ''} α, T = 0 | α, T = 1 | "
        "tokens a round |"
    )
    print("|---|---|---|---|---|---|" + "---|" * bool(metric), flush=True)
    train = dataclasses.replace(
        recipe.train, steps=options.steps, evaluate_every=options.steps, save_every=options.steps
    )
    answers = tuple(options.answers for _ in recipe.data.tasks or ("text",))
    for text, loss, distil in variants(recipe.distil, answers):
        if options.only and f"{text} {loss}" not in options.only:
            continue
        work = (
            options.work
            / recipe.name
            / f"{text} {loss}".replace(" ", "-").replace(",", "").replace("%", "")
        )
        out = work / "out"
        for path in options.work.glob(f"{recipe.name}/*/answers*.jsonl"):  # made once
            work.mkdir(parents=True, exist_ok=True)
            if not (work / path.name).exists():
                shutil.copy(path, work)
        if not out.exists():
            trained = dataclasses.replace(recipe, distil=distil, train=train)
            print(f"<!-- {run.checkpoint(trained, options.data, out, work)} -->", flush=True)
        draft, cells = jaxspec.load(out), [text, loss.replace("_", " ")]
        cells.append(f"{model_card.heldout_loss(draft, options.data, task):.2f}")
        if score is not None:
            cells.append(
                f"{score(model_card.decode(draft, prompts, options.max_new_tokens), references):.1f}"
            )
        rounds = []
        for temperature in (0.0, 1.0):
            key = jax.random.key(0) if temperature else None
            sampling = dict(max_new_tokens=options.max_new_tokens, temperature=temperature, key=key)
            rate = acceptance.measure(prepare(target, prompts, drafter=draft, **sampling)).rate
            cells.append(f"{rate.value:.3f} ± {rate.stderr:.3f}")
            stats = jaxspec.generate(target, prompts, drafter=draft, gamma=GAMMA, **sampling).stats
            rounds.append(f"{(stats.emitted - 1).sum() / stats.rounds.sum():.2f}")
        print("| " + " | ".join([*cells, ", ".join(rounds)]) + " |", flush=True)


if __name__ == "__main__":
    main()
