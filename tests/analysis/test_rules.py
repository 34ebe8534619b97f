"""Rules side by side: what is reported agrees with replay and with decoding; costs are only there, never judged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import accept
from jaxspec.accept import catalogue
from jaxspec.analysis.measure import replay, rules
from jaxspec.base import Prompt
from jaxspec.decode.request import prepare
from jaxspec.testing import table_model, table_model_from

TARGET = table_model(jax.random.key(1), 6, sharpness=1.5)
DRAFT = table_model_from(0.6 * TARGET.params + 0.4 * table_model(jax.random.key(2), 6).params)
PROMPT = Prompt(jax.random.randint(jax.random.key(3), (20, 3), 0, 6), jnp.full(20, 3))
RULES = [accept.rejection(), accept.lenient(0.5)]
OPTIONS = dict(key=jax.random.key(4), max_new_tokens=12)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_acceptance(temperature, tmp_path):
    job = prepare(TARGET, PROMPT, drafter=DRAFT, gamma=3, temperature=temperature, **OPTIONS)
    exact, inexact, one, three = rules.acceptance_of(job, RULES, candidates=(1, 3))
    trace = replay.collect(tmp_path / "trace", job)
    found = replay.evaluate(trace, RULES[0], gamma=3)
    assert exact["alpha"]["value"] == pytest.approx(found.alpha.value)
    assert exact["tokens_per_round"]["low"] == pytest.approx(found.tokens_per_round.interval[0])
    asked = dict(drafter=DRAFT, gamma=3, accept=RULES[1], temperature=temperature)
    stats = jaxspec.generate(TARGET, PROMPT, **asked, **OPTIONS).stats
    assert inexact["tokens_per_round"]["value"] == pytest.approx((stats.emitted - 1).sum() / stats.rounds.sum())
    assert (exact["exact"], inexact["exact"]) == (True, False)
    assert (one["rule"], three["rule"]) == ("rejection, 1 candidate", "rejection, 3 candidates")
    assert one["tokens_per_round"] is three["tokens_per_round"] is None and three["exact"]
    alphas = replay.alpha_of_candidates(trace, 3)
    assert [one["alpha"]["value"], three["alpha"]["value"]] == pytest.approx([alphas[0].value, alphas[2].value])
    assert abs(one["alpha"]["value"] - exact["alpha"]["value"]) < 4 * exact["alpha"]["stderr"] + 1e-6
    if temperature == 0:
        assert inexact["alpha"] is None
    else:
        assert inexact["alpha"]["value"] > exact["alpha"]["value"]


def test_costs():
    sizes, every = rules.Sizes(vocab=11, batch=2, gamma=3), [entry.rule for entry in catalogue.RULES.values()]
    taken = rules.costs(every, sizes, repeats=2, alike=True, candidates=(1, 4))
    names = [rule.name for rule in every]
    assert list(taken) == ["distributions", *names, "rejection, 1 candidate", "rejection, 4 candidates"]
    assert all(np.shape(seconds) == (2,) and (seconds > 0).all() for seconds in taken.values())
