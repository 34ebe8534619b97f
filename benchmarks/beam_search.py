"""Beam search on held-out prompts: passes saved and speed with a drafter, and hypotheses beside
transformers'.

    python -m benchmarks.beam_search --target debian-t5-base --draft debian-t5-small --task
    translation python -m benchmarks.beam_search --target debian-gpt-base --task text --width 24
    --transformers

Two cores, some minutes; --count sets how many prompts.

For each number of beams: steps a pass, whether every hypothesis and its order are those of the
search without a drafter, and seconds of both, measured interleaved, as medians with their spread.
With --transformers, which needs PyTorch, instead: how many prompts have other hypotheses than
transformers has for the same weights, for three length penalties, and by how much scores differ at
most.
"""

import argparse
import json
import tempfile
import time
from importlib import resources

import jax
import numpy as np

import jaxspec
from benchmarks import synthetic
from jaxspec.core import token_rows
from jaxspec.core.token_ids import frame_of
from jaxspec.weights import huggingface


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="debian-t5-base")
    parser.add_argument("--draft", default="debian-t5-small")
    parser.add_argument("--task", default="translation", help="of the held-out prompts")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--width", type=int, default=None, help="tokens that prompts are cut to")
    parser.add_argument("--beams", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--draft-beams", type=int, default=None)
    parser.add_argument(
        "--widen", type=int, default=0, help="the target's MLPs to this: the same text at more cost"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transformers", action="store_true")
    return parser.parse_args()


def prompts_of(target, task, count, width):
    path = resources.files("jaxspec") / "data" / "heldout" / f"{task}.jsonl"
    texts = [
        json.loads(line)["input"] for line in path.read_text(encoding="utf-8").splitlines()[:count]
    ]
    frame, keeps_end = frame_of(target.tokenizer), target.lm.limits.start_token is None
    rows = target.tokenizer(texts)["input_ids"]
    return [
        frame.cut(row, width, keeps_end=keeps_end) if width and len(row) > width else row
        for row in rows
    ]


def in_batches(rows, size):
    width = token_rows.bucket(max(map(len, rows)))
    return [token_rows.pad(rows[i : i + size], width) for i in range(0, len(rows), size)]


def search(target, batches, **options):
    began = time.perf_counter()
    searches = [jaxspec.beam_search(target, batch, **options) for batch in batches]
    return searches, time.perf_counter() - began


def same(ours, theirs):
    """Tells, for each prompt, whether its hypotheses are alike."""
    pairs = zip(ours.records(), theirs.records(), strict=True)
    different = {a["row"] for a, b in pairs if a["tokens"] != b["tokens"]}
    return [row not in different for row in range(len(ours.steps))]


def compare_with_a_drafter(target, draft, batches, options):
    for beams in options.beams:
        settings = dict(beams=beams, max_new_tokens=options.new)
        fast = dict(drafter=draft, gamma=options.gamma, draft_beams=options.draft_beams)
        for extra in ({}, fast):
            search(target, batches[:1], **settings, **extra)  # compiles
        seconds, ratio = ([], []), []
        for _ in range(options.repeats):
            plain, a = search(target, batches, **settings)
            quick, b = search(target, batches, **settings, **fast)
            seconds[0].append(a)
            seconds[1].append(b)
            ratio.append(a / b)
        alike = sum(sum(same(x, y)) for x, y in zip(plain, quick, strict=True))
        steps, passes = (
            sum(int((x.steps - 1).sum()) for x in quick),
            sum(int(x.passes.sum()) for x in quick),
        )
        off = max(np.abs(x.scores - y.scores).max() for x, y in zip(plain, quick, strict=True))
        times = " ".join(f"{np.median(x):.2f} s ({min(x):.2f} to {max(x):.2f})" for x in seconds)
        print(
            f"beams {beams}: {steps} steps in {passes} passes, {steps / passes:.2f} each; the "
            f"same {alike} of {sum(len(f.steps) for f in plain)}, scores within {off:.1e}; plain "
            f"and with a drafter {times}, {np.median(ratio):.2f}x ({min(ratio):.2f} to "
            f"{max(ratio):.2f})",
            flush=True,
        )


def compare_with_transformers(target, rows, options):
    import torch
    import transformers

    encoder = target.lm.limits.start_token is not None
    with tempfile.TemporaryDirectory() as folder:
        folder = huggingface.save(target, f"{folder}/target")
        kind = transformers.AutoModelForSeq2SeqLM if encoder else transformers.AutoModelForCausalLM
        peer = kind.from_pretrained(folder).eval()
    if encoder:  # transformers takes the length of the decoder's cache from the encoder's layers
        peer.config.num_layers = peer.config.num_decoder_layers
    if not encoder:  # rows of one length, so that none is padded
        rows = [row[: min(map(len, rows))] for row in rows]
    end = target.tokenizer.eos_token_id
    for beams in options.beams:
        for penalty in (0.6, 1.0, 2.0):
            wrong, off, count = 0, 0.0, 0
            for start in range(0, len(rows), 20):
                part = rows[start : start + 20]
                ours = jaxspec.beam_search(
                    target,
                    part,
                    beams=beams,
                    max_new_tokens=options.new,
                    length_penalty=penalty,
                    eos_ids=[end],
                )
                prompt = token_rows.pad(part, max(map(len, part)))
                mask = np.arange(prompt.tokens.shape[1])[None] < np.asarray(prompt.length)[:, None]
                with torch.no_grad():
                    theirs = peer.generate(
                        torch.tensor(np.asarray(prompt.tokens)), attention_mask=torch.tensor(mask.astype(int)),
                        num_beams=beams, num_return_sequences=beams, max_new_tokens=options.new, do_sample=False,
                        length_penalty=penalty, early_stopping=False, eos_token_id=end, pad_token_id=0,
                        return_dict_in_generate=True, output_scores=True,
                    )  # fmt: skip
                start = 1 if encoder else prompt.tokens.shape[1]
                sequences = theirs.sequences[:, start:].reshape(len(part), beams, -1).tolist()
                sequences = [
                    [x[: x.index(end) + 1] if end in x else x for x in row] for row in sequences
                ]
                for row in range(len(part)):
                    hypotheses = [r["tokens"] for r in ours.records() if r["row"] == row]
                    wrong += hypotheses != [
                        x[: len(y)] for x, y in zip(sequences[row], hypotheses, strict=True)
                    ]
                off = max(off, np.abs(ours.scores.ravel() - theirs.sequences_scores.numpy()).max())
                count += len(part)
            print(
                f"beams {beams}, penalty {penalty}: {wrong} of {count} prompts differ, scores "
                f"within {off:.1e}",
                flush=True,
            )


def main():
    options = arguments()
    target = jaxspec.load(options.target)
    rows = prompts_of(target, options.task, options.count, options.width)
    if options.widen:
        target = synthetic.widen(target, options.widen)
    print(
        f"{options.target}, {len(rows)} prompts, {options.new} tokens at most, batch "
        f"{options.batch}",
        flush=True,
    )
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}", flush=True)
    if options.transformers:
        compare_with_transformers(target, rows, options)
    else:
        compare_with_a_drafter(
            target, jaxspec.load(options.draft), in_batches(rows, options.batch), options
        )


if __name__ == "__main__":
    main()
