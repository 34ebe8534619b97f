"""Public functions under `jax_enable_x64`, drafted beside plain, as JSON;
`tests/test_wide_types.py` runs it.

python wide_types.py names        the names of all cases
python wide_types.py NAME ...     runs some of them: a line {"name": ..., "got": ..., "expected": ...} for each
"""

import itertools
import json
import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec import drafters, policies, rules
from jaxspec.core import BoundDrafter, Draft, Drafter, Rule, Verdict
from jaxspec.nets import adapters, decoder, t5, whisper
from jaxspec.testing import certify, check_model, table_model, word_tokenizer
from jaxspec.training import online
from tests.small import between, random_params, tiny_llama, tiny_t5

VOCAB, NEW = 7, 9
WORDS = word_tokenizer(["<unk>", "</s>", "a", "b", "c", "d", "e"])
TEMPLATED = word_tokenizer(
    WORDS.get_vocab(),
    chat_template="{% for message in messages %}{{ message.content + ' ' }}{% endfor %}",
)
TABLE = table_model(jax.random.key(1), VOCAB, sharpness=2.0)._replace(tokenizer=WORDS)
BLEND = between(TABLE, table_model(jax.random.key(2), VOCAB, sharpness=2.0), 0.7)
# int64, as JAX makes them here
PROMPTS = jaxspec.Prompt(jnp.array([[3, 1, 4], [2, 0, 0]]), jnp.array([3, 1]))
DRAFTED = dict(drafter=BLEND, gamma=3)
LIMIT = dict(max_new_tokens=NEW, eos_ids=[])
PENALTIES = dict(
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    top_k=5,
    top_p=0.95,
    min_p=0.01,
)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def tokens(out):
    return np.asarray(out.tokens).tolist()


def beside_plain(target=TABLE, prompts=PROMPTS, **options):
    """Greedy text with a drafter, and without."""
    plain = {
        name: value
        for name, value in options.items()
        if name not in ("drafter", "gamma", "rule", "policy")
    }
    return [
        tokens(jaxspec.generate(target, prompts, **LIMIT | given)) for given in (options, plain)
    ]


@case
def generate():
    return beside_plain(**DRAFTED, top_log_probs=2)


@case
def generate_with_penalties():
    return beside_plain(**DRAFTED, log_probs=True, **PENALTIES)


@case
def sampled_by_coupled_noise():
    """The draft's own noise: the text is that of plain sampling."""
    sampling = dict(temperature=[0.0, 0.8], key=jax.random.key(5), log_probs=True)
    return beside_plain(**DRAFTED, rule=rules.coupled(), **sampling)


@case
def every_rule():
    options = dict(
        log_probs=True, key=jax.random.key(5), temperature=[0.0, 0.8], policy=policies.adaptive()
    )
    judged = (rules.rejection(), rules.block(), rules.exact_match(), rules.coupled())
    got = [
        tokens(jaxspec.generate(TABLE, PROMPTS, rule=rule, **DRAFTED, **LIMIT, **options))[0]
        for rule in judged
    ]
    plain = tokens(jaxspec.generate(TABLE, PROMPTS, **LIMIT))[0]
    return got, [plain] * len(judged)


@case
def trees_that_are_sampled():
    widest = dict(nodes=5, depth=3, width=3)
    shapes = (
        drafters.tree(BLEND, (2, 2)),
        drafters.dynamic_tree(BLEND, **widest),
        drafters.sequences(BLEND, 2),
    )
    judged = (rules.rejection(), rules.traversal(), rules.k_seq())
    options = dict(log_probs=True, key=jax.random.key(5), temperature=[0.0, 0.8])
    got = [
        tokens(jaxspec.generate(TABLE, PROMPTS, drafter=shape, rule=rule, **LIMIT, **options))[0]
        for shape, rule in zip(shapes, judged, strict=True)
    ]
    plain = tokens(jaxspec.generate(TABLE, PROMPTS, **LIMIT))[0]
    return got, [plain] * len(got)


@case
def lookups():
    searches = (
        drafters.prompt_lookup(),
        drafters.suffix(texts=[[3, 1, 4, 2]]),
        drafters.token_recycling([(0,), (1,), (0, 0)]),
        drafters.online_ngram(3, top=2, slots=7),
        drafters.lookahead(window=2, ngram=2, candidates=1, pool=2),
        drafters.bigram([[3, 1, 4, 1, 5]], TABLE),
        drafters.cascade(BLEND, drafters.prompt_lookup()),
        drafters.horizontal_cascade(BLEND, drafters.prompt_lookup()),
        drafters.fallback(drafters.prompt_lookup(), BLEND),
    )
    got = [
        tokens(jaxspec.generate(TABLE, PROMPTS, drafter=x, gamma=3, log_probs=True, **LIMIT))
        for x in searches
    ]
    return got, [tokens(jaxspec.generate(TABLE, PROMPTS, **LIMIT))] * len(searches)


@case
def structured():
    return beside_plain(**DRAFTED, regex="[abc ]{4,8}", eos_ids=[1])


@case
def several_samples():
    options = dict(
        temperature=0.8, key=jax.random.key(5), num_samples=3, rule=rules.coupled(), log_probs=True
    )
    drafted = jaxspec.generate(TABLE, PROMPTS, **DRAFTED, **LIMIT, **options)
    del options["rule"]
    return tokens(drafted), tokens(jaxspec.generate(TABLE, PROMPTS, **LIMIT, **options))


@case
def stream():
    pieces = jaxspec.stream(TABLE, [3, 1, 4], **DRAFTED, **LIMIT, top_log_probs=1)
    whole = jaxspec.generate(TABLE, [[3, 1, 4]], **LIMIT)
    return np.concatenate([piece.tokens for piece in pieces]).tolist(), tokens(whole)[0]


@case
def prefix():
    shared = jaxspec.prefix(TABLE, [3, 1], drafter=BLEND)
    return beside_plain(prompts=[[4], [2, 5]], prefix=shared, **DRAFTED)[0], beside_plain(
        prompts=[[3, 1, 4], [3, 1, 2, 5]]
    )[1]


@case
def chat():
    def conversation(**options):
        talk = jaxspec.chat(TABLE._replace(tokenizer=TEMPLATED), **LIMIT, **options)
        return ["".join(piece.text for piece in talk.send(text)) for text in ("a b", "c")]

    return conversation(**DRAFTED), conversation()


@case
def rollout():
    prepared = jaxspec.prepare(TABLE, PROMPTS, **DRAFTED, **LIMIT, log_probs=True)
    out = jax.jit(lambda prompt: jaxspec.rollout(prepared, prompt=prompt))(PROMPTS)
    gradient = jax.grad(
        lambda params: jaxspec.rollout(
            prepared, weights=prepared.weights._replace(target=params)
        ).log_probs.raw.sum()
    )(TABLE.params)
    assert gradient.dtype == TABLE.params.dtype and bool(jnp.any(gradient != 0))
    return tokens(out)[0][:NEW], tokens(jaxspec.generate(TABLE, PROMPTS, **LIMIT))[0]


@case
def beam_search():
    options = dict(beams=2, **LIMIT, top_log_probs=2)
    drafted = jaxspec.beam_search(TABLE, PROMPTS, drafter=BLEND, gamma=2, **options)
    return tokens(drafted), tokens(jaxspec.beam_search(TABLE, PROMPTS, **options))


@case
def speculate():
    def f(x):
        return jnp.array([x, 0.0, -x])

    rows = [
        jaxspec.speculate(
            f, lambda token: token, 2.0, approximation=f, key=jax.random.key(seed), candidates=count
        )
        for seed, count in itertools.product(range(3), (1, 2))
    ]
    return [row.value for row in rows], [row.token for row in rows]


@case
def score():
    out = jaxspec.generate(TABLE, [[3, 1]], **LIMIT, log_probs=True)
    (row,) = jaxspec.score(TABLE, [([3, 1], out.tokens[0])])
    return np.round(row.log_probs, 3).tolist(), np.round(out.log_probs.raw[0], 3).tolist()


@case
def generate_many():
    prompts = [[3, 1, 4], [2], [5, 0]]
    options = dict(slots=2, in_order=True, log_probs=True, **LIMIT)
    drafted, plain = (
        [list(row.tokens) for row in jaxspec.generate_many(TABLE, prompts, **options, **given)]
        for given in (DRAFTED, {})
    )
    return drafted, plain


@case
def networks():
    got, expected = [], []
    for net, config in ((decoder, tiny_llama(VOCAB, window=3)), (t5, tiny_t5(VOCAB))):
        model, draft = (
            jaxspec.Model(
                net.language_model(config),
                random_params(net.init, config, seed, 0.6),
                config=config,
            )
            for seed in (1, 2)
        )
        pair = beside_plain(model, **DRAFTED | dict(drafter=draft), log_probs=True)
        got.append(pair[0])
        expected.append(pair[1])
    return got, expected


@case
def speech():
    config = whisper.WhisperConfig(
        VOCAB, 16, 24, 2, 1, 1, mels=4, source_positions=6, max_positions=32, start_token=1
    )
    target, draft = (
        jaxspec.Model(
            whisper.language_model(config),
            random_params(whisper.init, config, seed, 0.6),
            config=config,
        )
        for seed in (1, 2)
    )
    features = np.random.default_rng(0).standard_normal((2, config.mels, 12)).astype(np.float32)
    prompts = jaxspec.Prompt(jnp.array([[1], [1]]), jnp.array([1, 1]), jnp.asarray(features))
    return beside_plain(target, prompts, drafter=draft, gamma=3)


@case
def models_of_float64():
    """A network whose parameters and logits are float64, through an adapter and by hand."""
    table = jax.random.normal(jax.random.key(3), (VOCAB, VOCAB), jnp.float64)
    noise = jax.random.normal(jax.random.key(4), (VOCAB, VOCAB), jnp.float64)

    def bigram(params, tokens):
        return params[tokens]

    lm = adapters.from_function(bigram, vocab_size=VOCAB)
    target, draft = jaxspec.Model(lm, table), jaxspec.Model(lm, table + 0.3 * noise)
    check_model(target)

    def wide(params, cache, *arguments, **named):
        forward, cache = lm.extend(params, cache, *arguments, **named)
        return forward._replace(logits=forward.logits.astype(jnp.float64)), cache

    def prefill(params, prompt, room):
        forward, cache = lm.prefill(params, prompt, room)
        return forward._replace(logits=forward.logits.astype(jnp.float64)), cache

    by_hand = target._replace(lm=lm._replace(extend=wide, prefill=prefill))
    pairs = [
        beside_plain(model, drafter=draft, gamma=3, top_log_probs=2) for model in (target, by_hand)
    ]
    beams = [tokens(jaxspec.score(by_hand, [[3, 1, 4]])[0])]
    return [pair[0] for pair in pairs] + beams, [pair[1] for pair in pairs] + [[1, 4]]


def drafter_of_wide_types(is_tree):
    """Writes the most probable tokens of BLEND's table as int64 and float64."""

    def propose(weights, caches, context):
        batch, width = context.row.length.shape[0], 3
        last = context.row.tokens[jnp.arange(batch), context.row.length - 1]
        drafted = jnp.stack(
            [(last.astype(jnp.int64) + step) % VOCAB for step in range(width)], axis=1
        )
        length = jnp.full((batch,), width)
        log_probs = jnp.log(jnp.full((batch, width, VOCAB), 1 / VOCAB))
        if is_tree:
            return Draft(drafted, length, jnp.zeros((batch, width), jnp.int64), None), caches
        return Draft(drafted, length, None, log_probs), caches

    size = jaxspec.core.TreeSize(3, 1) if is_tree else None
    return BoundDrafter(Drafter(lambda start: (), propose, lambda end: end.caches, tree=size))


@case
def parts_of_your_own():
    """A drafter and a rule that return 64-bit arrays, as NumPy-like code makes them here."""

    def verify(keys, length, draft, target):
        verdict = rules.rejection().verify(keys, length, draft, target)
        wide = [None if x is None else x.astype(jnp.int64) for x in verdict]
        return Verdict(*wide)

    rule = Rule(verify, "of 64 bits", exact=True, trees=True)
    pairs = [
        beside_plain(drafter=drafter_of_wide_types(is_tree), gamma=3, rule=rule, log_probs=True)
        for is_tree in (False, True)
    ]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


@case
def certificates():
    target, draft = (table_model(jax.random.key(seed), vocab=3) for seed in (1, 2))
    return bool(certify(target, drafter=drafters.tree(draft, (2,)), steps=2) < 1e-5), True


@case
def learning():
    learner = online(BLEND, optimizer=optax.sgd(0.1), max_prompt=4, max_new_tokens=NEW, steps=1)
    state = learner.init()
    out = jaxspec.generate(TABLE, PROMPTS, drafter=learner.drafter(state), gamma=3, **LIMIT)
    state, _ = learner.update(state, TABLE, PROMPTS, out)
    again = jaxspec.generate(TABLE, PROMPTS, drafter=learner.drafter(state), gamma=3, **LIMIT)
    return tokens(again), tokens(jaxspec.generate(TABLE, PROMPTS, **LIMIT))


def main(names):
    jax.config.update("jax_enable_x64", True)
    if names == ["names"]:
        print(json.dumps([*CASES]))
        return
    for name in names:
        try:
            got, expected = CASES[name]()
        except Exception:
            got, expected = traceback.format_exc(), None
        print(json.dumps({"name": name, "got": got, "expected": expected}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
