"""Rules side by side: what is reported agrees with replay and with decoding; costs are only there, never judged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import accept
from jaxspec.analysis import replay, rules
from jaxspec.base import Prompt
from jaxspec.testing import table_model, table_model_from

TARGET = table_model(jax.random.key(1), 6, sharpness=1.5)
DRAFT = table_model_from(0.6 * TARGET.params + 0.4 * table_model(jax.random.key(2), 6).params)
PROMPT = Prompt(jax.random.randint(jax.random.key(3), (20, 3), 0, 6), jnp.full(20, 3))
RULES = [accept.rejection(), accept.lenient(0.5)]
OPTIONS = dict(key=jax.random.key(4), max_new_tokens=12)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_worth(temperature, tmp_path):
    asked = dict(gamma=3, temperature=temperature, batch=20, several=(1, 3))
    exact, inexact, one, three = rules.worth(TARGET, DRAFT, PROMPT, RULES, **asked, **OPTIONS)
    store = replay.record(tmp_path / "store", TARGET, DRAFT, PROMPT, temperature=temperature, **OPTIONS)
    found = replay.evaluate(store, RULES[0], gamma=3)
    assert exact["alpha"]["value"] == pytest.approx(found.alpha.value)
    assert exact["tokens_per_round"]["low"] == pytest.approx(found.tokens_per_round.interval[0])
    asked = dict(drafter=DRAFT, gamma=3, accept=RULES[1], temperature=temperature)
    stats = jaxspec.generate(TARGET, PROMPT, **asked, **OPTIONS).stats
    assert inexact["tokens_per_round"]["value"] == pytest.approx((stats.emitted - 1).sum() / stats.rounds.sum())
    assert (exact["exact"], inexact["exact"]) == (True, False)
    assert (one["rule"], three["rule"]) == ("iterated, 1 sample", "iterated, 3 samples")
    assert one["tokens_per_round"] is three["tokens_per_round"] is None and three["exact"]
    kept = replay.alpha_of_several(store, 3)
    assert [one["alpha"]["value"], three["alpha"]["value"]] == pytest.approx([kept[0].value, kept[2].value])
    assert abs(one["alpha"]["value"] - exact["alpha"]["value"]) < 4 * exact["alpha"]["stderr"] + 1e-6
    if temperature == 0:
        assert inexact["alpha"] is None
    else:
        assert inexact["alpha"]["value"] > exact["alpha"]["value"]


def test_costs():
    taken = rules.costs(RULES, vocab=11, batch=2, gamma=3, repeats=2, alike=True, several=(1, 4))
    assert list(taken) == ["laws", "rejection", "lenient(0.5)", "iterated, 1 sample", "iterated, 4 samples"]
    assert all(np.shape(seconds) == (2,) and (seconds > 0).all() for seconds in taken.values())
