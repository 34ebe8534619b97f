"""Tensors of several names: files that hold them under any of these, as
`safetensors.torch.save_model` writes them.
"""

import dataclasses
import json

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec.weights import hf_families, huggingface
from jaxspec.weights.tensors import CheckpointError
from tests.small import tiny_t5
from tests.weights.folders import T5, assert_same, model_of
from tests.weights.test_random_configurations import FAMILIES, options_of, saved_peer

DECODER = ("model.embed_tokens.weight", "lm_head.weight")
OF_T5 = (
    "shared.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "lm_head.weight",
)
OF_BART = (*(f"model.{name}" for name in OF_T5[:3]), "lm_head.weight")
OTHERS = {  # by architecture; the first name is that under which transformers saves the tensor
    "GPT2LMHeadModel": ("transformer.wte.weight", "lm_head.weight"),
    **dict.fromkeys(("T5ForConditionalGeneration", "UMT5ForConditionalGeneration"), OF_T5),
    "T5GemmaForConditionalGeneration": (
        "model.decoder.embed_tokens.weight",
        "lm_head.out_proj.weight",
    ),
    **{f"{name}ForConditionalGeneration": OF_BART for name in ("Bart", "MBart", "M2M100")},
    "MarianMTModel": OF_BART,
    "WhisperForConditionalGeneration": ("model.decoder.embed_tokens.weight", "proj_out.weight"),
}


def table_of(architecture: str) -> dict:
    """Return the config.json of a small model whose head is tied."""
    name = (
        architecture.removesuffix("ForCausalLM")
        .removesuffix("LMHeadModel")
        .removesuffix("ForConditionalGeneration")
    )
    name = name.removesuffix("MTModel")
    kind = getattr(transformers, f"{name}TextConfig", None) or getattr(
        transformers, f"{name}Config"
    )
    return kind(**options_of(architecture, 0)).to_dict()


def renamed(folder, kept, names, noted):
    """Write the tensor of several names under one of them only, perhaps with a note of the
    others.
    """
    weights = load_file(folder / "model.safetensors")
    weights[kept] = weights.pop(next(name for name in names if name in weights))
    others = {name: kept for name in names if name != kept}
    save_file(
        weights, folder / "model.safetensors", metadata={"format": "pt"} | (others if noted else {})
    )


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_tied_tensor_may_have_any_of_its_names_in_every_family(architecture, tmp_path):
    table = table_of(architecture)
    family = hf_families.of(table)
    model = model_of(family.read(table))
    assert model.config.tied_head
    names = OTHERS.get(architecture, DECODER)
    if architecture == "MarianMTModel" and model.config.source_vocab is not None:
        names = ("model.decoder.embed_tokens.weight", "lm_head.weight")
    named = dict(huggingface._theirs(model, family))
    folder = huggingface.write_folder(
        tmp_path / "folder", {huggingface.CONFIG: table}, named.items()
    )
    expected, config = huggingface.restore(folder)
    for kept in names[1:]:
        for noted in (True, False):
            renamed(folder, kept, names, noted)
            params, read = huggingface.restore(folder)
            assert read == config
            assert_same(params, expected)


@pytest.mark.slow
@pytest.mark.needs_torch
def test_what_save_model_writes_loads_in_every_family(tmp_path):
    """The library's own choice of name, beside what transformers writes of the same model."""
    from safetensors.torch import save_model

    for architecture in FAMILIES:
        folder = tmp_path / architecture
        peer = saved_peer(architecture, options_of(architecture, 0), folder)
        expected, config = huggingface.restore(folder)
        save_model(peer, str(folder / "model.safetensors"), metadata={"format": "pt"})
        params, read = huggingface.restore(folder)
        assert read == config, architecture
        assert_same(params, expected)


def madlad(folder):
    """Write a T5 as MADLAD-400 is: a head of its own, and the embedding as the decoder's alone."""
    model = model_of(dataclasses.replace(tiny_t5(24, layers=2), tied_head=False, scaled_head=False))
    huggingface.save(model, folder)
    return model, ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def test_an_embedding_beside_a_head_of_its_own(tmp_path):
    model, names = madlad(tmp_path / "folder")
    for says_tied in (False, True):  # transformers 5 calls every T5's head tied
        file = tmp_path / "folder" / "config.json"
        table = json.loads(file.read_text()) | {
            "tie_word_embeddings": says_tied,
            "scale_decoder_outputs": False,
        }
        file.write_text(json.dumps(table))
        for kept in names[1:]:
            renamed(tmp_path / "folder", kept, names, noted=False)
            read = jaxspec.load(tmp_path / "folder")
            assert not read.config.tied_head
            assert_same(read.params, model.params)


def test_a_head_that_only_the_file_calls_tied(tmp_path):
    """config.json says that the head is a matrix of its own, and the file that this repeats the
    embedding.
    """
    folder = tmp_path / "folder"
    model, _ = madlad(folder)
    for kept in OF_T5:
        weights = load_file(folder / "model.safetensors")
        embedding = next(weights[name] for name in OF_T5 if name in weights)
        weights = {name: x for name, x in weights.items() if name not in OF_T5} | {kept: embedding}
        others = {name: kept for name in OF_T5 if name != kept}
        save_file(weights, folder / "model.safetensors", metadata=others)
        params = jaxspec.load(folder).params
        np.testing.assert_array_equal(
            params["head"]["weight"], model.params["embedding"]["embedding"]
        )
        np.testing.assert_array_equal(
            params["embedding"]["embedding"], model.params["embedding"]["embedding"]
        )


def test_the_index_of_several_files_notes_the_names(tmp_path):
    """huggingface_hub.save_torch_model writes the notes there, and not into the files."""
    folder = tmp_path / "folder"
    model, _ = madlad(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights["lm_head.weight"] = weights.pop("shared.weight")
    files = {"lm_head.weight": "model-00001-of-00002.safetensors"}
    weight_map = {name: files.get(name, "model-00002-of-00002.safetensors") for name in weights}
    for file in set(weight_map.values()):
        save_file(
            {name: weights[name] for name in weights if weight_map[name] == file}, folder / file
        )
    table = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(table))
    # config.json: two matrices
    with pytest.raises(CheckpointError, match=r"missing \(1\): shared.weight"):
        jaxspec.load(folder)
    table["metadata"] |= {name: "lm_head.weight" for name in OF_T5[:3]}
    index.write_text(json.dumps(table))
    params = jaxspec.load(folder).params
    np.testing.assert_array_equal(params["head"]["weight"], model.params["embedding"]["embedding"])
    np.testing.assert_array_equal(
        params["embedding"]["embedding"], model.params["embedding"]["embedding"]
    )


def test_a_note_of_another_tensor_is_of_no_use(tmp_path):
    huggingface.save(model_of(T5), tmp_path / "folder")
    file = tmp_path / "folder" / "model.safetensors"
    weights = load_file(file)
    embedding = weights.pop("shared.weight")
    save_file(
        weights | {"other.weight": embedding}, file, metadata={"shared.weight": "third.weight"}
    )
    with pytest.raises(
        CheckpointError, match=r"missing \(1\): shared.weight\s+unexpected \(1\): other.weight"
    ):
        jaxspec.load(tmp_path / "folder")
    # A view of the embedding is of another shape.
    short = {name: x for name, x in weights.items() if name != "decoder.final_layer_norm.weight"}
    noted = {"decoder.final_layer_norm.weight": "shared.weight"}
    save_file(short | {"shared.weight": embedding}, file, metadata=noted)
    with pytest.raises(
        CheckpointError, match=r"wrong \(1\): decoder.final_layer_norm.weight is \[24, 16\]"
    ):
        jaxspec.load(tmp_path / "folder")
