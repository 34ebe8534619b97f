"""A draft model learns from its target: from the target's own outputs, and from its whole
distributions.

Acceptance depends on how much of the target's probability the drafter covers (alpha = E[sum min(p,
q)], Corollary 3.6 of arXiv 2211.17192). It does not depend on how well the drafter predicts the
data. So the drafter learns the target's distributions, after prefixes that the target itself
produces. Kim and Rush, arXiv 1606.07947, train on outputs; Zhou et al., DistillSpec, arXiv
2310.08461, on both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec import progress as bars
from jaxspec.core import LanguageModel, Model, Prompt, Request, Weights, noise, token_rows
from jaxspec.decode import autoregressive, loop
from jaxspec.files import digests, json_object, numbered, write_jsonl, write_text
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.training.data import Example, TrainingBatch
from jaxspec.training.divergences import Divergence, kl
from jaxspec.training.losses import (
    LossFunction,
    logits_and_labels,
    negative_log_likelihood,
    over_real,
)
from jaxspec.training.recipes import Answers

SLOTS = 64  # prompts that the teacher answers at once


def distillation(
    config, teacher: Model, weight: float, divergence: Divergence = kl
) -> LossFunction:
    """Returns a loss: `weight` times the divergence from the teacher's distribution, the rest the
    likelihood's.

    The likelihood is negative and logarithmic; both are per target token, teacher-forced on the
    same batch.
    """
    student_logits = logits_and_labels(config)
    teacher_logits = logits_and_labels(teacher.config)

    def loss(params, batch):
        logits, labels, real = student_logits(params, batch)
        p_logits, _, _ = teacher_logits(teacher.params, batch)
        log_p = jax.nn.log_softmax(jax.lax.stop_gradient(p_logits))
        apart = divergence(log_p, jax.nn.log_softmax(logits), real)
        return over_real(
            weight * apart + (1 - weight) * negative_log_likelihood(logits, labels), real
        )

    return loss


def own_texts(
    teacher: Model,
    tasks: Mapping[str, Sequence[Example]],
    options: Answers,
    longest: int,
    path: Path,
    progress: bool,
) -> dict[str, list[Example]]:
    """Returns the examples of each task with a model's answers to their sources, and the examples
    `texts` times.

    Args:
        options: a recipe's numbers.
        longest: most tokens of an answer; of a language model, of a text after its first token.
        path: the path of the stored answers, without the ending that each task adds.
    """
    if len(options.answers) != len(tasks):
        raise ValueError(
            f"answers is {list(options.answers)}: expected a number for each of {list(tasks)}"
        )
    if teacher.lm.limits.start_token is None:
        longest = longest + 1 - options.prompt
        n = options.prompt
        tasks = {
            task: [Example(x.target[:n], x.target[n:]) for x in texts if len(x.target) > n]
            for task, texts in tasks.items()
        }
    learnt: dict[str, list[Example]] = {}
    for (task, examples), count in zip(tasks.items(), options.answers, strict=True):
        few = examples[:: max(1, len(examples) // max(1, count))][:count]
        learnt[task] = list(examples) * options.texts
        for temperature in options.temperatures:
            beams = 1 if temperature else options.beams
            if temperature:
                way = f".{temperature}"
            elif beams > 1:
                way = f".beams{beams}"
            else:
                way = ""
            stored = path.with_name(f"{path.name}.{task}{way}.jsonl")
            learnt[task] += answers(teacher, few, stored, longest, progress, temperature, beams)
    if teacher.lm.limits.start_token is None:
        return {
            task: [
                Example(x.source[:0], np.concatenate([x.source, x.target]).astype(np.int32))
                for x in examples
            ]
            for task, examples in learnt.items()
        }
    return learnt


def answers(
    teacher: Model,
    examples: Sequence[Example],
    path: Path,
    max_new_tokens: int,
    progress: bool = True,
    temperature: float = 0.0,
    beams: int = 1,
) -> list[Example]:
    """Returns the examples' sources with the teacher's own outputs as targets: greedy, or one
    sample each.

    With more than one beam they are the most probable outputs that a beam search finds, as the
    teacher's texts of blockwise parallel decoding are (Stern, Shazeer, Uszkoreit, arXiv
    1811.03115).

    Answers are stored in `path` as they are made: stored answers are not made again. A killed run
    goes on, and a recipe that asks for more makes the rest. A sample depends on its source alone.

    Raises:
        ValueError: the file holds other answers; a source is too long for the teacher.
    """
    header = {
        "teacher": digests.of_arrays(jax.tree.leaves(teacher.params))[:16],
        "max_new_tokens": max_new_tokens,
    }
    header |= {"temperature": temperature} if temperature else {}
    header |= {"beams": beams} if beams > 1 else {}
    header |= {"begins": list(teacher.lm.limits.first_tokens)} if teacher.lm.limits.begin else {}
    stored = _open(path, header)
    all_sources = {tuple(example.source.tolist()) for example in examples}
    sources = sorted(all_sources.difference(stored), key=lambda source: (len(source), source))
    if beams > 1:
        rows = _searched(teacher, sources, beams, max_new_tokens)
    else:
        rows = _generated(teacher, sources, temperature, max_new_tokens)
    with path.open("a", encoding="utf-8") as file, bars.bar(progress, remaining=True) as bar:
        for number, tokens in bar.track(
            rows, total=len(sources), description="the teacher's outputs"
        ):
            stored[sources[number]] = tokens
            file.write(json.dumps({"source": sources[number], "target": tokens}) + "\n")
            file.flush()
    return [
        Example(e.source, np.array(stored[tuple(e.source.tolist())], np.int32)) for e in examples
    ]


Sources = Sequence[tuple[int, ...]]


def _generated(
    teacher: Model, sources: Sources, temperature: float, max_new_tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Yields the number of a source and the teacher's output for it, greedy or sampled, as they are
    done.
    """
    seeds = (
        hashlib.sha256(np.array(source, np.int32).tobytes()).digest()[:4] for source in sources
    )
    prompts = [
        {"prompt": x, "seed": int.from_bytes(seed, "big")}
        for x, seed in zip(sources, seeds, strict=True)
    ]
    limits: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max(map(len, sources), default=1),
    }
    key = jax.random.key(0) if temperature else None  # in whose place the prompts have seeds
    rows = jaxspec.generate_many(
        teacher, prompts, slots=SLOTS, temperature=temperature, key=key, **limits
    )
    return ((row.number, row.tokens) for row in rows)


def _searched(
    teacher: Model, sources: Sources, beams: int, max_new_tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Yields the number of a source and the best output that a beam search finds for it, some
    sources at a time.
    """
    at_once = max(1, SLOTS // beams)
    for start in range(0, len(sources), at_once):
        # A short last batch is filled up, so that all batches of one width are one program.
        batch = [
            list(sources[min(index, len(sources) - 1)]) for index in range(start, start + at_once)
        ]
        search = jaxspec.beam_search(teacher, batch, beams=beams, max_new_tokens=max_new_tokens)
        for number in range(start, min(start + at_once, len(sources))):
            best = search.tokens[number - start, 0]
            length = search.lengths[number - start, 0]
            yield number, best[:length].tolist()


def _open(path: Path, header: dict[str, Any]) -> dict[tuple[int, ...], list[int]]:
    """Reads the answers in `path`, by source; begins the file if it is missing, and drops a line
    that a kill cut.
    """
    if not path.is_file():
        write_jsonl(path, [header])
        return {}
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    first, *rows = (
        json_object(line, where) for where, line in numbered(complete.splitlines(), path)
    )
    if first != header:
        raise ValueError(
            f"{path} holds answers of {first}, expected {header}: move it away to have new ones "
            "made"
        )
    if complete != text:
        write_text(path, [complete])
    return {tuple(row["source"]): row["target"] for row in rows}


def on_policy(
    loss: LossFunction,
    student: LanguageModel,
    share: float,
    *,
    prompt: int = 16,
    eos: Sequence[int] = (),
    seed: int = 0,
) -> LossFunction:
    """Returns the same loss, on a mixture with texts that the student wrote (on-policy
    distillation).

    When it drafts, a model reads tokens that it wrote; so it is taught on them, by its target's
    distributions. Its texts are sampled in the training step itself and are gone after it. They
    depend on the parameters and the batch alone, so a run that is resumed makes the same ones
    (DistillSpec, arXiv 2310.08461).

    The student's answer to a row's source replaces its text: one sample at temperature 1, at most
    as long as the batch's rows. A decoder-only student continues the row's first tokens. Gradients
    do not flow through samples.

    Args:
        loss: a function of parameters and a batch.
        student: the model whose parameters these are.
        share: the share of rows to replace: 1 is all, 0.5 a mixture.
        prompt: tokens of a row that a decoder-only student is given.
        eos: the tokens that end a text.
    """

    def mixed(params: Any, batch: TrainingBatch) -> TrainingBatch:
        # The key differs from batch to batch, and depends on nothing else.
        key = jax.random.fold_in(
            jax.random.key(seed), jnp.sum(jnp.asarray(batch.target), dtype=jnp.int32)
        )
        written = samples(student, params, batch, jax.random.fold_in(key, 0), prompt, eos)
        drawn = (
            jax.random.uniform(jax.random.fold_in(key, 1), written.target_length.shape, jnp.float32)
            < share
        )
        drawn = drawn & (jnp.asarray(batch.target_length) > 0)
        target = jnp.where(drawn[:, None], written.target, jnp.asarray(batch.target))
        length = jnp.where(drawn, written.target_length, jnp.asarray(batch.target_length))
        return batch._replace(target=target, target_length=length)

    return lambda params, batch: loss(params, mixed(params, batch))


def samples(
    lm: LanguageModel,
    params: Any,
    batch: TrainingBatch,
    key: jax.Array,
    prompt: int,
    eos: Sequence[int],
) -> TrainingBatch:
    """Returns a batch with texts that a model has written."""
    target = jnp.asarray(batch.target)
    length = jnp.asarray(batch.target_length)
    rows, width = target.shape
    if lm.limits.start_token is not None:
        read = Prompt(jnp.asarray(batch.source), jnp.maximum(jnp.asarray(batch.source_length), 1))
        limit = width
    else:
        read = Prompt(target[:, :prompt], jnp.clip(length, 1, prompt))
        limit = width - prompt
    if limit < 1:
        raise ValueError(
            f"texts have {width} tokens, and the model is given {prompt} of them: expected fewer"
        )
    request = Request(
        keys=noise.row_keys(key, rows),
        sampling_params=SamplingParams(jnp.ones(rows, jnp.float32)),
        max_new_tokens=jnp.full(rows, limit, jnp.int32),
        eos=jnp.tile(jnp.array(eos or [-1], jnp.int32), (rows, 1)),
    )
    weights = Weights(jax.lax.stop_gradient(params))
    out = loop.generation(autoregressive(lm, at_temperature()), weights, read, request, limit)
    if lm.limits.start_token is not None:
        return batch._replace(target=out.tokens, target_length=out.length)
    row = jnp.pad(read.tokens, ((0, 0), (0, limit)))
    return batch._replace(
        target=token_rows.append(row, read.length, out.tokens),
        target_length=read.length + out.length,
    )
