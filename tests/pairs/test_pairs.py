"""The published pairs of docs/pairs.md: they load, fit each other, and trace a round; what does not
load says why.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from benchmarks import families, pairs
from jaxspec import drafters, nets
from jaxspec.decode import loop
from jaxspec.draft_heads import assistant, kind_of
from jaxspec.drafters.hidden_states import DraftHead
from jaxspec.nets import net_of
from jaxspec.nets.shapes import DecoderConfig
from jaxspec.nets.whisper import Whisper, speech_of
from jaxspec.weights import hf_families, huggingface
from jaxspec.weights.hf_families import names
from jaxspec.weights.tensors import CheckpointError

PAIRS, INDEX = pairs.pairs(), pairs.index()
SIBLINGS = [pair for pair in PAIRS if pair.format in pairs.MODELS]
MODELS = sorted({pair.target for pair in PAIRS} | {pair.drafter for pair in SIBLINGS})
HEADS = [pair for pair in PAIRS if pair.format in pairs.FORMATS]
TINY = "openai-community/gpt2-large"  # a target that no head was made for
PADDED = 256  # by how many ids vocabularies of a family may differ


def id_of(pair: pairs.Pair) -> str:
    return f"{pair.target}+{pair.drafter}"


def shallow(name: str, taps: tuple[int, ...] = (), last: int = 0) -> jaxspec.Model:
    """A model of a few layers, as wide as it is, whose parameters are shapes: all layers of a stack
    are alike.
    """
    config = pairs.model(name).config
    encoder_decoder = hasattr(config, "encoder_layers")
    fields = ("encoder_layers", "decoder_layers") if encoder_decoder else ("layers",)
    count = 2 + max(*taps, last, 0)
    if isinstance(nets.short_form(config), DecoderConfig):  # its layers are listed
        config = dataclasses.replace(config, layers=config.layers[:count])
    else:
        config = nets.replace(config, **dict.fromkeys(fields, count))
    params = pairs.in_dtype(pairs.abstract_params(config), "bfloat16")
    return jaxspec.Model(net_of(config).language_model(config, taps), params, None, config, name)


def drafter_of(pair: pairs.Pair) -> tuple[jaxspec.Model, jaxspec.Model | jaxspec.BoundDrafter]:
    """A shallow target, and its drafter, reading as many layers of it as the real one does."""
    if pair.format == "model":
        return shallow(pair.target), shallow(pair.drafter)
    if pair.format == "PARD":
        mask_token = pairs.table_of(pair.drafter)["pard_token"]
        return shallow(pair.target), drafters.parallel(shallow(pair.drafter), mask_token)
    if pair.format == "LayerSkip":
        layers = int(re.sub(r"\D", "", pair.drafter))
        target = shallow(pair.target, (layers,))
        return target, drafters.by_name(pair.drafter, target)
    config = pairs.describe(pair).config
    if wanted := getattr(config, "taps", ()):
        config = dataclasses.replace(config, taps=tuple(range(len(wanted))))
    params = pairs.in_dtype(pairs.abstract_params(config), "bfloat16")
    target = shallow(
        pair.target, getattr(config, "taps", ()), max(getattr(config, "sources", ()), default=0)
    )
    return target, kind_of(config).drafter(
        DraftHead(kind_of(config).head(config), params), target, None
    )


# --- the index


def test_every_configuration_is_used_and_has_a_source():
    refused = {row["model"] for row in INDEX["refused"]}
    named = set(MODELS) | {pair.drafter for pair in HEADS} | refused
    assert named == {
        path.name.replace("__", "/", 1) for path in (pairs.FOLDER / "configs").iterdir()
    }
    assert named == set(INDEX["configs"])


def test_every_format_has_a_pair():
    assert {pair.format for pair in PAIRS} == {"LayerSkip", *pairs.MODELS, *pairs.FORMATS}


@pytest.mark.parametrize("tokens", sorted({pair.tokens for pair in PAIRS} - {""}))
def test_published_numbers_have_a_source(tokens: str):
    assert re.search(r"\d", tokens)
    assert "](https://" in tokens


# --- models

UNLISTED = (  # of no published size, or with other positions than the size's
    *("XiaomiMiMo/MiMo-7B-RL", "distilbert/distilgpt2", "lmsys/vicuna-33b-v1.3"),
    *(
        "sshleifer/distilbart-cnn-12-6",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
    ),
    "Qwen/Qwen3-235B-A22B-Instruct-2507",
)


@pytest.mark.parametrize("name", MODELS)
def test_model_is_as_the_library_has_its_size(name: str):
    """Many configurations were written from the same sizes: of those this checks only how they are
    read back.
    """
    sizes = {
        size: config for family in hf_families.FAMILIES for size, config in family.sizes.items()
    }
    family, config = huggingface.read_config(pairs.folder_of(name))
    if name not in UNLISTED:
        size = names.size_of(name, sizes)
        assert size is not None
        # Of 32768 or 131072 positions, and of several epsilons, there are versions.
        different = {"max_positions", "epsilon", "dtype", "end_tokens"}
        forms = [dataclasses.asdict(nets.short_form(x)) for x in (config, sizes[size])]
        ours, theirs = (
            {key: x for key, x in form.items() if key not in different} for form in forms
        )
        assert ours == theirs
    assert family.model_types


@pytest.mark.parametrize("pair", SIBLINGS, ids=id_of)
def test_models_of_a_pair_have_one_vocabulary_but_for_padding(pair: pairs.Pair):
    target, draft = (pairs.model(name).lm.vocab_size for name in (pair.target, pair.drafter))
    assert abs(target - draft) <= PADDED


# --- draft heads


@pytest.mark.parametrize("pair", HEADS, ids=id_of)
def test_head_is_read_and_is_for_its_target(pair: pairs.Pair):
    config, target = pairs.describe(pair).config, pairs.model(pair.target)
    requirements = kind_of(config).head(config).requirements
    assert (requirements.vocab_size, requirements.hidden_size) == (
        target.lm.vocab_size,
        target.lm.inside.width,
    )
    assert all(0 <= tap < len(target.config.layers) - 1 for tap in requirements.taps)
    assert pair.gamma <= getattr(config, "count", getattr(config, "heads", pair.gamma))


@pytest.mark.parametrize("pair", HEADS, ids=id_of)
def test_head_is_refused_for_another_target(pair: pairs.Pair):
    with pytest.raises(CheckpointError):
        pairs.describe(pair, pairs.model(TINY))


# as cards, papers and the sizes of files have them, in millions; but for the embedding of EAGLE
PARAMETERS = {
    "yuhuili/EAGLE-Vicuna-7B-v1.3": 240,
    "yuhuili/EAGLE-Vicuna-13B-v1.3": 370,
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": 424.8,
    "deepseek-ai/dspark_qwen3_4b_block7": 2790 / 2,
    "deepseek-ai/dspark_qwen3_8b_block7": 4740 / 2,
    "google/gemma-4-E2B-it-assistant": 78,
    "z-lab/Qwen3-4B-DFlash-b16": 500,
    "z-lab/Qwen3-8B-DFlash-b16": 1000,
    "z-lab/Qwen3.5-4B-DFlash": 634.425856,
    "z-lab/Qwen3.5-9B-DFlash": 2.41 * 2**30 / 2e6,
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": 473.9,
    "z-lab/gpt-oss-120b-DFlash": 1570 / 2,
    "RedHatAI/Qwen3-8B-speculator.eagle3": 2044.116968 / 2,
    "RedHatAI/Qwen3-14B-speculator.eagle3": 2775.244776 / 2,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_head_has_as_many_parameters_as_published(name: str):
    pair = next(pair for pair in HEADS if pair.drafter == name)
    shapes = pairs.published_tensors(pair)
    without = ("embed_tokens.weight",) if pair.format == "EAGLE" else ()
    total = sum(
        jnp.prod(jnp.array(shape)).item()
        for tensor, shape in shapes.items()
        if tensor not in without
    )
    decimals = {500: 0.1, 1000: 0.06}.get(PARAMETERS[name], 0.03)
    assert total / 1e6 == pytest.approx(PARAMETERS[name], rel=decimals)


def test_published_assistant_has_the_shape_of_its_name():
    pair = next(pair for pair in HEADS if pair.format == "assistant")
    named, config = assistant.SIZES["gemma-4-e2b-assistant"], pairs.describe(pair).config
    assert dataclasses.replace(named, layer=config.layer) == config
    assert dataclasses.replace(named.layer, dtype="bfloat16") == config.layer


# --- rounds

ROUNDS = {  # one of each format, and of each family of models: the smallest
    (pair.format, pairs.model(pair.target).config.__class__): pair
    for pair in sorted(PAIRS, key=lambda pair: -pairs.model(pair.target).config.dim)
    if pair.format not in pairs.MODELS
    or len({pairs.model(n).lm.vocab_size for n in (pair.target, pair.drafter)}) == 1
}


@pytest.mark.parametrize("pair", ROUNDS.values(), ids=id_of)
def test_round_is_traced(pair: pairs.Pair):
    target, drafter = drafter_of(pair)
    sound = None if speech_of(target.config) is None else Whisper.example(target.config)
    prompt = jaxspec.Prompt(jnp.ones((1, 4), jnp.int32), jnp.array([4]), sound)
    options = {
        "gamma": pair.gamma,
        "max_new_tokens": 8,
        "temperature": 1.0,
        "key": jax.random.key(0),
        "eos_ids": (),
    }
    prepared = jaxspec.prepare(target, prompt, drafter=drafter, **options)

    def a_round(weights, prompt, request):
        return loop.advance(
            prepared.decoder, weights, loop.start(prepared.decoder, weights, prompt, request, 8)
        )

    _, info = jax.eval_shape(a_round, prepared.weights, prepared.prompt, prepared.request)
    assert info.draft.shape == (1, pair.gamma)


# --- what does not load


@pytest.mark.parametrize("row", INDEX["refused"], ids=lambda row: row["model"])
def test_refused_is_refused_with_its_reason(row: dict):
    with pytest.raises(CheckpointError, match=re.escape(row["message"])):
        if "target" not in row:
            huggingface.read_config(pairs.folder_of(row["model"]))
        else:
            pairs.describe(pairs.Pair("", row["target"], row["model"], "DFlash", 1))


def test_more_tensors_than_those_of_dflash_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Without a complaint what they are for would be left out."""
    pair = next(pair for pair in HEADS if pair.format == "DFlash")
    more = pairs.published_tensors(pair) | {"layers.0.convolution.weight": (2560, 2)}
    monkeypatch.setattr(pairs, "published_tensors", lambda pair: more)
    with pytest.raises(
        CheckpointError, match=r"the weights are not those of the block drafter of its config\.json"
    ):
        pairs.describe(pair)


# --- the page


@pytest.mark.slow
def test_page_has_what_is_computed():
    page = pairs.PAGE.read_text("utf-8")
    assert page == pairs.updated(page), "run python -m benchmarks.pairs"


def test_page_marks_what_is_not_confirmed_and_counts_it():
    marked, sources = pairs.code("amd/PARD-Qwen3-0.6B"), INDEX["configs"].values()
    assert marked == "`amd/PARD-Qwen3-0.6B` †"
    assert pairs.code("Qwen/Qwen3-8B") == "`Qwen/Qwen3-8B`"
    assert {pairs.origin(source) for source in sources} == set(pairs.SOURCES)
    unconfirmed = sum(pairs.origin(source) == pairs.UNCONFIRMED for source in sources)
    assert f"| {pairs.UNCONFIRMED} | {unconfirmed} |" in pairs.PAGE.read_text("utf-8")


def test_page_of_models_has_the_families_that_load():
    page = families.PAGE.read_text("utf-8")
    assert page == pairs.updated(page, families.BEGIN, families.sections()), (
        "run python -m benchmarks.families"
    )


def test_page_names_what_is_refused_and_its_reason():
    page = " ".join(pairs.PAGE.read_text("utf-8").split())
    for row in INDEX["refused"]:
        assert row["model"] in page
        assert row["message"] in page


def test_pair_that_fits_by_int8_alone_says_so():
    wide, narrow = pairs.sizes(next(pair for pair in PAIRS if pair.drafter == "Qwen/Qwen3-0.6B"))
    machine = pairs.roofline.machine("tpu-v5e")
    assert not wide.fits(machine)
    assert narrow.fits(machine)
