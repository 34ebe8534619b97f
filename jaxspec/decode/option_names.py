"""Names of generation options in other libraries, and what jaxspec has in their place.

`OTHER_NAMES` is the one table. Calls refuse its names with the advice that stands there. Lines of a
job obey a name that has a `field`, and refuse the others, unless their value asks for nothing. The
names come from OpenAI's API, vLLM's `SamplingParams` and requests, SGLang, transformers'
`GenerationConfig`, `generate` and `apply_chat_template`, text-generation-inference, llama.cpp and
Ollama.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, NamedTuple

from jaxspec.core import checks
from jaxspec.core.options import OF_JOB
from jaxspec.sampling.params import KEEPS_ALL, LACKING


class OtherName(NamedTuple):
    """An option of another library under a name that `generate` does not have.

    Attributes:
        advice: the end of the error message: the remedy.
        field: the field of a job's line with the same meaning, which a line may call by this name.
            Empty: none.
        neutral: values that ask for nothing, besides null and empty strings, lists and objects.
        in_lines: the advice for a line of a job; empty if it is `advice`.
    """

    advice: str
    field: str = ""
    neutral: tuple[Any, ...] = ()
    in_lines: str = ""


# arguments that hold prompts or change no text. A line of a job may have them as data of its own.
IN_CALLS = {
    "attention_mask": "it is called length, of jaxspec.Prompt(tokens, length); a list of lists of "
    "ids has its lengths",
    "input_ids": "it is called prompts, the second argument",
    "inputs": "it is called prompts, the second argument",
    "messages": "it is called prompts, the second argument, which takes conversations, too",
    "prompt": "it is called prompts, the second argument (of jaxspec.stream, which takes one, "
    "prompt)",
    "prompt_token_ids": "it is called prompts, the second argument",
    "batch_size": "a call decodes all of its prompts at once, jaxspec.generate_many as many as it "
    "has slots",
    "pad_token_id": "rows are padded with 0, and `lengths` says what is text",
    "return_dict_in_generate": "a Generation has texts, tokens, lengths and counts",
    "streamer": "it is called jaxspec.stream, which yields pieces of text",
    "use_cache": "a cache is always used",
}

LENGTH = "it is called max_new_tokens"
LENGTH_WITH_PROMPT = "it is called max_new_tokens, which does not count the prompt"
NO_LEAST_LENGTH = "with eos_ids=() a text ends at max_new_tokens only"
SAMPLES = "it is called num_samples"
STOP = "it is called stop"
ENDS = "it is called eos_ids"
ENDS_OF_JOB = "end tokens are an option of the job: eos_ids"
KEY = "it is called key"
SEED_FIELD = "give seed, an integer"
PENALTIES = "see repetition_penalty, presence_penalty and frequency_penalty"
BANNED = "it is called banned, which takes ids; sampling.banned_words, of several tokens"
TRUNCATED = f"use {', '.join(list(KEEPS_ALL)[:-1])} or {list(KEEPS_ALL)[-1]}"
PROCESSORS = "see logit_bias, banned and logits_processors, which takes functions of your own"
STRUCTURED = "give choices, regex or json_schema; there are no grammars"
BEAMS = "only jaxspec.beam_search searches with beams"
GAMMA = "it is called gamma"
DRAFTER = "it is called drafter"
EGAG = "it is called policy=jaxspec.policies.entropy(least, most, beta)"
LOOKUP = "it is called drafter=jaxspec.drafters.prompt_lookup(), and gamma"
LOG_PROBS = "it is called log_probs; top_log_probs is the number of tokens"
TOP_LOG_PROBS = "it is called top_log_probs"
LOG_PROBS_OF_JOB = "log probabilities are an option of the job: log_probs, top_log_probs"
TOKENS = "a result has tokens"
WHOLE_TEXTS = "a text ends before its stop string, and is without special tokens"
NO_PROMPT = "a result has no prompt"
TOOLS = "tools are offered to the model, and never forced"
TEMPLATE_VALUE = "values for a template stand in chat_template_kwargs"
ANSWER = "a conversation is written up to where the answer begins"
TOKENIZED = "the tokenizer is called by jaxspec, with its usual options"
CUT = "max_prompt_tokens and too_long of jaxspec.generate_many cut long prompts"
TEXT_ONLY = "models here write text"
LANGUAGE = "load the model with target_language"
NO_GUIDANCE = "it changes the distribution in a way that jaxspec does not have"
OWN_CODE = "jaxspec does not run code or extensions of other libraries"
ONE_MODEL = "load the model with its adapter: jaxspec.load(..., adapter=...)"

OTHER_NAMES: Mapping[str, OtherName] = {
    # The length and the number of texts.
    "max_tokens": OtherName(LENGTH, field="max_new_tokens"),
    "max_completion_tokens": OtherName(LENGTH, field="max_new_tokens"),
    "max_output_tokens": OtherName(LENGTH, field="max_new_tokens"),
    "max_gen_len": OtherName(LENGTH, field="max_new_tokens"),
    "max_tokens_to_sample": OtherName(LENGTH, field="max_new_tokens"),
    "num_predict": OtherName(LENGTH, field="max_new_tokens", neutral=(-1,)),
    "n_predict": OtherName(LENGTH, field="max_new_tokens", neutral=(-1,)),
    "max_length": OtherName(LENGTH_WITH_PROMPT, neutral=(20,)),
    "min_length": OtherName(NO_LEAST_LENGTH, neutral=(0,)),
    "min_tokens": OtherName(NO_LEAST_LENGTH, neutral=(0,)),
    "min_new_tokens": OtherName(NO_LEAST_LENGTH, neutral=(0,)),
    "max_time": OtherName(
        "break out of jaxspec.stream", in_lines="a job decodes each text to its end"
    ),
    "n": OtherName(SAMPLES, field="n"),
    "num_return_sequences": OtherName(SAMPLES, field="n"),
    "candidate_count": OtherName(SAMPLES, field="n"),
    "best_of": OtherName("take num_samples, and choose among the texts", neutral=(1,)),
    "beams": OtherName(BEAMS, neutral=(1,)),
    "draft_beams": OtherName(BEAMS),
    "sampling_params": OtherName("write each option as a field of its own"),
    "bad_words_token_ids": OtherName("use banned, a list of ids"),
    "return_logprob": OtherName(LOG_PROBS, neutral=(False,), in_lines=LOG_PROBS_OF_JOB),
    "input_embeds": OtherName("a prompt is text, messages or token ids"),
    # The end of a text.
    "stop_strings": OtherName(STOP, field="stop"),
    "stop_sequences": OtherName(STOP, field="stop"),
    "stop_regex": OtherName(
        "stop takes strings, no expressions; regex is what the whole text matches"
    ),
    "stop_strs": OtherName(STOP, field="stop"),
    "stopping_criteria": OtherName("see stop and eos_ids, or break out of jaxspec.stream"),
    "eos_token_id": OtherName(ENDS, in_lines=ENDS_OF_JOB),
    "stop_token_ids": OtherName(ENDS, in_lines=ENDS_OF_JOB),
    "ignore_eos": OtherName("give eos_ids=()", neutral=(False,), in_lines=ENDS_OF_JOB),
    "forced_eos_token_id": OtherName(
        "a text ends where the model ends it, or is cut; see sampling.forced_end"
    ),
    "include_stop_str_in_output": OtherName(WHOLE_TEXTS, neutral=(False,)),
    "no_stop_trim": OtherName(WHOLE_TEXTS, neutral=(False,)),
    "repetition_detection": OtherName(PENALTIES),
    # Random numbers.
    "seed": OtherName("it is called key=jax.random.key(seed)", field="seed"),
    "sampling_seed": OtherName("it is called key=jax.random.key(seed)", field="seed"),
    "random_seed": OtherName("it is called key=jax.random.key(seed)", field="seed"),
    "generator": OtherName(KEY, in_lines=SEED_FIELD),
    "rng": OtherName(KEY, in_lines=SEED_FIELD),
    # The distribution.
    "do_sample": OtherName("it is called temperature: 0 is greedy, 1 samples"),
    **{name: OtherName(TRUNCATED, neutral=neutral) for name, neutral in LACKING.items()},
    "dynatemp_range": OtherName("a row has one temperature", neutral=(0.0,)),
    "dynatemp_exponent": OtherName("a row has one temperature", neutral=(1.0,)),
    "no_repeat_ngram_size": OtherName(PENALTIES, neutral=(0,)),
    "encoder_no_repeat_ngram_size": OtherName(PENALTIES, neutral=(0,)),
    "encoder_repetition_penalty": OtherName(PENALTIES, neutral=(1.0,)),
    "exponential_decay_length_penalty": OtherName(PENALTIES),
    "repeat_penalty": OtherName(PENALTIES, neutral=(1.0,)),
    "repeat_last_n": OtherName(PENALTIES, neutral=(0, 64)),
    "repetition_context_size": OtherName(PENALTIES, neutral=(20,)),
    "penalize_nl": OtherName(PENALTIES, neutral=(False,)),
    "dry_multiplier": OtherName(PENALTIES, neutral=(0.0,)),
    "dry_base": OtherName(PENALTIES, neutral=(1.75,)),
    "dry_allowed_length": OtherName(PENALTIES, neutral=(2,)),
    "dry_penalty_last_n": OtherName(PENALTIES, neutral=(-1, 0)),
    "dry_sequence_breakers": OtherName(PENALTIES),
    "suppress_tokens": OtherName(BANNED),
    "begin_suppress_tokens": OtherName(BANNED),
    "bad_words": OtherName(BANNED),
    "bad_words_ids": OtherName(BANNED),
    "allowed_token_ids": OtherName("use banned, a list of the other ids"),
    "sequence_bias": OtherName(PROCESSORS),
    "logits_processor": OtherName(PROCESSORS),
    "custom_logit_processor": OtherName(PROCESSORS),
    "samplers": OtherName("logits processors run in the order of SamplingOptions"),
    "renormalize_logits": OtherName("distributions always sum to 1", neutral=(False, True)),
    "remove_invalid_values": OtherName(
        "logits that are not finite are errors of their row", neutral=(False,)
    ),
    "guidance_scale": OtherName(NO_GUIDANCE, neutral=(1.0,)),
    "negative_prompt_ids": OtherName(NO_GUIDANCE),
    "negative_prompt_attention_mask": OtherName(NO_GUIDANCE),
    "penalty_alpha": OtherName(NO_GUIDANCE, neutral=(0.0,)),
    "dola_layers": OtherName(NO_GUIDANCE),
    "watermark": OtherName(NO_GUIDANCE, neutral=(False,)),
    "watermarking": OtherName(NO_GUIDANCE, neutral=(False,)),
    "watermarking_config": OtherName(NO_GUIDANCE),
    "token_healing": OtherName("end the prompt where a word ends", neutral=(False,)),
    "forced_bos_token_id": OtherName(LANGUAGE, in_lines="give target_language"),
    "decoder_start_token_id": OtherName("a Prompt with an encoder's part says how its row begins"),
    # Beams.
    "num_beams": OtherName("it is called beams, of jaxspec.beam_search", neutral=(1,)),
    "beam_width": OtherName("it is called beams, of jaxspec.beam_search", neutral=(1,)),
    "use_beam_search": OtherName(BEAMS, neutral=(False,)),
    "early_stopping": OtherName("only jaxspec.beam_search has it", neutral=(False,)),
    "length_penalty": OtherName("only jaxspec.beam_search has it", neutral=(1.0,)),
    "num_beam_groups": OtherName(BEAMS, neutral=(1,)),
    "diversity_penalty": OtherName(BEAMS, neutral=(0.0,)),
    "constraints": OtherName(STRUCTURED),
    "force_words_ids": OtherName(STRUCTURED),
    # Text of a given form.
    "guided_choice": OtherName(STRUCTURED, field="choices"),
    "guided_regex": OtherName(STRUCTURED, field="regex"),
    "guided_json": OtherName(STRUCTURED, field="json_schema"),
    "response_format": OtherName(STRUCTURED, field="json_schema"),
    "response_schema": OtherName(STRUCTURED, field="json_schema"),
    "response_mime_type": OtherName(STRUCTURED, neutral=("text/plain",)),
    "guided_decoding": OtherName(STRUCTURED),
    "guided_decoding_backend": OtherName(STRUCTURED),
    "guided_grammar": OtherName(STRUCTURED),
    "guided_json_object": OtherName(STRUCTURED, neutral=(False,)),
    "guided_whitespace_pattern": OtherName(STRUCTURED),
    "structured_outputs": OtherName(STRUCTURED),
    "structural_tag": OtherName(STRUCTURED),
    "grammar": OtherName(STRUCTURED),
    "ebnf": OtherName(STRUCTURED),
    "prefix_allowed_tokens_fn": OtherName(STRUCTURED),
    # Drafting.
    "assistant_model": OtherName(DRAFTER, in_lines=OF_JOB),
    "assistant_tokenizer": OtherName(
        "it is called drafter, a model with its own tokenizer", in_lines=OF_JOB
    ),
    "num_speculative_tokens": OtherName(GAMMA, in_lines=OF_JOB),
    "num_assistant_tokens": OtherName(GAMMA, neutral=(20,), in_lines=OF_JOB),
    "num_assistant_tokens_schedule": OtherName(
        "it is called policy", neutral=("constant",), in_lines=OF_JOB
    ),
    "assistant_confidence_threshold": OtherName(
        "it is called policy", neutral=(0.4,), in_lines=OF_JOB
    ),
    "assistant_early_exit": OtherName("see drafters.early_exit"),
    "assistant_lookbehind": OtherName("see jaxspec.map_vocabulary", neutral=(10,)),
    "target_lookbehind": OtherName("see jaxspec.map_vocabulary", neutral=(10,)),
    "assistant_ensemble_weight": OtherName(
        "the text has the target's distribution alone", neutral=(0.0,)
    ),
    "prompt_lookup_num_tokens": OtherName(
        "it is called drafter=jaxspec.drafters.prompt_lookup(), and gamma", in_lines=OF_JOB
    ),
    "max_matching_ngram_size": OtherName(DRAFTER, neutral=(2,), in_lines=OF_JOB),
    "speculation_type": OtherName(DRAFTER, in_lines=OF_JOB),
    "speculative_config": OtherName(DRAFTER, in_lines=OF_JOB),
    "use_mtp": OtherName(DRAFTER, neutral=(False,), in_lines=OF_JOB),
    "is_assistant": OtherName(DRAFTER, neutral=(False,), in_lines=OF_JOB),
    "use_egag": OtherName(EGAG, neutral=(False,), in_lines=OF_JOB),
    "gamma_min": OtherName(EGAG, in_lines=OF_JOB),
    "gamma_max": OtherName(EGAG, in_lines=OF_JOB),
    "egag_ema_beta": OtherName(EGAG, in_lines=OF_JOB),
    "first_target": OtherName(
        "the target always writes the first token, with prefill", neutral=(True,)
    ),
    "skip_sample_adjustment": OtherName(
        "rejected tokens are always replaced from the residual", neutral=(False,)
    ),
    "lenience": OtherName(
        "it is called rule=jaxspec.rules.lenient(...)", neutral=(1.0,), in_lines=OF_JOB
    ),
    "prediction": OtherName("drafters look text up: drafter=jaxspec.drafters.prompt_lookup()"),
    # Results.
    "logprobs": OtherName(LOG_PROBS, neutral=(False,), in_lines=LOG_PROBS_OF_JOB),
    "top_logprobs": OtherName(TOP_LOG_PROBS, neutral=(0,), in_lines=LOG_PROBS_OF_JOB),
    "top_n_tokens": OtherName(TOP_LOG_PROBS, neutral=(0,), in_lines=LOG_PROBS_OF_JOB),
    "n_probs": OtherName(TOP_LOG_PROBS, neutral=(0,), in_lines=LOG_PROBS_OF_JOB),
    "logprob_token_ids": OtherName(TOP_LOG_PROBS, in_lines=LOG_PROBS_OF_JOB),
    "flat_logprobs": OtherName(LOG_PROBS, neutral=(False, True), in_lines=LOG_PROBS_OF_JOB),
    "prompt_logprobs": OtherName("jaxspec.score gives the log probabilities of texts"),
    "prompt_logprob_start": OtherName("jaxspec.score gives the log probabilities of texts"),
    "prompt_logprob_token_ids": OtherName("jaxspec.score gives the log probabilities of texts"),
    "decoder_input_details": OtherName(
        "jaxspec.score gives the log probabilities of texts", neutral=(False,)
    ),
    "output_scores": OtherName(LOG_PROBS, neutral=(False,), in_lines=LOG_PROBS_OF_JOB),
    "output_logits": OtherName(LOG_PROBS, neutral=(False,), in_lines=LOG_PROBS_OF_JOB),
    "output_attentions": OtherName("networks of jaxspec.nets give their logits", neutral=(False,)),
    "output_hidden_states": OtherName(
        "networks of jaxspec.nets give their logits", neutral=(False,)
    ),
    "debug": OtherName(
        "give trace_numbers=True; on the command line --trace --numbers", neutral=(False,)
    ),
    "return_token_ids": OtherName(
        TOKENS, neutral=(False,), in_lines="tokens is an option of the job (--tokens)"
    ),
    "return_tokens_as_token_ids": OtherName(LOG_PROBS, neutral=(False,), in_lines=LOG_PROBS_OF_JOB),
    "return_token_offsets": OtherName(TOKENS, neutral=(False,)),
    "return_prompt_text": OtherName(NO_PROMPT, neutral=(False,)),
    "return_full_text": OtherName(NO_PROMPT, neutral=(False,)),
    "echo": OtherName(NO_PROMPT, neutral=(False,)),
    "detokenize": OtherName("a result has both text and tokens", neutral=(True,)),
    "skip_special_tokens": OtherName(WHOLE_TEXTS, neutral=(True,)),
    "spaces_between_special_tokens": OtherName(WHOLE_TEXTS, neutral=(True,)),
    "include_reasoning": OtherName("a text holds all that the model writes", neutral=(True,)),
    "stream": OtherName(
        "it is called jaxspec.stream", neutral=(False,), in_lines="a job writes whole texts"
    ),
    "routed_experts_prompt_start": OtherName("a result has no experts", neutral=(0,)),
    # Prompts and templates.
    "suffix": OtherName(
        "a text follows its prompt: write both parts into the prompt, as the model was trained"
    ),
    "prefix_tokens": OtherName("it is called prefix"),
    "chat_template": OtherName("it holds for all texts: load the model with it"),
    "enable_thinking": OtherName(TEMPLATE_VALUE),
    "reasoning_effort": OtherName(TEMPLATE_VALUE),
    "thinking_token_budget": OtherName(TEMPLATE_VALUE, neutral=(-1,)),
    "verbosity": OtherName(TEMPLATE_VALUE),
    "add_generation_prompt": OtherName(ANSWER, neutral=(True,)),
    "continue_final_message": OtherName(ANSWER, neutral=(False,)),
    # its neutral value depends on the prompt: see `jobs.fields`
    "add_special_tokens": OtherName(TOKENIZED),
    "tokenize": OtherName(TOKENIZED, neutral=(True,)),
    "tokenizer_kwargs": OtherName(TOKENIZED),
    "return_tensors": OtherName(TOKENIZED),
    "return_dict": OtherName(TOKENIZED, neutral=(True, False)),
    "return_assistant_tokens_mask": OtherName(TOKENIZED, neutral=(False,)),
    "sanitize_control_tokens": OtherName(TOKENIZED, neutral=(False,)),
    "padding": OtherName("rows are padded by jaxspec", neutral=(False, True)),
    "truncation": OtherName(CUT, neutral=(False, "disabled")),
    "truncate": OtherName(CUT, neutral=(False,)),
    "truncation_side": OtherName(CUT),
    "truncate_prompt_tokens": OtherName(
        CUT, in_lines="max_prompt_tokens and too_long are options of the job"
    ),
    "src_lang": OtherName("load the model with source_language", field="source_language"),
    "tgt_lang": OtherName(LANGUAGE, field="target_language"),
    # and "none" where no tools are: see `jobs.fields`
    "tool_choice": OtherName(TOOLS, neutral=("auto",)),
    "parallel_tool_calls": OtherName(TOOLS, neutral=(True,)),
    "functions": OtherName("give tools as chat_template_kwargs", in_lines="give tools"),
    "function_call": OtherName(TOOLS, neutral=("auto", "none")),
    "web_search_options": OtherName(TOOLS),
    "modalities": OtherName(TEXT_ONLY, neutral=(["text"],)),
    "media_io_kwargs": OtherName(TEXT_ONLY),
    "mm_processor_kwargs": OtherName(TEXT_ONLY),
    # The rest of a request or a call.
    "generation_config": OtherName("give its values as options"),
    "extra_body": OtherName(
        "give its values as options", in_lines="write its fields into the line itself"
    ),
    "extra_args": OtherName(OWN_CODE),
    "vllm_xargs": OtherName(OWN_CODE),
    "custom_params": OtherName(OWN_CODE),
    "custom_generate": OtherName(OWN_CODE),
    "trace_decode_token_ids": OtherName("jaxspec.score gives the log probabilities of texts"),
    "lora_request": OtherName(ONE_MODEL),
    "lora_path": OtherName(ONE_MODEL),
    "adapter_id": OtherName(ONE_MODEL),
}


def check_names(names: Iterable[str], expected: Sequence[str]) -> None:
    """Raises TypeError for keywords that are not options of `generate`; see
    `checks.check_names`.
    """
    checks.check_names(
        names, expected, IN_CALLS | {name: entry.advice for name, entry in OTHER_NAMES.items()}
    )


def asks_for_nothing(name: str, value: Any) -> bool:
    """Says whether a value of another library's option leaves everything as it is.

    >>> asks_for_nothing("length_penalty", 1), asks_for_nothing("length_penalty", 0.6)
    (True, False)
    >>> asks_for_nothing("logprobs", False), asks_for_nothing("logprobs", 0)
    (True, False)
    """
    return is_empty(value) or any(is_same(value, neutral) for neutral in OTHER_NAMES[name].neutral)


def is_empty(value: Any) -> bool:
    """Says whether a value is null, or a string, a list or an object without content."""
    return value is None or (isinstance(value, Sized) and len(value) == 0)


def is_same(value: Any, neutral: Any) -> bool:
    """Compares a value with a plain one. The integer 1 is the number 1.0, and neither is True."""
    if getattr(value, "shape", ()) != ():  # an array
        return False
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def advice_for_line(name: str) -> str:
    """Returns the option that a line of a job should have in place of another library's."""
    entry = OTHER_NAMES[name]
    return entry.in_lines or entry.advice
