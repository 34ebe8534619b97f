"""Trains a toy head twice: as a whole, and in a run that kills itself after a checkpoint, or that
goes on with it.

    python tests/scripts/killed_head.py FOLDER        # ends by SIGKILL
    python tests/scripts/killed_head.py FOLDER --go-on

Writes the parameters to FOLDER/whole.npz and FOLDER/resumed.npz. Of tests/training/test_heads.py.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

import jaxspec
from jaxspec.nets import decoder
from jaxspec.testing import word_tokenizer
from jaxspec.training import heads, recipes
from jaxspec.training import run as training
from jaxspec.weights.parameters import flat

WORDS = ["</s>", "<unk>", *"abcdef"]
SHAPE = decoder.decoder_config(
    len(WORDS), dim=8, ff_dim=8, layers=1, heads=1, kv_heads=1, head_dim=8, max_positions=16
)
RECIPE = {
    "name": "toy",
    "family": "heads",
    "target": "toy",
    "head": dict(heads=2),
    "learn": dict(stride=2, kl=0.5),
    "data": dict(train="train.jsonl", heldout="train.jsonl", shapes=[[0, 12]]),
    "train": dict(
        steps=6, batch_tokens=48, learning_rate=0.1, warmup=1, evaluate_every=5, save_every=4
    ),
}


def kill(line: str) -> None:
    """At step 5, whose last checkpoint is that of step 4; the loss has changed at step 3."""
    if line.startswith("step 5"):
        os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, go_on: bool) -> None:
    """One of the two processes."""
    lm, params = decoder.language_model(SHAPE), decoder.init(SHAPE, jax.random.key(0))
    target = jaxspec.Model(lm, params, word_tokenizer(WORDS), SHAPE, "toy")
    heads.load = lambda name, **options: target
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS[2:], 10)) for _ in range(12)]
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )

    def run(work: str, log) -> dict:
        return flat(
            training.train(recipes.parse(RECIPE), folder, folder / work, log, progress=False)[
                0
            ].params
        )

    if go_on:
        lines: list[str] = []
        np.savez(folder / "resumed.npz", **run("cut", lines.append))
        print(json.dumps({"devices": jax.device_count(), "lines": lines}))
        return
    np.savez(folder / "whole.npz", **run("whole", lambda _: None))
    run("cut", kill)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["--go-on"])
