"""Drafters that `draft_heads.save` writes, read and run by vLLM's `speculators` beside jaxspec's own networks.

    pip install speculators==0.9.0 torch
    python -m benchmarks.speculators_parity --only DSpark

Tiny random networks in float32 on a random Llama, every option that the format has: EAGLE-3 and MTP at the first draft
token after each position, DFlash and DSpark over a whole block. Hidden states and tokens are random, the same for both.
EAGLE-1, Medusa, Kangaroo and PaSS have no class there; speculators puts its target's embedding in place of a block
drafter's own. Exits with 1 if logits differ by more than 1e-5. A minute on two
cores.
"""

import argparse
import dataclasses
import importlib.metadata
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import Model, nets
from jaxspec.core import Forward
from jaxspec.draft_heads import kind_of
from jaxspec.draft_heads.block_config import BlockConfig
from jaxspec.draft_heads.eagle import EagleConfig
from jaxspec.draft_heads.mtp import MTPConfig
from jaxspec.draft_heads.save import save
from jaxspec.draft_heads.target import shared_with
from jaxspec.draft_heads.training import DraftStarts, DraftStep
from jaxspec.nets import decoder
from jaxspec.weights import huggingface

try:
    import torch
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.models.dspark import core as dspark
except ImportError as error:
    sys.exit(f"{error}: this compares with speculators, install it with `pip install speculators==0.9.0 torch`")

TOLERANCE = 1e-5
VOCAB, WIDTH, POSITIONS, ANCHOR = 40, 16, 12, 5
LLAMA = decoder.decoder_config(
    VOCAB, WIDTH, ff_dim=24, layers=6, heads=4, kv_heads=2, head_dim=8, rope_base=100.0, epsilon=1e-5, max_positions=64
)
QWEN = nets.replace(LLAMA, head_norms=True)  # what blocks and modules have
EAGLE = EagleConfig(nets.replace(LLAMA, layers=1), WIDTH, taps=(0, 2, 3), own_head=True)
DFLASH = BlockConfig(nets.replace(QWEN, layers=2), WIDTH, taps=(0, 3), block=4, mask_token=VOCAB - 1)
DSPARK = dataclasses.replace(DFLASH, markov_rank=5, from_anchor=True)
SMALL = dict(own_head=True, draft_vocab=20)

FORMATS = {
    "EAGLE-3": EAGLE,
    "EAGLE-3, head_norms": dataclasses.replace(EAGLE, layer=nets.replace(QWEN, layers=1)),
    "EAGLE-3, draft_vocab": dataclasses.replace(EAGLE, draft_vocab=20),
    "EAGLE-3, the target's head": dataclasses.replace(EAGLE, own_head=False),
    "EAGLE-3, two layers": dataclasses.replace(EAGLE, layer=nets.replace(LLAMA, layers=2)),
    "EAGLE-3, own_embedding": dataclasses.replace(EAGLE, own_embedding=True),
    **{
        f"EAGLE-3, {option}": dataclasses.replace(EAGLE, **{option: True})
        for option in ("norm_before_residual", "norm_before_fc", "norm_each_tap", "norm_output")
    },
    "MTP": MTPConfig(nets.replace(QWEN, layers=1)),
    "DFlash": DFLASH,
    "DFlash, from_anchor": dataclasses.replace(DFLASH, from_anchor=True),
    "DFlash, draft_vocab": dataclasses.replace(DFLASH, **SMALL),
    **{
        f"DSpark, {markov}, {'from the anchor' if anchor else 'after the anchor'}": dataclasses.replace(
            DSPARK, markov=markov, from_anchor=anchor
        )
        for markov in ("vanilla", "gated", "rnn")
        for anchor in (True, False)
    },
    "DSpark, draft_vocab": dataclasses.replace(DSPARK, **SMALL),
}


def random_params(net, config, random):
    """Parameters away from norms of one; a vocabulary of its own is some of the target's ids."""
    shapes = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    params = jax.tree.map(lambda x: jnp.asarray(0.3 * random.standard_normal(x.shape), jnp.float32), shapes)
    if "vocabulary" in params:
        ids = np.sort(random.choice(VOCAB, config.draft_vocab, replace=False))
        params["vocabulary"] = jnp.asarray(ids, jnp.int32)
    return params


def ours(target, config, params, states, tokens):
    """Logits of what follows some of the tokens, in the drafter's vocabulary: [draft tokens, vocabulary]."""
    shared, block = shared_with(target.lm, target.params), isinstance(config, BlockConfig)
    forward = Forward(jnp.zeros(0), jnp.asarray(states), jnp.asarray(states))
    after, place = jnp.asarray(tokens[:, 1:]), jnp.array([ANCHOR - 1]) if block else jnp.arange(POSITIONS - 1)
    depths = config.count if block else 1
    if not block:
        forward = jax.tree.map(lambda x: x[:, : POSITIONS - 1] if x.ndim else x, forward._replace(logits=None))
    kind = kind_of(config).training
    assert kind is not None
    starts = DraftStarts(forward, after, place, depths, lambda *_: forward)
    hidden = kind.hidden_states(config, params, shared, starts)[0]
    ahead = jnp.asarray(tokens[:, ANCHOR : ANCHOR + depths]) if block else after[0][:, None]
    by_depth, memory = [], None
    for depth in range(depths):
        logits, memory = kind.logits(config, params, shared, DraftStep(hidden, ahead, depth, memory))
        by_depth.append(logits)
    logits = np.concatenate(by_depth)
    return logits[:, np.asarray(params["vocabulary"])] if "vocabulary" in params else logits


def theirs(folder, config, states, tokens):
    """The same, by the class that speculators chooses for the folder."""
    settings = SpeculatorModelConfig.from_pretrained(folder)
    settings.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=settings).eval().float()
    if not isinstance(config, MTPConfig):
        # transformers leaves what the folder lacks as the memory was, and speculators fills in only what is NaN.
        overwritten = dict(overwrite_embed_tokens=not config.own_embedding, overwrite_lm_head=not config.own_head)
        model._load_verifier_weights(**overwritten)
    ids, states = torch.tensor(tokens).long(), torch.tensor(states)
    zeros, caught = torch.zeros(1, POSITIONS, dtype=torch.long), []
    with torch.no_grad():
        if isinstance(config, MTPConfig):
            return model(ids, states)[0][0][0].numpy()
        if isinstance(config, EagleConfig):
            model.lm_head.register_forward_hook(lambda module, _, logits: caught.append(logits))
            model(states[:, :-1], ids[:, 1:], zeros[:, 1:], ttt_steps=1)
            return caught[0][0].numpy()
        anchors, last = zeros.float(), torch.zeros(1, POSITIONS, WIDTH)
        anchors[0, ANCHOR] = 1
        if not config.markov_rank:
            logits = model._backbone_forward(states, ids, anchors, last, zeros, max_anchors=1)[1]
        else:
            with mock.patch.object(dspark, "compute_metrics", lambda logits, *_, **__: (caught.append(logits), {})):
                model(states, ids, anchors, last, zeros, max_anchors=1)
            logits = caught[0]
    return logits[0, config.block - config.count :].numpy()


def main():
    """Prints a line for each format, and exits with 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="formats whose names hold this")
    wanted = {name: config for name, config in FORMATS.items() if parser.parse_args().only in name}
    random, worst = np.random.default_rng(0), 0.0
    print(f"speculators {importlib.metadata.version('speculators')}, torch {torch.__version__}\n")
    print("| format | largest difference of logits | their range |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary) / "target"
        target = Model(decoder.language_model(LLAMA), random_params(decoder, LLAMA, random), None, LLAMA, str(where))
        huggingface.save(target, where)
        for number, (name, config) in enumerate(wanted.items()):
            params = random_params(kind_of(config), config, random)
            folder = save(config, params, Path(temporary) / str(number), target=target)
            read = 1 if isinstance(config, MTPConfig) else len(config.taps)
            states = random.standard_normal((1, POSITIONS, read * WIDTH)).astype(np.float32)
            tokens = random.integers(0, VOCAB, (1, POSITIONS)).astype(np.int32)
            expected = theirs(folder, config, states, tokens)
            actual = ours(target, config, params, states, tokens)[: len(expected)]
            worst = max(worst, float(np.abs(actual - expected).max()))
            print(f"| {name} | {np.abs(actual - expected).max():.1e} | {np.ptp(expected):.1f} |", flush=True)
    if worst > TOLERANCE:
        sys.exit(f"logits differ by {worst:.1e}: expected at most {TOLERANCE}")


if __name__ == "__main__":
    main()
