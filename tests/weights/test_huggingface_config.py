"""Hugging Face folders: config.json, generation_config.json and the files of a tokenizer."""

import dataclasses
import io
import json
import types

import jax.numpy as jnp
import pytest
import sentencepiece
import transformers

import jaxspec
from jaxspec.core import token_ids
from jaxspec.decode.chat_templates import chat_ids
from jaxspec.weights import generation_config, hf_families, huggingface, tokenizers
from jaxspec.weights.hf_families import common, gemma, gemma4
from jaxspec.weights.orbax import CheckpointError
from tests.weights.folders import GPT, LLAMA, T5, model_of, tokenizer


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json describes no model that can be loaded"),
        ("[]", "it is of type list, expected an object"),
        ("[" * 100_000, "describes no model that can be loaded: it is nested too deeply"),
        ("{}", "model_type is None: expected one of t5"),
        ('{"model_type": "llama"}', "it lacks 'hidden_size'"),
        (
            '{"model_type": "llama", "hidden_size": "x", "num_attention_heads": 2}',
            "describes no model",
        ),
    ],
)
def test_a_config_that_cannot_be_used(folder, content, message):
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        jaxspec.load(folder)


WRONG = [  # of a Llama's config.json: what is changed, and what is said of it
    ({"num_attention_heads": 0}, "num_attention_heads is 0: expected a positive integer"),
    ({"num_key_value_heads": 3}, "heads"),
    ({"hidden_size": "16"}, "hidden_size is '16': expected a positive integer"),
    ({"hidden_size": -16}, "hidden_size is -16: expected a positive integer"),
    ({"hidden_size": 16.5}, "hidden_size is 16.5: expected a positive integer"),
    ({"vocab_size": True}, "vocab_size is True: expected a positive integer"),
    (
        {"intermediate_size": 2**62},
        "intermediate_size is 4611686018427387904: expected a positive integer",
    ),
    ({"intermediate_size": 2**30}, "wrong"),
    ({"vocab_size": []}, r"vocab_size is \[\]: expected a positive integer"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny': expected a positive number"),
    ({"rope_theta": float("nan")}, "rope_theta is nan: expected a positive number"),
    ({"rope_scaling": "linear"}, "rope_scaling is of type str: expected an object"),
    (
        {"rope_scaling": {"type": "linear", "factor": -1}},
        "factor is -1: expected a positive number",
    ),
    ({"head_dim": 10**9}, "head_dim is 1000000000: expected at most 65,536"),
    (
        {"relative_attention_max_distance": 10**9, "model_type": "t5"},
        "relative_attention_max_distance is 1000000000: expected at most",
    ),
    ({"head_dim": 3}, "self_attn.q_proj.weight is .*, expected|describes no"),
    ({"hidden_act": ["silu"]}, "describes no model that can be loaded: TypeError"),
    ({"num_hidden_layers": 5000}, r"missing \(44982\): model\.layers\.2\."),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: expected at most 10,000"),
    ({"num_hidden_layers": 10**6, "model_type": "gemma2"}, "expected at most 10,000"),
    (
        {"num_hidden_layers": 10**6, "model_type": "qwen2", "use_sliding_window": True},
        "expected at most 10,000",
    ),
    ({"num_hidden_layers": 3}, r"missing \(9\): model.layers.2"),
    ({"model_type": "gpt2"}, "it lacks 'n_embd'"),
    ({"model_type": {}}, r"model_type is \{\}"),
    ({"model_type": "t5"}, "it lacks 'd_model'"),
    ({"text_config": 3, "model_type": "gemma3"}, "text_config is of type int: expected an object"),
    ({"layer_types": 7, "model_type": "gemma2"}, "describes no model"),
]


SIZES = {"gemma-2-2b": gemma.SIZES_2, "gemma-3-1b": gemma.SIZES_3, "gemma-4-31b": gemma4.SIZES}


@pytest.mark.parametrize("size", SIZES)
def test_a_soft_cap_of_zero_is_none(size):
    family, table = hf_families.describe(SIZES[size][size])
    caps = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), 0)
    common.check(table | caps, family.keys)
    without = family.read({**table, **dict.fromkeys(caps, None)})
    assert family.read(table | caps) == without and without.logits_cap is None
    with pytest.raises(
        common.FamilyError, match="final_logit_softcapping is -1: expected a positive number"
    ):
        common.check({"final_logit_softcapping": -1}, family.keys)


def test_wrong_values_in_a_config(folder):
    """Each is told before any weights are read; none takes long, or fails in another way."""
    right = json.loads((folder / "config.json").read_text())
    for change, message in WRONG:
        (folder / "config.json").write_text(json.dumps(right | change))
        with pytest.raises(CheckpointError, match=message):
            jaxspec.load(folder)


def test_tokenizer_and_chat_template(folder):
    loaded = jaxspec.load(folder).tokenizer
    assert loaded("the old dog")["input_ids"] == [3, 4, 5]
    assert loaded.eos_token_id == 1
    assert (
        loaded.apply_chat_template([{"role": "user", "content": "the dog"}], tokenize=False)
        == "user: the dog</s>"
    )
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1


OTHER = "{{ bos_token }}{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}"


@pytest.mark.parametrize("form", ["text", "jinja", "json"])
def test_a_template_of_ones_own_replaces_the_one_that_a_model_brings(folder, tmp_path, form):
    given = tmp_path / f"template.{form}"
    given.write_text(json.dumps({"chat_template": OTHER}) if form == "json" else OTHER)
    model = jaxspec.load(folder, chat_template=OTHER if form == "text" else str(given))
    chat = [{"role": "user", "content": " the dog "}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(chat, chat_template=OTHER, add_generation_prompt=True)[
        "input_ids"
    ]
    assert chat_ids(model, chat) == expected == [2, 3, 5, 2]
    assert chat_ids(jaxspec.load(folder), chat) != expected


def test_a_template_that_refuses_a_conversation_is_no_wrong_template(folder):
    """Its answer is the conversation's error, not the model's."""
    only_system = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('system first') }}{% endif "
        "%}the dog"
    )
    model = jaxspec.load(folder, chat_template=only_system)
    assert chat_ids(model, [{"role": "system", "content": "old"}]) == [3, 5]
    with pytest.raises(ValueError, match=r"refuses the conversation .*system first"):
        chat_ids(model, [{"role": "user", "content": "old"}])


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{% for m in messages %}\n{{ m", ValueError, "the chat template is wrong in line 2"),
        (
            "none.jinja",
            ValueError,
            "chat_template is 'none.jinja', which cannot be read .*expected the path",
        ),
        ("table.json", ValueError, "has no text under 'chat_template'"),
        (3, TypeError, "chat_template is of type int: expected a path, or a template's text"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused_before_any_weights(
    folder, tmp_path, monkeypatch, template, error, message
):
    (folder / "model.safetensors").unlink()
    (tmp_path / "table.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        jaxspec.load(folder, chat_template=template)


def test_a_template_needs_a_tokenizer(folder):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    with pytest.raises(ValueError, match="has no tokenizer, so it cannot have a chat template"):
        jaxspec.load(folder, chat_template=OTHER)


def test_a_tokenizer_that_is_a_sentencepiece_model(tmp_path):
    """The repositories of T5 v1.1 hold no tokenizer.json."""
    texts = [
        "the old dog saw a new cat",
        "a cat saw the new dog",
        "an old cat, a new dog",
        "the cat and the dog",
    ]
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 50),
        model_writer=proto,
        vocab_size=40,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    (tmp_path / "spiece.model").write_bytes(proto.getvalue())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "t5", "architectures": ["T5Model"]})
    )
    special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 0}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    pieces = sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())
    loaded = tokenizers.load(tmp_path)
    for text in texts:
        assert loaded(text)["input_ids"] == [*pieces.encode(text), 1]
        assert loaded.decode(pieces.encode(text)) == text


PLACES = {  # from an id to what config.json, and generation_config.json if there is one, say
    "a number": lambda end: ({}, {"eos_token_id": end}),
    "a list": lambda end: ({}, {"eos_token_id": [99, -1, end]}),
    "a number in config.json": lambda end: ({"eos_token_id": end}, None),
    "a list in config.json": lambda end: ({"eos_token_id": [end, 99]}, None),
    "another one in config.json": lambda end: ({"eos_token_id": 1}, {"eos_token_id": end}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("config", "words"), [(LLAMA, tokenizer()), (GPT, None), (T5, tokenizer())]
)
def test_texts_end_where_the_files_say(tmp_path, config, words, place):
    """The tokenizer may have another end, or be absent; ids that the model lacks are no reason to
    refuse it.
    """
    folder = huggingface.save(model_of(config, words=words), tmp_path / "it")
    prompt = jaxspec.Prompt(jnp.array([[3, 4]]), jnp.array([2]))
    plain = (
        jaxspec.generate(jaxspec.load(folder), prompt, eos_ids=(), max_new_tokens=6)
        .tokens[0]
        .tolist()
    )
    end = plain[2]
    changed, generation = PLACES[place](end)
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | changed))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    out = jaxspec.generate(jaxspec.load(folder), prompt, max_new_tokens=6)
    assert out.tokens[0].tolist() == plain[: plain.index(end) + 1]


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": [2, 3]}, {"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [2, 3]}, {"temperature": 0.7}, ()),
        ({"eos_token_id": 2}, {"eos_token_id": None}, ()),
        ({"eos_token_id": None, "text_config": {"eos_token_id": 5}}, None, (5,)),
        ({"eos_token_id": 2, "text_config": {"eos_token_id": 5}}, None, (2,)),
        ({"eos_token_id": None}, None, ()),
    ],
)
def test_which_file_says_where_texts_end_is_as_in_transformers(folder, config, generation, ends):
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert huggingface.read_config(folder)[1].end_tokens == ends
    source = "config.json" if generation is None else "generation_config.json"
    theirs = transformers.GenerationConfig.from_pretrained(
        folder, source, _from_model_config=generation is None
    )
    assert theirs.eos_token_id in (list(ends), *(ends or [None]))


def test_a_model_without_the_tokens_that_should_end_its_texts_goes_on(folder, caplog):
    (folder / "generation_config.json").write_text('{"eos_token_id": 99}')
    model = jaxspec.load(folder)
    assert caplog.messages == [
        f"{folder}: eos_token_id is [99], and the model has ids from 0 to 23: texts go on to "
        "max_new_tokens"
    ]
    assert token_ids.ends(model) == []
    unnamed = model._replace(lm=model.lm._replace(limits=model.lm.limits._replace(end_tokens=())))
    for end, ends in ((5, [5]), (99, []), (None, [])):
        assert (
            token_ids.ends(unnamed._replace(tokenizer=types.SimpleNamespace(eos_token_id=end)))
            == ends
        )


def test_what_generation_config_json_asks_for_and_is_not_done_is_said(folder, caplog):
    table = {
        "repetition_penalty": 1.1,
        "num_beams": 1,
        "forced_bos_token_id": 3,
        "min_length": 0,
        "temperature": 0.6,
    }
    (folder / "generation_config.json").write_text(json.dumps(table))
    huggingface.read_config(folder)
    (said,) = caplog.messages
    assert (
        "generation_config.json asks for repetition_penalty=1.1, forced_bos_token_id=3, which"
        in said
    )


NO_TEXT = {  # keys that change how a text is computed or returned, not the text
    *(
        "use_cache",
        "cache_config",
        "max_cache_len",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
    ),
    *(
        "low_memory",
        "prefill_chunk_size",
        "use_mtp",
        "is_assistant",
        "speculation_type",
        "transformers_version",
    ),
    *(
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
    ),
    *(
        "assistant_early_exit",
        "target_lookbehind",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
    ),
    *(
        "num_return_sequences",
        "return_dict_in_generate",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
    ),
    *("output_logits", "pad_token_id", "remove_invalid_values", "_from_model_config"),
}
READ = {"bos_token_id", "eos_token_id", "decoder_start_token_id"}
LIMITS = {"max_length", "max_new_tokens"}
OF_SAMPLING = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
}


def test_every_key_of_transformers_is_read_or_told_of_or_changes_no_greedy_text(folder, caplog):
    told = {
        *(*generation_config.NOT_READ, *generation_config.ABSENT, *generation_config.OF_BEAMS),
        *(*generation_config.ABSENT_OF_BEAMS, generation_config.QUANTISED_CACHE[0]),
    }
    assert (
        set(vars(transformers.GenerationConfig())) <= told | READ | LIMITS | OF_SAMPLING | NO_TEXT
    )
    neutral = {
        "guidance_scale": 1.0,
        "watermarking_config": None,
        "token_healing": False,
        "penalty_alpha": 0.0,
    }
    # of one beam
    neutral |= {"cache_implementation": "static", "num_beam_groups": 2, "force_words_ids": []}
    (folder / "generation_config.json").write_text(json.dumps(neutral))
    huggingface.read_config(folder)
    assert not caplog.messages
    asked = {
        "guidance_scale": 1.5,
        "watermarking_config": {"bias": 2.5},
        "token_healing": True,
        "penalty_alpha": 0.6,
        "dola_layers": "high",
        "assistant_ensemble_weight": 0.5,
        "max_time": 3.0,
        "force_words_ids": [[5]],
        "cache_implementation": "quantized",
    }
    for key, value in asked.items():
        caplog.clear()
        (folder / "generation_config.json").write_text(json.dumps({key: value}))
        huggingface.read_config(folder)
        (said,) = caplog.messages
        assert f"asks for {key}={value!r}, which jaxspec does not read" in said, said
        advice = (
            f"jaxspec writes the text without {key}: remove that from the file, or decode with "
            "transformers"
        )
        assert said.endswith(advice)
    caplog.clear()
    both = {"num_beams": 4, "num_beam_groups": 2, "guidance_scale": 3, "min_length": 2}
    (folder / "generation_config.json").write_text(json.dumps(both))
    huggingface.read_config(folder)
    (said,) = caplog.messages
    for part in (
        "pass what `generate` has",
        "pass `beam_search` beams",
        "text without guidance_scale, num_beam_groups",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("config", "generation", "start"),
    [
        ({"decoder_start_token_id": 0}, {"decoder_start_token_id": 5}, 5),
        ({"decoder_start_token_id": 7}, None, 7),
        ({"decoder_start_token_id": None, "bos_token_id": 4}, None, 4),
        ({"decoder_start_token_id": 7}, {"bos_token_id": 4}, 4),
        # transformers' generate has none, and refuses
        ({"decoder_start_token_id": 7}, {"eos_token_id": 1}, 7),
        ({"decoder_start_token_id": None, "pad_token_id": 6}, None, 6),  # the same
    ],
)
def test_a_decoder_starts_with_the_token_that_transformers_takes(
    tmp_path, config, generation, start
):
    folder = huggingface.save(model_of(T5), tmp_path / "t5")
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert jaxspec.load(folder).lm.limits.start_token == start


def test_a_saved_t5_with_end_tokens_starts_and_ends_alike_in_transformers(tmp_path):
    config = dataclasses.replace(T5, start_token=3, end_tokens=(5, 7))
    theirs = transformers.GenerationConfig.from_pretrained(
        huggingface.save(model_of(config), tmp_path / "t5")
    )
    assert (theirs.decoder_start_token_id, theirs.eos_token_id) == (3, [5, 7])


@pytest.mark.parametrize("size", ["t5-small", "mt5-small", "umt5-small"])
def test_forced_beginnings_are_read_and_written_without_a_warning(size, tmp_path, caplog):
    family = next(family for family in hf_families.FAMILIES if size in family.sizes)
    (tmp_path / "config.json").write_text(
        json.dumps(family.write(family.sizes[size]) | {"model_type": family.model_types[0]})
    )
    (tmp_path / "generation_config.json").write_text('{"forced_bos_token_id": 9}')
    _, config = huggingface.read_config(tmp_path)
    assert (config.begin_tokens, caplog.messages) == ((9,), [])
    assert family.write_generation(config) == {"forced_bos_token_id": 9}
    (tmp_path / "generation_config.json").write_text('{"forced_bos_token_id": [9]}')
    with pytest.raises(
        CheckpointError,
        match=r"generation_config\.json .*: forced_bos_token_id is \[9\]: expected an id",
    ):
        huggingface.read_config(tmp_path)


@pytest.mark.needs_torch
def test_a_t5_with_a_forced_beginning_writes_the_texts_of_transformers(tmp_path):
    """A folder has place for one token."""
    # transformers makes a cache of as many layers as the encoder has.
    config = dataclasses.replace(
        T5, decoder_layers=T5.encoder_layers, begin_tokens=(9,), end_tokens=(1,)
    )
    model = model_of(config)
    folder = huggingface.save(model, tmp_path / "t5")
    import torch

    peer = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    theirs = peer.generate(torch.tensor([[3, 4, 5, 1]]), max_new_tokens=6, do_sample=False)[
        0
    ].tolist()
    ours = jaxspec.generate(jaxspec.load(folder), [[3, 4, 5, 1]], max_new_tokens=5)
    assert theirs[:2] == [T5.start_token, 9]
    assert ours.tokens[0].tolist() == theirs[2:]
    longer = dataclasses.replace(model.config, begin_tokens=(9, 8))
    with pytest.raises(CheckpointError, match=r"begin_tokens is \(9, 8\): expected one at most"):
        huggingface.save(model._replace(config=longer), tmp_path / "longer")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "cannot be used: it is of type list, expected an object"),
        ("{", "cannot be used: "),
        (
            '{"eos_token_id": [1, "</s>"]}',
            "eos_token_id has '</s>': expected an id, or a list of ids",
        ),
        ('{"eos_token_id": true}', "eos_token_id has True: expected an id, or a list of ids"),
        (
            '{"decoder_start_token_id": 24}',
            "decoder_start_token_id is 24: expected an id from 0 to 23",
        ),
        (
            '{"decoder_start_token_id": [0]}',
            r"decoder_start_token_id is \[0\]: expected an id from 0 to 23",
        ),
    ],
)
def test_a_generation_config_that_cannot_be_used(folder, content, message):
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json:? {message}"):
        huggingface.restore(folder)


def test_a_tokenizer_that_brings_code_is_refused(folder, tmp_path):
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}})
    )
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'was here')!r})\n")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* cannot be loaded"):
        jaxspec.load(folder)
    assert not (tmp_path / "was here").exists()


ROWS = 40_960  # of a Qwen 3
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA_3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192}
SMALL = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PUBLISHED = {  # what config.json has of positions: model_type, the longest row, a scaling
    "qwen3-8b": ("qwen3", ROWS, None),
    "qwen2.5-0.5b": ("qwen2", 32_768, None),
    "qwen2.5-7b": ("qwen2", 131_072, None),
    "qwen3-30b-a3b": ("qwen3_moe", ROWS, None),
    "qwen3.5-9b": ("qwen3_5_text", 262_144, None),
    "glm-4-32b-0414": ("glm4", 32_768, None),
    "smollm3-3b": ("smollm3", 65_536, None),
    "llama-2-7b": ("llama", 4096, None),
    "llama-3.1-8b": ("llama", 131_072, LLAMA_3 | {"factor": 8.0}),
    "gemma-3-4b": ("gemma3_text", 131_072, {"rope_type": "linear", "factor": 8.0}),
    "olmo-3-7b": (
        "olmo3",
        65_536,
        YARN | {"factor": 8.0, "original_max_position_embeddings": 8192},
    ),
    "gpt-oss-20b": ("gpt_oss", 131_072, None),
    "ministral-3-8b": ("ministral3", None, None),
}
LONGEST = [  # a published size, what its card or somebody adds to config.json, and the longest row
    ("qwen3-8b", {"rope_scaling": YARN}, 131_072),
    # transformers: of the longest row
    ("qwen3-8b", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 4 * ROWS),
    ("qwen3-8b", {"rope_scaling": YARN | {"factor": None}}, ROWS),  # the factor is longest / first
    ("qwen3-8b", {"rope_scaling": YARN | {"factor": 1.0}}, ROWS),
    ("qwen3-8b", {"rope_parameters": YARN | {"rope_theta": 1e6}}, 131_072),
    (
        "qwen3-8b",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN},
        131_072,
    ),
    (
        "qwen3-8b",
        {
            "rope_parameters": {"rope_type": "default"},
            "rope_scaling": {"type": "yarn", "factor": 2},
        },
        2 * ROWS,
    ),
    ("qwen2.5-0.5b", {"rope_scaling": YARN}, 131_072),
    # of which the base model's config.json has 131,072 already
    ("qwen2.5-7b", {"rope_scaling": YARN}, 131_072),
    ("qwen3-30b-a3b", {"rope_scaling": YARN}, 131_072),
    (
        "qwen3.5-9b",
        {
            "rope_parameters": YARN
            | {
                "original_max_position_embeddings": 262_144,
                "rope_theta": 1e7,
                "mrope_section": [11, 11, 10],
            }
            | {"partial_rotary_factor": 0.25}
        },
        1_048_576,
    ),
    (
        "qwen3.5-9b",
        {"rope_scaling": YARN | {"original_max_position_embeddings": 262_144}},
        1_048_576,
    ),
    ("glm-4-32b-0414", {"rope_scaling": YARN}, 131_072),
    # As in transformers, the first context outside of the table counts before the one in it.
    ("qwen3-8b", {"rope_scaling": YARN, "original_max_position_embeddings": 16_384}, 65_536),
    (
        "smollm3-3b",
        {"rope_scaling": YARN | {"factor": 2.0, "original_max_position_embeddings": 65_536}},
        131_072,
    ),
    # vicuna-7b-v1.5-16k
    ("llama-2-7b", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
    # longer rows would change the base
    ("llama-2-7b", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 4096),
    # These have the longest row in max_position_embeddings.
    ("llama-3.1-8b", {}, 131_072),
    ("llama-3.1-8b", {"rope_scaling": LLAMA_3}, 131_072),
    ("gemma-3-4b", {}, 131_072),
    ("olmo-3-7b", {}, 65_536),
    ("gpt-oss-20b", {}, 131_072),
    ("ministral-3-8b", {}, 262_144),
    (
        "llama-3.1-8b",
        {"rope_scaling": YARN | {"factor": 40.0, "original_max_position_embeddings": 4096}},
        163_840,
    ),
]


def test_the_longest_row_is_what_a_scaling_of_positions_gives():
    for size, added, longest in LONGEST:
        model_type, rows, scaling = PUBLISHED[size]
        table = {"model_type": model_type, "max_position_embeddings": rows, "rope_scaling": scaling}
        config = hf_families.of(table).read(SMALL | table | added)
        assert config.max_positions == longest, (size, added)


def test_rows_go_on_to_what_a_scaling_gives(folder):
    """`generate` takes positions past max_position_embeddings."""
    table = json.loads((folder / "config.json").read_text())
    first = table["max_position_embeddings"]
    prompt = [[3] * first]
    with pytest.raises(ValueError, match=f"has {first}"):
        jaxspec.generate(jaxspec.load(folder), prompt, max_new_tokens=2)
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": first}
    (folder / "config.json").write_text(json.dumps(table | {"rope_scaling": scaling}))
    assert jaxspec.generate(
        jaxspec.load(folder), prompt, max_new_tokens=2, eos_ids=()
    ).tokens.shape == (1, 2)
