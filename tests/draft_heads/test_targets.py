"""Every published kind of draft head on every kind of target: drafted text is plain text, in chains
and trees.
"""

import dataclasses
import functools
import itertools

import pytest
from flax import nnx

import jaxspec
from jaxspec import draft_heads, drafters
from jaxspec.draft_heads import medusa
from jaxspec.nets import adapters
from tests.draft_heads import test_block, test_mtp
from tests.draft_heads.conftest import CASES, PROMPT
from tests.marks import marked
from tests.nets import test_end_index
from tests.nets.test_end_index import StandIn

LAYERS = 4  # of the targets
ROWS = [PROMPT, [9, 2], [7, 7, 1, 0, 3, 12, 5]]
LIMITS = {"max_new_tokens": 8, "eos_ids": ()}
TAPS = {  # which of four layers a head reads, as its files say it
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "aux_hidden_state_layer_ids": [1, 3],
    "num_target_layers": LAYERS,
}
BLOCK = {"dflash_config": {"mask_token_id": 12, "target_layer_ids": [0, 2], "block_size": 4}}
HEADS = {  # kinds: published cases of conftest.py
    "EAGLE-3": "EAGLE-3, speculators",
    "P-EAGLE": "P-EAGLE",
    "DFlash": "DFlash, z-lab's windows",
    "DFlash 2": "DFlash 2, speculators",
    "DSpark": "DSpark, speculators",
    "MTP": "MTP, speculators",
}
TARGETS = {
    "recurrent": "Qwen3_5ForCausalLM",
    "Gemma 4": "Gemma4ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "experts": "Qwen3MoeForCausalLM",
}
EVERY = list(itertools.product(HEADS, TARGETS, ("chain", "tree")))
COVERING = {  # each head, each target, chains and trees
    ("EAGLE-3", "Gemma 4", "tree"),
    ("P-EAGLE", "gpt-oss", "chain"),
    ("DFlash", "recurrent", "chain"),
    ("DFlash 2", "experts", "tree"),
    ("DSpark", "Gemma 4", "chain"),
    ("MTP", "gpt-oss", "tree"),
    ("EAGLE-3", "recurrent", "tree"),  # a refusal
}
FAST = {
    ("EAGLE-3", "Gemma 4", "tree"),
    ("DFlash", "recurrent", "chain"),
    ("EAGLE-3", "recurrent", "tree"),
}


@pytest.fixture(scope="module")
def target_of(tmp_path_factory):
    """Makes a target by its name, with its plain text."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("targets") / "target"
        test_block.peer(TARGETS[name]).save_pretrained(folder)
        target = jaxspec.load(folder)
        return target, jaxspec.generate(target, ROWS, **LIMITS).tokens.tolist()

    return make


def drafter_of(kind, target, folder):
    """A drafter of a kind for a target, read from the files that its case has."""
    case = CASES[HEADS[kind]]
    table = case.table | {key: value for key, value in TAPS.items() if key in case.table}
    table |= BLOCK if "dflash_config" in table else {}
    return jaxspec.load_drafter(
        dataclasses.replace(case, table=table).write(folder / "head", None), target=target
    )


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    ("kind", "name", "shape"), marked(EVERY, slow=COVERING - FAST, exhaustive={*EVERY} - COVERING)
)
def test_drafted_text_is_plain_text(kind, name, shape, target_of, tmp_path):
    target, plain = target_of(name)
    if (kind, name) == ("MTP", "recurrent"):  # its own module, with gates, of a target of its own
        target = test_mtp.module(small=True).target
        drafter, rows = (
            test_mtp.module(small=True),
            [[token % target.lm.vocab_size for token in row] for row in ROWS],
        )
        plain = jaxspec.generate(target, rows, **LIMITS).tokens.tolist()
    else:
        drafter, rows = drafter_of(kind, target, tmp_path), ROWS
    if shape == "chain":
        out = jaxspec.generate(target, rows, drafter=drafter, gamma=3, **LIMITS)
    elif name == "recurrent":
        with pytest.raises(
            ValueError, match=r"the target takes chains only .*recurrent layers take no trees"
        ):
            jaxspec.generate(target, rows, drafter=drafters.tree(drafter, (2, 1)), **LIMITS)
        return
    else:
        out = jaxspec.generate(target, rows, drafter=drafters.tree(drafter, (2, 1)), **LIMITS)
    assert out.tokens.tolist() == plain
    assert out.stats.drafted.sum() > 0


@pytest.fixture(scope="module")
def foreign():
    """A network of another library, through its adapter."""
    return adapters.from_tunix(StandIn(nnx.Rngs(0)))


@pytest.mark.parametrize("name", draft_heads.load.shipped())
def test_an_adapters_model_is_no_target_of_heads(foreign, name):
    message = f"{name} reads hidden states, and StandIn gives none .* jaxspec.from_arrays converts"
    with pytest.raises(ValueError, match=message):
        jaxspec.load_drafter(name, target=foreign)
    with pytest.raises(ValueError, match=message):
        jaxspec.generate(foreign, ROWS, drafter=name)


def test_ways_of_drafting_that_need_more_than_logits_say_so(foreign):
    advice = "expected a network of jaxspec.nets: .* jaxspec.from_arrays converts those of other"
    config = medusa.HeadsConfig(test_end_index.VOCAB, dim=test_end_index.WIDTH, heads=2)
    head = jaxspec.DraftHead(medusa.head(config), {})
    calls = [
        lambda: medusa.heads(head, foreign),
        lambda: drafters.early_exit(foreign, 1),
        lambda: drafters.quantised(foreign),
        lambda: jaxspec.with_taps(foreign, (0,)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=advice):
            call()
