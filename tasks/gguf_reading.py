"""How transformers is asked to read a GGUF file. Imports it inside the function."""

from collections.abc import Mapping
from pathlib import Path

from validators.gguf_names import ROPE_FACTORS
from validators.release import open_release


def gguf_arguments(folder: Path, loading: Mapping[str, bool]) -> dict[str, object]:
    """Return what `from_pretrained` needs for a folder whose weights are a GGUF file.

    The config is the file's own metadata as transformers reads it, and two things that transformers 5.24 does not read
    (integrations/ggml.py): the size of a head, for some architectures; and, of a file that divides frequencies of RoPE, by what. The config
    says that, and whether the file holds the same is held elsewhere (tasks/measure_gguf.py).

    Args:
        folder: any release.
        loading: how configs are loaded.

    Returns:
        Keyword arguments; none for a folder of safetensors.
    """
    release = open_release(folder)
    if not release.is_gguf:
        return {}
    from transformers import AutoConfig

    file = release.ggufs[0]
    config = AutoConfig.from_pretrained(folder, gguf_file=file.name, **loading)
    head_dim = file.metadata.get(f"{file.metadata.get('general.architecture')}.attention.key_length")
    if head_dim is not None:
        config.head_dim = head_dim
    scaling = release.config.get("rope_parameters") or release.config.get("rope_scaling")
    if isinstance(scaling, Mapping) and any(tensor.name == ROPE_FACTORS for tensor in file.tensors):
        config.rope_parameters = {**scaling, "rope_theta": config.rope_parameters["rope_theta"]}
    return {"gguf_file": file.name, "config": config}
