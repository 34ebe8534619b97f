"""Loading drafters that read their target's hidden states: EAGLE, Medusa, MTP modules, DFlash and DSpark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec import drafters, folders, published
from jaxspec import model as models
from jaxspec.base import Bound, Drafter, Model, Params
from jaxspec.decode.request import first_difference
from jaxspec.nets.block import BlockConfig
from jaxspec.nets.eagle import EagleConfig
from jaxspec.nets.heads import HeadsConfig
from jaxspec.nets.mtp import MTPConfig
from jaxspec.weights import draft_heads, huggingface
from jaxspec.weights.orbax import CheckpointError

DRAFTERS = {
    EagleConfig: drafters.eagle,
    BlockConfig: drafters.block,
    HeadsConfig: drafters.heads,
    MTPConfig: drafters.mtp,
}


def load_drafter(
    source: str | Path, *, target: Model, taps: Sequence[int] | None = None, revision: str | None = None
) -> Bound[Drafter]:
    """Loads a published drafter that reads a target's hidden states, ready for `generate(target, ..., drafter=...)`.

        target = jaxspec.load("Qwen/Qwen3-8B", dtype="bfloat16")
        drafter = jaxspec.load_drafter("AngelSlim/Qwen3-8B_eagle3", target=target)
        out = jaxspec.generate(target, prompts, drafter=drafter, gamma=4)

    What kind it is, its config.json and the names of its tensors say: EAGLE and EAGLE-3 (their authors' spelling,
    SGLang's and vLLM's), the `speculators` format (eagle3, dflash, dspark, mtp), Medusa, DFlash, DSpark, and the
    modules for multi-token prediction in a model's own folder (`source` is then the target's). The layers that it reads
    of the target
    need not be asked for: `generate` runs the target with these taps.

    Args:
        source: a folder, or a hub id, owner/name.
        target: the model that it was made for. Its matrices get the dtype of the target's computation, and lie on its
        mesh.
        taps: the layers to read, counted from 0 for the output of the first one, if the folder is wrong or silent about
            them. Numbers that are off by one cost acceptance, never exactness.
        revision: of a hub id: a branch, a tag or a commit.

    Returns:
        The drafter, for this target.

    Raises:
        CheckpointError: there is no such folder, it is of none of these formats, it was made for another target, or it
        is
            damaged.
        ValueError: a revision is given of something that is not of the hub.
    """
    config, params = read_head(source, target=target, taps=taps, revision=revision)
    wanted = getattr(config, "taps", ())
    if wanted:
        target = models.with_taps(target, wanted)
    return DRAFTERS[type(config)](Bound(published.net_of(config).head(config), params), target)


def read_head(
    source: str | Path, *, target: Model, taps: Sequence[int] | None = None, revision: str | None = None
) -> tuple[Any, Params]:
    """The configuration and the parameters of a published drafter, to be trained further, say, or to be written.

    Arguments and errors as those of `load_drafter`. `weights.draft_heads.save` writes them.
    """
    folder = _find(source, revision)
    tokenizer = huggingface.tokenizer(folder)
    both = tokenizer is not None and target.tokenizer is not None
    if both and (first := first_difference(target.tokenizer, tokenizer)) is not None:
        index, ours, theirs = first
        raise CheckpointError(
            f"{folder} has another tokenizer than the target: id {index} is {ours!r} for the target and {theirs!r} "
            "there. It was made for another target"
        )
    return draft_heads.restore(folder, target, None if taps is None else tuple(taps))


def _find(source: str | Path, revision: str | None) -> Path:
    path = Path(source).expanduser()
    folders.recover(path)
    if path.exists():
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}, but {source} is a folder: only models of the hub have revisions"
            )
        return path
    if not models.is_hub_id(source):
        raise CheckpointError(f"no drafter at {source}: expected a folder, or a hub id (owner/name)")
    return huggingface.download(str(source), revision, huggingface.DRAFTER_FILES)
