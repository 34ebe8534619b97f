"""Side by side with transformers: the same weights, prompts, threads and number of tokens, in one process, interleaved.

    python -m jaxspec.analysis.peer --target debian-t5-base --draft debian-t5-small --gamma 4,7
    python -m jaxspec.analysis.peer --target debian-gpt-base --draft debian-gpt-small --widen 16384 --json > gpt.json

`--widen` and `--widen-draft` make a small pair cost what one of other sizes would, with the same text.
The pair is exported with `jaxspec.weights.huggingface.save`, and decoded on the CPU, greedily, in float32, by
`jaxspec.generate` and by transformers' `generate`: plainly, speculatively, and (decoder-only models) with draft tokens
looked up in the context. A call's time is from token ids to token ids, with all that either library does on the host.
transformers drafts as many tokens in every round as jaxspec does (schedule "constant", no confidence threshold),
and refuses to speculate on batches. It runs eagerly, as is its default: nothing is compiled.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer
from rich.console import Console

import jaxspec
from jaxspec import corpus, drafters
from jaxspec.analysis import peer_tables, peer_transformers
from jaxspec.analysis.measure import environment, synthetic
from jaxspec.analysis.measure.statistics import median_min_max
from jaxspec.analysis.measure.timing import interleave
from jaxspec.base import Model, Prompt
from jaxspec.decode import generate, request
from jaxspec.files import read_jsonl
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import int8

MATCH = 3  # the longest match that either library looks up
OURS, THEIRS = "jaxspec", "transformers"
Name = tuple[str, str, int]  # library, how, gamma


class Settings(NamedTuple):
    """What to measure.

    Attributes:
        gammas: draft tokens a round, one measurement each.
        batches: batch sizes, one comparison each.
        new_tokens: tokens to generate per prompt: exactly, or with `ends` at most.
        repeats: timed runs of each variant.
        ends: whether the tokenizer's end token ends a text.
        threads: of PyTorch; 0 for as many CPUs as JAX has.
    """

    gammas: tuple[int, ...] = (4,)
    batches: tuple[int, ...] = (1,)
    new_tokens: int = 64
    repeats: int = 5
    ends: bool = False
    threads: int = 0


class Variant(NamedTuple):
    """A way to decode.

    Attributes:
        library, how, gamma: what it is called; gamma is 0 for plain decoding.
        run: decodes all prompts: the tokens of every row.
        passes: decodes them, and returns how many passes the target made, prefill included.
    """

    library: str
    how: str
    gamma: int
    run: Callable[[], list[list[int]]]
    passes: Callable[[], int]


def compare(target: Model, draft: Model, prompt: Prompt, settings: Settings) -> dict[str, Any]:
    """All variants at every batch size.

    Args:
        target, draft: two T5s or two GPTs in float32 with one vocabulary.
        prompt: rows to decode, at least as many as the largest batch; a remainder is left out.
        settings: what to measure.

    Returns:
        "environment" (of both libraries), "target", "draft", the settings, and "batches": for each its "variants"
        (tokens per second as median, min, max; passes of the target; rows whose text is transformers' plain decoding's)
        and "ratios", repeat by repeat, of ours over theirs and of either over its own plain decoding.

    Raises:
        ImportError: PyTorch is not installed.
        ValueError: JAX runs on an accelerator, models that are not float32, or too few prompts.
    """
    peer_transformers.check()
    import torch
    import transformers

    _check(target, draft, prompt, settings)
    about = environment.current()
    torch.set_num_threads(settings.threads or about["cpus"])
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    about["torch_threads"] = torch.get_num_threads()
    eos = target.tokenizer.eos_token_id if settings.ends else None
    found: dict[str, Any] = {"environment": about, "target": _describe(target), "draft": _describe(draft)}
    found |= settings._asdict() | {"batches": []}
    with tempfile.TemporaryDirectory() as folder:
        theirs, assistant = (peer_transformers.load(m, Path(folder) / s, eos) for m, s in ((target, "t"), (draft, "d")))
    for batch in settings.batches:
        groups = [Prompt(*(x[i : i + batch] for x in prompt)) for i in range(0, len(prompt.length) - batch + 1, batch)]
        variants = _ours(target, draft, groups, settings, eos) + _theirs(theirs, assistant, groups, settings)
        found["batches"].append(
            {"batch": batch, "prompts": batch * len(groups), **_measure(variants, settings.repeats)}
        )
    return found


def _ours(target: Model, draft: Model, groups: Sequence[Prompt], settings: Settings, eos: int | None) -> list[Variant]:
    # Without a tokenizer: ids in, ids out, as on the other side.
    target, draft = target._replace(tokenizer=None), draft._replace(tokenizer=None)
    ends = () if eos is None else (eos,)

    def variant(how: str, gamma: int = 0, drafter: Any = None) -> Variant:
        options = dict(drafter=drafter, gamma=gamma, max_new_tokens=settings.new_tokens, eos_ids=ends)

        def decode():
            return [generate(target, group, **options) for group in groups]

        def run() -> list[list[int]]:
            return [row[:n].tolist() for out in decode() for row, n in zip(out.tokens, out.lengths, strict=True)]

        return Variant(OURS, how, gamma, run, lambda: sum(1 + int(out.stats.rounds.max()) for out in decode()))

    found = [variant("plain")] + [variant("speculative", gamma, draft) for gamma in settings.gammas]
    if target.lm.start_token is None:
        found += [variant("prompt_lookup", gamma, drafters.prompt_lookup(MATCH)) for gamma in settings.gammas]
    return found


def _theirs(target: Any, assistant: Any, groups: Sequence[Prompt], settings: Settings) -> list[Variant]:
    decoder_only = not target.config.is_encoder_decoder
    given = [peer_transformers.inputs(group, left=decoder_only) for group in groups]

    def variant(how: str, gamma: int = 0, options: Callable[[], dict[str, Any]] = dict) -> Variant:
        def run() -> list[list[int]]:
            chosen = options()
            return [
                row for one in given for row in peer_transformers.decode(target, one, settings.new_tokens, **chosen)
            ]

        def passes() -> int:
            with peer_transformers.counting(target) as count:
                run()
            return count[0]

        return Variant(THEIRS, how, gamma, run, passes)

    found = [variant("plain")]
    if len(groups[0].length) > 1:  # "assisted generate is only supported for batch_size = 1"
        return found
    for gamma in settings.gammas:
        found.append(variant("speculative", gamma, lambda gamma=gamma: peer_transformers.assisted(assistant, gamma)))
    if decoder_only:
        for gamma in settings.gammas:
            prompt_lookup = {"prompt_lookup_num_tokens": gamma, "max_matching_ngram_size": MATCH}
            found.append(variant("prompt_lookup", gamma, lambda prompt_lookup=prompt_lookup: prompt_lookup))
    return found


def _measure(variants: Sequence[Variant], repeats: int) -> dict[str, Any]:
    texts = [variant.run() for variant in variants]  # compiles
    passes = [variant.passes() for variant in variants]
    seconds = interleave([variant.run for variant in variants], repeats)
    speeds = np.array([[sum(map(len, rows))] for rows in texts]) / seconds
    index = {variant[:3]: i for i, variant in enumerate(variants)}
    plain = texts[index[THEIRS, "plain", 0]]
    rows = [
        dict(zip(("library", "how", "gamma"), variant[:3], strict=True))
        | {"tokens_per_second": median_min_max(speeds[i]), "target_passes": passes[i]}
        | {"same_text": sum(a == b for a, b in zip(texts[i], plain, strict=True))}
        for i, variant in enumerate(variants)
    ]
    ratios = []
    for variant in index:
        for other in _compared(variant, index):
            ratios.append(
                {"of": variant, "over": other, **median_min_max(speeds[index[variant]] / speeds[index[other]])}
            )
    return {"variants": rows, "ratios": ratios}


def _compared(variant: Name, variants: Container[Name]) -> list[Name]:
    """What a variant's speed is compared with: its own library's plain decoding, and for ours theirs of the same kind.

    Where they have none of the kind, their plain decoding.

    >>> _compared((OURS, "speculative", 4), [(THEIRS, "plain", 0)])
    [('jaxspec', 'plain', 0), ('transformers', 'plain', 0)]
    """
    library, how, gamma = variant
    found = [] if how == "plain" else [(library, "plain", 0)]
    if library == OURS:
        same = (THEIRS, how, gamma)
        found.append(same if same in variants else (THEIRS, "plain", 0))
    return found


def _check(target: Model, draft: Model, prompt: Prompt, settings: Settings) -> None:
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"JAX runs on {jax.default_backend()}, PyTorch would on the CPU: set JAX_PLATFORMS=cpu for a comparison"
        )
    for model in (target, draft):
        if not isinstance(model.config, T5Config | GPTConfig) or _dtype(model) != "float32":
            raise ValueError(f"{model.name or 'a model'} is {model.config}: expected a T5 or a GPT in float32")
    if len(prompt.length) < max(settings.batches):
        raise ValueError(
            f"got {len(prompt.length)} prompts for a batch of {max(settings.batches)}: give more, or ask for less"
        )
    if settings.ends and target.tokenizer is None:
        raise ValueError("ends needs the tokenizer's end token, but the target has no tokenizer")


def _dtype(model: Model) -> str:
    return int8.dtype_of(model.params, model.config.dtype)


def _describe(model: Model) -> dict[str, Any]:
    return {"name": model.name, "parameters": int8.count(model.params)}


def main(
    target: Annotated[str, typer.Option(help="The larger model: a shipped checkpoint's name, or a folder.")],
    draft: Annotated[str, typer.Option(help="The smaller model.")],
    gamma: Annotated[str, typer.Option("--gamma", "-g", help="Draft tokens a round, separated by commas.")] = "4",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1",
    widen: Annotated[int, typer.Option(help="Widen the target's feed-forward blocks to this: same text.")] = 0,
    widen_draft: Annotated[
        int, typer.Option(help="The same for the drafter: same draft tokens, the cost of a size.")
    ] = 0,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=1)] = 64,
    rows: Annotated[int, typer.Option(help="Prompts that one timed run decodes.", min=1)] = 8,
    repeats: Annotated[int, typer.Option(help="Timed runs of each variant.", min=1)] = 5,
    prompts: Annotated[Path | None, typer.Option(help="A .jsonl file with inputs; by default held-out ones.")] = None,
    ends: Annotated[bool, typer.Option("--ends", help="Let texts end, instead of --new-tokens each.")] = False,
    threads: Annotated[int, typer.Option(help="PyTorch's; by default as many CPUs as JAX has.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
) -> None:
    """Compares jaxspec with transformers on the CPU; ends with status 1 if any text differs."""
    peer_transformers.check()
    gammas, batches = (tuple(map(int, text.split(","))) for text in (gamma, batch))
    big, small = jaxspec.load(target), jaxspec.load(draft)
    lines = corpus.heldout(corpus.tasks_of(big)[0]) if prompts is None else read_jsonl(prompts)
    texts = [line["input"] for line in itertools.islice(lines, max(rows, *batches))]
    big, small = (synthetic.widen(m, width) if width else m for m, width in ((big, widen), (small, widen_draft)))
    settings = Settings(gammas, batches, new_tokens, repeats, ends, threads)
    found = compare(big, small, request.encode(big, texts), settings)
    found["target"]["widened_to"], found["draft"]["widened_to"] = widen or None, widen_draft or None
    if as_json:
        print(json.dumps(found))
    else:
        screen = Console(highlight=False)
        screen.width = max(screen.width, peer_tables.WIDTH)
        screen.print(peer_tables.headline(found), *peer_tables.tables(found), sep="\n")
    different = peer_tables.disagreements(found)
    for line in filter(None, [peer_tables.busy(found), *different]):
        print(line, file=sys.stderr)
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
