"""Drafters that `draft_heads.save` writes, read and run by vLLM's `speculators` beside jaxspec's
own networks.

    pip install speculators==0.9.0 torch
    python -m benchmarks.speculators_parity --only DSpark

Tiny random networks in float32 on a random Llama, every option that the format has. EAGLE-3 and MTP
are compared at the first draft token after each position, P-EAGLE at the first three, DFlash,
DFlash 2 and DSpark over a whole block. Windows are of 3 positions, in the first of two layers.
Hidden states and tokens are random, the same for both. EAGLE-1, Medusa, Kangaroo and PaSS have no
class there; speculators puts its target's embedding in place of a block drafter's own. Exits with 1
if logits differ by more than 1e-5. A minute on two cores.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks import parity
from benchmarks.parity import ANCHOR, LLAMA, POSITIONS, QWEN, VOCAB, WIDTH, with_window
from jaxspec import nets
from jaxspec.draft_heads import kind_of
from jaxspec.draft_heads.block_config import BlockConfig
from jaxspec.draft_heads.dflash2 import DFlash2Config
from jaxspec.draft_heads.eagle import EagleConfig
from jaxspec.draft_heads.load import read_head
from jaxspec.draft_heads.mtp import MTPConfig
from jaxspec.draft_heads.save import save

try:
    import torch
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.models.dspark import core as dspark
    from speculators.models.peagle import core as peagle
except ImportError as error:
    sys.exit(
        f"{error}: this compares with speculators, install it with `pip install speculators==0.9.0 "
        "torch`"
    )

DEPTHS = 3  # P-EAGLE's draft tokens after each position
EAGLE = EagleConfig(nets.replace(LLAMA, layers=1), WIDTH, taps=(0, 2, 3), own_head=True)
PARALLEL = dataclasses.replace(
    EAGLE,
    layer=nets.replace(QWEN, layers=2),
    mask_token=VOCAB - 1,
    norm_each_tap=True,
    own_embedding=True,
)
BLOCK = dict(
    layer=nets.replace(QWEN, layers=2),
    hidden_size=WIDTH,
    taps=(0, 3),
    block=4,
    mask_token=VOCAB - 1,
)
DFLASH = BlockConfig(**BLOCK)
DFLASH2 = DFlash2Config(**BLOCK, causal_windows=False, group=4, rank=5, candidates=6)
DSPARK = dataclasses.replace(DFLASH, markov_rank=5, from_anchor=True)
SMALL = dict(own_head=True, draft_vocab=20)
WINDOWED = with_window(nets.replace(QWEN, layers=2))
# whose folder is changed after it was written, and read by both
UNUSED = "DFlash, windows that are not used"


FORMATS = {
    "EAGLE-3": EAGLE,
    "EAGLE-3, head_norms": dataclasses.replace(EAGLE, layer=nets.replace(QWEN, layers=1)),
    "EAGLE-3, draft_vocab": dataclasses.replace(EAGLE, draft_vocab=20),
    "EAGLE-3, the target's head": dataclasses.replace(EAGLE, own_head=False),
    "EAGLE-3, two layers": dataclasses.replace(EAGLE, layer=nets.replace(LLAMA, layers=2)),
    "EAGLE-3, windows": dataclasses.replace(EAGLE, layer=WINDOWED),
    "EAGLE-3, windows, no head_norms": dataclasses.replace(
        EAGLE, layer=with_window(nets.replace(LLAMA, layers=2))
    ),
    "EAGLE-3, windows in all layers": dataclasses.replace(
        EAGLE, layer=with_window(nets.replace(LLAMA, layers=1))
    ),
    "EAGLE-3, own_embedding": dataclasses.replace(EAGLE, own_embedding=True),
    **{
        f"EAGLE-3, {option}": dataclasses.replace(EAGLE, **{option: True})
        for option in ("norm_before_residual", "norm_before_fc", "norm_each_tap", "norm_output")
    },
    "P-EAGLE": PARALLEL,
    "P-EAGLE, draft_vocab": dataclasses.replace(PARALLEL, draft_vocab=20),
    "P-EAGLE, windows, no head_norms": dataclasses.replace(
        PARALLEL, layer=with_window(nets.replace(LLAMA, layers=2))
    ),
    "MTP": MTPConfig(nets.replace(QWEN, layers=1)),
    "DFlash": DFLASH,
    "DFlash, from_anchor": dataclasses.replace(DFLASH, from_anchor=True),
    "DFlash, draft_vocab": dataclasses.replace(DFLASH, **SMALL),
    "DFlash, windows, causal": dataclasses.replace(DFLASH, layer=WINDOWED, causal_windows=True),
    "DFlash, windows, not causal": dataclasses.replace(
        DFLASH, layer=WINDOWED, causal_windows=False
    ),
    UNUSED: dataclasses.replace(DFLASH, layer=WINDOWED, causal_windows=True),
    "DFlash 2": DFLASH2,
    "DFlash 2, windows in all layers": dataclasses.replace(
        DFLASH2, layer=with_window(nets.replace(QWEN, layers=1))
    ),
    "DFlash 2, windows, causal": dataclasses.replace(DFLASH2, layer=WINDOWED, causal_windows=True),
    "DFlash 2, windows, not causal": dataclasses.replace(DFLASH2, layer=WINDOWED),
    **{
        f"DSpark, {markov}, {'from the anchor' if anchor else 'after the anchor'}": dataclasses.replace(
            DSPARK, markov=markov, from_anchor=anchor
        )
        for markov in ("vanilla", "gated", "rnn")
        for anchor in (True, False)
    },
    "DSpark, draft_vocab": dataclasses.replace(DSPARK, **SMALL),
}


def theirs(folder, config, states, tokens):
    """The logits by the class that speculators chooses for the folder, as `parity.logits_of` lists
    them.
    """
    settings = SpeculatorModelConfig.from_pretrained(folder)
    settings.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(folder, config=settings).eval().float()
    if not isinstance(config, MTPConfig):
        # transformers leaves what the folder lacks as the memory was, and speculators fills in only
        # what is NaN.
        overwritten = dict(
            overwrite_embed_tokens=not config.own_embedding, overwrite_lm_head=not config.own_head
        )
        model._load_verifier_weights(**overwritten)
    ids, states = torch.tensor(tokens).long(), torch.tensor(states)
    with torch.no_grad():
        if isinstance(config, MTPConfig):
            return model(ids, states)[0][0][0].numpy()
        if isinstance(config, EagleConfig):
            return logits_of_eagle(model, config, states[:, :-1], ids[:, 1:]).numpy()
        return logits_of_block(model, config, states, ids)[0, config.block - config.count :].numpy()


def logits_of_eagle(model, config, states, ids):
    """Logits at every position, which its head makes on the way to a loss."""
    caught, zeros = [], torch.zeros_like(ids)
    model.lm_head.register_forward_hook(lambda module, _, logits: caught.append(logits))
    if config.mask_token is None:
        model(states, ids, zeros, ttt_steps=1)
        return caught[0][0]
    # Training draws where drafts begin: here they begin everywhere, as far as the text goes.
    size = ids.shape[1]
    pairs = torch.tensor(
        [(start, depth) for depth in range(DEPTHS) for start in range(size - depth)]
    )
    fixed = dict(
        generate_cod_sample_indices=lambda **_: (pairs[:, 0], pairs[:, 1]),
        compute_metrics=lambda **_: (None, {}),
    )
    with mock.patch.multiple(peagle, **fixed):
        model(states, ids, zeros, verifier_last_hidden_states=torch.zeros(1, size, WIDTH))
    return caught[0][0]


def logits_of_block(model, config, states, ids):
    """Logits of a block at the anchor, given the text's tokens before each."""
    zeros, last = torch.zeros(1, POSITIONS, dtype=torch.long), torch.zeros(1, POSITIONS, WIDTH)
    anchors, caught = zeros.float(), []
    anchors[0, ANCHOR] = 1
    if config.markov_rank:
        with mock.patch.object(
            dspark, "compute_metrics", lambda logits, *_, **__: (caught.append(logits), {})
        ):
            model(states, ids, anchors, last, zeros, max_anchors=1)
        return caught[0]
    hidden, logits, *_, place = model._backbone_forward(
        states, ids, anchors, last, zeros, max_anchors=1
    )
    if not isinstance(config, DFlash2Config):
        return logits
    before = model._predecessor_ids(ids, place).reshape(1, -1)
    candidates, scores = model.candidate_selector.select(logits, hidden, before)
    return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)


def compared(target, config, folder, random):
    """The largest difference of one drafter's logits, and their range."""
    params = parity.random_params(kind_of(config), config, random)
    save(config, params, folder, target=target)
    if folder.name == UNUSED:
        table = json.loads((folder / "config.json").read_text())
        table["transformer_layer_config"]["use_sliding_window"] = False
        (folder / "config.json").write_text(json.dumps(table))
        config, params = read_head(folder, target=target)
    states, tokens = parity.random_text(
        1 if isinstance(config, MTPConfig) else len(config.taps), random
    )
    is_parallel = isinstance(config, EagleConfig) and config.mask_token is not None
    actual = parity.logits_of(target, config, params, states, tokens, DEPTHS if is_parallel else 1)
    if is_parallel:  # drafts that pass the end of the text are left out
        actual = actual.reshape(DEPTHS, POSITIONS - 1, -1)
        actual = np.concatenate(
            [logits[: POSITIONS - 1 - depth] for depth, logits in enumerate(actual)]
        )
    expected = theirs(folder, config, states, tokens)
    return parity.difference(actual[: len(expected)], expected)


def main():
    """Prints a line for each format, and exits with 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="formats whose names hold this")
    wanted = {name: config for name, config in FORMATS.items() if parser.parse_args().only in name}
    print(f"speculators {importlib.metadata.version('speculators')}, torch {torch.__version__}\n")
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as temporary:
        target, folder = parity.random_target(Path(temporary) / "target", random), Path(temporary)
        parity.report(
            "logits",
            ((name, *compared(target, x, folder / name, random)) for name, x in wanted.items()),
        )


if __name__ == "__main__":
    main()
