"""Rollouts for Tunix: with stand-ins for its classes always, with Tunix itself where it is installed."""

import abc
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxspec.decode import loop
from jaxspec.nets import adapters
from jaxspec.training import online
from tests.marks import other_library
from tests.nets.test_end_index import Ids, StandIn, greedy, nnx_logits, tunix_module

PROMPTS = ["7 11 8 5 9 11", "30", "7 11 7 11"]
ROWS = [[2, *map(int, prompt.split())] for prompt in PROMPTS]
NEW = 12


@dataclasses.dataclass
class Config:
    """What the engine reads of Tunix's `RolloutConfig`."""

    max_tokens_to_generate: int = NEW
    temperature: float = 0.0
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 8
    eos_tokens: list[int] | None = None
    return_logprobs: bool = True


@dataclasses.dataclass
class Output:
    """Tunix's `RolloutOutput`."""

    text: list[str]
    logits: list[jax.Array]
    tokens: list[np.ndarray]
    left_padded_prompt_tokens: np.ndarray
    logprobs: list[np.ndarray] | None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type:
    """`JaxspecRollout`, of Tunix's base class or of a stand-in."""
    if not importlib.util.find_spec("tunix"):
        names = ("tunix", "tunix.rl", "tunix.rl.common", "tunix.rl.rollout")
        modules = {name: ModuleType(name) for name in (*names, "tunix.rl.rollout.base_rollout")}
        base = modules["tunix.rl.rollout.base_rollout"]
        base_class = type("BaseRollout", (abc.ABC,), {})
        vars(base).update(BaseRollout=base_class, RolloutOutput=Output)
        modules["tunix"].__spec__ = importlib.machinery.ModuleSpec("tunix", None)
        vars(modules["tunix.rl.rollout"]).update(base_rollout=base)
        vars(modules["tunix.rl"]).update(common=modules["tunix.rl.common"])
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "jaxspec.integrations.tunix", raising=False)
    engine = importlib.import_module("jaxspec.integrations.tunix").JaxspecRollout
    base = importlib.import_module("tunix.rl.rollout.base_rollout")
    assert issubclass(engine, base.BaseRollout)  # what `ClusterConfig` asks
    return engine


def own_texts(module: Any) -> list[list[int]]:
    """Greedy texts without a cache, up to the end token."""
    texts = [greedy(lambda row: nnx_logits(module, row), row, NEW) for row in ROWS]
    return [text[: text.index(1) + 1] if 1 in text else text for text in texts]


def texts_of(out: Any) -> list[list[int]]:
    return [row.tolist() for row in out.tokens]


@pytest.fixture(scope="module")
def module() -> StandIn:
    return StandIn(nnx.Rngs(0))


@pytest.mark.parametrize("kind", ["suffix", "earlier answers", "a model"])
def test_greedy_answers_are_the_policys(engine: type, module: StandIn, kind: str):
    options = {
        "suffix": {},
        "earlier answers": {"earlier_tokens": 100},
        "a model": {"drafter": adapters.from_tunix(StandIn(nnx.Rngs(1), layers=1))},
    }[kind]
    rollout = engine(module, Ids(), None, Config(), gamma=3, **options)
    own = own_texts(module)
    rounds = []
    for _ in range(2):
        out = rollout.generate(PROMPTS, Config())
        assert texts_of(out) == own
        assert out.text[0] == " ".join(map(str, own[0]))
        rounds.append(int(rollout.stats.rounds.sum()))
    if kind == "earlier answers":  # the second epoch copies from the first
        assert rounds[1] < rounds[0]
    assert out.left_padded_prompt_tokens[1].tolist() == [0] * 6 + ROWS[1]


@pytest.mark.slow
def test_a_drafter_that_learns_drafts_better_and_changes_no_answer(engine: type, module: StandIn):
    draft = adapters.from_tunix(StandIn(nnx.Rngs(1), layers=1))
    learner = online(draft, optimizer=optax.adam(0.02), max_prompt=8, max_new_tokens=NEW, steps=20)
    rollout = engine(module, Ids(), drafter=learner, gamma=3)
    own = own_texts(module)
    rounds = []
    for _ in range(5):
        assert texts_of(rollout.generate(PROMPTS, Config())) == own
        rounds.append(int(rollout.stats.rounds.sum()))
    assert rounds[-1] < rounds[0]


def test_log_probabilities_are_those_of_a_whole_pass(engine: type, module: StandIn):
    rollout = engine(module, Ids(), gamma=3)
    out = rollout.generate(PROMPTS, Config(temperature=1.0, seed=jax.random.key(3)))
    for prompt, answer, reported in zip(ROWS, out.tokens, out.logprobs, strict=True):
        row = [*prompt, *answer.tolist()]
        whole = jax.nn.log_softmax(nnx_logits(module, row)[0])[len(prompt) - 1 : -1]
        expected = whole[jnp.arange(len(answer)), answer]
        np.testing.assert_allclose(reported, expected, atol=1e-4)


def test_answers_differ_from_call_to_call_unless_a_seed_is_given(engine: type, module: StandIn):
    rollout = engine(module, Ids())
    config = Config(temperature=1.0)
    first, second = (texts_of(rollout.generate(PROMPTS, config)) for _ in range(2))
    assert first != second
    seeded = dataclasses.replace(config, seed=7)
    first, second = (texts_of(rollout.generate(PROMPTS, seeded)) for _ in range(2))
    assert first == second


def test_new_parameters_compile_nothing(engine: type):
    rollout = engine(StandIn(nnx.Rngs(0)), Ids(), gamma=3)
    rollout.generate(PROMPTS, Config())
    programs = loop.generation.num_programs()
    other = StandIn(nnx.Rngs(5))
    rollout.update_params(nnx.state(other, nnx.Param))
    out = rollout.generate(PROMPTS, Config())
    assert loop.generation.num_programs() == programs
    assert texts_of(out) == own_texts(other)


def test_a_long_prompt_loses_its_beginning(engine: type, module: StandIn):
    rollout = engine(module, Ids())
    out = rollout.generate([" ".join(map(str, range(3, 20)))], Config())
    assert out.left_padded_prompt_tokens.tolist() == [list(range(12, 20))]


def test_earlier_answers_and_a_drafter_are_refused(engine: type, module: StandIn):
    draft = adapters.from_tunix(module)
    with pytest.raises(ValueError, match="earlier_tokens is 9 and a drafter is given"):
        engine(module, Ids(), drafter=draft, earlier_tokens=9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_answers_and_log_probabilities_are_those_of_tunix(engine: type):
    vanilla = other_library("tunix", "tunix.rl.rollout.vanilla_rollout")
    from tunix.rl.rollout import base_rollout

    qwen = tunix_module("qwen3", "Qwen3")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        policy, draft, moved = qwen(0, 2), qwen(1, 1), qwen(7, 2)
        size = base_rollout.CacheConfig(cache_size=64, num_layers=2, num_kv_heads=2, head_dim=16)
        config = base_rollout.RolloutConfig(
            max_tokens_to_generate=NEW,
            temperature=0.0,
            top_p=None,
            max_prompt_length=8,
            return_logprobs=True,
        )
        ours = engine(policy, Ids(), drafter=adapters.from_tunix(draft), gamma=3)
        theirs = vanilla.VanillaRollout(policy, Ids(), size)

        def check_greedy() -> None:
            for a, b in zip(
                texts_of(ours.generate(PROMPTS, config)),
                theirs.generate(PROMPTS, config).tokens,
                strict=True,
            ):
                text = np.asarray(b).tolist()  # without the end token
                assert a in (text, [*text, 1])

        check_greedy()
        sampling = dataclasses.replace(config, temperature=1.0, seed=jax.random.key(0))
        out = ours.generate(PROMPTS, sampling)
        # Their pass takes every 0 for padding: answers with that token are left out.
        kept = [i for i, answer in enumerate(out.tokens) if 0 not in answer.tolist()]
        assert kept
        completions = np.zeros((len(PROMPTS), NEW), np.int32)
        for row, answer in zip(completions, out.tokens, strict=True):
            row[: len(answer)] = answer
        again = ours.get_per_token_logps(
            jnp.asarray(out.left_padded_prompt_tokens), jnp.asarray(completions)
        )
        for i in kept:
            reported = out.logprobs[i]
            np.testing.assert_allclose(reported, again[i][: len(reported)], atol=1e-5)
        parameters = nnx.state(moved, nnx.Param)
        ours.update_params(parameters)
        theirs.update_params(parameters)
        check_greedy()
