"""What lies beside weights, index, config and tokenizer, and what it means there: a part of the `files` check.

A file is judged by its name, by the first row of KINDS that fits, and whatever its name by its first bytes: a pickle stays a pickle under
any suffix. Code of the model's own is told from a forgotten script by the config's `auto_map`. A link is followed, so it is judged as what
it leads to; only where it leads is judged here.

Sources: transformers' Trainer, accelerate, DeepSpeed and PyTorch DCP (names of training state); peft (names of adapters); transformers'
`dynamic_module_utils` (`auto_map`); the pickle protocol's first opcode; torch.save's zip layout.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from reports.codes import finding
from reports.errors import name_some
from reports.model import Finding
from reports.paths import real_path
from validators.expectation import Evidence
from validators.release import INDEX_NAME, MANIFEST_NAME, STAGE_FOLDER, Release, is_bookkeeping, parse_json_object


@dataclass(frozen=True, slots=True)
class _Kind:
    """Files whose name fits `pattern` (anywhere in it, whatever the case) are `what`."""

    code: str
    what: str
    pattern: re.Pattern[str]


def _kind(code: str, what: str, pattern: str) -> _Kind:
    return _Kind(code, what, re.compile(pattern, re.IGNORECASE))


LFS_POINTER = r"^version https://git-lfs\.github\.com/"
# The first row that fits counts: `optimizer.pt.tmp` is half-written, `optimizer.pt` training state, any other `.pt` a pickle.
KINDS: tuple[_Kind, ...] = (
    _kind(
        "files.half-written",
        "a file or folder that a writer did not finish",
        r"\.(tmp|temp|incomplete|part|partial|crdownload|aria2|filepart)($|/)|(^|/)tmp[a-z0-9_]{8}$|(^|/)\.progress/|\.shardwright-[0-9a-f]{16}/",
    ),
    _kind(
        "files.training-state",
        "state of a training run",
        r"(^|/)(optimizer|scheduler|scaler|rng_state|random_states|sampler|dataloader)[\w-]*\.(pt|pth|bin|pkl)$"
        r"|(^|/)(trainer_state\.json|training_args\.(bin|json)|zero_to_fp32\.py|latest(_checkpointed_iteration\.txt)?|\.metadata)$"
        r"|_(optim|model)_states\.pt$|\.distcp$|(^|/)events\.out\.tfevents|(^|/)(wandb|global_step\d+|checkpoint-\d+)/",
    ),
    _kind("files.adapter", "an adapter, which loaders put on top of the weights", r"(^|/)adapter_(config\.json|model\.bin)$"),
    _kind("files.pickle", "a pickle format", r"\.(bin|pt|pth|pkl|pickle|ckpt|joblib|dill)$"),
    _kind("files.executable", "a program", r"\.(so|dll|dylib|exe|pyd|pyc|pyo|whl|egg|jar|msi|com|scr)(\.\d+)*$"),
    _kind("files.script", "a script", r"\.(sh|bash|zsh|bat|cmd|ps1|js|vbs|pl|rb|lua)$"),
    _kind(
        "files.other-format",
        "weights, or an index of weights, in a format that is not judged here",
        r"\.(ggml|h5|msgpack|onnx|onnx_data|tflite|nemo|npz|npy|mlmodel|engine)$|(^|/)(pytorch|tf|flax)_model[\w.-]*\.index\.json$",
    ),
    _kind(
        "files.leftover",
        "a leftover of an editor or a system",
        r"(~|\.(bak|orig|rej|swp|old|lock))$|(^|/)(\.DS_Store|Thumbs\.db|desktop\.ini|\._.*|\.nfs.*)$|(^|/)(__pycache__|\.ipynb_checkpoints)/",
    ),
)
# What a file begins with, whatever its name says; bytes as Latin-1. A pickle's first opcode is PROTO with a protocol of 2 to 5.
MAGIC: tuple[_Kind, ...] = (
    _kind("files.pickle", "a pickle, by its first bytes", r"^\x80[\x02-\x05]|^PK\x03\x04[\s\S]{26,200}/data\.pkl"),
    _kind(
        "files.executable", "a program, by its first bytes", r"^(\x7fELF|MZ(?=[\s\S]{0,62}\x00)|\xca\xfe\xba\xbe|[\xce\xcf]\xfa\xed\xfe)"
    ),
    _kind("files.script", "a script, by its first line", r"^#! ?/"),
    _kind("files.lfs-pointer", "a Git LFS pointer", LFS_POINTER),
)
_HEAD_NBYTES = 256
_NEVER_EMPTY = (".json", ".model", ".jinja")
_PARSED = ("config.json", "generation_config.json", INDEX_NAME, MANIFEST_NAME)  # reported as what cannot be parsed
_ADAPTER_TENSOR = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|base_layer|modules_to_save)(\.|$)")
_AUTO_MAPS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def judge_beside(evidence: Evidence) -> Iterator[Finding]:
    """Judge every file that is no weight file, links of any kind, and adapters among the tensors of a model without a family.

    Args:
        evidence: a folder; nothing is said of a release that is only planned.

    Yields:
        Findings, at most one per file and kind.
    """
    folder = evidence.release.folder
    if folder is None:
        return
    references = _references(folder)
    for name in evidence.release.others:
        if not is_bookkeeping(name) and not (evidence.in_stage and name.startswith(STAGE_FOLDER)):
            yield from _judge_file(folder, name, has_code=bool(references))
    yield from _judge_code(references, evidence.release)
    yield from _judge_links(folder)
    if evidence.expected is None:  # with a family, the inventory names them
        for tensor in evidence.release.stored():
            if _ADAPTER_TENSOR.search(tensor.name):
                yield finding("files.adapter-tensor", tensor.name, expected="merged weights", found=f"in {tensor.file}")


def read_head(path: Path) -> str:
    """Return the first bytes of a file.

    Args:
        path: the file.

    Returns:
        At most _HEAD_NBYTES bytes, as Latin-1.
    """
    with path.open("rb") as file:
        return file.read(_HEAD_NBYTES).decode("latin-1")


def _judge_file(folder: Path, name: str, *, has_code: bool) -> Iterator[Finding]:
    path = folder / name
    nbytes = path.stat().st_size
    if not nbytes and name.endswith(_NEVER_EMPTY) and name not in _PARSED:
        yield finding("files.zero-length", name, expected="content", found="0 bytes")
    if name.endswith(".py") and not any(kind.pattern.search(name) for kind in KINDS):
        if not has_code:
            yield finding("files.script", name, expected="code that an auto_map names", found="code, and no auto_map")
        return
    head = read_head(path)
    kind = next((kind for kind in KINDS if kind.pattern.search(name)), None) or next(
        (kind for kind in MAGIC if kind.pattern.search(head)), None
    )
    if kind is not None:
        yield finding(kind.code, name, expected="safetensors, config, tokenizer and text", found=kind.what)


def _references(folder: Path) -> Mapping[str, str]:
    # Per class that an auto_map names, "module.Class" or "owner/repository--module.Class": the file that names it.
    found: dict[str, str] = {}
    for name in _AUTO_MAPS:
        settings = parse_json_object(folder / name)
        auto_map = settings.get("auto_map") if isinstance(settings, Mapping) else None
        for value in auto_map.values() if isinstance(auto_map, Mapping) else ():
            found |= {each: name for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)}
    return found


def _judge_code(references: Mapping[str, str], release: Release) -> Iterator[Finding]:
    by_file: dict[str, list[str]] = {}
    for reference, name in references.items():
        by_file.setdefault(name, []).append(reference)
    for name, named in by_file.items():
        modules = sorted({reference.rpartition(".")[0] for reference in named})
        absent = [f"{module}.py" for module in modules if "--" not in module and f"{module.replace('.', '/')}.py" not in release.others]
        found = f"code of {name_some(modules)}" + (f"; {name_some(absent)} absent" if absent else "")
        yield finding("files.remote-code", f"{name}: auto_map", expected="an architecture that the loaders know", found=found)


def _judge_links(folder: Path) -> Iterator[Finding]:
    blobs = real_path(folder).parent.parent / "blobs"  # where the hub's cache keeps what its snapshots link to
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink()):
        name = path.relative_to(folder).as_posix()
        if not path.exists():
            yield finding("files.link-broken", name, expected="a file", found=f"a link to {path.readlink()}, which is not there")
        elif not real_path(path).is_relative_to(real_path(folder)) and real_path(path).parent != blobs:
            yield finding("files.link-outside", name, expected="a file of the folder", found=f"a link to {path.readlink()}")
