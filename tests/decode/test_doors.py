"""Every function that decodes refuses the same bad input, in the same words."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.core import Prompt
from jaxspec.nets import adapters, decoder
from jaxspec.testing import table_model, word_tokenizer
from tests.small import tiny_gpt

WORDS = ["<end>", "the", "cat", "sat", "on", "mat"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def model(seed, words=WORDS):
    tokenizer = word_tokenizer(words, end="<end>", unknown="<end>", chat_template=TEMPLATE)
    return table_model(jax.random.key(seed), 6)._replace(tokenizer=tokenizer)


TARGET, ONE = model(0), Prompt(jnp.array([[1, 2]]), jnp.array([2]))
SMALL = tiny_gpt(6, max_positions=8)
ZEROS = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype),
    jax.eval_shape(lambda: decoder.init(SMALL, jax.random.key(0))),
)
SHORT = jaxspec.Model(decoder.language_model(SMALL), ZEROS, config=SMALL)


def rollout(target, prompts, **options):
    return jaxspec.rollout(
        jaxspec.prepare(target, ONE, max_new_tokens=4), prompt=prompts, **options
    )


DOORS = {
    "generate": jaxspec.generate,
    "stream": lambda target, prompts, **options: list(jaxspec.stream(target, prompts, **options)),
    "prepare": jaxspec.prepare,
    "replace": lambda target, prompts, **options: jaxspec.prepare(target, prompts).replace(
        **options
    ),
    "beam_search": jaxspec.beam_search,
    "prefix": lambda target, prompts, **options: jaxspec.prefix(target, prompts, **options),
    "chat": lambda target, prompts, **options: jaxspec.chat(target, **options),
    "rollout": rollout,
}
OPTIONS, PROMPTS = ("prefix", "rollout"), ("replace", "chat")  # those that take no such input
BAD = {
    "a name for a target": (
        dict(target="gpt2"),
        r"target is 'gpt2', a name: pass jaxspec\.load",
        ("rollout",),
    ),
    "no language model": (
        dict(target=TARGET._replace(lm=len)),
        "first argument is not a LanguageModel",
        ("rollout",),
    ),
    "another library's option": (
        dict(max_length=3),
        "'max_length': it is called max_new_tokens",
        OPTIONS,
    ),
    "structured output": (dict(guided_json="{}"), "give choices, regex or json_schema", OPTIONS),
    "no rows": (
        dict(prompts=Prompt(jnp.zeros((0, 2), int), jnp.zeros(0, int))),
        "got no prompts",
        PROMPTS,
    ),
    "an id that is no token": (
        dict(prompts=ONE._replace(tokens=jnp.array([[1, 6]]))),
        "token id 6: expec",
        PROMPTS,
    ),
    "an empty prompt": (
        dict(prompts=ONE._replace(length=jnp.array([0]))),
        "prompt 0 is empty",
        PROMPTS,
    ),
    "a length that is too long": (
        dict(prompts=ONE._replace(length=jnp.array([3]))),
        "its row holds 2 tok",
        PROMPTS,
    ),
    "numbers that are no ids": (
        dict(prompts=ONE._replace(tokens=jnp.ones((1, 2)))),
        "dtype float32: expe",
        PROMPTS,
    ),
    "no rows of ids": (
        dict(prompts=ONE._replace(tokens=jnp.array([1, 2]))),
        r"expected \[batch, prompt\]",
        PROMPTS,
    ),
    "ragged lists": (dict(prompts=Prompt([[1, 2], [3]], [2, 1])), "as a list of lists", PROMPTS),
    "bytes": (dict(prompts=b"the"), "prompts is bytes: expected text", (*PROMPTS, "rollout")),
    "no text": (
        dict(prompts=[3.5]),
        "prompt 0 is 3.5, of type float: expected text",
        (*PROMPTS, "rollout"),
    ),
    "no prompts": (dict(prompts=None), "there are no prompts", (*PROMPTS, "rollout")),
    "gamma": (dict(gamma=2.5), "gamma is 2.5: expected an integer", OPTIONS),
    "a negative gamma": (dict(gamma=-1), "gamma is -1: expected at least 0", OPTIONS),
    "max_new_tokens": (dict(max_new_tokens=0), "max_new_tokens is 0: expected at least 1", OPTIONS),
    "eos_ids": (dict(eos_ids=[6]), "eos_ids has 6: expected ids from 0 to 5", OPTIONS),
    "log_probs": (dict(log_probs=5), "log_probs is 5: expected True or False", OPTIONS),
    "top_log_probs": (
        dict(top_log_probs=9),
        "top_log_probs is 9: expected a number from 0 to 6",
        OPTIONS,
    ),
    "num_samples": (
        dict(num_samples=0),
        "num_samples is 0: expected at least 1",
        (*OPTIONS, "beam_search"),
    ),
    "rule": (
        dict(rule="block"),
        r"rule is 'block', a name: pass jaxspec\.rules\.block",
        (*OPTIONS, "beam_search"),
    ),
    "policy": (dict(policy=3), "policy is of type int: expected one of", (*OPTIONS, "beam_search")),
    "temperature": (
        dict(temperature=-1),
        "temperature is -1: expected 0",
        (*OPTIONS, "beam_search"),
    ),
    "key": (
        dict(key=0),
        r"key is 0: expected a key, such as jax\.random\.key\(0\)",
        ("beam_search", "prefix"),
    ),
    "drafter": (
        dict(drafter=3),
        "drafter is of type int: expected a jaxspec.Model, one of",
        ("rollout",),
    ),
    "a name for a drafter": (
        dict(drafter="small"),
        r"no checkpoint at small\. Expected a folder",
        ("rollout",),
    ),
    "tokenizers": (
        dict(drafter=model(1, [*WORDS[:5], "rug"])),
        "id 5 is 'mat' for the target",
        ("rollout",),
    ),
    "positions": (
        dict(target=SHORT, prompts=[[1] * 8], max_new_tokens=1),
        "8 tokens and 1 new ones need 9 positions, but the target has 8",
        (*PROMPTS, "rollout"),
    ),
}


def refusal(door, arguments):
    with pytest.raises((TypeError, ValueError)) as caught:
        DOORS[door](**dict(target=TARGET, prompts=ONE) | arguments)
    return type(caught.value), str(caught.value)


CASES = [(bad, door) for bad, (_, _, others) in BAD.items() for door in DOORS if door not in others]


@pytest.mark.parametrize(("bad", "door"), CASES, ids=lambda value: value)
def test_the_same_input_is_refused_in_the_same_words(bad, door):
    arguments, message, _ = BAD[bad]
    if door == "prefix":
        arguments = {name: value for name, value in arguments.items() if name != "max_new_tokens"}
    error, said = refusal(door, arguments)
    assert re.search(message, said)
    assert (error, said) == refusal("generate", BAD[bad][0])


@pytest.mark.parametrize("door", [door for door in DOORS if door not in ("rollout", "replace")])
def test_so_is_a_call_inside_a_transformation(door):
    def call(params):
        return DOORS[door](TARGET._replace(params=params), ONE)

    with pytest.raises(
        TypeError, match=r"inside jit, vmap .* jaxspec\.prepare\(.*jaxspec\.rollout\("
    ):
        jax.eval_shape(call, TARGET.params)


def test_a_model_that_looks_ahead_is_refused_wherever_prompts_are_read():
    def looks_ahead(params, tokens):
        return params[tokens] + jnp.mean(params[tokens], axis=1, keepdims=True)

    lm = adapters.from_function(looks_ahead, vocab_size=7)
    target = jaxspec.Model(lm, jax.random.normal(jax.random.key(0), (7, 7)), TARGET.tokenizer)
    for door in ("generate", "prepare", "prefix", "chat", "beam_search"):
        with pytest.raises(ValueError, match="so drafted text would not be its own"):
            DOORS[door](target, ONE)
