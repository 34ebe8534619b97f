"""A `Setting` is a way to decode a `Task`, and a `BenchResult` has what was measured of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import nets, rules, sharding
from jaxspec.analysis.environment import Environment
from jaxspec.analysis.memory import MemoryUse
from jaxspec.analysis.statistics import Rate, Spread
from jaxspec.core import BoundDrafter, BoundPolicy, Drafter, Model, Prompt, Rule
from jaxspec.decode.request import Prepared
from jaxspec.weights import quantisation

PLANNED = "plan"  # in the place of a gamma: the one that `analysis.plan` chooses
ADAPTIVE = "adaptive"  # in the place of a policy: `policies.adaptive` with costs as measured
JAXSPEC = "jaxspec"  # the name of the backend that is used where a setting has none
NAMES = {"drafter": "name", "policy": "policy_name"}  # fields, and those that name their values


class Task(NamedTuple):
    """Prompts, and how much text is generated from each."""

    name: str  # the task's name, for tables
    prompts: Sequence[str] | Prompt  # strings, or rows of token ids
    new_tokens: int = 64  # most new tokens per prompt
    ends: bool = True  # whether end tokens end a text; if not, each has exactly `new_tokens`


class Backend(NamedTuple):
    """Another way to run settings than the compiled program, to be compared with it: another
    library, for example.
    """

    name: str  # for tables
    # (setting, its batches, a folder for files) -> a call for each batch, which decodes it and
    # waits for the result; then the new tokens of all rows, and the number of the target's passes,
    # with prefill's
    decode: Callable[
        [Setting, Sequence[Prepared], Path],
        tuple[Sequence[Callable[[], object]], list[list[int]], int],
    ]


class Setting(NamedTuple):
    """One way to decode a task: all that its text and its speed depend on, but for the machine."""

    task: Task  # the prompts, and how much text
    # a model, one of `jaxspec.drafters`, one of your own, or None for plain decoding
    drafter: Model | BoundDrafter | Drafter | None = None
    # draft tokens a round, or `PLANNED`; no effect on a drafter of trees, whose size is its own
    gamma: int | str = 3
    rule: Rule = rules.rejection()  # the acceptance rule
    # the draft-length policy; None drafts all gamma tokens, `ADAPTIVE` is `policies.adaptive` with
    # c and v as measured
    policy: BoundPolicy | str | None = None
    # sampling options of `generate`, as {"temperature": 1.0}; greedy if empty
    sampling: Mapping[str, Any] = {}
    batch: int = 1  # prompts at a time
    # A target other than `bench.run`'s: in another dtype, or on a mesh.
    target: Model | None = None
    backend: Backend | None = None  # runs it; None: the compiled program
    name: str = ""  # the drafter's, for tables; a model has one
    policy_name: str = ""  # the policy's

    @property
    def is_plain(self) -> bool:
        """True if nothing is drafted: no drafter, or chains of no tokens."""
        if isinstance(self.drafter, BoundDrafter):
            functions = self.drafter.functions
        else:
            functions = self.drafter
        return functions is None or (self.gamma == 0 and getattr(functions, "tree", None) is None)

    @property
    def drafter_name(self) -> str:
        """The name of the drafter, or of its model or factory; empty for plain decoding."""
        if self.is_plain:
            return ""
        return self.name or getattr(self.drafter, "name", "") or "unnamed"

    @property
    def policy_label(self) -> str:
        """The name of the policy, or of its factory; empty without one."""
        if self.policy is None or isinstance(self.policy, str):
            return self.policy_name or self.policy or ""
        return self.policy_name or self.policy.name or "unnamed"

    @property
    def temperature(self) -> float:
        """The highest of its texts; 0 is greedy."""
        return float(np.max(self.sampling.get("temperature", 0.0) or 0.0))

    backend_name = property(
        lambda self: self.backend.name if self.backend else JAXSPEC, doc="The backend's name."
    )

    def plain(self) -> Setting:
        """Returns plain decoding of the same task, by the same target and backend."""
        alike = {
            "sampling": self.sampling,
            "batch": self.batch,
            "target": self.target,
            "backend": self.backend,
        }
        return Setting(self.task, None, 0, **alike)


def product(**axes: Any) -> list[Setting]:
    """Returns every combination of the values of some fields of `Setting`, once; the last axis
    changes fastest.

    Args:
        **axes: for each field a sequence of values, or one value; of drafters and policies also a
            dict of names and values.

    >>> task = Task("letters", ["a b a"])
    >>> settings = product(
    ...     task=task, drafter={"copy": None}, gamma=[2, 3], sampling=[{}, {"temperature": 1.0}]
    ... )
    >>> [(setting.gamma, dict(setting.sampling)) for setting in settings]
    [(2, {}), (2, {'temperature': 1.0}), (3, {}), (3, {'temperature': 1.0})]
    """
    unknown = axes.keys() - set(Setting._fields)
    if unknown:
        raise TypeError(
            f"Setting has no field {min(unknown)!r}: expected some of {', '.join(Setting._fields)}"
        )
    choices: list[list[dict[str, Any]]] = []
    for field, values in axes.items():
        if field in NAMES and isinstance(values, Mapping):
            choices.append([{field: value, NAMES[field]: name} for name, value in values.items()])
        else:
            several = isinstance(values, list | tuple) and not hasattr(values, "_fields")
            choices.append([{field: value} for value in (values if several else [values])])
    return [
        Setting(**{name: value for fields in combination for name, value in fields.items()})
        for combination in itertools.product(*choices)
    ]


def setting_of(prepared: Prepared, name: str, batch: int) -> Setting:
    """Makes a setting of a generation, for a task of some name and a number of prompts at a
    time.
    """
    o = prepared.options
    if o.num_samples != 1:
        raise ValueError(
            f"num_samples is {o.num_samples}: expected 1, and each prompt as often as its samples"
        )
    if np.ndim(o.max_new_tokens) or np.ndim(o.sampling.get("temperature", 0.0)):
        raise ValueError(
            "a setting has one max_new_tokens and one temperature for all of its prompts"
        )
    task = Task(name, prepared.prompt, int(o.max_new_tokens), ends=o.eos_ids != ())
    told = {*Setting._fields, "max_new_tokens", "key", "eos_ids", "num_samples"}
    sampling = {
        option: value
        for option, value in o.keywords().items()
        if option not in told and value is not None and value is not False
    }
    return Setting(task, o.drafter, o.gamma, o.rule, o.policy, sampling, batch)


class SettingSummary(NamedTuple):
    """A setting in words and numbers; of plain decoding the drafter, policy and rule are empty."""

    target: str
    task: str
    drafter: str = ""
    policy: str = ""
    rule: str = ""
    exact: bool = True  # whether the rule is
    # most draft tokens a round; 0 where nothing is drafted, or before gamma is planned
    gamma: int = 0
    planned: bool = False  # whether gamma is the plan's choice
    # the plan's advice; if it is not to speculate, gamma is the best all the same
    pays: bool = True
    temperature: float = 0.0
    sampling: str = ""  # the other options, in words
    dtype: str = "float32"
    mesh: str = ""
    batch: int = 1
    new_tokens: int = 0
    backend: str = JAXSPEC

    is_plain = property(lambda self: not self.drafter, doc="True for plain decoding.")
    label = property(
        lambda self: f"{self.task}, T = {self.temperature:g}, {self.drafter}", doc="For a sentence."
    )


def summary(setting: Setting, target: Model) -> SettingSummary:
    """Describes a setting in words and numbers; its gamma is not known before it is prepared."""
    return SettingSummary(
        target=target.name,
        task=setting.task.name,
        drafter=setting.drafter_name,
        policy=setting.policy_label,
        rule="" if setting.is_plain else setting.rule.name,
        exact=setting.is_plain or setting.rule.exact,
        planned=setting.gamma == PLANNED,
        temperature=setting.temperature,
        sampling=", ".join(
            f"{name}={value}" for name, value in setting.sampling.items() if name != "temperature"
        ),
        dtype=dtype_of(target),
        mesh=mesh_name(target),
        batch=setting.batch,
        new_tokens=setting.task.new_tokens,
        backend=setting.backend_name,
    )


def mesh_name(model: Model) -> str:
    """Returns the mesh that a model lies on, as `jaxspec.load` takes it; empty for one device."""
    mesh = sharding.mesh_of(model.params)
    if mesh is None:
        return ""
    return ",".join(f"{name}={size}" for name, size in mesh.shape.items())


def dtype_of(model: Model) -> str:
    """Returns the dtype of a model's matrices."""
    leaves = jax.tree.leaves(model.params)
    computed = nets.dtype_of(model.config, str(leaves[0].dtype) if leaves else "float32")
    return quantisation.dtype_of(model.params, computed)


class Costs(NamedTuple):
    """The costs of passes; c, v and search in one-token passes of the target."""

    c: Spread  # a one-token pass of the model that drafts; 0 for a look-up
    v: Spread  # the pass that judges gamma draft tokens
    search: float  # a round's search of a look-up; 0 where a model drafts
    target_ms: Spread  # a one-token pass of the target, in milliseconds
    verify_ms: Spread  # the pass that judges gamma draft tokens
    draft_ms: Spread | None  # a one-token pass of the model that drafts; None for a look-up


class Predicted(NamedTuple):
    """Speed over plain decoding that costs and draft tokens promise, after prefill. Of chains."""

    # Theorem 3.8 with c and v as measured, without a policy: independent draft tokens
    theorem: float | None = None
    rounds: float | None = None  # with the rounds that were run, each as long as its longest draft


class Drafts(NamedTuple):
    """The draft tokens of a run, a round."""

    share_of_rounds: Rate  # rounds in which there was a draft
    tokens_per_round: float  # draft tokens of each row
    # draft tokens of the batch, whose rounds are as long as the longest row's
    longest_per_round: float
    conditional: Rate | None = None  # accepted over tested draft tokens; chains only
    # the same by their place in the round; chains only
    conditional_by_draft_token: tuple[Rate, ...] = ()


class Latency(NamedTuple):
    """Milliseconds until a reader of the stream has the first token, and the percentiles over all
    others.
    """

    first: Spread
    p50: Spread | None
    p95: Spread | None


class Difference(NamedTuple):
    """The first difference from plain decoding: the text's number, the token's, and both texts'
    tokens up to it.
    """

    text: int
    position: int
    tokens: tuple[int, ...]
    plain: tuple[int, ...]


class BenchResult(NamedTuple):
    """A setting and what was measured."""

    setting: SettingSummary  # what was measured
    texts: int = 0  # how many a run decodes
    tokens: int = 0  # their new tokens
    passes: int = 0  # the target's, with prefill's
    tokens_per_round: Rate | None = None  # without each text's first token, which prefill yields
    drafts: Drafts | None = None  # the draft tokens of a run; None for plain decoding
    # greedy texts that are plain decoding's; None for samples and inexact rules
    same_text: int | None = None
    difference: Difference | None = None  # where the first that is not differs
    seconds: tuple[float, ...] = ()  # seconds of each timed run; empty if nothing was timed
    prefill_seconds: float | None = None  # median of a run's prefills; None if unknown
    tokens_per_second: Spread | None = None  # the speed of the runs
    # over plain decoding by the same target and backend, repeat by repeat
    speed: Spread | None = None
    speed_after_prefill: Spread | None = None  # the same without what prefill takes
    # over the group's first plain decoding, if of another dtype, mesh, backend
    speed_over_first: Spread | None = None
    first_call: float | None = None  # seconds of the first one, which compiles the program
    latency: Latency | None = None  # latency of the timed run
    memory: MemoryUse | None = None  # memory of the timed run
    # E[sum min(p, q)] over all positions of the target's own text, or with a lenient rule what it
    # accepts
    alpha: Rate | None = None
    costs: Costs | None = None  # costs of the passes
    predicted: Predicted | None = None  # what theory predicts from the costs
    group: str = ""  # the same for results that were interleaved
    environment: Environment | None = None  # machine, versions, command
    error: str | None = None  # why there are no numbers

    later_tokens = property(
        lambda self: self.tokens - self.texts, doc="New tokens but for prefill's, one a text."
    )


def ratio(plain: np.ndarray, other: np.ndarray, tokens: float = 1.0) -> Spread | None:
    """Divides plain decoding's time by another, repeat by repeat; None if noise leaves no time at
    all.

    >>> ratio(np.array([2.0, 4.0]), np.array([1.0, 1.0]))
    Spread(median=3.0, min=2.0, max=4.0)
    """
    if (plain > 0).all() and (other > 0).all():
        return Spread.of(tokens * plain / other)
    return None


def over(result: BenchResult, other: BenchResult) -> Spread | None:
    """Divides a result's speed by another's that was interleaved with it, repeat by repeat."""
    if result.group != other.group or not (result.seconds and other.seconds and other.tokens):
        return None
    return ratio(np.array(other.seconds), np.array(result.seconds), result.tokens / other.tokens)


def to_json(value: Any) -> Any:
    """Turns a result, or a part of one, into what JSON has; numbers that are not finite become
    None.

    >>> to_json({"speed": Spread(2.0, 1.0, math.inf), "c": np.ones(2), "file": Path("rows.jsonl")})
    {'speed': {'median': 2.0, 'min': 1.0, 'max': None}, 'c': [1.0, 1.0], 'file': 'rows.jsonl'}
    """
    if hasattr(value, "_asdict"):
        value = value._asdict()
    elif dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(name): to_json(entry) for name, entry in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, tuple | list | np.ndarray):
        return [
            to_json(entry) for entry in (value.tolist() if isinstance(value, np.ndarray) else value)
        ]
    if isinstance(value, Path):
        return str(value)
    return value
