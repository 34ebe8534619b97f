"""Other libraries' names of options: none is passed over, and their defaults ask for nothing."""

import inspect

import pytest
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase

import jaxspec
from jaxspec.decode import option_names
from jaxspec.decode.option_names import IN_CALLS, OTHER_NAMES
from jaxspec.jobs import fields, openai

WITHOUT_EFFECT = {  # of transformers: what no text depends on, and what is no option
    *(
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "compile_config",
        "disable_compile",
        "bos_token_id",
    ),
    *(
        "continuous_batching_config",
        "prefill_chunk_size",
        "transformers_version",
        "_from_model_config",
        "low_memory",
    ),
    *("self", "kwargs", "synced_gpus", "conversation"),
}
OF_JOBS = {
    "slots",
    "in_order",
    "max_ahead",
    "on_error",
    "group",
    "progress",
    "skipped",
    "varying",
    "options",
}
MODELS = {"target", "prompts", "source", "others", "sampling"}
VLLM = {  # a dump of SamplingParams' defaults and of its requests'
    **{
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 0.0,
    },
    **{
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "seed": None,
        "stop": [],
        "stop_token_ids": [],
        "ignore_eos": False,
    },
    **{
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
    },
    **{
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
    },
    **{
        "output_kind": 0,
        "structured_outputs": None,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_words": [],
    },
    **{
        "extra_args": None,
        "length_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "min_new_tokens": 0,
        "best_of": 1,
    },
    **{
        "use_beam_search": False,
        "truncate_prompt_tokens": None,
        "echo": False,
        "suffix": "",
        "guided_choice": [],
    },
    **{
        "add_special_tokens": True,
        "tool_choice": "none",
        "thinking_token_budget": -1,
        "early_stopping": False,
    },
    **{
        "flat_logprobs": False,
        "routed_experts_prompt_start": 0,
        "banned": [],
        "guided_json": None,
        "choices": [],
        "tools": [],
    },
}
OPENAI = {  # parameters of completions and of chat completions
    *(
        "model",
        "prompt",
        "best_of",
        "echo",
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "n",
        "stop",
    ),
    *(
        "presence_penalty",
        "seed",
        "stream",
        "stream_options",
        "suffix",
        "temperature",
        "top_p",
        "user",
        "messages",
    ),
    *(
        "function_call",
        "functions",
        "max_completion_tokens",
        "metadata",
        "modalities",
        "parallel_tool_calls",
    ),
    *(
        "prediction",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "service_tier",
        "store",
    ),
    *(
        "prompt_cache_key",
        "tool_choice",
        "tools",
        "top_logprobs",
        "verbosity",
        "web_search_options",
    ),
}


def test_every_option_of_transformers_is_obeyed_or_refused():
    """Also those that a later version may add: this test names them."""
    signatures = (GenerationMixin.generate, PreTrainedTokenizerBase.apply_chat_template)
    names = {
        *GenerationConfig().to_dict(),
        *(name for f in signatures for name in inspect.signature(f).parameters),
    }
    known = {name for name in names if fields.setting_of(name, {}) is not None}
    assert names - known - IN_CALLS.keys() == names & WITHOUT_EFFECT


def test_every_option_of_jaxspec_is_obeyed_or_refused():
    functions = (jaxspec.generate, jaxspec.generate_many, jaxspec.load)
    names = {name for function in functions for name in inspect.signature(function).parameters}
    names |= {*jaxspec.sampling.SamplingOptions.__annotations__} - OF_JOBS - MODELS
    assert {
        name for name in names - OF_JOBS - MODELS if fields.setting_of(name, {}) is None
    } == set()


def test_every_parameter_of_openai_is_known_in_a_body():
    body = dict.fromkeys(OPENAI)
    assert openai.fields_of({"custom_id": "a", "body": body}) == body
    with pytest.raises(
        ValueError, match="body has 'top_kk', which is neither OpenAI's nor an option here"
    ):
        openai.fields_of({"custom_id": "a", "body": {"prompt": "a", "top_kk": 5}})


def test_defaults_of_other_libraries_ask_for_nothing():
    """Those of vLLM and of transformers, whose do_sample=False is greedy at any temperature."""
    settings = fields.read({"prompt": "a", **VLLM})
    assert all(
        fields.is_neutral(name, value) or not value for name, value in settings.sampling.items()
    )
    assert settings._replace(sampling={}, stop=None) == fields.read(
        {"prompt": "a", "n": 1, "max_tokens": 16}
    )
    settings = fields.read({"prompt": "a", **GenerationConfig()._get_default_generation_params()})
    assert (
        settings.sampling["temperature"] == 0
        and settings.sampling["top_k"] == 50
        and settings.pattern is None
    )


def test_a_neutral_value_asks_for_nothing_and_another_is_refused_with_advice():
    nothing = fields.read({"prompt": "a"})
    assert not OTHER_NAMES.keys() & IN_CALLS.keys()
    for name, entry in OTHER_NAMES.items():
        assert entry.field in ("", *fields.OBEYED), name
        if name in fields.OBEYED:
            continue
        for value in (None, "", [], {}, *entry.neutral):
            assert fields.read({"prompt": "a", name: value}) == nothing, (name, value)
        if not entry.field:
            with pytest.raises(ValueError) as error:
                fields.read({"prompt": "a", name: "something"})
            assert str(error.value).startswith(
                f"the field '{name}' is not obeyed: {entry.in_lines or entry.advice}."
            )
        with pytest.raises(TypeError, match=f"there is no option '{name}'") as raised:
            option_names.check_names([name], ["temperature"])
        assert entry.advice in str(raised.value)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"suffix": "x"}, "'suffix' is not obeyed: a text follows its prompt"),
        ({"length_penalty": True}, "'length_penalty' is not obeyed"),
        ({"lengthPenalty": 2}, "'lengthPenalty' is not obeyed: only jaxspec.beam_search"),
        ({"do_sample": True}, "'do_sample' is not obeyed: it is called temperature"),
        ({"tool_choice": "none", "tools": [{}], "messages": []}, "'tool_choice' is not obeyed"),
        ({"add_special_tokens": False}, "'add_special_tokens' is not obeyed"),
        ({"documents": [{}]}, "'documents' is for the template of a chat: give messages"),
        ({"source_language": 3}, "source_language is 3: expected the name of a language"),
        ({"logits_processors": ["x"]}, "'logits_processors' is not obeyed"),
        (
            {"extra_body": {"top_k": 3}},
            "'extra_body' is not obeyed: write its fields into the line itself",
        ),
    ],
)
def test_an_option_that_is_not_obeyed_says_so(own, said):
    with pytest.raises(ValueError, match=said):
        fields.read({"prompt": "a", **own})


def test_values_whose_meaning_other_fields_decide():
    assert fields.read({"prompt": "a", "do_sample": True, "temperature": 0.5}).sampling == {
        "temperature": 0.5
    }
    assert fields.read({"prompt": "a", "do_sample": False, "temperature": 0.5}).sampling == {
        "temperature": 0.0
    }
    chat = {
        "messages": [{"role": "user", "content": "a"}],
        "add_special_tokens": False,
        "tool_choice": "none",
    }
    assert fields.read(chat).template == {}
    assert fields.read({"prompt": "a", "lengthPenalty": 1, "stop_sequences": ["x"]}).stop == ["x"]
