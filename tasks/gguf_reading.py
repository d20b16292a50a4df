"""How transformers is asked to read a GGUF file. Imports it inside the function."""

from collections.abc import Mapping
from pathlib import Path

from validators.release import open_release


def gguf_arguments(folder: Path, loading: Mapping[str, bool]) -> dict[str, object]:
    """Return what `from_pretrained` needs for a folder whose weights are a GGUF file.

    The config is the file's own metadata as transformers reads it, and the size of a head as the file states it, which transformers 5.24
    does not read for every architecture (integrations/ggml.py).

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
    return {"gguf_file": file.name, "config": config}
