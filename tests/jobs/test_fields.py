"""Fields of a job's prompts: each is obeyed, refused by name, or the caller's own; and a row's text
is as they say.
"""

import inspect
import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.core import Model
from jaxspec.decode.option_names import OTHER_NAMES
from jaxspec.jobs import fields, many, slots
from jaxspec.sampling.params import OPTIONS
from jaxspec.testing import word_tokenizer
from tests.drafters.cases import LARGE_MODEL, LARGE_TARGET
from tests.jobs.test_many import KEY, PROMPTS, REQUESTS, WORDS
from tests.jobs.test_many import OPTIONS as JOB

VOCAB = LARGE_TARGET.lm.vocab_size
SPEAKER = Model(
    LARGE_TARGET.lm,
    LARGE_TARGET.params,
    word_tokenizer(WORDS, chat_template="{{ messages[0].content }}"),
)
OWN = [  # settings of the prompts, in turn
    {},
    {"temperature": 0.0, "top_p": 0.1},
    {"temperature": 2.5, "seed": 11},
    {"top_k": 2},
    {"top_p": 0.6, "presence_penalty": 1.5},
    {"min_p": 0.4, "repetition_penalty": 1.8, "temperature": 1.2},
    {"frequency_penalty": 0.7, "banned": [3]},
    {"logit_bias": {"2": 1.5, 5: float("-inf")}, "draft_temperature": 0.3},
    {"top_k": 3, "draft_top_k": 2, "draft_top_p": 0.9},
]
SETTINGS = [OWN[n % len(OWN)] for n in range(len(REQUESTS))]


def keys_of(settings, numbers):
    """The keys of rows: from the job's by number, or from a seed as `generate` has it for a single
    prompt.
    """
    seeds = [own.get("seed") for own in settings]
    rows = [jax.random.key_data(jax.random.fold_in(KEY, number)) for number in numbers]
    for row, seed in enumerate(seeds):
        if seed is not None:
            rows[row] = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 0))
    return jax.random.wrap_key_data(jnp.stack(rows))


def arrays_of(settings, default):
    """The same settings as `generate` takes them, a value for each row."""
    neutral = {"top_k": 2**30, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    arrays = {
        name: np.array([own.get(name, value) for own in settings])
        for name, value in neutral.items()
    }
    arrays["temperature"] = np.array([own.get("temperature", default) for own in settings])
    drafts = [
        own.get("draft_temperature", heat)
        for own, heat in zip(settings, arrays["temperature"], strict=True)
    ]
    own_drafts = {
        name: np.array([own.get(f"draft_{name}", own.get(name, all_of)) for own in settings])
        for name, all_of in (("top_k", 2**30), ("top_p", 1.0))
    }
    bias = np.zeros((len(settings), VOCAB))
    for row, own in enumerate(settings):
        for token, value in own.get("logit_bias", {}).items():
            bias[row, int(token)] += value
        bias[row, own.get("banned", [])] = -np.inf
    arrays |= {f"draft_{name}": values for name, values in own_drafts.items()}
    return arrays | {"draft_temperature": np.array(drafts), "logit_bias": bias}


def tokens_of(out):
    return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]


@pytest.mark.parametrize("default", [0.8, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_prompts_own_settings_are_those_of_generate(default):
    """In slots beside others, whose settings differ; and later ones with other values compile
    nothing.
    """
    job = {name: value for name, value in JOB.items() if name not in ("temperature", "key")} | {
        "temperature": default
    }
    requests = [request | own for request, own in zip(REQUESTS, SETTINGS, strict=True)]
    run = dict(
        slots=4, group=2, drafter=LARGE_MODEL, key=KEY, max_prompt_tokens=32, in_order=True, **job
    )
    rows = list(jaxspec.generate_many(LARGE_TARGET, requests, **run))
    options = job | arrays_of(SETTINGS, default)
    limits = np.array([request["max_new_tokens"] for request in REQUESTS], np.int32)
    keys = keys_of(SETTINGS, range(len(PROMPTS)))
    out = jaxspec.generate(
        LARGE_TARGET,
        PROMPTS,
        drafter=LARGE_MODEL,
        **options | {"max_new_tokens": limits, "key": keys},
    )
    assert [row.tokens for row in rows] == tokens_of(out)
    varying = {
        "temperature": 2.5,
        "top_k": 2,
        "top_p": 0.6,
        "min_p": 0.4,
        "banned": [3],
        "draft_temperature": 0.3,
    }
    varying |= {"draft_top_k": 2, "draft_top_p": 0.9}
    varying |= dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), 1.5)
    assert len(list(jaxspec.generate_many(LARGE_TARGET, requests, varying=varying, **run))) == len(
        requests
    )
    programs = (
        slots.prefill.num_programs(),
        slots.run_rounds.num_programs(),
        slots.insert.num_programs(),
    )
    others = [{**request, **own} for request, own in zip(REQUESTS, SETTINGS[::-1], strict=True)]
    assert len(list(jaxspec.generate_many(LARGE_TARGET, others, varying=varying, **run))) == len(
        others
    )
    assert (
        slots.prefill.num_programs(),
        slots.run_rounds.num_programs(),
        slots.insert.num_programs(),
    ) == programs


def test_prompts_that_ask_for_more_than_the_program_has_wait_for_another():
    """What comes before and after has the text of a job without them."""
    plain = [{"prompt": [1, 2], "max_new_tokens": 6}] * 9
    own = [*plain[:4], plain[0] | {"temperature": 0.9, "top_k": 3}, *plain[5:]]
    run = dict(slots=1, max_new_tokens=6, eos_ids=(), in_order=True, key=KEY)
    rows = [list(jaxspec.generate_many(LARGE_TARGET, prompts, **run)) for prompts in (plain, own)]
    assert [a.tokens == b.tokens for a, b in zip(*rows, strict=True) if a.number != 4] == [True] * 8
    options = dict(
        temperature=[0.9],
        top_k=[3],
        key=jax.random.fold_in(KEY, 4)[None],
        max_new_tokens=6,
        eos_ids=(),
    )
    assert (
        rows[1][4].tokens == jaxspec.generate(LARGE_TARGET, [[1, 2]], **options).tokens[0].tolist()
    )


def test_each_text_of_a_prompt_has_a_key_of_its_own():
    """The first is that of a job of one text each; the others do not depend on how many there
    are.
    """
    options = JOB | {"max_new_tokens": 8, "slots": 3, "in_order": True}
    one = list(jaxspec.generate_many(LARGE_TARGET, PROMPTS[:4], **options))
    rows = list(jaxspec.generate_many(LARGE_TARGET, PROMPTS[:4], num_samples=3, **options))
    assert [(row.number, row.sample, row.samples) for row in rows] == [
        (n, k, 3) for n in range(4) for k in range(3)
    ]
    assert [row.tokens for row in rows[::3]] == [row.tokens for row in one]
    own = [{"prompt": PROMPTS[n], "n": 2 + n} for n in range(2)]
    fewer = list(jaxspec.generate_many(LARGE_TARGET, own, **options))
    assert [row.tokens for row in fewer] == [row.tokens for row in rows[:2] + rows[3:6]]
    bits = [
        jax.random.key_data(jax.random.fold_in(jax.random.fold_in(KEY, 1), jnp.uint32(2**31 + k)))
        for k in (1, 2)
    ]
    keys = jax.random.wrap_key_data(jnp.stack(bits))
    out = jaxspec.generate(
        LARGE_TARGET, [PROMPTS[1]] * 2, **JOB | {"key": keys, "max_new_tokens": 8}
    )
    assert [row.tokens for row in rows[4:6]] == tokens_of(out)
    assert [row.to_dict()["sample"] for row in rows[:3]] == [0, 1, 2] and "sample" not in one[
        0
    ].to_dict()


def test_a_prompts_own_stop_string_takes_the_place_of_the_jobs():
    texts = ["the old cat", "sat the", "cat", "the cat sat the"]
    stops = [["cat"], "old the", [], None]
    options = JOB | {"eos_ids": (), "max_new_tokens": 40}
    prompts = [
        {"prompt": text} | ({} if stop is None else {"stop": stop})
        for text, stop in zip(texts, stops, strict=True)
    ]
    rows = list(
        jaxspec.generate_many(SPEAKER, prompts, slots=2, in_order=True, stop=["sat sat"], **options)
    )
    for number, stop in enumerate((["cat"], ["old the"], [], ["sat sat"])):
        out = jaxspec.generate(SPEAKER, texts, stop=stop, **options)
        assert (rows[number].text, rows[number].finish) == (out.texts[number], out.finish[number])
    assert rows[2].finish == "length"


def test_a_chat_has_template_values_of_its_own(monkeypatch):
    template = "{{ messages[0].content }} {{ word }}{% if tools %} {{ tools[0].name }}{% endif %}"
    monkeypatch.setattr(SPEAKER.tokenizer, "chat_template", template)
    chat = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "old"}],
            }
        ]
    }
    prompts = [
        chat,
        chat | {"chat_template_kwargs": {"word": "cat"}},
        chat | {"tools": [{"name": "sat"}]},
        {"prompt": "the", "tools": [{"name": "sat"}]},
    ]
    options = dict(
        chat_template_kwargs={"word": "the"},
        on_error="yield",
        in_order=True,
        max_new_tokens=2,
        slots=1,
    )
    rows = list(jaxspec.generate_many(SPEAKER, prompts, **options))
    assert [row.prompt_tokens for row in rows] == [3, 3, 4, 0] and "give messages with it" in rows[
        3
    ].error
    assert (
        rows[0].tokens
        == jaxspec.generate(SPEAKER, "the old the", max_new_tokens=2).tokens[0].tolist()
    )
    monkeypatch.setattr(SPEAKER.tokenizer, "chat_template", "{{ messages[0].content }}")
    rows = list(jaxspec.generate_many(SPEAKER, prompts, **options))
    assert "does not read tools" in rows[2].error


def test_every_option_of_sampling_is_a_field():
    assert set(OPTIONS) <= set(fields.OBEYED)
    assert {"drafter", "key", "log_probs", "logits_processors", "too_long"} < fields.REFUSED.keys()
    assert "slots" not in fields.REFUSED
    assert not {*fields.OBEYED, *OTHER_NAMES} & fields.REFUSED.keys()


def test_options_of_jobs_have_the_defaults_of_the_table():
    parameters = inspect.signature(jaxspec.generate_many).parameters
    table = {name: parameters[name].default for name in fields.JOB_OPTIONS}
    assert table == fields.JobOptions()._asdict()
    limit = parameters["max_new_tokens"].default
    assert limit == jaxspec.prepare(LARGE_TARGET, [[0]]).options.max_new_tokens


def test_a_refused_field_is_named_unless_it_asks_for_nothing():
    nothing = fields.read({"prompt": "a"})
    for name in fields.REFUSED:
        with pytest.raises(
            ValueError, match=f"the field '{name}' is not obeyed: .* put it into the field metadata"
        ):
            fields.read({"prompt": "a", name: "something"})
        for value in (None, False) if name in ("log_probs", "trace_numbers") else (None,):
            assert fields.read({"prompt": "a", name: value}) == nothing


def test_neutral_values_need_no_program_of_their_own_and_take_back_the_jobs():
    """A client's dump of defaults compiles nothing; top_k of 0 or -1 keeps every token, even if the
    job keeps two.
    """
    dump = {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1,
        "banned": [],
    }
    plain = [{"prompt": prompt, "max_new_tokens": 6} for prompt in PROMPTS[:4]]
    options = dict(slots=4, max_new_tokens=6, in_order=True, key=KEY, temperature=0.8, eos_ids=())
    rows = list(jaxspec.generate_many(LARGE_TARGET, plain, **options))
    programs = (
        slots.prefill.num_programs(),
        slots.run_rounds.num_programs(),
        slots.insert.num_programs(),
    )
    dumped = list(
        jaxspec.generate_many(LARGE_TARGET, [prompt | dump for prompt in plain], **options)
    )
    assert [row.tokens for row in dumped] == [row.tokens for row in rows]
    assert (
        slots.prefill.num_programs(),
        slots.run_rounds.num_programs(),
        slots.insert.num_programs(),
    ) == programs
    narrow = list(jaxspec.generate_many(LARGE_TARGET, plain, top_k=2, **options))
    wide = list(
        jaxspec.generate_many(
            LARGE_TARGET, [prompt | {"top_k": 0} for prompt in plain], top_k=2, **options
        )
    )
    assert (
        [row.tokens for row in wide]
        == [row.tokens for row in rows]
        != [row.tokens for row in narrow]
    )


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (
            {"max_tokens": 3, "max_completion_tokens": 3},
            "'max_tokens' and 'max_completion_tokens' mean the same",
        ),
        ({"max_tokens": 0}, "max_tokens is 0: expected an integer from 1 to 8"),
        (
            {"max_completion_tokens": 9},
            "max_completion_tokens is 9: expected an integer from 1 to 8",
        ),
        ({"n": 0}, "n is 0"),
        ({"n": True}, "n is True"),
        ({"seed": -1}, "seed is -1"),
        ({"temperature": [0.5]}, r"temperature is \[0.5\]: expected a number"),
        ({"top-k": 5}, "'top-k' is spelled 'top_k' here"),
        ({"maxTokens": 5}, "'maxTokens' is spelled 'max_tokens' here"),
        ({"tools": "a"}, "tools is 'a': expected a list of objects"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs is 3"),
    ],
)
def test_a_field_that_is_wrong_says_so(own, said):
    with pytest.raises(ValueError, match=said):
        fields.read({"prompt": "a", **own}, most=8)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"logit_bias": {"9": 1}}, "logit_bias has 9"),
        ({"banned": list(range(6))}, "rule out all"),
        ({"temperature": 1}, "temperature is 1 and there is no key"),
        ({"n": 2}, "n is 2 at temperature 0"),
        ({"stop": 3}, "stop is 3"),
        ({"stop": ["a"]}, "need a tokenizer"),
    ],
)
def test_a_value_that_cannot_be_obeyed_is_the_prompts_error(own, said):
    prompts = [{"id": "a", "prompt": [1], "label": "x", **own}, [1]]
    rows = list(
        jaxspec.generate_many(
            LARGE_TARGET, prompts, slots=1, on_error="yield", in_order=True, max_new_tokens=2
        )
    )
    assert said in rows[0].error and rows[0].fields == {"label": "x"} and rows[1].error is None


def test_a_key_is_needed_only_where_no_seed_is():
    options = dict(slots=1, max_new_tokens=2, temperature=0.0)
    (row,) = jaxspec.generate_many(
        LARGE_TARGET, [{"prompt": [1], "temperature": 1, "seed": 5}], **options
    )
    out = jaxspec.generate(
        LARGE_TARGET, [[1]], temperature=[1.0], key=jax.random.key(5), max_new_tokens=2
    )
    assert row.tokens == out.tokens[0].tolist()


def test_a_number_that_is_null_says_nothing_and_a_role_is_the_callers_own_beside_a_prompt():
    prompts = [{"prompt": [1], "number": None}, {"prompt": [1], "role": "judge"}]
    rows = list(
        jaxspec.generate_many(LARGE_TARGET, prompts, in_order=True, max_new_tokens=2, slots=1)
    )
    assert [(row.number, row.fields) for row in rows] == [(0, {}), (1, {"role": "judge"})]


def test_numbers_and_ids_that_occur_twice_are_noticed():
    prompts = [
        {"id": "a", "number": 3, "prompt": [1]},
        {"number": 3, "prompt": [2]},
        {"id": "a", "prompt": [1]},
        [4],
    ]
    options = dict(slots=1, max_new_tokens=2, on_error="yield", in_order=True)
    with pytest.warns(UserWarning, match="the id 'a' of prompt 2 is that of an earlier one"):
        rows = list(jaxspec.generate_many(LARGE_TARGET, prompts, **options))
    assert [row.error is None for row in rows] == [True, False, True, False]
    # and place 3 is its number, too
    assert "the number 3 is that of an earlier prompt" in rows[1].error


def test_a_prompt_without_a_usable_number_has_its_place():
    prompts = [[1], {"number": "x", "prompt": [2]}, {"number": 2**40, "prompt": [3]}]
    options = dict(slots=1, max_new_tokens=2, on_error="yield", in_order=True)
    rows = list(jaxspec.generate_many(LARGE_TARGET, prompts, **options))
    assert [row.number for row in rows] == [0, 1, 2]
    assert all("expected an integer from 0" in row.error for row in rows[1:])


def test_values_of_numpy_are_plain_in_a_row():
    prompts = [
        {
            "id": np.int64(3),
            "prompt": np.array([1]),
            "scores": np.ones(2, np.float32),
            "flag": np.bool_(True),
        }
    ]
    (row,) = jaxspec.generate_many(
        LARGE_TARGET, prompts, slots=1, max_new_tokens=2, top_log_probs=2
    )
    plain = row.to_dict()
    assert (plain["id"], plain["fields"]) == (3, {"scores": [1.0, 1.0], "flag": True})
    assert type(plain["id"]) is int and type(plain["fields"]["flag"]) is bool
    columns = ("raw_log_probs", "sampled_log_probs", "top_tokens", "top_log_probs")
    assert all(isinstance(plain[name], list) and len(plain[name]) == 2 for name in columns)


def test_a_long_prompt_has_slots_of_its_own(monkeypatch):
    """The others keep theirs; the job says which prompt it is, what it takes, and what bounds
    it.
    """
    monkeypatch.setattr(many, "LONG", 64)
    made = []

    class Slots(slots.Slots):
        def __init__(self, prepared, width, *, slots, **arguments):
            super().__init__(prepared, width, slots, **arguments)
            made.append((width, slots))

    monkeypatch.setattr(many, "Slots", Slots)
    prompts = [[1, 2], {"id": "long", "prompt": [3] * 200}, *[[n % 6] for n in range(30)], [2] * 40]
    options = JOB | {"slots": 4, "drafter": LARGE_MODEL}
    with pytest.warns(
        UserWarning,
        match=r"prompt long has 200 tokens, .* It gets 1 slot of its own, of [\d.]+ kB of",
    ):
        rows = list(jaxspec.generate_many(LARGE_TARGET, prompts, **options))
    assert made == [(16, 4), (48, 4), (256, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide = list(jaxspec.generate_many(LARGE_TARGET, prompts, max_prompt_tokens=200, **options))
    assert made[3:] == [(256, 4)]
    texts = [{row.number: row.tokens for row in result} for result in (rows, wide)]
    assert texts[0] == texts[1] and rows[-1].number == 1
    made.clear()
    with pytest.warns(UserWarning, match="prompt long"):
        ordered = list(
            jaxspec.generate_many(LARGE_TARGET, prompts, in_order=True, max_ahead=3, **options)
        )
    assert [row.tokens for row in ordered] == [texts[0][n] for n in range(len(prompts))]
    assert made[0] == (16, 4) and (256, 1) in made


def test_waiting_for_a_program_can_be_interrupted():
    """The runtime's own wait would not notice; a program that takes long is a long prefill, for
    example.
    """

    class Endless:
        looks = 0

        def is_ready(self):
            self.looks += 1
            if self.looks > 3:
                signal.raise_signal(signal.SIGINT)
            return self.looks > 9

    with pytest.raises(KeyboardInterrupt):
        many._wait_for(Endless())
    many._wait_for(jnp.ones(2) + 1)
