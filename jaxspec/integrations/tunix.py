"""Rollouts of Tunix's reinforcement learning by speculative decoding.

The samples' distribution is the policy's, whatever drafts. It needs google-tunix.
"""

from __future__ import annotations

import collections
import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxspec import core, decode, drafters
from jaxspec.core import token_rows
from jaxspec.nets.adapters import from_tunix
from jaxspec.training.online_distillation import Online


class JaxspecRollout:
    """Samples a policy's answers with a drafter: a rollout engine for `tunix.rl.rl_cluster`.

    Give it to Tunix with its options filled in:

        ClusterConfig(rollout_engine=functools.partial(JaxspecRollout, drafter=draft, gamma=5), ...)

    Three drafters fit a policy that moves. A small model that stays as it is costs nothing to keep,
    and drafts a little worse as the policy leaves it. One that learns
    (`jaxspec.training.online`) follows the policy. `earlier_tokens` without a drafter copies from the
    last answers: the next epoch asks the same prompts again.

    Args:
        rollout_actor: the policy, a network of Tunix's zoo (`adapters.from_tunix`).
        tokenizer: one with Tunix's methods `encode`, `decode`, `bos_id`, `eos_id` and `pad_id`.
        mesh: not read: the policy's parameters say where they lie.
        rollout_config: not read here; each `generate` is given one.
        drafter: a Model, a drafter of `jaxspec.drafters`, or the learner that
            `jaxspec.training.online` returns; None: `drafters.suffix` over the row and, with
            `earlier_tokens`, over earlier answers.
        gamma: draft tokens per round.
        rule, policy: the ones that `jaxspec.generate` takes. A rule that is not exact changes the distribution.
        earlier_tokens: how many tokens of earlier answers to keep for `suffix`; 0 keeps none.

    Attributes:
        stats: the statistics of the last call of `generate`; `stats.tokens_per_round` has
            the tokens a round of each row.

    Raises:
        ValueError: `earlier_tokens` is given with a drafter, which would not read them.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: Any = None,
        *,
        drafter: Any = None,
        gamma: int = 5,
        rule: core.Rule | None = None,
        policy: core.BoundPolicy | core.Policy | None = None,
        earlier_tokens: int = 0,
    ):
        if earlier_tokens and drafter is not None:
            raise ValueError(
                f"earlier_tokens is {earlier_tokens} and a drafter is given: earlier answers are "
                "read by suffix, the drafter without one. Leave one of the two out"
            )
        self._module = rollout_actor
        self._tokenizer = tokenizer
        self._target = from_tunix(rollout_actor)
        self._options: dict[str, Any] = {"gamma": gamma, "rule": rule, "policy": policy}
        self._drafter = drafter
        self._learner = drafter if isinstance(drafter, Online) else None
        self._learnt: Any = None if self._learner is None else self._learner.init()
        self._earlier: collections.deque[list[int]] = collections.deque()
        self._earlier_tokens = earlier_tokens
        self._calls = itertools.count()
        self.stats: core.Stats | None = None

    def generate(self, prompts: list[str], rollout_config: Any, **_: Any) -> Any:
        """Samples an answer to each prompt: a `RolloutOutput` by a `RolloutConfig`.

        The log probabilities are those of the distribution that tokens were drawn from: at
        temperature 1 without truncation, the trainer's own. At temperature 0 they are the raw ones.
        """
        from tunix.rl.rollout import base_rollout

        config = rollout_config
        rows = [self._encoded(prompt, config.max_prompt_length) for prompt in prompts]
        prompt = token_rows.pad(rows)
        out = decode.generate(
            self._target,
            prompt,
            drafter=self._current(),
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k if config.top_k is not None and config.top_k > 0 else None,
            max_new_tokens=config.max_tokens_to_generate,
            eos_ids=list(config.eos_tokens or [self.eos_id()]),
            key=self._key(config.seed),
            log_probs=config.return_logprobs,
            **self._options,
        )
        self.stats = out.stats
        if self._learner is not None:
            self._learnt = self._learner.update(self._learnt, self._target, prompt, out)[0]
        lengths = np.asarray(out.lengths)
        answers = _cut(out.tokens, lengths)
        self._keep(rows, answers)
        log_probs = None
        if out.log_probs is not None:
            is_greedy = config.temperature == 0
            reported = out.log_probs.raw if is_greedy else out.log_probs.sampled
            log_probs = _cut(reported, lengths)
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(answer.tolist()) for answer in answers],
            logits=[],
            tokens=answers,
            left_padded_prompt_tokens=self._left_padded(rows, config.max_prompt_length),
            logprobs=log_probs,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Computes log probabilities [row, token] of answers by Tunix's own pass."""
        from tunix.rl import common

        graph, params = nnx.split(self._module)
        return common.compute_per_token_logps(
            graph,
            params,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            stop_gradient=True,
            return_logits=False,
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Takes the trained parameters; nothing is compiled again.

        Args:
            params: the parameters, as `nnx.update` takes them: those that are absent stay.
            filter_types: not read here: `params` are already the filtered ones.
        """
        nnx.update(self._module, params)
        # A trainer of another precision would make other programs.
        policy = jax.tree.map(
            lambda new, old: new.astype(old.dtype),
            nnx.split(self._module)[1],
            self._target.params,
        )
        self._target = self._target._replace(params=policy)

    def pad_id(self) -> int:
        """Returns the tokenizer's id of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the tokenizer's id of the end of a text."""
        return self._tokenizer.eos_id()

    def model(self) -> nnx.Module:
        """Returns the policy."""
        return self._module

    def _encoded(self, prompt: str, longest: int) -> list[int]:
        """Encodes a prompt as Tunix's Sampler does, and cuts its beginning if it is too long."""
        ids = list(self._tokenizer.encode(prompt))
        begin = self._tokenizer.bos_id()
        if begin and ids[:1] != [begin]:
            ids = [begin, *ids]
        return ids[-longest:]

    def _current(self) -> Any:
        if self._learner is not None:
            return self._learner.drafter(self._learnt)
        if self._drafter is not None:
            return self._drafter
        if self._earlier_tokens == 0:
            return drafters.suffix()
        return drafters.suffix(texts=list(self._earlier), room=2 * self._earlier_tokens)

    def _keep(self, rows: Sequence[list[int]], answers: Sequence[np.ndarray]) -> None:
        """Keeps texts for the next calls; the oldest go first."""
        if not self._earlier_tokens:
            return
        texts = zip(rows, answers, strict=True)
        self._earlier.extend([*row, *answer.tolist()] for row, answer in texts)
        while sum(map(len, self._earlier)) > self._earlier_tokens:
            self._earlier.popleft()

    def _key(self, seed: Any) -> jax.Array:
        """Makes the key of a call: the seed's, or else a new one for each call."""
        if seed is None:
            return jax.random.fold_in(jax.random.key(0), next(self._calls))
        if isinstance(seed, int):
            return jax.random.key(seed)
        return seed

    def _left_padded(self, rows: Sequence[list[int]], width: int) -> np.ndarray:
        padded = np.full((len(rows), width), self.pad_id(), np.int32)
        for row, line in zip(rows, padded, strict=True):
            line[width - len(row) :] = row
        return padded


def _register() -> None:
    """Makes the class one of Tunix's rollout engines, which `ClusterConfig` asks for.

    Tunix need not be installed to read this file, so the class cannot derive from its base.
    """
    if importlib.util.find_spec("tunix") is None:
        return
    from tunix.rl.rollout import base_rollout

    base_rollout.BaseRollout.register(JaxspecRollout)


_register()


def _cut(values: Any, lengths: np.ndarray) -> list[np.ndarray]:
    """Returns the values of each row up to its length."""
    return [row[:length] for row, length in zip(np.asarray(values), lengths.tolist(), strict=True)]
