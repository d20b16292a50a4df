"""llama.cpp itself, through the low-level bindings of llama-cpp-python: what an engine makes of a GGUF file."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

REASON = "not run: llama-cpp-python is not installed (pip install llama-cpp-python builds llama.cpp, minutes)"


class Engine:
    """A loaded file. All in fp32 where llama.cpp lets one choose."""

    def __init__(self, library, model) -> None:
        self._library, self._model = library, model
        self._vocab = library.llama_model_get_vocab(model)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """(S, V) of one sequence."""
        library = self._library
        asked = library.llama_context_default_params()
        asked.n_ctx = asked.n_batch = asked.n_ubatch = max(32, len(ids))
        asked.type_k = asked.type_v = 0  # GGML_TYPE_F32
        asked.flash_attn_type = 0
        context = library.llama_init_from_model(self._model, asked)
        batch = library.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.n_seq_id[place], batch.logits[place] = token, place, 1, 1
            batch.seq_id[place][0] = 0
        assert library.llama_decode(context, batch) == 0
        rows, columns = len(ids), library.llama_vocab_n_tokens(self._vocab)
        found = np.ctypeslib.as_array(library.llama_get_logits(context), shape=(rows * columns,)).reshape(rows, columns).copy()
        library.llama_batch_free(batch)
        library.llama_free(context)
        return torch.from_numpy(found)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, special tokens put around it and found in it."""
        raw, ids = text.encode(), (ctypes.c_int32 * 4096)()
        return list(ids[: self._library.llama_tokenize(self._vocab, raw, len(raw), ids, 4096, True, True)])

    def special(self) -> tuple[int, int]:
        """The ids of bos and eos."""
        return self._library.llama_vocab_bos(self._vocab), self._library.llama_vocab_eos(self._vocab)


@contextmanager
def open_engine(path: Path) -> Iterator[Engine]:
    """Load a file in llama.cpp; skips the test where that is not installed."""
    library = pytest.importorskip("llama_cpp.llama_cpp", reason=REASON)
    library.llama_backend_init()
    asked = library.llama_model_default_params()
    asked.n_gpu_layers = 0
    model = library.llama_model_load_from_file(str(path).encode(), asked)
    assert model, f"llama.cpp does not load {path}"
    yield Engine(library, model)
    library.llama_model_free(model)
