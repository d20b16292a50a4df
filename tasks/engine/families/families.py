"""The families this product knows."""

from tasks.engine.families.deepseek import DEEPSEEK_V3
from tasks.engine.families.dims import Config
from tasks.engine.families.family import Family
from tasks.engine.families.gpt2 import GPT2
from tasks.engine.families.llama import LLAMA, MISTRAL
from tasks.engine.families.moe import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from tasks.engine.families.qwen import QWEN2, QWEN3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V3, GPT2)


def find_family(config: Config) -> Family | None:
    """Return the family of a config's model type, or None.

    Args:
        config: parsed config.json.

    Returns:
        The family whose `model_types` has it.
    """
    model_type = config.get("model_type")
    return next((family for family in FAMILIES if model_type in family.model_types), None)
