"""DFlash drafters that z-lab's `dflash` makes and writes, read and run by jaxspec beside its own
classes.

    pip install dflash==0.1.0 transformers torch
    python -m benchmarks.zlab_parity --only windows

Tiny random networks in float32 on a random Llama: DFlash and DFlash 2 with windows, causal layers
and scales. Windows are of 3 positions, in the first of two layers. Hidden states and tokens are
random, the same for both. The script compares log-probabilities of a whole block; those of DFlash 2
follow the tokens that z-lab's code draws. It exits with 1 if they differ by more than 1e-5. Half a
minute on two cores.
"""

import argparse
import importlib.metadata
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import parity
from benchmarks.parity import ANCHOR, LLAMA, VOCAB, WIDTH, WINDOW
from jaxspec.draft_heads.load import read_head

try:
    import torch
    import transformers
    from dflash import model as zlab
except ImportError as error:
    sys.exit(
        f"{error}: this compares with z-lab's, install it with `pip install dflash==0.1.0 "
        "transformers torch`"
    )

BLOCK, TAPS = 4, (0, 3)
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
SCALES = {"input_embedding_scale": 0.5, "output_multiplier": 0.7, "final_logit_softcapping": 4.0}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 6}

CASES = {  # entries of config.json, and of its dflash_config
    "DFlash": ({}, {}),
    "DFlash, causal layers": ({"is_causal": True}, {}),
    "DFlash, windows": (WINDOWS, {}),
    "DFlash, windows, causal layers": (WINDOWS | {"is_causal": True}, {}),
    "DFlash, windows, not causal": (WINDOWS | {"is_causal": False}, {}),
    "DFlash, windows that are not used": (WINDOWS | {"use_sliding_window": False}, {}),
    "DFlash, windows by number": ({"layer_types": None, "max_window_layers": 1}, {}),
    "DFlash, scales": ({}, SCALES),
    "DFlash, scales beside dflash_config": (SCALES, {}),
    "DFlash 2": ({}, SELECTOR),
    "DFlash 2, windows": (WINDOWS, SELECTOR),
    "DFlash 2, windows, not causal": (WINDOWS | {"is_causal": False}, SELECTOR),
    "DFlash 2, scales": ({}, SELECTOR | SCALES),
}


def made(table, options, random):
    """A random drafter of z-lab's class."""
    config = transformers.Qwen3Config(
        **dict(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=2,
            head_dim=8,
        ),
        **dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        ),
        **dict(
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            max_position_embeddings=64,
        ),
        **dict(sliding_window=WINDOW, num_target_layers=len(LLAMA.layers)),
        **{"use_sliding_window": True, "layer_types": ["full_attention"] * 2, **table},
        dflash_config={
            "block_size": BLOCK,
            "mask_token_id": VOCAB - 1,
            "target_layer_ids": list(TAPS),
            **options,
        },
    )
    network = zlab.DFlash2DraftModel if "selector_rank" in options else zlab.DFlashDraftModel
    model = network(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.tensor(0.3 * random.standard_normal(parameter.shape)))
    return model


@torch.no_grad()
def theirs(model, target, states, tokens):
    """Log-probabilities of a block by z-lab's code, [draft tokens, vocabulary], and the tokens that
    they depend on.
    """
    ids = torch.full((1, BLOCK), VOCAB - 1)
    ids[0, 0] = int(tokens[0, ANCHOR])
    scale = float(zlab._draft_value(model.config, "input_embedding_scale", 1.0))
    hidden = model(
        target_hidden=torch.tensor(states[:, :ANCHOR]),
        noise_embedding=zlab._raw_input_embeddings(target, ids, scale),
        position_ids=torch.arange(ANCHOR + BLOCK)[None],
    )[:, 1 - BLOCK :]
    logits = model.compute_logits(hidden, target.lm_head)
    if isinstance(model, zlab.DFlash2DraftModel):
        path, candidates, probs = model.propose(hidden, ids[:, 0], target.lm_head, temperature=1.0)
        tokens = tokens.copy()
        tokens[:, ANCHOR + 1 : ANCHOR + BLOCK] = path
        logits = torch.full_like(logits, -torch.inf).scatter(-1, candidates, probs.log())
    return logits[0].log_softmax(-1).numpy(), tokens


def main():
    """Prints a line for each case, and exits with 1 if one differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose names hold this")
    wanted = {name: case for name, case in CASES.items() if parser.parse_args().only in name}
    torch.manual_seed(0)
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("dflash", "transformers", "torch")
    ]
    print(f"{', '.join(versions)}\n")
    parity.report("log-probabilities", compared(wanted, np.random.default_rng(0)))


def compared(wanted, random):
    """Yields the name of each case, the largest difference of log-probabilities, and their
    range.
    """
    with tempfile.TemporaryDirectory() as temporary:
        target = parity.random_target(Path(temporary) / "target", random)
        llama = transformers.LlamaForCausalLM.from_pretrained(Path(temporary) / "target").eval()
        for number, (name, (table, options)) in enumerate(wanted.items()):
            model, folder = made(table, options, random), Path(temporary) / str(number)
            model.save_pretrained(folder)
            states, tokens = parity.random_text(len(TAPS), random)
            expected, tokens = theirs(model, llama, states, tokens)
            config, params = read_head(folder, target=target)
            logits = parity.logits_of(target, config, params, states, tokens)
            log_probs = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
            yield name, *parity.difference(log_probs, expected)


if __name__ == "__main__":
    main()
