"""The options of a generation: one table, from which calls, jobs, commands and pages are made.

`Options` declares the options of `jaxspec.generate` apart from sampling, and
`sampling.SamplingOptions` those of the distribution. `OPTIONS` is the table of both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np

from jaxspec import core, rules
from jaxspec.core.checks import (
    at_least,
    check_model,
    check_type,
    in_range,
    integer,
    integers,
    key_of,
)
from jaxspec.core.options import Flag, Option, Sizes, declared
from jaxspec.decode import option_names
from jaxspec.decode.shared_prefix import SharedPrefix
from jaxspec.sampling import SamplingOptions
from jaxspec.sampling import params as sampling_params
from jaxspec.sampling.params import per_row

F = TypeVar("F", bound=Callable[..., Any])
NEW_TOKENS = 128  # most new tokens of a row, by default
MOST = 2**29  # new tokens: what a row holds is counted in int32


def _drafter(value: Any, name: str, sizes: Sizes) -> core.Model | core.BoundDrafter | None:
    if value is None:
        return None
    if isinstance(value, core.Model):
        check_model(value, name)
        return value
    if isinstance(value, core.Drafter):
        return core.BoundDrafter(value)
    expected = "a jaxspec.Model, one of jaxspec.drafters, or None"
    check_type(value, core.BoundDrafter, name, expected, "jaxspec.drafters")
    return value


def _gamma(value: Any, name: str, sizes: Sizes) -> int:
    values = {name: integer(value, name, "an integer")}
    at_least(0, **values)
    in_range(0, 2**31 - 1, below=False, **values)
    return values[name]


def _rule(value: Any, name: str, sizes: Sizes) -> core.Rule:
    if value is None:
        return rules.rejection()
    expected = "a rule, such as jaxspec.rules.rejection()"
    check_type(value, core.Rule, name, expected, "jaxspec.rules")
    return value


def _policy(value: Any, name: str, sizes: Sizes) -> core.BoundPolicy | None:
    if isinstance(value, core.Policy):
        return core.BoundPolicy(value)
    expected = "one of jaxspec.policies, or None"
    check_type(value, core.BoundPolicy | None, name, expected, "jaxspec.policies")
    return value


def _max_new_tokens(value: Any, name: str, sizes: Sizes) -> np.ndarray | None:
    """Reads the limit of each row [batch]; None fits it to the models."""
    if value is None:
        return None
    limit = per_row(value, sizes.batch, name, np.int32)
    if limit.min() < 1 or limit.max() >= MOST:
        raise ValueError(f"{name} is {value!r}: expected at least 1, and fewer than {MOST}")
    return limit


def _key(value: Any, name: str, sizes: Sizes) -> Any:
    return None if value is None else key_of(value)


def _num_samples(value: Any, name: str, sizes: Sizes) -> int:
    return integers(1, **{name: value})[0]


def _log_probs(value: Any, name: str, sizes: Sizes) -> bool:
    if not isinstance(value, bool):
        raise TypeError(
            f"{name} is {value!r}: expected True or False; top_log_probs is the number of tokens"
        )
    return value


def _top_log_probs(value: Any, name: str, sizes: Sizes) -> int | None:
    if value is None:
        return None
    top = integer(value, name, f"an integer from 0 to the target's {sizes.vocab} token ids")
    in_range(0, sizes.vocab, below=False, **{name: top})
    return top


def _trace_numbers(value: Any, name: str, sizes: Sizes) -> bool:
    check_type(value, bool, name, "True or False")
    return value


class Options(NamedTuple):
    """The options of a generation, as `Prepared` keeps them.

    The fields are `jaxspec.generate`'s arguments of these names, which describes them; `sampling`
    has the `SamplingOptions` that are given. The annotations declare the options for `OPTIONS`.
    """

    drafter: Annotated[
        core.Model | core.BoundDrafter | None,
        Option(
            "A smaller model with the same tokenizer, or one of the drafters.",
            _drafter,
            group="Drafting",
            page="choosing.md#which-drafter",
        ),
    ] = None
    gamma: Annotated[
        int,
        Option(
            "Draft tokens per round, the most of them with a policy.",
            _gamma,
            group="Drafting",
            flag=Flag(int, "N", "-g"),
        ),
    ] = 5
    rule: Annotated[
        core.Rule,
        Option(
            "Which draft tokens are accepted.",
            _rule,
            group="Drafting",
            page="choosing.md#which-rule",
        ),
    ] = rules.rejection()
    policy: Annotated[
        core.BoundPolicy | None,
        Option(
            "How many tokens to draft, round by round.",
            _policy,
            group="Drafting",
            page="policies.md",
        ),
    ] = None
    max_new_tokens: Annotated[
        Any,
        Option(
            "Most new tokens of each text.",
            _max_new_tokens,
            per="prompt",
            ndim=0,
            flag=Flag(int, "N", "-n"),
        ),
    ] = None
    key: Annotated[
        Any,
        Option(
            "A `jax.random.key`; required unless the temperature is 0.",
            _key,
            ndim=0,
            advice=option_names.SEED_FIELD,
        ),
    ] = None
    eos_ids: Annotated[
        Any,
        Option("Tokens that end a text, by id or name; by default the model's own."),
    ] = None
    num_samples: Annotated[
        int,
        Option(
            "Texts of each prompt; several need a temperature.",
            _num_samples,
            per="prompt",
            group="Output",
            flag=Flag(int, "N", least=1),
        ),
    ] = 1
    log_probs: Annotated[
        bool,
        Option(
            "Report the log probability of each token.",
            _log_probs,
            group="Output",
            flag=Flag(bool),
            page="#log-probabilities",
        ),
    ] = False
    top_log_probs: Annotated[
        int | None,
        Option(
            "Also report the N most probable tokens at each place.",
            _top_log_probs,
            group="Output",
            flag=Flag(int, "N", least=0),
            page="#log-probabilities",
        ),
    ] = None
    trace_numbers: Annotated[
        bool,
        Option(
            "Keep the numbers of each draft token in the trace.",
            _trace_numbers,
            group="Output",
            page="measuring.md#with-numbers",
        ),
    ] = False
    prefix: Annotated[
        SharedPrefix | None,
        Option(
            "What all prompts begin with, read once.",
            group="Prompts",
            flag=Flag(str, "TEXT|FILE"),
            page="jobs.md#what-all-prompts-begin-with",
        ),
    ] = None
    sampling: SamplingOptions = SamplingOptions()

    @property
    def reported(self) -> int | None:
        """Counts the most probable tokens to report beside each; None: no log probabilities.

        >>> Options().reported, Options(log_probs=True).reported, Options(top_log_probs=3).reported
        (None, 0, 3)
        """
        if self.top_log_probs is None and self.log_probs:
            return 0
        return self.top_log_probs

    def keywords(self) -> dict[str, Any]:
        """Returns the options as keywords of `jaxspec.prepare`."""
        named = self._asdict()
        del named["sampling"]
        return named | self.sampling

    def read(self, sizes: Sizes) -> Options:
        """Checks and converts every option but those of sampling; see `Option.read`."""
        values = {
            name: OPTIONS[name].read(value, name, sizes)
            for name, value in self._asdict().items()
            if name in OPTIONS
        }
        return self._replace(**values)


OPTIONS: dict[str, Option] = {
    **declared(Options),
    "stop": Option(
        "Strings that end a text, cut from it.",
        per="prompt",
        flag=Flag(str, "TEXT"),
        name="stop",
        default=(),
    ),
    "chat_template_kwargs": Option(
        "Values for the template of conversations.",
        per="prompt",
        group="Prompts",
        page="chat.md",
        name="chat_template_kwargs",
    ),
    **sampling_params.DECLARED,
}
"""All options of `jaxspec.generate` by their names."""


def check_names(options: Iterable[str]) -> None:
    """Raises TypeError for a keyword that is not an option, with advice for other libraries'
    names.
    """
    option_names.check_names(options, [*OPTIONS])


def shown(names: Iterable[str]) -> Callable[[F], F]:
    """Shows a function's `**options` in `help` and in completion, by their names and defaults."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        explicit = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=OPTIONS[name].default,
            )
            for name in names
        ]
        shown_signature = signature.replace(parameters=[*explicit, *keywords])
        function.__signature__ = shown_signature  # type: ignore[attr-defined]
        return function

    return decorate


def gathered(options: Mapping[str, Any]) -> Options:
    """Sorts keywords of `jaxspec.prepare` into options and sampling options."""
    named = {name: value for name, value in options.items() if name in Options._fields}
    sampling: Any = {
        name: value for name, value in options.items() if name in sampling_params.DECLARED
    }
    return Options(**named, sampling=sampling)


def check_shared(options: Mapping[str, Any], advice: str) -> None:
    """Raises ValueError if an option has a value for each of several rows; `advice` ends the
    message.
    """
    for name, value in options.items():
        dimensions = OPTIONS[name].ndim if name in OPTIONS else None
        if value is None or dimensions is None:
            continue
        if name == "key":  # jax.random.PRNGKey makes an array
            value = key_of(value)
        if np.ndim(value) > dimensions:
            raise ValueError(f"{name} has a value for each of several rows: {advice}")
