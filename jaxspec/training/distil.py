"""A draft model learns from its target: from the target's own outputs, and from its whole distributions.

Acceptance is decided by how much of the target's probability the drafter covers (alpha = E[sum min(p, q)], Corollary
3.6 of arXiv 2211.17192), not by how well it predicts the data; so the drafter is trained on the target's laws, at the
prefixes that the target itself produces. Outputs as training data: Kim and Rush, arXiv 1606.07947; both at once:
Zhou et al., DistillSpec, arXiv 2310.08461.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from jaxspec.base import Model, Prompt
from jaxspec.decode import generate
from jaxspec.training.data import Example
from jaxspec.training.jsonl import read_jsonl, write_jsonl
from jaxspec.training.losses import LossFunction, logits_and_labels, over_real

BATCH = 64  # prompts that the teacher answers at once


def distillation(config, teacher: Model, weight: float) -> LossFunction:
    """`weight` times KL(p, q) to the teacher's law p, and 1 - `weight` times the negative log likelihood.

    Both per target token, teacher-forced on the same batch.
    """
    student_logits, teacher_logits = logits_and_labels(config), logits_and_labels(teacher.config)

    def loss(params, batch):
        logits, labels, real = student_logits(params, batch)
        p_logits, _, _ = teacher_logits(teacher.params, batch)
        log_p = jax.nn.log_softmax(jax.lax.stop_gradient(p_logits))
        log_q = jax.nn.log_softmax(logits)
        is_label = jnp.arange(logits.shape[-1])[None, None, :] == labels[..., None]
        likelihood = -jnp.sum(jnp.where(is_label, log_q, 0.0), axis=-1)
        divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        return over_real(weight * divergence + (1 - weight) * likelihood, real)

    return loss


def answers(
    teacher: Model, examples: Sequence[Example], path: Path, max_new_tokens: int, progress: bool = True
) -> list[Example]:
    """The examples' sources with the teacher's own greedy outputs as targets; kept in `path`, made once.

    Examples are answered in order of length, so that a batch holds little padding.
    """
    if path.is_file():
        return [Example(np.array(r["source"], np.int32), np.array(r["target"], np.int32)) for r in read_jsonl(path)]
    ordered = sorted(examples, key=lambda example: len(example.source))
    batches = [ordered[i : i + BATCH] for i in range(0, len(ordered), BATCH)]
    made = []
    for batch in track(batches, "the teacher's outputs", disable=not progress):
        width = max(len(example.source) for example in batch)
        tokens, length = np.zeros((BATCH, width), np.int32), np.ones((BATCH,), np.int32)
        for row, example in enumerate(batch):
            tokens[row, : len(example.source)], length[row] = example.source, len(example.source)
        limits = np.where(np.arange(BATCH) < len(batch), max_new_tokens, 1)
        out = generate(teacher, Prompt(jnp.asarray(tokens), jnp.asarray(length)), max_new_tokens=limits)
        for row, example in enumerate(batch):
            made.append(Example(example.source, out.tokens[row, : out.lengths[row]]))
    write_jsonl(path, ({"source": e.source.tolist(), "target": e.target.tolist()} for e in made))
    return made
