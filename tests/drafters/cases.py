"""Every drafter, with what its conformance tests are given: one table, and the models and samplers
of all of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.oracle import oracle
from jaxspec import drafters, policies, rules
from jaxspec.core import BoundDrafter, Prompt
from jaxspec.drafters.common import as_drafter
from jaxspec.drafters.lookups import datastore
from jaxspec.drafters.uniform import uniform
from jaxspec.sampling import SamplingParams, at_temperature
from jaxspec.testing import table_model
from jaxspec.vocab.remap import map_vocabulary

EXACT = 1e-5  # total variation; float32 comes to some 1e-7
TARGET, MODEL = table_model(jax.random.key(1), 3), table_model(jax.random.key(2), 3, sharpness=1.5)
PROMPT = Prompt(jnp.array([[1, 0, 2]]), jnp.array([3]))
EVERYTHING = at_temperature(3, True)  # one program for all of these
PLAIN = SamplingParams(jnp.ones(1), jnp.array([3]), jnp.ones(1))
SAMPLING = {
    "plain": PLAIN,
    "warped": SamplingParams(jnp.array([1.3]), jnp.array([2]), jnp.array([0.9])),
    "temperature 0": PLAIN._replace(temperature=jnp.zeros(1)),
}
POLICIES = {
    "constant": policies.constant(1),
    "heuristic": policies.heuristic(start=1, grow=1),
    "confidence": policies.confidence(0.45),
    "entropy": policies.entropy(1, 2, 0.5),
    "adaptive": policies.adaptive(0.1, 0.1, pause=1),
    "oracle": oracle(np.array([[2, 0, 1]])),
}

# Of three tokens.
TEXTS = [[0, 1, 1, 2, 0, 1, 2, 2, 1, 0], [2, 2, 0]]
TABLES = drafters.bigram(TEXTS, TARGET, followers=2)
# lacks the pairs 0 0, 0 2, 1 0 and 2 1
TRIGRAM = drafters.ngram([[0, 1, 1, 2, 0, 1], [2, 2, 0]], TARGET, order=3)
STORE = datastore.build([[0, 2, 1, 1, 0, 2], [1, 0]], vocab_size=3)
SMALL = table_model(jax.random.key(4), 3, order=1)
SPELLED = map_vocabulary(
    table_model(jax.random.key(3), 2, sharpness=1.5), [2, 0], 3, [[1], [0, 1], [0]]
)

# Of six tokens, for rows among other rows.
LARGE_TARGET = table_model(jax.random.key(5), 6, sharpness=2.0)
LARGE_TEXTS = [[1, 2, 3, 1, 2, 3, 4, 5], [4, 5, 0, 4, 5], [0, 0, 1, 2]]
LARGE_TABLES = drafters.ngram(LARGE_TEXTS, LARGE_TARGET, order=3)
LARGE_MODEL = table_model(jax.random.key(6), 6, sharpness=2.0)
LARGE_STORE = datastore.build([[*row, *row] for row in LARGE_TEXTS], vocab_size=6)


class Case(NamedTuple):
    """A drafter, and which of the tests in drafters/test_conformance.py go through it."""

    drafter: BoundDrafter  # of `TARGET`
    large: BoundDrafter | None = None  # of `LARGE_TARGET`: rows among other rows
    slow: bool = True  # the test of its distribution
    exhaustive: bool = False  # others stand for it
    # its programs are large: three tokens are enumerated, and no truncated distribution
    brief: bool = False
    permuted: bool = False  # in drafters/test_conformance.py; the others are in decode/test_rows.py
    # with which its distribution is enumerated, if `--exhaustive` is given
    policies: tuple[str, ...] = ()
    usual_policies: tuple[str, ...] = ()  # and without
    # which judge its trees without `--exhaustive`; with it all do
    usual_rules: tuple[str, ...] = ()


ALL = tuple(POLICIES)
CASES = {
    "a model": Case(
        as_drafter(MODEL),
        exhaustive=True,
        policies=ALL,
        usual_policies=("heuristic", "confidence", "adaptive"),
    ),
    "a model of another vocabulary": Case(
        as_drafter(SPELLED), exhaustive=True, permuted=True, policies=ALL
    ),
    "its argmax": Case(drafters.greedy(MODEL), exhaustive=True, policies=ALL),
    "unigram": Case(as_drafter(drafters.unigram(TEXTS, TARGET)), exhaustive=True, policies=ALL),
    "n-gram samples": Case(as_drafter(TABLES), as_drafter(LARGE_TABLES), policies=ALL),
    "n-gram argmax": Case(drafters.greedy(TABLES), drafters.greedy(LARGE_TABLES), policies=ALL),
    "samples without back-off": Case(
        drafters.without_backoff(TRIGRAM), drafters.without_backoff(LARGE_TABLES), policies=ALL
    ),
    "argmax without back-off": Case(
        drafters.greedy(drafters.without_backoff(TRIGRAM)), policies=ALL
    ),
    "a model in parallel": Case(
        drafters.parallel(MODEL, mask_token=2),
        drafters.parallel(LARGE_MODEL, mask_token=5),
        slow=False,
        policies=ALL,
        usual_policies=("adaptive",),
    ),
    "uniform": Case(uniform(), uniform(), policies=ALL),
    "prompt_lookup": Case(
        drafters.prompt_lookup(2),
        drafters.prompt_lookup(2),
        policies=ALL,
        usual_policies=("adaptive",),
    ),
    "forced": Case(drafters.forced(), exhaustive=True),  # nothing is; tests/structured has patterns
    "retrieval": Case(
        drafters.retrieval(STORE, longest=3, shortest=2),
        drafters.retrieval(LARGE_STORE),
        policies=ALL,
    ),
    "online_ngram": Case(
        drafters.online_ngram(3, top=2, slots=7),
        drafters.online_ngram(3, top=2, slots=7),
        policies=ALL,
    ),
    "fallback": Case(
        drafters.fallback(drafters.prompt_lookup(2, 2), drafters.without_backoff(TRIGRAM), MODEL),
        drafters.fallback(
            drafters.prompt_lookup(3, 3), drafters.without_backoff(LARGE_TABLES), LARGE_MODEL
        ),
        policies=ALL,
        usual_policies=("oracle",),
    ),
    "a tree": Case(
        drafters.tree(MODEL, (2, 1)),
        drafters.tree(LARGE_MODEL, (2, 2, 1)),
        brief=True,
        policies=("constant", "heuristic", "adaptive", "oracle"),
    ),
    "a tree of n-grams": Case(
        drafters.tree(TABLES, (1, 2), draw="mixed"), exhaustive=True, brief=True
    ),
    "a ragged tree": Case(
        drafters.tree(MODEL, shape=[(0,), (1,), (1, 0)], draw="without_replacement"),
        exhaustive=True,
        brief=True,
        permuted=True,
    ),
    "sequences": Case(
        drafters.sequences(MODEL, k=2, length=2),
        drafters.sequences(LARGE_MODEL, k=3, length=2),
        brief=True,
        permuted=True,
        usual_rules=("coupled", "traversal", "k_seq"),
    ),
    "a tree of two models": Case(
        drafters.tree([MODEL, SMALL], (2, 1)),
        drafters.tree([LARGE_MODEL, LARGE_TABLES], (2, 2, 1), draw="mixed"),
        brief=True,
        permuted=True,
        policies=("adaptive",),
        usual_rules=("traversal",),
    ),
    "sequences of two models": Case(
        drafters.sequences([MODEL, TABLES], k=2, length=2),
        drafters.sequences([LARGE_MODEL, LARGE_TABLES], k=3, length=2),
        exhaustive=True,  # but for k_seq
        brief=True,
        usual_rules=("k_seq",),
    ),
    "a dynamic tree": Case(
        drafters.dynamic_tree(MODEL, nodes=4, depth=3, width=2),
        drafters.dynamic_tree(LARGE_MODEL, nodes=6, depth=3, width=3),
        brief=True,
        permuted=True,
        policies=("adaptive",),
        usual_policies=("adaptive",),
        usual_rules=("coupled", "traversal", "exact_match"),
    ),
    "a dynamic tree of n-grams": Case(
        drafters.dynamic_tree(TABLES, nodes=3, depth=2, width=2),
        exhaustive=True,
        brief=True,
        permuted=True,
    ),
    "token_recycling": Case(
        drafters.token_recycling([(0,), (1,), (0, 0)]),
        drafters.token_recycling(),
        brief=True,
        permuted=True,
        policies=("constant",),
        usual_rules=("coupled", "typical"),
    ),
    "prompt_lookup, a tree": Case(
        drafters.prompt_lookup(2, candidates=2, length=2),
        drafters.prompt_lookup(candidates=2, length=4),
        brief=True,
        permuted=True,
        usual_rules=("traversal",),
    ),
    "retrieval, a tree": Case(
        drafters.retrieval(STORE, longest=2, shortest=1, candidates=2, length=2),
        exhaustive=True,
        brief=True,
        permuted=True,
    ),
    "suffix": Case(drafters.suffix(3, places=4), drafters.suffix(), permuted=True, policies=ALL),
    "suffix, a tree": Case(
        drafters.suffix(3, places=4, candidates=2, length=2), brief=True, permuted=True
    ),
    "a cascade": Case(
        drafters.cascade(MODEL, SMALL, gamma=2),
        drafters.cascade(
            LARGE_MODEL, drafters.cascade(LARGE_TABLES, drafters.prompt_lookup(), gamma=1), gamma=2
        ),
        exhaustive=True,
        brief=True,
        permuted=True,
        policies=("confidence", "adaptive"),
    ),
    "a cascade of three levels": Case(
        drafters.cascade(MODEL, drafters.cascade(SMALL, drafters.prompt_lookup(2), gamma=1)),
        brief=True,
        permuted=True,
    ),
    "a cascade, lower levels warmer": Case(
        drafters.cascade(MODEL, SMALL, gamma=1, inner_temperature=2.0),
        exhaustive=True,
        brief=True,
        permuted=True,
    ),
    "a cascade with a tree inside": Case(
        drafters.cascade(MODEL, drafters.tree(SMALL, (2,))),
        exhaustive=True,
        brief=True,
        permuted=True,
    ),
    "a cascade by the block rule": Case(
        drafters.cascade(MODEL, SMALL, gamma=2, rule=rules.block()),
        exhaustive=True,
        brief=True,
        permuted=True,
    ),
    "a lenient cascade": Case(
        drafters.cascade(MODEL, SMALL, gamma=1, rule=rules.lenient(0.5)),
        exhaustive=True,
        brief=True,
        permuted=True,
    ),
    "a horizontal cascade": Case(
        drafters.horizontal_cascade(MODEL, SMALL, tokens=1),
        drafters.horizontal_cascade(LARGE_MODEL, drafters.greedy(LARGE_TABLES), tokens=2),
        brief=True,
        permuted=True,
        policies=("confidence", "adaptive"),
    ),
    "a look-up, then a model": Case(
        drafters.horizontal_cascade(drafters.prompt_lookup(2), TABLES, tokens=1),
        exhaustive=True,
        brief=True,
        permuted=True,
    ),
    "jacobi": Case(drafters.jacobi(), drafters.jacobi(), permuted=True, policies=ALL),
    "lookahead": Case(
        drafters.lookahead(window=2, ngram=2, candidates=1, pool=2),
        drafters.lookahead(window=3, ngram=3, candidates=2, pool=16),
        brief=True,
        permuted=True,
        policies=("constant",),
        usual_rules=("traversal",),
    ),
    "lookahead with two levels": Case(
        drafters.lookahead(window=2, ngram=3, candidates=1, pool=2),
        slow=False,
        brief=True,
        permuted=True,
    ),
}
TREES = [name for name, case in CASES.items() if case.drafter.functions.tree is not None]
