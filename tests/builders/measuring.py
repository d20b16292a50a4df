"""A small, slow, independent measurer: TensorTable, ValueTable and logits of a release, by torch and the safetensors library alone."""

import zlib
from functools import lru_cache, reduce
from operator import xor
from pathlib import Path

import pandas as pd
import torch
import transformers
from safetensors import safe_open

from reports.model import LogitsComparison
from tasks.witnesses.native_forward import run_native
from validators.policy import LIMITS
from validators.tables import format_shape

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64}
VALUE_COLUMNS = ["name", "witness", "numel", "differing", "max_abs", "first", "expected_crc32", "found_crc32", "flushed"]
CODES = {dtype: code for code, dtype in DTYPES.items()}


def load_release(folder: Path) -> list[tuple[str, str, torch.Tensor]]:
    """Return (file, name, tensor) of every stored tensor. Raises SafetensorError for a file the library refuses."""
    found = []
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found += [(path.relative_to(folder).as_posix(), name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118
    return found


def measure_tensors(folder: Path) -> pd.DataFrame:
    """Return the TensorTable of a folder."""
    return pd.DataFrame([_statistics(*entry) for entry in load_release(folder)])


def measure_values(folder: Path, source: Path) -> pd.DataFrame:
    """Return the ValueTable of a folder against a source folder of the same names; the cast is torch's."""
    wanted = {name: tensor for _, name, tensor in load_release(source)}
    rows = [_comparison(name, tensor, wanted[name]) for _, name, tensor in load_release(folder) if name in wanted]
    return pd.DataFrame(rows, columns=VALUE_COLUMNS)


def plan_of(source: Path, dtype: str = "", keep: frozenset[str] = frozenset()) -> pd.DataFrame:
    """Return the PlanTable of an export of `source` that keeps names and casts to `dtype`."""
    rows = []
    for file, name, tensor in load_release(source):
        own = CODES[tensor.dtype]
        target = own if name in keep else dtype or own
        box = ",".join(f"0:{length}" for length in tensor.shape)
        rows.append(
            {
                **{"name": name, "file": file, "dtype": target, "shape": format_shape(tuple(tensor.shape)), "op": "same"},
                **{"nbytes": tensor.numel() * DTYPES[target].itemsize, "encoding": "copy" if own == target else "cast"},
                "sources": f"{name}[{box}]",
            }
        )
    return pd.DataFrame(rows)


def compare_logits(folder: Path, source: Path, row: str, ranks: Path | None = None) -> LogitsComparison:
    """Return how far a folder's logits are from a source folder's, both through transformers in fp32; or from those of Megatron's ranks."""
    found = _logits(folder)
    expected = _logits(source) if ranks is None else _native_logits(ranks, found.shape[-1])
    reference, candidate = (torch.log_softmax(logits.double(), -1) for logits in (expected, found))
    kl = (reference.exp() * (reference - candidate)).sum(-1).flatten()
    agree = (reference.argmax(-1) == candidate.argmax(-1)).double()
    metrics = {
        "mean_kl": kl.mean().item(),
        "p95_kl": kl.quantile(0.95).item(),
        "cosine": torch.cosine_similarity(expected.double(), found.double(), dim=-1).mean().item(),
        "top1": agree.mean().item(),
        "top1_positions": float(agree.numel()),
        "max_abs": (reference - candidate).abs().max().item(),
    }
    name, witness = ("cast", "source") if ranks is None else ("mapping", "native forward")
    return LogitsComparison(name, witness, "release", row, kl.numel(), metrics, LIMITS[row])


@lru_cache(maxsize=8)
def _logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(_ids(model.config.vocab_size), use_cache=False).logits


@lru_cache(maxsize=8)
def _native_logits(ranks: Path, vocab: int) -> torch.Tensor:
    return run_native("megatron", (ranks,), [_ids(vocab)]).logits[0][..., :vocab]


def _ids(vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (4, 96), generator=torch.Generator().manual_seed(3))


def _statistics(file: str, name: str, tensor: torch.Tensor) -> dict:
    values = tensor.double().flatten()
    finite = values[values.isfinite()]
    return {
        **{"name": name, "file": file, "dtype": CODES[tensor.dtype], "shape": format_shape(tuple(tensor.shape))},
        "nbytes": tensor.numel() * tensor.element_size(),
        "absmax": finite.abs().max().item() if len(finite) else float("nan"),
        "rms": finite.square().mean().sqrt().item(),
        "mean": finite.mean().item(),
        "nonfinite": len(values) - len(finite),
        "zero_share": (values == 0).double().mean().item(),
        "constant": int(len(values) > 1 and bool((values == values[0]).all())),
        "parity": parity_of(tensor),
        "relative_error": float("nan"),
        "sample": values_at(tensor, 32),
        "repeated": repeated_rows(tensor) if tensor.ndim == 2 and not any(part.isdecimal() for part in name.split(".")) else "",
    }


def parity_of(tensor: torch.Tensor) -> str:
    """Return the XOR of all values' bits, in hex."""
    bits = tensor.flatten().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    return f"{reduce(xor, bits.tolist(), 0) % 256 ** tensor.element_size():x}"


def values_at(tensor: torch.Tensor, count: int) -> str:
    """Return the hex of evenly spaced values: not the product's choice, but like it the same for every tensor of a shape."""
    flat = tensor.flatten()
    chosen = flat[torch.linspace(0, len(flat) - 1, min(count, len(flat))).long()]
    return chosen.contiguous().view(torch.uint8).numpy().tobytes().hex()


def repeated_rows(tensor: torch.Tensor) -> str:
    """Return every row that is zero or equals an earlier one, as runs of one row."""
    seen: dict[tuple, int] = {}
    rows = [(i, "zero" if not any(row) else seen.setdefault(tuple(row), i)) for i, row in enumerate(tensor.double().tolist())]
    return " ".join(f"{i}:{i + 1}={origin}" for i, origin in rows if origin != i)


def _comparison(name: str, found: torch.Tensor, source: torch.Tensor) -> dict:
    wanted = source.to(found.dtype)
    same_shape = found.shape == wanted.shape
    bits = (tensor.contiguous().view(torch.uint8).reshape(-1, tensor.element_size()) for tensor in (found, wanted))
    unequal = torch.ne(*bits).any(-1) if same_shape else torch.ones(found.numel(), dtype=torch.bool)
    differing = int(unequal.sum())
    gap = (found.double() - wanted.double()).abs().max().item() if same_shape else float("nan")
    checksums = [zlib.crc32(t.contiguous().view(torch.uint8).numpy().tobytes()) if differing else -1 for t in (wanted, found)]
    return {
        **{"name": name, "witness": "second path", "numel": found.numel() if same_shape else 0, "differing": differing, "max_abs": gap},
        "first": int(unequal.nonzero()[0]) if differing else -1,
        **{"expected_crc32": checksums[0], "found_crc32": checksums[1]},
        "flushed": int(((source != 0) & (wanted == 0)).sum()),
    }
