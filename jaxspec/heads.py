"""Loading drafters that read their target's hidden states: EAGLE, Medusa, Kangaroo, PaSS, MTP, DFlash, DSpark."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import buffers, drafters, folders, published
from jaxspec import model as models
from jaxspec.base import Bound, Drafter, ExitAdapter, Model, Params, Prompt
from jaxspec.decode import generate
from jaxspec.decode.request import first_difference
from jaxspec.draft_heads import KINDS, kind_of
from jaxspec.drafters.hidden_states import with_head
from jaxspec.nets import stack
from jaxspec.nets.block import BlockConfig
from jaxspec.nets.exit_adapter import ExitAdapterConfig
from jaxspec.nets.heads import HeadsConfig
from jaxspec.nets.lookahead_embeddings import LookAheadConfig
from jaxspec.weights import draft_heads, huggingface, orbax
from jaxspec.weights.orbax import CheckpointError


def _early_exit(adapter: Bound[ExitAdapter], target: Model, head: Model | None = None) -> Bound[Drafter]:
    return drafters.early_exit(target, adapter.functions.needs.taps[0] + 1, head=head, adapter=adapter)


DRAFTERS = {
    BlockConfig: drafters.block,
    HeadsConfig: drafters.heads,
    LookAheadConfig: drafters.lookahead_embeddings,
    ExitAdapterConfig: _early_exit,
}

TEXTS = (  # to measure on, where none are given
    "The capital of France is",
    "This package contains the documentation of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "It was late in the evening when",
    "To install the program, first",
    "In mathematics, a prime number is",
)
# A greedy acceptance rate of the first draft token below that of any drafter made for its target: heads trained for
# minutes have 0.15 and more, weights of another model next to nothing. Layers that are off by one may cost too little
# to be seen: `debian-gpt-eagle` has 0.39 with those that it was trained on, and 0.40 with the ones after them.
TOO_LOW = 0.1


def load_drafter(
    source: str | Path,
    *,
    target: Model,
    taps: Sequence[int] | None = None,
    head: Model | None = None,
    revision: str | None = None,
    check: bool | Sequence[str] | Prompt = False,
) -> Bound[Drafter]:
    """Loads a published drafter that reads a target's hidden states, ready for `generate(target, ..., drafter=...)`.

        target = jaxspec.load("Qwen/Qwen3-8B", dtype="bfloat16")
        drafter = jaxspec.load_drafter("AngelSlim/Qwen3-8B_eagle3", target=target)
        out = jaxspec.generate(target, prompts, drafter=drafter, gamma=4)

    What kind it is, its config.json and the names of its tensors say: EAGLE and EAGLE-3 (their authors' spelling,
    SGLang's and vLLM's), the `speculators` format (eagle3, dflash, dspark, mtp), Medusa, DFlash, DSpark, Kangaroo,
    PaSS, and the modules for multi-token prediction in a model's own folder (`source` is then the target's). The layers
    that it reads of the target need not be asked for: `generate` runs the target with these taps.

    Args:
        source: a folder, a hub id, owner/name, or the name of a shipped drafter.
        target: the model that it was made for. Its matrices get the dtype of the target's computation, and lie on its
            mesh.
        taps: the layers to read, counted from 0 for the output of the first one, if the folder is wrong or silent about
            them. Numbers that are off by one cost acceptance, never exactness.
        head: `jaxspec.trim_vocabulary(target, size=...)`, for a drafter that uses the target's head: it then computes
            the logits of so many tokens, and drafts no others (FR-Spec).
        revision: of a hub id: a branch, a tag or a commit.
        check: whether to measure how often its first draft token is accepted, on a few texts or on prompts that are
            given, and to warn if that is too seldom for a drafter of this target. Nothing else shows that weights are
            another's: the text stays exact. Takes as long as generating 32 tokens.

    Returns:
        The drafter, for this target.

    Raises:
        CheckpointError: there is no such folder, it is of none of these formats, it was made for another target, or it
            is damaged.
        ValueError: a revision is given of something that is not of the hub, or a head for a drafter that has its own.

    Warns:
        UserWarning: the folder names another model than this target, one of the same shapes.
    """
    config, params = read_head(source, target=target, taps=taps, revision=revision)
    wanted = getattr(config, "taps", ())
    if wanted:
        target = models.with_taps(target, wanted)
    network: Bound[Any] = Bound(published.net_of(config).head(config), params)
    if type(config) in {kind.config for kind in KINDS}:
        made = kind_of(config).drafter(network, target, head)
    elif isinstance(config, ExitAdapterConfig):
        made = _early_exit(network, target, head)
    else:
        made = DRAFTERS[type(config)](network if head is None else with_head(network, head), target)
    if check is not False:
        check_acceptance(made, None if check is True else check, name=str(source))
    return made


def check_acceptance(
    drafter: Bound[Drafter], prompts: Sequence[str] | Prompt | None = None, *, tokens: int = 32, name: str = "it"
) -> float:
    """How often a drafter's first draft token is accepted, at temperature 0; warns if it is too seldom to be right.

    Of a drafter of trees: how often one of the first draft tokens is, which is no less than that of the chain inside.

    Args:
        drafter: with its target.
        prompts: to continue; None: a few English texts, or single tokens for a target without a tokenizer.
        tokens: how many to generate for each.
        name: of the drafter, for the warning.

    Returns:
        The acceptance rate.
    """
    target = drafter.target
    assert target is not None
    options: dict[str, Any] = {} if drafter.functions.tree else {"gamma": 1}
    if prompts is None:
        few = np.linspace(0, target.lm.vocab_size - 1, len(TEXTS)).astype(int)
        prompts = list(TEXTS) if target.tokenizer is not None else buffers.pad([[int(i)] for i in few])
    trace = generate(target, prompts, drafter=drafter, max_new_tokens=tokens, **options).trace
    drafted = int(np.sum(np.greater(trace.num_tested, 0)))
    rate = int(np.sum(np.greater(trace.num_accepted, 0))) / max(1, drafted)
    if rate < TOO_LOW:
        warnings.warn(
            f"{name} has {rate:.0%} of its first draft tokens accepted (of {drafted}, at temperature 0), and one that "
            f"was made for its target has more than {TOO_LOW:.0%}: it may be another model's, or its numbers of layers "
            "may be counted otherwise (taps=)",
            stacklevel=3,
        )
    return rate


def read_head(
    source: str | Path, *, target: Model, taps: Sequence[int] | None = None, revision: str | None = None
) -> tuple[Any, Params]:
    """The configuration and the parameters of a published drafter, to be trained further, say, or to be written.

    Arguments and errors as those of `load_drafter`. `weights.draft_heads.save` writes them.
    """
    if not isinstance(target, Model):
        raise TypeError(f"target is {target!r}: expected a jaxspec.Model, as jaxspec.load returns it")
    if taps is not None:
        stack.check_numbers(taps)
    folder = _find(source, revision)
    tokenizer = huggingface.tokenizer(folder)
    both = tokenizer is not None and target.tokenizer is not None
    if both and (first := first_difference(target.tokenizer, tokenizer)) is not None:
        index, ours, theirs = first
        raise CheckpointError(
            f"{folder} has another tokenizer than the target: id {index} is {ours!r} for the target and {theirs!r} "
            "there. It was made for another target"
        )
    _check_name(folder, target)
    config, params = draft_heads.restore(folder, target, None if taps is None else tuple(taps))
    if taps is not None and not getattr(config, "taps", ()):
        raise ValueError(f"taps is {list(taps)}, and {folder} reads the last layer's output only: leave it out")
    return config, params


def _check_name(folder: Path, target: Model) -> None:
    """Compares the name of the target with that of the model that a folder says it was made for.

    Only names that mean one model are compared: the hub's ids, and those of shipped models. A folder may be called
    anything, and a name that holds the other is a copy's, as a rule: quantised, or fine-tuned.

    Raises:
        CheckpointError: the other model is a shipped one, of another number of layers.

    Warns:
        UserWarning: it is another one, as far as is known.
    """
    try:
        table = huggingface.read_object(folder / huggingface.CONFIG)
        about = (table.get("speculators_config") or {}).get("verifier") or {}
    except (OSError, ValueError, AttributeError):  # `draft_heads.restore` says so
        return
    named = table.get("base_model_name_or_path") or about.get("name_or_path")
    known = models.shipped()
    if not isinstance(named, str) or not all(models.is_hub_id(x) or x in known for x in (named, target.name)):
        return
    theirs, ours = (re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower()) for name in (named, target.name))
    if not theirs or not ours or theirs in ours or ours in theirs:
        return
    if named in known:
        theirs, ours = (_layers(x) for x in (orbax.read_manifest(known[named]).model, target.config))
        if ours and theirs != ours:
            raise CheckpointError(
                f"{folder} was made for {named}, a model of {theirs} layers, and {target.name} has {ours}: load it "
                f"with target=jaxspec.load({named!r})"
            )
    warnings.warn(
        f"{folder} was made for {named}, and the target is {target.name}: the text stays exact, but few draft tokens "
        "may be accepted; check=True measures how many",
        stacklevel=4,
    )


def _layers(config: Any) -> int:
    return getattr(config, "decoder_layers", getattr(config, "layers", 0))


def shipped() -> dict[str, Path]:
    """The drafters that come with jaxspec, by name."""
    found: dict[str, Path] = {}
    for folder in models.SHIPPED:
        for config in sorted(folder.glob(f"*/{huggingface.CONFIG}")):
            found.setdefault(config.parent.name, config.parent)
    return found


def _find(source: str | Path, revision: str | None) -> Path:
    path = Path(source).expanduser()
    folders.recover(path)
    if not path.exists() and (found := shipped().get(path.name)) and path.parts[-2:-1] in ((), ("checkpoints",)):
        path = found
    if path.exists():
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, but {source} is a folder: only models of the hub have revisions"
            )
        return path
    if path.name in models.shipped():
        raise CheckpointError(f"{source} is a model: load it by jaxspec.load, and pass it as the drafter")
    if not models.is_hub_id(source):
        names = ", ".join(shipped()) or "none in this installation"
        raise CheckpointError(
            f"no drafter at {source}: expected a folder, the name of a shipped one ({names}), or a hub id (owner/name)"
        )
    return huggingface.download(str(source), revision, huggingface.DRAFTER_FILES)
