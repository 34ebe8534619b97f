"""The model families people have: what a Hugging Face config.json of each means here, and the published sizes.

A family is data and three small functions (`common.Family`); the networks themselves are in `jaxspec.nets`.
"""

from jaxspec.families import gemma, gpt, lamda, llama, mistral, qwen, t5
from jaxspec.families.common import Family, FamilyError, Tensor

__all__ = ["FAMILIES", "Family", "FamilyError", "Tensor", "of"]

FAMILIES: tuple[Family, ...] = (
    t5.T5,
    t5.MT5,
    gpt.GPT2,
    llama.LLAMA,
    mistral.MISTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    gemma.GEMMA2,
    gemma.GEMMA3,
    lamda.LAMDA,
)


def of(table: dict) -> Family:
    """The family of a config.json.

    Raises:
        FamilyError: none of ours, or a variant that would compute something else.

    >>> of({"model_type": "qwen3"}).title
    'Qwen 3'
    """
    if "quantization_config" in table:
        raise FamilyError("its weights are quantised (quantization_config): expected float32, float16 or bfloat16 ones")
    for family in FAMILIES:
        if table.get("model_type") in family.model_types:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise FamilyError(f"model_type is {table.get('model_type')!r}, expected one of {known}")
