"""Cascades: what they draft is what the drafting model drafts alone, whatever drafts for it; bad
input.
"""

import typing

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import Model, drafters, policies, rules
from jaxspec.core import BoundDrafter, Caches, Draft, token_rows
from jaxspec.drafters.cascade import CascadeFunctions
from jaxspec.nets import decoder
from jaxspec.testing import table_model
from tests.marks import marked
from tests.small import tiny_gpt

TARGET, LARGE, SMALL = (table_model(jax.random.key(seed), 6, sharpness=2.0) for seed in (1, 2, 3))
# Tables that agree now and then: the target's, with noise.
LARGE, SMALL = (
    model._replace(params=TARGET.params + 0.6 * model.params) for model in (LARGE, SMALL)
)
FORGETS = BoundDrafter(drafters.prompt_lookup().functions._replace(rollback=None))
ROWS = token_rows.pad([[1, 2, 3, 1, 2, 3], [4], [5, 0, 5]], 8)
OPTIONS = dict(gamma=4, max_new_tokens=np.array([17, 9, 24]))
SHAPE = tiny_gpt(6, layers=2)
NET = Model(decoder.language_model(SHAPE), decoder.init(SHAPE, jax.random.key(0)), config=SHAPE)
TAPPED = jaxspec.with_taps(NET, [0])
INNER = {
    "three levels": (
        LARGE,
        drafters.cascade(SMALL, drafters.prompt_lookup(), gamma=2),
        {"gamma": 2},
    ),
    "a tree": (LARGE, drafters.tree(SMALL, (2, 1)), {}),
    "its own layers": (NET, drafters.early_exit(NET, layers=1), {}),
    "its own layers, with taps": (NET, drafters.early_exit(TAPPED, layers=1), {}),
}


def _counts(out):
    return [
        np.asarray(getattr(out.stats, name)).tolist() for name in ("rounds", "drafted", "accepted")
    ]


@pytest.mark.quick
@pytest.mark.parametrize("name", marked(INNER, slow={*INNER} - {"its own layers, with taps"}))
def test_greedy_rounds_are_those_of_the_drafting_model_alone(name):
    """So its cache is right after every number of accepted tokens, of inner drafts and of the
    draft.
    """
    draft, inner, options = INNER[name]
    alone = jaxspec.generate(TARGET, ROWS, drafter=draft, **OPTIONS)
    out = jaxspec.generate(
        TARGET, ROWS, drafter=drafters.cascade(draft, inner, **options), **OPTIONS
    )
    np.testing.assert_array_equal(
        out.tokens, jaxspec.generate(TARGET, ROWS, max_new_tokens=OPTIONS["max_new_tokens"]).tokens
    )
    assert _counts(out) == _counts(alone)
    assert name == "its own layers" or sum(_counts(out)[2]) > 0


@pytest.mark.slow
def test_a_policy_ends_drafts_as_those_of_the_drafting_model_alone():
    policy = policies.confidence(0.6)
    alone = jaxspec.generate(TARGET, ROWS, drafter=LARGE, policy=policy, **OPTIONS)
    for drafter in (
        drafters.cascade(LARGE, SMALL),
        drafters.horizontal_cascade(LARGE, LARGE, tokens=2),
    ):
        assert _counts(
            jaxspec.generate(TARGET, ROWS, drafter=drafter, policy=policy, **OPTIONS)
        ) == _counts(alone)


@pytest.mark.slow
def test_horizontal_drafts_are_one_after_the_other():
    alone = jaxspec.generate(TARGET, ROWS, drafter=LARGE, **OPTIONS)
    split = drafters.horizontal_cascade(
        LARGE, drafters.horizontal_cascade(LARGE, LARGE, tokens=1), tokens=2
    )
    assert _counts(jaxspec.generate(TARGET, ROWS, drafter=split, **OPTIONS)) == _counts(alone)


@pytest.mark.quick
def test_a_model_that_drafts_first_reads_all_that_its_rounds_commit():
    """A round commits more tokens than it has drafted; a decoder's drafts depend on all of them."""
    draft = NET._replace(params=decoder.init(SHAPE, jax.random.key(5)))
    options = dict(prompts=ROWS, gamma=5, max_new_tokens=20, eos_ids=())
    alone = jaxspec.generate(draft, drafter=draft, **options)
    split = jaxspec.generate(
        draft, drafter=drafters.horizontal_cascade(draft, draft, tokens=1), **options
    )
    assert _counts(split) == _counts(alone)


def test_inner_rounds_are_told_which_rows_have_ended():
    """So `suffix(share=True)` has the same rows to search inside of a cascade as by itself."""
    inner, told = drafters.prompt_lookup(), []

    def propose(weights, caches, context):
        jax.debug.callback(lambda finished: told.append(finished.tolist()), context.finished)
        return inner.functions.propose(weights, caches, context)

    spy = BoundDrafter(inner.functions._replace(propose=propose))
    jaxspec.generate(TARGET, ROWS, drafter=drafters.cascade(LARGE, spy), **OPTIONS)
    jax.effects_barrier()
    assert [False] * 3 in told and [False, True, False] in told


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: drafters.cascade(LARGE, table_model(jax.random.key(0), 7)),
            "share one vocabulary: table-6 has 6 .* 7",
        ),
        (
            lambda: drafters.cascade(LARGE, table_model(jax.random.key(0), 6, encoder=True)),
            "not both decoder-only",
        ),
        (
            lambda: drafters.cascade(LARGE, drafters.early_exit(NET, 1)),
            "reads the hidden states of",
        ),
        (
            lambda: drafters.cascade(
                LARGE, BoundDrafter(drafters.prompt_lookup().functions._replace(rollback=None))
            ),
            "take back",
        ),
        (
            lambda: drafters.cascade(LARGE, drafters.tree(SMALL, (2,)), rule=rules.block()),
            "takes chains only",
        ),
        (lambda: drafters.cascade(LARGE, SMALL, gamma=0), "gamma is 0"),
        (lambda: drafters.cascade(LARGE, SMALL, inner_temperature=0), "drafters.greedy"),
        (
            lambda: drafters.cascade(LARGE, SMALL, inner_temperature="a"),
            "inner_temperature is 'a': expected a finite",
        ),
        (
            lambda: drafters.cascade(LARGE, SMALL, inner_temperature=float("nan")),
            "inner_temperature is nan",
        ),
        (
            lambda: drafters.horizontal_cascade(LARGE, drafters.tree(SMALL, (2,))),
            "then drafts trees",
        ),
        (
            lambda: drafters.horizontal_cascade(LARGE, drafters.early_exit(NET, 1)),
            "has not read the first",
        ),
        (lambda: drafters.horizontal_cascade(LARGE, SMALL, tokens=0), "tokens is 0"),
    ],
)
def test_what_is_no_cascade_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: drafters.cascade(LARGE, None),
            "inner is None: expected a jaxspec.Model, or one of jaxspec.drafters",
        ),
        (lambda: drafters.cascade(LARGE, "x"), "inner is 'x': expected a jaxspec.Model"),
        (
            lambda: drafters.cascade(LARGE, drafters.suffix),
            "inner is suffix, which was not called: expected",
        ),
        (
            lambda: drafters.cascade(LARGE, policies.constant(1)),
            "inner is of type BoundPolicy: expected a jaxspec.Model",
        ),
        (
            lambda: drafters.cascade(LARGE, SMALL, rule="block"),
            "rule is 'block': expected a rule, such as jaxspec.rules",
        ),
        (
            lambda: drafters.cascade(LARGE, SMALL, rule=rules.block),
            "rule is block, which was not called: expected a rule",
        ),
        (
            lambda: drafters.horizontal_cascade(None, LARGE),
            "first is None: expected a jaxspec.Model",
        ),
        (lambda: drafters.horizontal_cascade(LARGE, 3), "then is 3: expected a jaxspec.Model"),
        (lambda: drafters.fallback(None), "a drafter is None: expected a jaxspec.Model"),
    ],
)
def test_what_is_no_drafter_or_rule_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_levels_are_compared_with_the_target():
    other = table_model(jax.random.key(0), 7)
    with pytest.raises(ValueError, match="has 7 token ids"):
        jaxspec.generate(
            other, token_rows.pad([[1]]), drafter=drafters.cascade(LARGE, SMALL), max_new_tokens=2
        )


def test_hints_of_a_proposal_can_be_read():
    assert typing.get_type_hints(CascadeFunctions.propose)["return"] == tuple[Draft, Caches]
