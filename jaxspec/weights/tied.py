"""Tensors that have several names, such as an embedding that is also the head: files may hold them
under any of these.

`transformers` writes such a tensor under the name that the network gives it first
(`model.embed_tokens.weight`). `safetensors.torch.save_model` takes the name that sorts first
(`lm_head.weight`), and notes the others in the file's metadata. Files that were converted otherwise
have no such note.

    in a file                                     read as
    lm_head.weight                                model.embed_tokens.weight, of a config.json with a tied head
    decoder.embed_tokens.weight, lm_head.weight   shared.weight, and a head of its own (MADLAD-400, a T5)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.weights.hf_families.common import EMBEDDING, Family, Tensor
from jaxspec.weights.tensors import Shard


def repeated_names(family: Family, config: Any, names: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns {name that a file may hold as well: the tensor of the network that it repeats}.

    Args:
        names: the network's parameters, as `family.names` returns them.

    >>> from jaxspec.weights import hf_families
    >>> family = hf_families.of({"model_type": "qwen3"})
    >>> config = family.sizes["qwen3-0.6b"]
    >>> repeated_names(family, config, family.names(config))
    {'lm_head.weight': 'model.embed_tokens.weight'}
    """
    expected = {tensor.name for tensor in names.values()}
    if config.tied_head:
        head = {family.head: names[EMBEDDING].name}
    else:
        head = {}
    # The sides of a Marian may have embeddings apart: then these are tensors of the network, and
    # repeat none.
    return {
        name: first
        for name, first in {**family.copies, **head}.items()
        if first in expected and name not in expected
    }


def with_repeats(files: list[Shard], family: Family, repeated: Mapping[str, str]) -> list[Shard]:
    """Returns the files with the tensors that they were written without, as far as the files say
    so.

    What `by_first_names` gives its name is left to it. A tensor that lies here twice would be read
    and compared.
    """

    def is_added(name: str | None, kept: str | None) -> bool:
        return name not in repeated and (kept is None or repeated.get(kept) != name)

    return [
        file.under(
            {
                name: kept
                for name, kept in file.repeats.items()
                if is_added(family.canonical(name), family.canonical(kept))
            }
        )
        for file in files
    ]


def by_first_names(files: list[Shard], family: Family, repeated: Mapping[str, str]) -> list[Shard]:
    """Returns the files with each tensor under the network's name for it, if they hold it under
    another one only.

    Args:
        repeated: the tensors' other names, from `repeated_names`. The head is last: files with
            other copies of the embedding may have a head that differs, whatever config.json says.
    """
    stored = {family.canonical(name): name for file in files for name in file.shapes}
    renamed: dict[str, str] = {}
    for name, first in repeated.items():
        if first not in stored and first not in renamed and name in stored:
            renamed[first] = stored[name]
    if not renamed:
        return files
    left_out = set(renamed.values())
    return [file.under(renamed).keep(lambda name: name not in left_out) for file in files]
