"""An acceptance rule: which draft tokens are accepted, and what follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from jaxtyping import Array, Float, Int

from jaxspec.core.distribution import Distribution
from jaxspec.core.draft import Draft, Verdict
from jaxspec.core.language_model import Keys

AcceptanceRatio = Callable[
    [Float[Array, "batch step vocab"], Float[Array, "batch step vocab"], Int[Array, "batch step"]],
    Float[Array, "batch step"],
]
"""(log_p, log_q, tokens) -> see `Rule.acceptance_ratio`."""


class Trials(NamedTuple):
    """The numbers by which a rule judged a round's draft tokens; NaN for tokens that it did not
    judge.

    Attributes:
        r: the uniform draw that the draft token's test compared.
        acceptance: the probability that this test is passed, before r is drawn: r below it passes.
        residual_mass: Z, the mass of the unnormalised residual that the next token is drawn from if
            this draft token is rejected; of `rules.rejection` the sum of max(p - q, 0).
    """

    r: Float[Array, "batch node"]
    acceptance: Float[Array, "batch node"]
    residual_mass: Float[Array, "batch node"]


TrialsOf = Callable[[Keys, Int[Array, " batch"], Draft, Distribution], Trials]
"""(keys, position, draft, target) -> see `Rule.trials`; the arguments are those of `Verify`."""


class Verify(Protocol):
    def __call__(
        self, keys: Keys, position: Int[Array, " batch"], draft: Draft, target: Distribution
    ) -> Verdict:
        """Judges a draft.

        Args:
            keys: the rows' keys.
            position: each row's length, where the draft begins.
            draft: N draft tokens of each row: tokens [batch, N], and log_probs [batch, I, vocab] or
                None. I are the entries of the drafter's distributions; in a chain I = N.
            target: its distributions at N + 1 positions, as log_probs [batch, N + 1, vocab] or
                tokens [batch, N + 1]: entry i is after fed token i (0: the last committed one).
        """
        ...


class Rule(NamedTuple):
    """An acceptance rule.

    Attributes:
        name: the rule's name, with its parameters.
        exact: whether the text has the target's distribution for every drafter; if not, the
            docstring of the rule's factory states the guarantee instead.
        trees: whether it judges trees (`Draft.parent`), or chains only.
        sources: whether it judges trees whose nodes' children were drawn from several distributions
            (`Draft.sources`), or from one distribution only.
        shares_noise: whether draft tokens drawn with plain sampling's own noise are accepted more
            often.
        acceptance_ratio: the probability that a text's token x is drafted and accepted, over p(x),
            for each x. Its products give how many draft tokens are accepted (`analysis.replay`). A
            rule that judges draft tokens jointly multiplies the ratios before it cuts them at 1.
            None where the ratio is not known.
        lenience: l of a rule that accepts each draft token x with probability min(1, p(x) / (l
            q(x))): 1 of `rejection`, less of `lenient`; None of rules that accept otherwise.
        trials: the numbers of the tests, computed again for a trace with numbers: noise is
            addressed, so they are those that `verify` compared. None of rules that draw no number
            for each draft token.
        needs_sampling: whether it says nothing at temperature 0, where draft tokens have no
            probabilities. Rows at temperature 0 are then refused, since another rule would judge
            them.

    >>> import jax.numpy as jnp
    >>> def nothing(keys, position, draft, target):  # plain greedy decoding, in its own terms
    ...     zero = jnp.zeros_like(draft.length)
    ...     return Verdict(zero, target.tokens[:, 0], zero)
    >>> rule = Rule(nothing, "nothing", exact=True)
    >>> draft = Draft(jnp.array([[4, 9]]), jnp.array([2]))
    >>> rule.verify(
    ...     None, None, draft, Distribution(tokens=jnp.array([[4, 5, 6]]))
    ... ).next_token.tolist()
    [4]
    """

    verify: Verify
    name: str
    exact: bool
    trees: bool = False
    sources: bool = False
    shares_noise: bool = False
    acceptance_ratio: AcceptanceRatio | None = None
    lenience: float | None = None
    trials: TrialsOf | None = None
    needs_sampling: bool = False
