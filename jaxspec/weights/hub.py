"""Models of the Hugging Face hub: which files of a repository are downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxspec.weights import lora
from jaxspec.weights.hf_families.common import read_object
from jaxspec.weights.tensors import CheckpointError

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # configuration and tokenizer
WEIGHT_FILES = ("model*.safetensors", "flax_model*.msgpack", "pytorch_model*.bin")
ADAPTER_FILES = ("adapter_model*.safetensors", "adapter_model*.bin")
DRAFTER_FILES = (*WEIGHT_FILES, "medusa_lm_head*.safetensors", "medusa_lm_head*.pt")
IN_FOLDERS = "*/*"  # where repositories keep other formats of the same weights


def refuse_adapter(folder: Path, name: str | Path) -> None:
    """Raises ValueError for a folder with an adapter, which is not a model by itself."""
    if not (folder / lora.CONFIG).is_file():
        return
    try:
        table = read_object(folder / lora.CONFIG)
    except ValueError:
        table = {}
    base = table.get("base_model_name_or_path", "another model")
    described = table.get("peft_type", "LoRA")
    adapter = f"{name} is an adapter ({described}, by its {lora.CONFIG}) of {base}, not a model"
    merge = "what is no LoRA is merged with peft: merge_and_unload().save_pretrained(FOLDER)"
    raise CheckpointError(f"{adapter}: load that with adapter={str(name)!r} (--adapter); {merge}")


def download(
    name: str,
    revision: str | None = None,
    files: tuple[str, ...] = WEIGHT_FILES,
    is_adapter: bool = False,
) -> Path:
    """Downloads the folder of a hub id, unless it is in the cache; tokens and offline mode are
    huggingface_hub's.

    Args:
        name: owner/name.
        revision: a branch, a tag or a commit; None for the main branch.
        files: patterns of what may hold weights. The first existing one is taken.
        is_adapter: whether it is an adapter that is wanted; if not, one is refused.
    """
    from huggingface_hub import snapshot_download

    try:
        # Patterns are tried one by one, so that a repository with several formats is downloaded
        # once.
        for weights in files:
            patterns: dict[str, Any] = dict(
                allow_patterns=[*SMALL_FILES, weights], ignore_patterns=IN_FOLDERS
            )
            folder = Path(snapshot_download(name, revision=revision, **patterns))
            if not is_adapter:
                refuse_adapter(folder, name)
            if list(folder.glob(weights)):
                return folder
    except (OSError, ValueError) as error:
        if str(error).strip():
            reason = str(error).strip().splitlines()[0]
        else:
            reason = type(error).__name__
        settings = "HF_TOKEN, HF_HUB_OFFLINE and HF_HOME work as they do in huggingface_hub"
        raise CheckpointError(
            f"{name} cannot be had from the Hugging Face hub: {reason} ({settings})"
        ) from error
    raise CheckpointError(
        f"{name} has no weights on the Hugging Face hub: expected one of {', '.join(files)}"
    )
