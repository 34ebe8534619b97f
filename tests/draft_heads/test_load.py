"""Drafters that do not fit: for another target, damaged, or given options that they have no use
for.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, drafters, nets
from jaxspec.draft_heads import kangaroo, lookahead_embeddings
from jaxspec.draft_heads.load import read_head
from jaxspec.draft_heads.save import save, save_parallel
from jaxspec.nets import decoder
from jaxspec.nets.decoder import decoder_config
from jaxspec.testing import table_model, word_tokenizer
from jaxspec.vocab import trim
from jaxspec.weights import orbax
from jaxspec.weights.loading import shipped
from jaxspec.weights.orbax import CheckpointError
from tests.marks import optional
from tests.small import tiny_llama

torch = optional("torch")
safetensors_torch = optional("safetensors.torch")
pytestmark = pytest.mark.needs_torch  # published drafters are drawn and written with it

V, D, FF, HEADS, KV, HD, LAYERS = 13, 16, 24, 4, 2, 4, 7  # as in conftest.py
NARROW = decoder_config(V, 8, FF, LAYERS, HEADS, KV, HD, rope_base=100.0)
WORDS = decoder_config(V + 3, D, FF, LAYERS, HEADS, KV, HD, rope_base=100.0)
DEEPER = decoder_config(V, D, FF, LAYERS + 2, HEADS, KV, HD, rope_base=100.0)
SHALLOW = decoder_config(V, D, FF, 4, HEADS, KV, HD, rope_base=100.0)


def layers_of(name):
    """How many decoder layers a shipped T5 has."""
    return orbax.read_manifest(shipped()[name]).model.decoder_layers


def unloaded(config):
    """A model whose parameters nobody reads."""
    net = decoder
    return Model(net.language_model(config), {}, None, config, "other")


@pytest.mark.parametrize(
    ("name", "other", "complaint"),
    [
        pytest.param(
            "EAGLE",
            NARROW,
            "width of hidden states is 16, and the target's 8",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "EAGLE-3, its authors'",
            NARROW,
            "width of hidden states is 16, and the target's 8",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "EAGLE-3, its authors'",
            WORDS,
            "vocabulary size is 13, and the target's 16",
            marks=pytest.mark.slow,
        ),
        (
            "EAGLE-3, SGLang's",
            SHALLOW,
            "it reads layers .* of its target, which has 4: the output of 4 cannot be read",
        ),
        pytest.param(
            "Medusa",
            NARROW,
            "width of hidden states is 16, and the target's 8",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "Medusa", WORDS, "vocabulary size is 13, and the target's 16", marks=pytest.mark.slow
        ),
        ("MTP, Qwen's", decoder.gpt_config(V, D, FF, 2, 2), "which has no rotary positions"),
        (
            "MTP, Qwen's",
            decoder_config(V, D, FF, 2, 2, 2, 8),
            "k_proj.weight is .8, 16., expected .16, 16.",
        ),
        ("DFlash", NARROW, "width of hidden states is 16"),
        ("DFlash", SHALLOW, "which has 4: the output of 4 cannot be read"),
        ("DFlash", DEEPER, f"number of target layers is {LAYERS}, and the target's {LAYERS + 2}"),
    ],
)
def test_a_drafter_for_another_target(name, other, complaint, folder, tmp_path, published):
    where = published[name].write(tmp_path / "it", folder)
    with pytest.raises(CheckpointError, match=complaint):
        jaxspec.load_drafter(where, target=unloaded(other))


def test_look_ahead_vectors_are_read_again_and_not_for_another_target(target, tmp_path):
    config = lookahead_embeddings.LookAheadConfig(V, D, vectors=2)
    params = lookahead_embeddings.init(config, jax.random.key(0))
    where = save(config, params, tmp_path / "vectors", target=target)
    again, same = read_head(where, target=target)
    assert again == config
    np.testing.assert_array_equal(same["vectors"], params["vectors"])
    for other, complaint in (
        (NARROW, "width of hidden states is 16, and the target's 8"),
        (WORDS, "size is 13, and the target's 16"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            jaxspec.load_drafter(where, target=unloaded(other))


def test_a_drafter_whose_head_and_embedding_are_written_once(folder, target, tmp_path, published):
    """`safetensors.torch.save_model` writes one of the names, and notes the other in the
    metadata.
    """
    where = published["EAGLE-3, DeepSpec's"].write(tmp_path / "it", folder)
    weights = safetensors_torch.load_file(where / "model.safetensors")
    weights["lm_head.weight"] = weights["embed_tokens.weight"].clone()
    safetensors_torch.save_file(weights, where / "model.safetensors")
    _, expected = read_head(where, target=target)
    del weights["embed_tokens.weight"]
    safetensors_torch.save_file(
        weights, where / "model.safetensors", metadata={"embed_tokens.weight": "lm_head.weight"}
    )
    _, params = read_head(where, target=target)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert jax.tree.structure(params) == jax.tree.structure(expected)


def test_a_drafter_that_names_another_model(target, tmp_path):
    """A target of the same width and vocabulary is refused where it is known to have more layers,
    or fewer.
    """
    config = kangaroo.ExitAdapterConfig(nets.replace(target.config, layers=1), exit=2)
    params = kangaroo.init(config, jax.random.key(0))
    folder = save(config, params, tmp_path / "it", target=target._replace(name="org/tiny-7b"))
    table = json.loads((folder / "config.json").read_text())
    assert table["base_model_name_or_path"] == "org/tiny-7b"
    with pytest.warns(
        UserWarning, match="made for org/tiny-7b, and the target is org/other: the text stays exact"
    ):
        jaxspec.load_drafter(folder, target=target._replace(name="org/other"))
    for name in ("org/tiny-7b", "other/Tiny-7B-int8", "a-folder", ""):  # a copy, or nobody knows
        jaxspec.load_drafter(folder, target=target._replace(name=name))

    say(folder, base_model_name_or_path="debian-t5-large", num_target_layers=None)
    layers = layers_of("debian-t5-large")
    with pytest.raises(
        CheckpointError,
        match=rf"-large, a model of {layers} layers, .* has 7: .*load\('debian-t5-large",
    ):
        jaxspec.load_drafter(folder, target=target._replace(name="debian-gpt-base"))
    say(folder, num_target_layers=LAYERS + 1)
    with pytest.raises(CheckpointError, match=f"layers is {LAYERS + 1}, and the target's {LAYERS}"):
        jaxspec.load_drafter(folder, target=target)


@pytest.mark.slow
def test_shipped_drafters_and_other_shipped_models():
    layers = layers_of("debian-t5-large")
    with pytest.raises(
        CheckpointError, match=f"-base, a model of 5 layers, and debian-t5-large has {layers}"
    ):
        jaxspec.load_drafter("debian-t5-base-lookahead", target=jaxspec.load("debian-t5-large"))


def test_options_that_a_drafter_has_no_use_for(folder, target, tmp_path, published, draft_of):
    medusa, eagle = (published[name].write(tmp_path / name, folder) for name in ("Medusa", "EAGLE"))
    for wrong in ("024", ("0", "2")):
        with pytest.raises(
            ValueError, match=r"taps (is the string|has) '0.*: expected numbers of layers"
        ):
            jaxspec.load_drafter(eagle, target=target, taps=wrong)
        with pytest.raises(
            ValueError, match=r"taps (is the string|has) '0.*: expected numbers of layers"
        ):
            jaxspec.with_taps(target, wrong)
    with pytest.raises(
        ValueError, match=r"taps is \[1\], and .* reads the last layer's output only"
    ):
        jaxspec.load_drafter(medusa, target=target, taps=[1])
    few = jaxspec.trim_vocabulary(target, size=4)
    with pytest.raises(
        ValueError, match="the drafter has its own head, which can be trimmed only in training"
    ):
        jaxspec.load_drafter(medusa, target=target, head=few)
    other = jaxspec.Model(lm=unloaded(NARROW).lm, params={})
    with pytest.raises(ValueError, match=r"expects hidden states of width .* has 8"):
        jaxspec.load_drafter(eagle, target=target, head=other)
    _, log_probs = draft_of(jaxspec.load_drafter(eagle, target=target, head=few))
    assert set(np.flatnonzero(np.isfinite(log_probs[0]))) == set(trim.draft_tokens(few).tolist())


def as_float8(x):
    return x.to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"fc.weight": as_float8}, "fc.weight is float8_e4m3fn, so it is quantised, and no scales"),
        (
            {"fc.weight": as_float8, "fc.weight_scale": lambda x: torch.ones(1)},
            r"its weights are quantised \(fc.weight_scale\)",
        ),
        (
            {"fc.weight": None, "fc.qweight": lambda x: torch.ones((1, 8), dtype=torch.int32)},
            r"its weights are quantised \(fc.qweight\)",
        ),
    ],
)
def test_a_quantised_drafter_is_said_to_be_quantised(
    folder, target, tmp_path, published, tensors, said
):
    where = published["EAGLE"].write(tmp_path / "it", folder)
    file = where / "pytorch_model.bin"
    have = torch.load(file)
    have |= {name: x(have["fc.weight"]) if callable(x) else x for name, x in tensors.items()}
    torch.save({name: x for name, x in have.items() if x is not None}, file)
    with pytest.raises(CheckpointError, match=said):
        jaxspec.load_drafter(where, target=target)


def damaged_file(where: Path):
    file = where / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-200])


def change(where: Path, **tensors):
    """Tensors in place of others; None removes one."""
    file = where / "model.safetensors"
    have = safetensors_torch.load_file(file) | tensors
    safetensors_torch.save_file({name: x for name, x in have.items() if x is not None}, file)


def say(where: Path, **keys):
    table = json.loads((where / "config.json").read_text()) | keys
    (where / "config.json").write_text(json.dumps(table))


def layer(where: Path):
    return json.loads((where / "config.json").read_text())["transformer_layer_config"]


# what speculators makes of a target whose heads are rotated in part: the drafter's are rotated
# whole
SHARE = "partial_rotary_factor"
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 0], SHARE: 1.0}
BAD = {
    "truncated": (damaged_file, "damaged"),
    "no weights": (lambda where: (where / "model.safetensors").unlink(), "has no weights"),
    "no config": (lambda where: (where / "config.json").unlink(), "No such file"),
    "a tensor is missing": (
        lambda where: change(where, **{"norm.weight": None}),
        "missing .1.: norm.weight",
    ),
    "a tensor too many": (
        lambda where: change(where, **{"layers.0.conv": torch.ones(2)}),
        "unexpected .1.: layers",
    ),
    "of another shape": (
        lambda where: change(where, **{"norm.weight": torch.ones(3)}),
        "norm.weight is .3., expected",
    ),
    "both spellings": (
        lambda where: change(where, **{"midlayer.mlp.up_proj.weight": torch.ones(FF, D)}),
        "holds layers.0.mlp.up_proj.weight twice",
    ),
    "ids that no target has": (
        lambda where: change(
            where, d2t=torch.tensor([0] * 5 + [99]), **{"lm_head.weight": torch.ones(6, D)}
        ),
        "d2t gives ids from 0 to 104",
    ),
    "a vocabulary without a head": (
        lambda where: change(where, d2t=torch.zeros(6).long(), **{"lm_head.weight": None}),
        "no lm_head for it",
    ),
    "integers": (
        lambda where: change(where, **{"norm.weight": torch.ones(D).long()}),
        "norm.weight is int64",
    ),
    "windows": (
        lambda where: say(where, transformer_layer_config={"layer_types": ["sliding_attention"]}),
        "sliding_window is missing: expected a number",
    ),
    "a share of each head is rotated": (
        lambda where: say(
            where, transformer_layer_config=layer(where) | {"partial_rotary_factor": 0.5}
        ),
        "partial_rotary_factor is 0.5: only 1.0 is supported",
    ),
    "a share of each head is rotated, with positions of images": (
        lambda where: say(
            where, transformer_layer_config=layer(where) | {"rope_parameters": MROPE | {SHARE: 0.5}}
        ),
        "partial_rotary_factor is 0.5: only 1.0 is supported",
    ),
    "an unknown format": (
        lambda where: change(where, **{"fc.weight": None}),
        "match no known format: expected",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_damaged_and_unknown_drafters(name, folder, target, tmp_path, published):
    where = published["EAGLE-3, speculators"].write(tmp_path / "it", folder)
    spoil, complaint = BAD[name]
    spoil(where)
    with pytest.raises(CheckpointError, match=complaint):
        jaxspec.load_drafter(where, target=target)


def test_a_drafter_for_a_target_with_a_partial_rotation_is_rotated_whole(
    folder, target, tmp_path, published
):
    where = published["EAGLE-3, speculators"].write(tmp_path / "it", folder)
    config, _ = read_head(where, target=target)
    say(where, transformer_layer_config=layer(where) | {"rope_parameters": MROPE})
    assert read_head(where, target=target)[0] == config


def test_a_drafter_with_another_tokenizer(folder, target, tmp_path, published):
    where = published["EAGLE-3, speculators"].write(tmp_path / "it", folder)
    word_tokenizer(["</s>", "<unk>", "a", "b"]).save_pretrained(where)
    with_words = target._replace(tokenizer=word_tokenizer(["</s>", "<unk>", "a", "c"]))
    with pytest.raises(
        CheckpointError, match=r"another tokenizer than the target: id .* is 'c' .* and 'b'"
    ):
        jaxspec.load_drafter(where, target=with_words)


def test_there_is_no_such_drafter(target):
    with pytest.raises(
        CheckpointError, match="no drafter at no/such/folder: expected a folder, the name of a ship"
    ):
        jaxspec.load_drafter("no/such/folder", target=target)


def test_a_model_without_layers_has_no_taps():
    with pytest.raises(ValueError, match="no layers to tap"):
        jaxspec.with_taps(table_model(jax.random.key(0), 3), (0,))


def test_a_whole_model_with_a_mask_token_drafts_in_parallel(tmp_path):
    """PARD's folders are those of models, with one number more in config.json."""
    config = tiny_llama(24, max_positions=64)
    model = Model(
        decoder.language_model(config), decoder.init(config, jax.random.key(3)), None, config, "it"
    )
    folder = save_parallel(model, 7, tmp_path / "pard")
    table = json.loads((folder / "config.json").read_text())
    assert table["pard_token"] == 7
    assert jaxspec.load(folder).config == config
    with pytest.raises(ValueError, match="mask_token is 24"):
        save_parallel(model, 24, tmp_path / "no")
    with pytest.raises(CheckpointError, match="give overwrite to replace it"):
        save_parallel(model, 7, folder)
    drafter = jaxspec.load_drafter(folder, target=model)
    given = drafters.parallel(jaxspec.load(folder), 7)
    options = dict(gamma=3, max_new_tokens=9, eos_ids=())
    out, expected = (
        jaxspec.generate(model, [[5, 6, 9]], drafter=x, **options) for x in (drafter, given)
    )
    assert (out.tokens == expected.tokens).all() and (
        out.stats.rounds == expected.stats.rounds
    ).all()
    assert drafter.name == "pard" and drafter.functions == given.functions
    with pytest.raises(ValueError, match=r"taps is of draft heads, and .*pard is a whole model"):
        jaxspec.load_drafter(folder, target=model, taps=(0,))
    for token, complaint in (
        (24, "mask_token is 24: expected a number from 0 to below 24"),
        ("7", "'7': expected the"),
    ):
        (folder / "config.json").write_text(json.dumps(table | {"pard_token": token}))
        with pytest.raises(CheckpointError, match=f"config.json.*pard_token.*{complaint}"):
            jaxspec.load_drafter(folder, target=model)
