"""Ways to decode that are compared: a `Setting` of a `Task`; `product` makes all combinations of some axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import nets, rules, sharding
from jaxspec.analysis.result import SettingSummary, fingerprint
from jaxspec.core import BoundDrafter, BoundPolicy, Drafter, Model, Prompt, Rule, token_rows
from jaxspec.decode.request import Prepared
from jaxspec.files.digests import of_arrays
from jaxspec.weights import quantisation

PLANNED = "plan"  # in the place of a gamma: the one that `analysis.plan` chooses
ADAPTIVE = "adaptive"  # in the place of a policy: `policies.adaptive` with costs as measured
JAXSPEC = "jaxspec"  # the name of the backend that is used where a setting has none
NAMES = {"drafter": "name", "policy": "policy_name"}  # fields, and those that name their values


class Task(NamedTuple):
    """Prompts, and how much text is generated from each.

    Attributes:
        name: the task's name, for tables.
        prompts: strings, or rows of token ids.
        new_tokens: most new tokens per prompt.
        ends: whether end tokens end a text; if not, each has exactly `new_tokens`.
    """

    name: str
    prompts: Sequence[str] | Prompt
    new_tokens: int = 64
    ends: bool = True


class Backend(NamedTuple):
    """Another way to run settings than the compiled program, to be compared with it: another library, for example.

    Attributes:
        name: the backend's name, for tables.
        decode: (setting, its batches, a folder for files) -> a call for each batch, which decodes it and waits for the
            result. Then the new tokens of all rows, and the number of the target's passes, with prefill's.
    """

    name: str
    decode: Callable[[Setting, Sequence[Prepared], Path], tuple[Sequence[Callable[[], object]], list[list[int]], int]]


class Setting(NamedTuple):
    """One way to decode a task: all that its text and its speed depend on, but for the machine.

    Attributes:
        task: the prompts, and how much text.
        drafter: a model, one of `jaxspec.drafters`, one of your own, or None for plain decoding.
        gamma: draft tokens a round, or `PLANNED`; of a drafter of trees, whose size is its own, without effect.
        rule: the acceptance rule.
        policy: the draft-length policy; None drafts all gamma tokens, `ADAPTIVE` is `policies.adaptive` with c and v as
            measured.
        sampling: sampling options of `generate`, such as {"temperature": 1.0}; greedy if empty.
        batch: prompts at a time.
        target: if it is not the one that `bench.run` was given: the same in another dtype, or on a mesh.
        backend: runs it; None: the compiled program.
        name, policy_name: names of the drafter and the policy, for tables. A model has a name.
    """

    task: Task
    drafter: Model | BoundDrafter | Drafter | None = None
    gamma: int | str = 3
    rule: Rule = rules.rejection()
    policy: BoundPolicy | str | None = None
    sampling: Mapping[str, Any] = {}
    batch: int = 1
    target: Model | None = None
    backend: Backend | None = None
    name: str = ""
    policy_name: str = ""

    @property
    def is_plain(self) -> bool:
        """True if nothing is drafted: no drafter, or chains of no tokens."""
        functions = self.drafter.functions if isinstance(self.drafter, BoundDrafter) else self.drafter
        return functions is None or (self.gamma == 0 and getattr(functions, "tree", None) is None)

    @property
    def temperature(self) -> float:
        """The highest of its texts; 0 is greedy."""
        return float(np.max(self.sampling.get("temperature", 0.0) or 0.0))

    @property
    def drafter_name(self) -> str:
        """The name of the drafter: its own, else that of the model or the factory; empty for plain decoding."""
        return "" if self.is_plain else self.name or getattr(self.drafter, "name", "") or "unnamed"

    @property
    def is_named(self) -> bool:
        """True if the drafter has a name that tells it from others of its kind."""
        return bool(self.name) or isinstance(self.drafter, Model)

    @property
    def policy_label(self) -> str:
        """The name of the policy: its own, else that of its factory; empty if there is none."""
        if self.policy is None or isinstance(self.policy, str):
            return self.policy_name or self.policy or ""
        return self.policy_name or self.policy.name or "unnamed"

    @property
    def backend_name(self) -> str:
        """The name of the backend."""
        return JAXSPEC if self.backend is None else self.backend.name

    def plain(self) -> Setting:
        """Returns plain decoding of the same task, by the same target and backend."""
        alike = {"sampling": self.sampling, "batch": self.batch, "target": self.target, "backend": self.backend}
        return Setting(self.task, None, 0, **alike)


def product(**axes: Any) -> list[Setting]:
    """Returns every combination of the values of some fields of `Setting`, once; the last axis changes fastest.

    Args:
        **axes: for each field a sequence of values, or one value; of drafters and policies also a dict of names and
            values.

    Raises:
        TypeError: `Setting` has no such field.

    >>> task = Task("letters", ["a b a"])
    >>> settings = product(task=task, drafter={"copy": None}, gamma=[2, 3], sampling=[{}, {"temperature": 1.0}])
    >>> [(setting.gamma, dict(setting.sampling)) for setting in settings]
    [(2, {}), (2, {'temperature': 1.0}), (3, {}), (3, {'temperature': 1.0})]
    """
    if unknown := axes.keys() - set(Setting._fields):
        raise TypeError(f"Setting has no field {min(unknown)!r}: expected some of {', '.join(Setting._fields)}")
    lists: list[list[dict[str, Any]]] = []
    for field, values in axes.items():
        if field in NAMES and isinstance(values, Mapping):
            lists.append([{field: value, NAMES[field]: name} for name, value in values.items()])
        elif isinstance(values, list | tuple) and not hasattr(values, "_fields"):
            lists.append([{field: value} for value in values])
        else:
            lists.append([{field: values}])
    return [
        Setting(**{name: value for fields in combination for name, value in fields.items()})
        for combination in itertools.product(*lists)
    ]


def setting_of(prepared: Prepared, name: str, batch: int) -> Setting:
    """Makes a setting of a generation.

    Args:
        prepared: the generation.
        name: the task's name.
        batch: prompts at a time.

    Raises:
        ValueError: the generation has options with a value for each row.
    """
    options = dict(prepared.options)
    if options.pop("num_samples", 1) != 1:
        raise ValueError(
            f"num_samples is {prepared.options['num_samples']}: expected 1, and each prompt as often as wanted"
        )
    drafter, gamma, rule, policy, limit, _, eos = (
        options.pop(name) for name in ("drafter", "gamma", "rule", "policy", "max_new_tokens", "key", "eos_ids")
    )
    if np.ndim(limit) or any(np.ndim(value) for name, value in options.items() if name == "temperature"):
        raise ValueError("a setting has one max_new_tokens and one temperature for all of its prompts")
    task = Task(name, prepared.prompt, int(limit), ends=eos != ())
    sampling = {option: value for option, value in options.items() if value is not None and value is not False}
    return Setting(task, drafter, gamma, rule or rules.rejection(), policy, sampling, batch)


Digests = dict[tuple[int, ...], tuple[list[Any], str]]  # of arrays by their ids, and the arrays: ids stay theirs


def describe(setting: Setting, target: Model, digests: Digests | None = None) -> dict[str, Any]:
    """Describes a setting in JSON: two settings of one description have the same results.

    Args:
        setting: the setting.
        target: the one that `bench.run` was given.
        digests: the digests of parameters that were already read. New ones are added, so that the settings of a model
            read its parameters once.
    """
    digests = {} if digests is None else digests
    task, model, policy = setting.task, setting.target or target, setting.policy
    prompts = task.prompts if not isinstance(task.prompts, Prompt) else token_rows.to_lists(*task.prompts)
    description: dict[str, Any] = {
        "task": task.name,
        "prompts": fingerprint(list(prompts)),
        "new_tokens": task.new_tokens,
        "ends": task.ends,
        "target": identity(model.name, model.params, digests),
        "sampling": {name: np.asarray(value).tolist() for name, value in setting.sampling.items()},
        "batch": setting.batch,
        "mesh": mesh_name(model),
        "backend": setting.backend_name,
    }
    if not setting.is_plain:
        numbers = () if policy is None or isinstance(policy, str) else policy.params
        description |= {
            "drafter": identity(setting.drafter_name, _values(setting.drafter), digests),
            "gamma": setting.gamma,
            "rule": setting.rule.name,
            "policy": identity(setting.policy_label, numbers, digests),
        }
    return description


def identity(name: str, values: Any, digests: Digests) -> str:
    """Returns a name with a digest of arrays, which tells two models of one name apart."""
    leaves = jax.tree.leaves(values)
    ids = tuple(map(id, leaves))
    if ids not in digests:
        digests[ids] = leaves, of_arrays(leaves)[:12]
    return f"{name} {digests[ids][1]}"


def mesh_name(model: Model) -> str:
    """Returns the mesh that a model lies on, as `jaxspec.load` takes it; empty for one device."""
    mesh = sharding.mesh_of(model.params)
    return "" if mesh is None else ",".join(f"{name}={size}" for name, size in mesh.shape.items())


def dtype_of(model: Model) -> str:
    """Returns the dtype of a model's matrices."""
    leaves = jax.tree.leaves(model.params)
    computed = nets.dtype_of(model.config, str(leaves[0].dtype) if leaves else "float32")
    return quantisation.dtype_of(model.params, computed)


def _values(drafter: Any) -> Any:
    return [getattr(drafter, "params", ()), [model.params for model in getattr(drafter, "models", ())]]


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
        sampling=", ".join(f"{name}={value}" for name, value in setting.sampling.items() if name != "temperature"),
        dtype=dtype_of(target),
        mesh=mesh_name(target),
        batch=setting.batch,
        new_tokens=setting.task.new_tokens,
        backend=setting.backend_name,
    )
