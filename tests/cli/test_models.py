"""`jaxspec models`: its numbers are those of the networks."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxspec import nets
from jaxspec.analysis import memory, sizes
from jaxspec.cli import models
from jaxspec.cli.main import app
from jaxspec.core import Prompt, Room
from jaxspec.drafters.lookups import ngram_model
from jaxspec.nets import decoder, t5
from jaxspec.nets.decoder import decoder_config, gpt_config
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import hf_families, loading, orbax, quantisation
from jaxspec.weights import shipped as shipped_models

runner = CliRunner()
T5 = T5Config(32, dim=16, ff_dim=24, heads=2, head_dim=4, encoder_layers=3, decoder_layers=2)
GPT = gpt_config(32, dim=16, ff_dim=24, layers=3, heads=2, max_positions=16)
LLAMA = decoder_config(
    32, dim=16, ff_dim=24, layers=3, heads=4, kv_heads=2, head_dim=4, head_norms=True
)
NGRAM = ngram_model.NGramConfig(32, (5, 9), followers=2)
NETS = [(t5, T5), (decoder, GPT), (decoder, LLAMA)]
EACH = pytest.mark.parametrize(("net", "config"), NETS, ids=["t5", "gpt", "decoder"])


def nbytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@EACH
def test_parameters_and_memory_are_those_of_the_whole_network(net, config):
    params = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    row = memory.of_config("it", config)
    assert row.parameters == sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    assert row.memory_bytes["float32"] == nbytes(params)
    narrow = jax.eval_shape(lambda p: quantisation.quantise(p, jnp.bfloat16), params)
    assert row.memory_bytes["bfloat16"] == nbytes(narrow) < nbytes(params)
    assert row.memory_bytes["int8"] == nbytes(
        jax.eval_shape(lambda p: quantisation.quantise(p, jnp.int8), params)
    )
    small = jax.eval_shape(lambda p: quantisation.quantise(p, jnp.int4), params)
    halves = sum(math.prod(x.shape) // 2 for x in jax.tree.leaves(small) if x.dtype == jnp.int4)
    assert row.memory_bytes["int4"] == nbytes(small) - halves


def test_tables_are_integers_whatever_the_dtype():
    params = jax.eval_shape(lambda: ngram_model.init(NGRAM, jax.random.key(0)))
    row = memory.of_config("it", NGRAM)
    assert row.memory_bytes == dict.fromkeys(
        ("float32", "bfloat16", "int8", "int4"), nbytes(params)
    )
    assert row.parameters == sum(math.prod(x.shape) for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("net", "config"), [*NETS, (ngram_model, NGRAM)], ids=["t5", "gpt", "decoder", "ngram"]
)
def test_the_cache_per_token_is_what_one_more_token_of_a_row_takes(net, config):
    lm = net.language_model(config)
    params = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))

    def cache(rows, capacity):
        tokens, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 4), (rows,)))
        return nbytes(
            jax.eval_shape(
                lambda p, q: lm.prefill(p, q, Room(capacity))[1], params, Prompt(tokens, length)
            )
        )

    more = [cache(rows, 9) - cache(rows, 8) for rows in (1, 2)]
    assert memory.of_config("it", config).cache_bytes_per_token["float32"] == more[1] - more[0]


PUBLISHED = {  # those of transformers' models of the published configurations
    "t5-v1_1-base": 247_577_856,
    "t5-v1_1-xxl": 11_135_332_352,
    "flan-t5-xl": 2_849_757_184,
    "byt5-small": 299_637_760,
    "byt5-xxl": 12_906_899_328,
    "mt5-small": 300_176_768,
    "mt5-xxl": 12_921_057_280,
    "umt5-small": 306_601_984,
    "umt5-xxl": 12_972_531_712,
    "t5gemma-s-s": 312_517_632,
    "t5gemma-b-b": 591_490_560,
    "t5gemma-xl-xl": 3_766_980_608,
    "t5gemma-9b-2b": 12_292_375_296,
    "t5gemma-2-270m-270m": 368_424_832,
    "bart-base": 139_470_681,  # with the biases of logits, which files hold
    "bart-large-cnn": 406_340_696,
    "mbart-large-50": 611_129_542,
    "opus-mt-en-de": 73_944_309,
    "m2m100-418m": 483_905_536,
    "nllb-200-distilled-600m": 615_073_792,
    "nllb-200-3.3b": 3_344_863_232,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "phi-3-mini-4k": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "ministral-3-3b": 3_429_006_336,
    "ministral-3-8b": 8_489_553_920,
    "ministral-3-14b": 13_506_073_600,
    "granite-4.0-micro": 3_402_836_480,
    "apertus-8b": 8_053_338_240,  # with two buffers of each layer, which its files hold
    "apertus-70b": 70_599_864_640,
    "command-r": 34_980_831_232,
    "command-r-plus": 103_810_674_688,
    "stablelm-2-1.6b": 1_644_515_328,
    "stablelm-2-12b": 12_143_185_920,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "ministral-8b": 8_019_808_256,
    "mistral-small-24b": 23_572_403_200,
    "phi-4-mini": 3_836_021_760,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "exaone-4.0-1.2b": 1_279_391_488,
    "exaone-4.0-32b": 32_003_216_384,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "granite-4.0-350m": 352_379_904,
    "granite-4.0-1b": 1_631_750_144,
    "command-r7b": 8_028_033_024,
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-0414": 9_400_279_040,
    "glm-4-32b-0414": 32_566_081_536,
    "ernie-4.5-0.3b": 360_748_032,
    "helium-1-preview-2b": 2_172_643_840,
    "smollm3-3b": 3_075_098_624,
    "seed-oss-36b": 36_151_104_512,
    "hunyuan-0.5b": 539_010_048,
    "hunyuan-1.8b": 1_791_080_448,
    "hunyuan-4b": 4_221_757_440,
    "hunyuan-7b": 7_504_568_320,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "nemotron-mini-4b": 4_190_509_056,
    "afm-4.5b": 4_619_184_640,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
    "gemma-3-27b": 27_009_346_304,
}


def test_published_parameter_counts():
    parameters = {
        size.name: size.parameters for rows in sizes.read().families.values() for size in rows
    }
    assert {name: parameters[name] for name in PUBLISHED} == PUBLISHED


def test_the_file_of_sizes_has_all_families():
    """And of two small networks what is counted now, whatever their dtype."""
    known = sizes.read()
    names = {title: [size.name for size in rows] for title, rows in known.families.items()}
    assert names == {family.title: list(family.sizes) for family in hf_families.FAMILIES}, (
        "run python -m benchmarks.sizes"
    )
    assert known.heads == sizes.count_heads()
    assert sizes.FILE.read_text("utf-8") == known.to_json()
    for family in (hf_families.gpt.GPT2, hf_families.whisper.WHISPER):
        name, config = next(iter(family.sizes.items()))
        assert known.families[family.title][0] == sizes.count(config, name)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_parameters_in_the_file_of_sizes_are_those_that_are_counted():
    """The test before this one counts two networks. Memory and caches take as long again: see the
    next.
    """
    configs = {
        name: config for family in hf_families.FAMILIES for name, config in family.sizes.items()
    }

    def count(config):
        network = nets.net_of(config)
        return network.total(config, lambda piece: quantisation.count(network.shapes(piece)))

    parameters = {
        size.name: size.parameters for rows in sizes.read().families.values() for size in rows
    }
    assert {name: count(config) for name, config in configs.items()} == parameters


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_file_of_sizes_is_what_is_counted():
    assert sizes.count_all() == sizes.read(), "run python -m benchmarks.sizes"


def test_the_cache_of_an_8b_llama_in_bfloat16():
    """32 layers x (key, value) x 8 heads x 128 x 2 bytes."""
    row = memory.of_config("llama", hf_families.llama.SIZES["llama-3.1-8b"])
    assert row.cache_bytes_per_token["bfloat16"] == 131_072
    assert row.memory_bytes["bfloat16"] == pytest.approx(2 * 8_030_261_248, rel=1e-4)


@pytest.fixture
def shipped(monkeypatch, tmp_path):
    """One shipped checkpoint, in a folder of no models."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for file in orbax.TOKENIZER:
        (tokenizer / file).write_text("{}")
    params = decoder.init(GPT, jax.random.key(0))
    manifest = dict(name="ours", dtype="bfloat16", description={"heldout_loss": 1.5})
    orbax.save(tmp_path / "shipped" / "ours", params, GPT, tokenizer, **manifest)
    monkeypatch.setattr(shipped_models, "FOLDERS", (tmp_path / "shipped",))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "shipped" / "ours"


def listed(*arguments):
    result = runner.invoke(app, ["models", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_short_list_has_what_is_here(shipped):
    """Shipped models, those of this folder, and families by name: no sizes, and no more lines than
    a screen has.
    """
    output = listed()
    assert "No models in this folder" in output
    for part in ("ours", "bfloat16", "T5, FLAN-T5, ByT5", "Mixtral", "163 sizes"):
        assert part in output, part
    assert "mixtral-8x7b" not in output
    assert len(output.splitlines()) < 30


def test_models_of_this_folder_are_what_loading_would_open(shipped):
    here = Path()
    shutil.copytree(shipped, here / "trained" / "mine")
    config = here / "theirs" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"model_type": "llama", "torch_dtype": "float16"}))
    (config.parent / "model.safetensors").write_bytes(bytes(2000))
    (here / "small.gguf").write_bytes(bytes(1000))
    # Neither a datastore, nor a tokenizer's folder, nor what is damaged or hidden.
    for name, file, text in (
        ("store", "manifest.toml", "kind = 'datastore'"),
        ("tokenizer", "config.json", "{}"),
        ("damaged", "manifest.toml", "family = "),
        (".hidden", "manifest.toml", "family = 'gpt'\nparameters = 1\ndtype = 'int8'"),
    ):
        (here / name).mkdir()
        (here / name / file).write_text(text)
    rows = list(models.models_in(here))
    assert [row.name for row in rows] == ["small.gguf", "theirs", "trained/mine"]
    formats = [loading.format_of(here / row.name).name for row in rows]
    assert formats == ["gguf", "huggingface", "jaxspec"]
    assert rows[0].size == 1000 and rows[1].stored_as == "float16" and rows[1].size > 2000
    count = memory.of_config("ours", GPT).parameters
    assert (rows[2].parameters, rows[2].stored_as) == (count, "bfloat16")
    assert "trained/mine" in listed()


def test_sizes_by_family_or_name():
    llamas = listed("Llama")
    assert "llama-3.1-405b" in llamas and "cache a" in llamas and "gpt2" not in llamas
    row = next(line for line in listed("Qwen/Qwen3-8B").splitlines() if "qwen3-8b" in line)
    assert "8.2B" in row and "16.4 GB" in row
    assert "gemma-4-e2b-assistant" in listed("assistant")
    everything = listed("--all")
    names = [name for family in hf_families.FAMILIES for name in family.sizes]
    assert all(f" {name} " in everything for name in names)
    result = runner.invoke(app, ["models", "nothing"])
    assert result.exit_code == 2 and "'nothing'" in result.stderr


def test_all_that_is_known_is_in_json(shipped):
    report = json.loads(runner.invoke(app, ["models", "--json", "mixtral"]).stdout)
    assert set(report) == {"shipped", "heads", "here", "families", "published_heads"}
    (rows,) = report["families"].values()
    assert [row["name"] for row in rows] == ["mixtral-8x7b", "mixtral-8x22b"]
    assert all(row["config"]["vocab_size"] == 32_000 for row in rows[:1])
    (ours,) = report["shipped"]
    assert (ours["name"], ours["stored_as"], ours["about"]) == (
        "ours",
        "bfloat16",
        {"heldout_loss": 1.5},
    )
    assert ours["parameters"] == memory.of_config("ours", GPT).parameters


def test_the_list_needs_no_jax():
    code = (
        "import sys; from jaxspec.cli.main import app\n"
        "for arguments in ([], ['llama']):\n"
        "    try: app(['models', *arguments])\n"
        "    except SystemExit: pass\n"
        "print([name for name in ('jax', 'numpy', 'flax') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
