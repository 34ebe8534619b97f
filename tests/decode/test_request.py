"""Bad input gets a clear error, and vocabularies that differ are handled."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.core import Prompt, Rule, Verdict, token_rows
from jaxspec.decode import request
from jaxspec.decode.options import NEW_TOKENS, OPTIONS
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder
from jaxspec.testing import certify_prepared, table_model, table_model_from, word_tokenizer
from tests.small import tiny_gpt

WORDS = ["<end>", "the", "cat", "sat", "on", "mat"]


def tokenizer(words=WORDS):
    return word_tokenizer(words, end="<end>", unknown="<end>")


def model(seed=0, vocab=6, words=WORDS):
    return table_model(jax.random.key(seed), vocab)._replace(tokenizer=tokenizer(words))


TARGET, DRAFT = model(0), model(1)
ONE = Prompt(jnp.array([[1, 2]]), jnp.array([2]))


def test_prepare_names_the_options_of_generate():
    """With their defaults, so that `help` and a notebook's completion show them; but for stop
    strings.
    """
    parameters = inspect.signature(prepare).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert defaults == {name: o.default for name, o in OPTIONS.items() if name != "stop"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(gamma=-1), "gamma is -1: expected at least 0"),
        (dict(gamma=2.5), "gamma is 2.5"),
        (dict(max_new_tokens=0), "max_new_tokens is 0: expected at least 1"),
        (dict(max_new_tokens=2.5), "max_new_tokens is 2.5"),
        (dict(max_new_tokens=[1, 2]), r"max_new_tokens has shape \(2,\) for 1 prompts"),
        (dict(temperature=-0.5), "temperature is -0.5: expected 0"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(temperature=1.0), "key is required"),
        (dict(top_k=0), "top_k is 0: expected at least 1"),
        (dict(top_p=0.0), r"top_p is 0.0: expected a number in \(0, 1\]"),
        (dict(top_p=1.5), "top_p is 1.5"),
        (dict(min_p=1.5), r"min_p is 1.5: expected a number in \[0, 1\]"),
        (dict(repetition_penalty=0.0), "repetition_penalty is 0.0: expected a positive number"),
        (dict(presence_penalty=float("inf")), "presence_penalty is inf: expected a finite number"),
        (dict(frequency_penalty=[0.1, 0.2]), r"frequency_penalty has shape \(2,\) for 1 prompts"),
        (dict(draft_temperature=-1), "draft_temperature is -1: expected 0"),
        (dict(draft_top_k=0), "draft_top_k is 0: expected at least 1"),
        (dict(draft_top_p=1.5), r"draft_top_p is 1.5: expected a number in \(0, 1\]"),
        (dict(logit_bias={6: 1.0}), "logit_bias has 6: expected ids from 0 to 5"),
        (
            dict(logit_bias=[0.0, 1.0]),
            r"logit_bias has shape \(2,\): expected {id: bias}, or an array of shape \(6,\)",
        ),
        (
            dict(logit_bias={1: float("nan")}),
            "logit_bias has nan: expected finite numbers, or -inf",
        ),
        (dict(banned=[-1]), "banned has -1: expected ids from 0 to 5"),
        (
            dict(logit_bias={5: float("-inf")}, banned=range(5)),
            "rule out all 6 tokens for prompt 0",
        ),
        (dict(eos_ids=[6]), "eos_ids has 6: expected ids from 0 to 5"),
        (dict(stop=[""]), "stop has an empty string"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        jaxspec.generate(TARGET, "the cat", drafter=DRAFT, **options)


def test_arguments_of_a_wrong_type_are_refused():
    with pytest.raises(TypeError, match=r"target is of type int: expected a jaxspec.Model"):
        jaxspec.generate(3, "the cat")
    with pytest.raises(TypeError, match="drafter is of type int"):
        jaxspec.generate(TARGET, "the cat", drafter=3)
    with pytest.raises(TypeError, match="prompt 1 is 3, of type int"):
        jaxspec.generate(TARGET, ["the cat", 3])


def test_different_tokenizers_are_named_by_their_first_difference():
    other = model(1, words=["<end>", "the", "dog", "sat", "on", "mat"])
    with pytest.raises(ValueError, match="id 2 is 'cat' for the target and 'dog' for the drafter"):
        jaxspec.generate(TARGET, "the cat", drafter=other)
    with pytest.raises(
        ValueError,
        match=r"the target \(table-6\) and the drafter \(small\) have different tokenizers",
    ):
        jaxspec.generate(TARGET, "the cat", drafter=other._replace(name="small"))


def test_tokenizers_are_compared_where_both_have_a_token():
    """An id that only one of them has may lie anywhere, not just past the other's end."""
    ours = tokenizer({"<end>": 0, "the": 1, "cat": 4, "mat": 9})
    assert (
        request.first_difference(ours, tokenizer({"<end>": 0, "the": 1, "dog": 3, "mat": 9}))
        is None
    )
    assert request.first_difference(
        ours, tokenizer({"<end>": 0, "the": 1, "mat": 8, "rug": 9})
    ) == (9, "mat", "rug")


HOLES = {"<unk>": 0} | {f"w{i}": i for i in range(1, 5)} | {"<end>": 11}  # 6 tokens, ids up to 11


def holed(seed):
    """A model of 16 ids whose greedy text goes through those that are no tokens, until it ends with
    id 11.
    """
    chain = [1, 7, 3, 10, 4, 11]
    table = np.full((16, 16), -4.0, np.float32)
    table[chain[:-1], chain[1:]] = 4.0
    table += np.asarray(jax.random.normal(jax.random.key(seed), (16, 16)))
    table[:, 15] = 9.0  # no token has it: it only pads the vocabulary, and is never generated
    return table_model_from(jnp.asarray(table))._replace(
        tokenizer=word_tokenizer(HOLES, end="<end>")
    )


@pytest.mark.parametrize("options", [{}, {"drafter": holed(1), "gamma": 3}])
def test_ids_are_bounded_by_the_largest_not_by_how_many_there_are(options):
    out = jaxspec.generate(holed(0), "w1", max_new_tokens=8, **options)
    assert out.tokens[0].tolist() == [7, 3, 10, 4, 11] and out.texts == ["w3 w4"]
    biased = jaxspec.generate(holed(0), "w1", max_new_tokens=8, logit_bias={11: 60}, **options)
    assert biased.tokens[0].tolist() == [11]


def test_every_token_with_a_name_is_masked_by_no_option():
    with pytest.raises(ValueError, match="rule out all 12 tokens"):
        jaxspec.generate(holed(0), "w1", banned=range(12))


def test_encoder_decoder_needs_its_kind():
    other = table_model(jax.random.key(1), 6, encoder=True)._replace(tokenizer=tokenizer())
    message = (
        "the target is decoder-only and the drafter an encoder-decoder: both must be of one kind"
    )
    with pytest.raises(ValueError, match=message):
        jaxspec.generate(TARGET._replace(name=""), "the cat", drafter=other._replace(name=""))
    message = r"the target \(big\) is decoder-only and the drafter \(small\) an encoder-decoder"
    with pytest.raises(ValueError, match=message):
        jaxspec.generate(
            TARGET._replace(name="big"), "the cat", drafter=other._replace(name="small")
        )


def test_the_default_limit_is_cut_to_the_positions_that_are_left():
    """Each row's own, of the model with the fewest; a limit that was asked for is an error."""
    lm = TARGET.lm

    def of_positions(count):
        return TARGET._replace(
            lm=lm._replace(limits=lm.limits._replace(max_positions=count)), tokenizer=None
        )

    prompts = [[0, 1, 2], [0]]
    assert jaxspec.prepare(TARGET, prompts).options.max_new_tokens == NEW_TOKENS
    small = jaxspec.prepare(of_positions(16), prompts, drafter=of_positions(12))
    assert small.request.max_new_tokens.tolist() == [9, 11] == small.options.max_new_tokens.tolist()
    assert jaxspec.prepare(of_positions(200), prompts).options.max_new_tokens == NEW_TOKENS
    bound = jaxspec.drafters.model(of_positions(5))
    several = jaxspec.prepare(
        TARGET, [[0]], drafter=bound, num_samples=2, temperature=1.0, key=jax.random.key(0)
    )
    assert several.options.max_new_tokens == 4 and several.max_new_tokens == 16
    for options in ({"max_new_tokens": 128}, {}):
        with pytest.raises(
            ValueError, match=r"need \d+ positions, but the target has 2: shorten the prompt"
        ):
            jaxspec.prepare(of_positions(2), prompts, **options)


@pytest.mark.slow
def test_prompt_longer_than_the_positions():
    config = tiny_gpt(6, max_positions=16)
    small = jaxspec.Model(decoder.language_model(config), decoder.init(config, jax.random.key(0)))
    long = Prompt(jnp.ones((1, 12), jnp.int32), jnp.array([12]))
    with pytest.raises(
        ValueError, match="12 tokens and 5 new ones need 17 positions, but the target has 16"
    ):
        jaxspec.generate(small, long, max_new_tokens=5)
    assert jaxspec.generate(
        small, long, drafter=small, gamma=3, max_new_tokens=4
    ).lengths.tolist() == [4]
    both = Prompt(jnp.ones((2, 12), jnp.int32), jnp.array([12, 2]))  # each row fits by itself
    assert jaxspec.generate(
        small, both, drafter=small, gamma=3, max_new_tokens=[4, 14]
    ).lengths.tolist() == [4, 14]
    bare = TARGET._replace(tokenizer=None)
    with pytest.raises(ValueError, match="but the drafter has 16"):
        jaxspec.generate(bare, long, drafter=small, max_new_tokens=5)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 6), (6, 8)], ids=["target padded", "drafter padded"])
def test_vocabularies_padded_differently(sizes):
    """Sizes like 151936 and 152064: the shared ids are the tokenizer's, and neither model draws the
    padding.
    """
    target, draft = (table_model(jax.random.key(s), n) for s, n in zip((0, 1), sizes, strict=True))
    padded = target if sizes[0] == 8 else draft
    loud = table_model_from(padded.params.at[..., 6:].add(20.0))  # padding that wants to be drawn
    target, draft = (loud if m is padded else m for m in (target, draft))
    target, draft = (m._replace(tokenizer=tokenizer()) for m in (target, draft))
    options = dict(gamma=3, max_new_tokens=16, eos_ids=())
    plain = jaxspec.generate(target, ONE, **options)
    fast = jaxspec.generate(target, ONE, drafter=draft, **options)
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    hot = jaxspec.generate(
        target, ONE, drafter=draft, temperature=2.0, key=jax.random.key(0), **options
    )
    assert plain.tokens.max() < 6 and hot.tokens.max() < 6


WITHOUT_PARENTHESES = "is the function {0}: call it, and pass what it returns, jaxspec.{1}.{0}"
NOT_IDS = "expected an integer: ids from 0 to 5"
CHAT = (
    "is a chat message: expected a conversation, a list of messages, or a list of nothing but "
    "conversations"
)
TOLD = [  # what people pass, and what they are told
    (dict(logit_bias={"3": 1}), f"one of logit_bias is '3': {NOT_IDS}"),
    (dict(logit_bias={True: 1}), f"one of logit_bias is True: {NOT_IDS}"),
    (dict(logit_bias={3: "a"}), "logit_bias has 'a' for token 3: expected a number"),
    (dict(logit_bias={3: "1"}), "logit_bias has '1' for token 3: expected a number"),
    (dict(logit_bias={3: None}), "logit_bias has None for token 3: expected a number"),
    (dict(logit_bias={3: [1, [2]]}), r"logit_bias is \[1, \[2\]\]: expected {id: bias}"),
    (dict(logit_bias="abc"), "logit_bias is 'abc': expected {id: bias}, or an array of shape"),
    (dict(banned=["cat"]), f"one of banned is 'cat': {NOT_IDS}"),
    (dict(banned=[True]), f"one of banned is True: {NOT_IDS}"),
    (dict(eos_ids=1.0), f"one of eos_ids is 1.0: {NOT_IDS}"),
    (dict(eos_ids=True), f"one of eos_ids is True: {NOT_IDS}"),
    (dict(max_new_tokens=3.0), "max_new_tokens is 3.0: expected an integer, or one per prompt"),
    (
        dict(max_new_tokens=[[3], [1, 2]]),
        r"max_new_tokens is \[\[3\], \[1, 2\]\]: expected an integer",
    ),
    (dict(top_k="2"), "top_k is '2': expected an integer, or one per prompt"),
    (dict(top_p="0.5"), "top_p is '0.5': expected a number, or one per prompt"),
    (
        dict(drafter="debian-t5-small"),
        r"the drafter \(debian-t5-small\) an encoder-decoder: both must be of one kind",
    ),
    (dict(drafter=Path("small")), r"drafter is 'small', a name: pass jaxspec.load\('small'\)"),
    (dict(drafter="prompt_lookp"), "there is no drafter 'prompt_lookp': did you mean 'prompt_"),
    (dict(rule="block"), r"rule is 'block', a name: pass jaxspec.rules.block\("),
    (dict(policy="adaptive"), r"policy is 'adaptive', a name: pass jaxspec.policies.adaptive\("),
    (dict(prompts={"role": "user", "content": "the"}), f"prompts {CHAT}"),
    (
        dict(prompts=[{"role": "user", "content": "the"}]),
        "has no chat template: give text, or a model that is tuned",
    ),
    (dict(prompts=[[1], [{"role": "user", "content": "the"}]]), f"prompt 1 {CHAT}"),
    (dict(prompts=[{"text": "the"}]), "prompt 0 is a dict with 'text': expected the text itself"),
    (
        dict(prompts=SimpleNamespace(column_names=["text", "id"])),
        "a SimpleNamespace with the columns 'text', 'id'",
    ),
    (dict(prompts=None), "there are no prompts: give text"),
    (dict(prompts=["the", None]), "prompt 1 is None, of type NoneType: expected text"),
    (dict(prompts=["the", [1]]), r"prompt 1 is \[1\], of type list: expected text"),
    (
        dict(prompts=[[1], "the"]),
        "prompt 1 is text, and others are token ids: expected all of one kind",
    ),
    (
        dict(prompts=[1.0, 2.0]),
        "prompt 0 is 1.0, of type float: expected text, or all as token ids",
    ),
    (dict(prompts=np.array([[1.0]])), "prompt 0 is a list of more than integers, it has 1.0"),
    (
        dict(prompts=np.array([[[1, 2]]])),
        r"prompt 0 is a list of more than integers, it has \[1, 2\]",
    ),
    (dict(prompts=np.array([[True]])), "prompt 0 is a list of more than integers, it has True"),
    (dict(prompts=[ONE]), "prompt 0 is a jaxspec.Prompt, which has rows itself"),
    (
        dict(prompts=Prompt(ONE.tokens, jnp.array([2.0]))),
        "prompt lengths have dtype float32: expected integers",
    ),
    (dict(temprature=1.0), "there is no option 'temprature': did you mean temperature"),
    (
        dict(do_sample=True),
        "there is no option 'do_sample': it is called temperature: 0 is greedy, 1 samples",
    ),
    (
        dict(num_return_sequences=2),
        "there is no option 'num_return_sequences': it is called num_samples",
    ),
    (dict(num_samples=0), "num_samples is 0: expected at least 1"),
    (dict(num_samples=2), "num_samples is 2 at temperature 0: the texts would be the same"),
    (dict(seed=0), r"there is no option 'seed': it is called key=jax.random.key\(seed\)"),
    (dict(streamer=1), "it is called jaxspec.stream, which yields pieces of text"),
    (
        dict(length_penalty=1),
        "there is no option 'length_penalty': only jaxspec.beam_search has it",
    ),
    (
        dict(forced_eos_token_id=2),
        "there is no option 'forced_eos_token_id': a text ends where the model ends",
    ),
    (
        dict(guided_json="{}"),
        "there is no option 'guided_json': give choices, regex or json_schema",
    ),
    (
        dict(batch_size=2),
        "there is no option 'batch_size': a call decodes all of its prompts at once",
    ),
    (dict(qqqq=1), "there is no option 'qqqq': expected one of"),
    (
        dict(gamma=0, policy=jaxspec.policies.constant(2)),
        "got a policy and gamma=0, of which nothing is drafted",
    ),
    (dict(gamma=True), "gamma is True: expected an integer"),
    (dict(gamma="3"), "gamma is '3': expected an integer"),
    (dict(key=0), r"key is 0: expected a key, such as jax.random.key\(0\)"),
    (dict(key="0"), "key is of type str: expected jax.random.key"),
    (dict(key=jax.random.split(jax.random.key(0), 3)), r"keys of shape \(3,\) for 1 rows"),
    (dict(rule=jaxspec.rules.block), WITHOUT_PARENTHESES.format("block", "rules")),
    (
        dict(rule=lambda *_: None),
        "rule is of type function: expected a rule, such as jaxspec.rules.rejection",
    ),
    (dict(policy=jaxspec.policies.heuristic), WITHOUT_PARENTHESES.format("heuristic", "policies")),
    (
        dict(drafter=jaxspec.drafters.prompt_lookup),
        WITHOUT_PARENTHESES.format("prompt_lookup", "drafters"),
    ),
    (dict(eos_ids="<nothing>"), "eos_ids has '<nothing>', which is not a token of the target's"),
    (
        dict(max_new_tokens=10**9),
        "max_new_tokens is 1000000000: expected at least 1, and fewer than 536870912",
    ),
    (
        dict(max_new_tokens=10**12),
        r"max_new_tokens is 1000000000000: expected a number below 2\*\*31",
    ),
    (
        dict(max_new_tokens=5 * 10**8, prompts=["the"] * 64),
        "max_new_tokens=500000000 for 64 prompts take .*B of mem",
    ),
    (
        dict(gamma=2 * 10**9, max_new_tokens=2**28),
        "gamma=2000000000 for 1 prompts take .*B .*: lower gamma",
    ),
    (dict(gamma=10**12), "gamma is 1000000000000: expected a number from 0 to 2147483647"),
    (dict(stop=5), "stop is 5: expected a string, or a list of strings"),
    (dict(stop=[5]), r"stop is \[5\]: expected a string, or a list of strings"),
    (dict(prompts=7), "the prompts are of type int: expected text"),
    (dict(prompts=jnp.array(7)), "the prompts are of type .*: expected text"),
    (dict(prompts=b"the cat"), r"prompts is bytes: expected text, such as prompts\.decode"),
    (dict(prompts=[b"the cat"]), "prompt 0 is bytes"),
    (dict(prompts="the \ud800"), "half of a surrogate pair"),
    (dict(stop="\ud800"), "stop has .* half of a surrogate pair"),
    (dict(prompts=[[1, 2], [1.5]]), "prompt 1 is a list of more than integers"),
    (dict(prompts=[[1, 2], []]), "prompt 1 is empty"),
    (
        dict(prompts={"input_ids": [[1]], "attention_mask": [[1]]}),
        "a dict with 'input_ids', 'attention_mask': expected",
    ),
    (
        dict(num_samples=10**9, temperature=1.0, key=jax.random.key(0)),
        "num_samples=1000000000 take .*B of memory",
    ),
    (
        dict(prompts=Prompt([[1, 2], [3]], [2, 1])),
        "give rows of several lengths as a list of lists",
    ),
    (
        dict(rule=Rule(lambda *_: None, "mine", True)),
        "the rule mine returned type NoneType: expected a core.Verdict",
    ),
    (
        dict(
            rule=Rule(
                lambda k, p, draft, t: Verdict(draft.tokens, draft.length, draft.length),
                "mine",
                True,
            )
        ),
        r"the rule mine returned num_accepted of shape \(1, 2\) and dtype int32: expected integers of shape \(1,\)",
    ),
    (
        dict(
            rule=Rule(
                lambda k, p, draft, t: Verdict(draft.length + 1, draft.length, draft.length),
                "mine",
                True,
            ),
            eos_ids=[],
        ),
        r"the rule mine accepted more draft tokens than there were, .* for prompts \[0\]: expected num_accepted from 0",
    ),
]


@pytest.mark.parametrize("name", ["grammar", "guided_regex", "guided_choice", "response_format"])
def test_other_names_of_structured_output_are_refused_wherever_options_are_taken(name):
    chatty = TARGET._replace(
        tokenizer=word_tokenizer(WORDS, end="<end>", unknown="<end>", chat_template="the")
    )
    for start in (
        lambda **options: jaxspec.generate(TARGET, "the cat", **options),
        lambda **options: list(jaxspec.stream(TARGET, "the cat", **options)),
        lambda **options: list(jaxspec.generate_many(TARGET, ["the cat"], **options)),
        lambda **options: jaxspec.prepare(TARGET, "the cat", **options),
        lambda **options: jaxspec.beam_search(TARGET, "the cat", **options),
        lambda **options: jaxspec.chat(chatty, **options),
    ):
        with pytest.raises(
            TypeError, match=f"no option '{name}': give choices, regex or json_schema"
        ):
            start(**{name: "{}"})


@pytest.mark.parametrize(
    ("options", "message"), TOLD, ids=[next(iter(options)) for options, _ in TOLD]
)
def test_what_people_pass_is_told_in_their_words(options, message):
    arguments = dict(prompts="the cat", drafter=DRAFT, gamma=2, max_new_tokens=6) | options
    with pytest.raises((TypeError, ValueError, FloatingPointError), match=message):
        jaxspec.generate(TARGET, **arguments)


def test_a_call_without_prompts_names_what_was_given_in_their_place():
    encoded = tokenizer()(["the cat"])
    for call in (
        jaxspec.generate,
        jaxspec.prepare,
        jaxspec.beam_search,
        lambda *a, **k: list(jaxspec.stream(*a, **k)),
    ):
        with pytest.raises(
            TypeError, match="no option 'input_ids': it is called prompts, the second argument"
        ):
            call(TARGET, "the cat", **encoded)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'prompt"):
            call(TARGET, max_new_tokens=3)


def test_a_gamma_that_no_row_can_use_is_cut():
    """A program of 9,999 draft tokens would be compiled for minutes. Smaller ones stay as they
    are.
    """
    prepared = jaxspec.prepare(TARGET, "the cat", drafter=DRAFT, gamma=9999, max_new_tokens=6)
    assert prepared.decoder.gamma == 15
    assert prepared.replace(max_new_tokens=40).decoder.gamma == 47
    assert prepared.replace(gamma=7).decoder.gamma == 7
    assert prepared.replace(gamma=15).decoder == prepared.decoder  # the same program
    assert (
        jaxspec.prepare(TARGET, "the cat", drafter=DRAFT, gamma=5, max_new_tokens=1).decoder.gamma
        == 5
    )


def test_a_target_that_is_no_model_is_told_what_it_is():
    with pytest.raises(TypeError, match=r"target is 'gpt2', a name: pass jaxspec.load\('gpt2'\)"):
        jaxspec.generate("gpt2", "the cat")
    linear = type("Linear", (), {"state_dict": None})()
    with pytest.raises(TypeError, match=r"target is a Linear of PyTorch: pass jaxspec.load"):
        jaxspec.generate(linear, "the cat")


class Tensor:
    """An array of another library, with the methods that are used."""

    def __init__(self, values):
        self._values = values

    def __iter__(self):
        return (Tensor(value) for value in self._values)

    def tolist(self):
        return self._values


def test_arrays_of_any_library_are_taken():
    def prepared(prompts=ONE, **options):
        return request.prepare(TARGET, prompts, **options)

    expected = [[1, 2], [3]]
    for prompts in (
        Tensor(expected),
        [Tensor(row) for row in expected],
        [jnp.array(row) for row in expected],
    ):
        assert token_rows.to_lists(*prepared(prompts).prompt[:2]) == expected
    assert prepared(Tensor([1, 2])).prompt.length.tolist() == [2]
    assert prepared(eos_ids=Tensor([1])).request.eos.tolist() == [[1]]
    bias = prepared(
        banned=Tensor([1, 2]), logit_bias={np.int64(3): jnp.float32(2)}
    ).request.sampling_params.bias
    assert bias[0].tolist() == [0, -np.inf, -np.inf, 2, 0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jaxspec.rules.lenient("0.5"), r"lenience is '0.5': expected a number in \(0, 1\]"),
        (lambda: jaxspec.rules.typical(True), r"epsilon is True: expected a number in \(0, 1\]"),
        (lambda: jaxspec.drafters.online_ngram("3"), "n is '3': expected an integer"),
        (
            lambda: jaxspec.drafters.retrieval("x", longest=3.0),
            "longest is 3.0: expected an integer",
        ),
    ],
)
def test_numbers_of_factories_are_numbers(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert jaxspec.rules.lenient(jnp.float32(0.5)) is jaxspec.rules.lenient(0.5)


@pytest.mark.slow
def test_what_people_pass_is_taken():
    """One program: other spellings of one call give one text."""
    call = dict(
        drafter=DRAFT,
        gamma=2,
        max_new_tokens=6,
        temperature=1.0,
        key=jax.random.key(0),
        eos_ids=[0],
    )
    expected = jaxspec.generate(TARGET, "the cat", **call).tokens
    for change in (
        dict(gamma=np.int64(2)),
        dict(gamma=jnp.int32(2)),
        dict(key=jax.random.PRNGKey(0)),
        dict(key=np.array([0, 0], np.uint32)),
        dict(eos_ids=0),
        dict(eos_ids=np.int32(0)),
        dict(eos_ids="<end>"),
        dict(eos_ids=["<end>"]),
        dict(max_new_tokens=np.int64(6)),
        dict(max_new_tokens=[6]),
        dict(temperature=[1]),
        *(
            dict(prompts=x)
            for x in (
                [1, 2],
                [[1, 2]],
                (1, 2),
                np.array([1, 2]),
                np.array([[1, 2]]),
                jnp.array([1, 2]),
            )
        ),
        dict(prompts=Prompt([[1, 2]], [2])),
        dict(prompts=["the cat"]),
    ):
        arguments = dict(prompts="the cat") | call | change
        np.testing.assert_array_equal(jaxspec.generate(TARGET, **arguments).tokens, expected)
    ragged = jaxspec.generate(TARGET, [[1, 2], [3]], max_new_tokens=3).tokens
    np.testing.assert_array_equal(
        ragged, jaxspec.generate(TARGET, ["the cat", "sat"], max_new_tokens=3).tokens
    )


def test_a_prepared_generation_has_no_stop_strings():
    prepared = request.prepare(TARGET, ONE)
    for call in (
        lambda: request.prepare(TARGET, ONE, stop=["cat"]),
        lambda: prepared.replace(stop="cat"),
    ):
        with pytest.raises(
            TypeError, match=r"no stop strings, .*: give stop to jaxspec.generate or jaxspec.stream"
        ):
            call()


def test_programs_hold_only_the_processors_that_were_asked_for():
    def processors(**options):
        sampling_params = request.prepare(
            TARGET, ONE, key=jax.random.key(0), **options
        ).request.sampling_params
        return {name for name, value in sampling_params._asdict().items() if value is not None}

    always = {"temperature"}
    assert processors() == processors(temperature=1.0) == always
    assert processors(min_p=0.1) == always | {"min_p"}
    assert processors(banned=[1]) == processors(logit_bias={1: 2.0}) == always | {"bias"}
    assert processors(repetition_penalty=1.0) == always | {"repetition"}
    assert processors(presence_penalty=0.0) == always | {"presence"}
    assert processors(frequency_penalty=0.0) == always | {"frequency"}
    assert processors(top_k=3, top_p=0.5, temperature=1.0) == always | {"top_k", "top_p"}


def test_biases_and_bans_are_one_array():
    two = Prompt(jnp.array([[1], [2]]), jnp.array([1, 1]))
    bias = np.arange(12.0).reshape(2, 6)
    for logit_bias, expected in [
        ({2: 1.5}, [[0, 0, 1.5, 0, 0, 0]] * 2),
        (bias[0], [bias[0]] * 2),
        (bias, bias),
    ]:
        expected = np.array(expected, np.float32)
        expected[:, 3] = -np.inf
        got = request.prepare(
            TARGET, two, logit_bias=logit_bias, banned=[3]
        ).request.sampling_params.bias
        np.testing.assert_array_equal(got, expected)


def test_the_drafters_temperature_is_its_own_where_the_target_samples():
    two = Prompt(jnp.array([[1], [2]]), jnp.array([1, 1]))
    options = dict(drafter=DRAFT, key=jax.random.key(0), draft_temperature=0.25)
    row_options = request.prepare(TARGET, two, temperature=[0.0, 1.0], **options).request
    assert row_options.sampling_params.temperature.tolist() == [0, 1]
    assert row_options.draft_sampling_params.temperature.tolist() == [0, 0.25]
    assert (
        request.prepare(TARGET, two, temperature=0.0, **options).request.draft_sampling_params
        is None
    )


def test_the_drafters_truncation_is_its_own():
    two = Prompt(jnp.array([[1], [2]]), jnp.array([1, 1]))
    options = dict(drafter=DRAFT, key=jax.random.key(0), temperature=1.0)
    alone = request.prepare(TARGET, two, draft_top_k=[2, 3], **options).request
    assert (
        alone.sampling_params.top_k >= 6
    ).all() and alone.draft_sampling_params.top_k.tolist() == [2, 3]
    both = request.prepare(TARGET, two, top_k=4, top_p=0.5, draft_top_p=0.25, **options).request
    assert (
        both.sampling_params.top_p.tolist() == [0.5, 0.5]
        and both.draft_sampling_params.top_p.tolist() == [0.25] * 2
    )
    assert (
        both.draft_sampling_params.top_k.tolist() == both.sampling_params.top_k.tolist() == [4, 4]
    )
    greedy = request.prepare(TARGET, two, draft_top_k=2, **options | {"temperature": 0.0})
    assert greedy.request.draft_sampling_params is None and greedy.decoder.gamma == 5


@pytest.mark.parametrize("cut", [{"draft_top_k": 2}, {"draft_top_p": 0.4, "top_k": 5}])
def test_a_drafter_that_is_cut_leaves_the_texts_distribution_as_it_is(cut):
    """The drafter draws what it keeps, divided by its mass, and that is what the rule is told."""
    target, draft = table_model(jax.random.key(1), vocab=3), table_model(jax.random.key(2), vocab=3)
    options = {"gamma": 1, "max_new_tokens": 3, "temperature": 1.0, "key": jax.random.key(0)}
    prepared = request.prepare(target, ONE, drafter=draft, **options, **cut)
    assert certify_prepared(prepared, 3) < 1e-6
    columns = jaxspec.generate(
        target, ONE, drafter=draft, **options | {"max_new_tokens": 40}, **cut, trace_numbers=True
    ).trace.table()
    whole = jaxspec.generate(
        target, ONE, drafter=draft, **options | {"max_new_tokens": 40}, trace_numbers=True
    ).trace.table()
    assert columns["entropy"].max() <= np.log(2) / np.log(3) + 1e-6 < whole["entropy"].max()


def test_unknown_sizes_without_tokenizers_raise():
    with pytest.raises(ValueError, match=r"6 token ids and the drafter \(table-8\) 8"):
        jaxspec.generate(
            TARGET._replace(tokenizer=None), ONE, drafter=table_model(jax.random.key(0), 8)
        )


def test_tokenizers_are_compared_once_per_pair(monkeypatch):
    ours, theirs = tokenizer(), tokenizer()
    target = TARGET._replace(tokenizer=ours)
    first = request.prepare(target, "red", drafter=target._replace(tokenizer=theirs))
    monkeypatch.setattr(type(ours), "convert_ids_to_tokens", None)  # a second comparison would fail
    again = request.prepare(target, "red", drafter=target._replace(tokenizer=theirs))
    assert again.decoder is first.decoder


def test_preparing_other_shapes_compiles_only_the_keys(caplog):
    """Each eager operation at a new shape is a program: some 0.02 s on a CPU, and more on a TPU."""
    prepare(TARGET, [[1, 2]], eos_ids=3)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        prepare(
            TARGET,
            [[1] * 41] * 7,
            drafter=DRAFT,
            temperature=0.5,
            top_k=3,
            eos_ids=[1, 2],
            key=jax.random.key(0),
        )
    compiled = [
        record.message.split()[1]
        for record in caplog.records
        if record.message.startswith("Compiling ")
    ]
    assert "jit(_keys_of_rows)" in compiled
    of_the_seed = {"jit(_threefry_seed)", "jit(stage)"}
    assert (
        set(compiled) <= {"jit(_keys_of_rows)"} | of_the_seed and compiled.count("jit(stage)") <= 1
    )
