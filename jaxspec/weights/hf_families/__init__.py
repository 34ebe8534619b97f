"""The model families people have: their Hugging Face config.json read as our configurations, and
their published sizes.

A family is data and three small functions (`common.Family`); the networks themselves are in
`jaxspec.nets`.
"""

import dataclasses
from typing import Any

from jaxspec import optional_imports
from jaxspec.weights import quantised_files
from jaxspec.weights.hf_families import (
    bart,
    cohere,
    cwm,
    gemma,
    gemma4,
    glm,
    gpt,
    granite,
    hyperclovax,
    llama,
    llama_like,
    mistral,
    mixtures,
    olmo,
    phi,
    qwen,
    qwen3_5,
    t5,
    t5gemma,
    ungated,
    whisper,
)
from jaxspec.weights.hf_families.common import Family, FamilyError, Tensor, check

__all__ = ["FAMILIES", "Family", "FamilyError", "Tensor", "describe", "of"]

FAMILIES: tuple[Family, ...] = (
    *(
        t5.T5,
        t5.MT5,
        t5.UMT5,
        t5gemma.T5GEMMA,
        t5gemma.T5GEMMA2,
        gpt.GPT2,
        llama.LLAMA,
        mistral.MISTRAL,
    ),
    *(
        qwen.QWEN2,
        qwen.QWEN3,
        qwen3_5.QWEN3_5,
        gemma.GEMMA2,
        gemma.GEMMA3,
        gemma.GEMMA,
        mistral.MINISTRAL,
        phi.PHI3,
    ),
    *(olmo.OLMO2, olmo.OLMO3, olmo.EXAONE4, granite.GRANITE, cohere.COHERE, cohere.COHERE2),
    *(glm.GLM, glm.GLM4, glm.ERNIE, glm.HELIUM),
    *(llama_like.SMOLLM3, llama_like.SEED_OSS, llama_like.HUNYUAN, llama_like.STABLELM),
    *(hyperclovax.HYPERCLOVAX, cwm.CWM),
    *(ungated.STARCODER2, ungated.NEMOTRON, ungated.ARCEE),
    *(gemma4.GEMMA4, mistral.MISTRAL3, mistral.MINISTRAL3, granite.GRANITE4, ungated.APERTUS),
    *(mixtures.QWEN3_MOE, mixtures.MIXTRAL, mixtures.GPT_OSS, whisper.WHISPER),
    *bart.FAMILIES,
)


def of(table: dict) -> Family:
    """Returns the family of a config.json, whose keys it checks.

    >>> of({"model_type": "qwen3"}).title
    'Qwen 3'
    """
    quantised_files.scheme_of(table)  # refuses what is not read
    for family in FAMILIES:
        if table.get("model_type") in family.model_types:
            check(table, family.keys)
            return family
    expected = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise FamilyError(f"model_type is {table.get('model_type')!r}: expected one of {expected}")


def describe(config: Any) -> tuple[Family, dict[str, Any]]:
    """Returns the first family that can write all of a configuration, and the config.json that it
    writes.

    What is written is read again and compared: but for a family's `unwritten` fields nothing is
    lost.

    Raises:
        FamilyError: no family writes such a configuration.

    >>> family, table = describe(llama.SIZES["llama-3.1-8b"])
    >>> family.title, table["rope_scaling"]["factor"]
    ('Llama', 8.0)
    """
    # A configuration says nothing of its family: the first whose file can hold all of it will do.
    for family in FAMILIES:
        if family.write is None:
            continue
        try:
            table = family.write(config)
            if (
                dataclasses.replace(
                    family.read(table), **{x: vars(config)[x] for x in family.unwritten}
                )
                == config
            ):
                return family, table
        except (AttributeError, KeyError, ValueError):
            # another network's, or with options that the family lacks
            continue
    raise FamilyError(
        f"no family writes a config.json of this {type(config).__name__}: save a model that "
        "jaxspec.load has read from one, or set Model.source"
    )


__getattr__ = optional_imports.submodules(__name__)
