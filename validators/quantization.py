"""What a release says of its quantization, and which of its tensors are parts of quantized weights. No check of its own.

Read are compressed-tensors' `config_groups` and the `fp8` method (DeepSeek's blocks, or one scale per tensor). Other methods are recognised
by name, and not judged. A weight counts as quantized by what is stored, never by what is declared: the `quantized` check holds one
against the other.

Sources: compressed-tensors 0.20.1, quantization/quant_config.py, quant_args.py and utils/match.py; transformers 5.24, quantizers/.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from validators.layouts import (
    CACHE_SUFFIXES,
    DECLARING_FILES,
    LAYOUT_OF_FORMAT,
    MAIN_SUFFIXES,
    SUFFIXES_AROUND,
    TELLING_SUFFIXES,
    LayoutName,
    Scheme,
)
from validators.release import Release, StoredTensor

NOT_COMPRESSED = frozenset({"dense", "fakequant"})  # weights stored as they were, to be quantized when loaded
_FIELDS = ("quantization_config", "compression_config")  # the second until compressed-tensors 0.6
_UNNAMED = frozenset({"load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit"})
_QUANTIZED_DTYPES = frozenset({"F8_E4M3", "F8_E5M2", "I8", "U8"})
# Modules of which another class than Linear is beyond doubt, by the last part of their names.
EMBEDDINGS = frozenset({"embed_tokens", "wte", "wpe", "word_embeddings", "tok_embeddings", "embed_in"})
_ENDLESS = re.compile(r"\([^()]*[+*][^()]*\)[+*{]")  # a repeated group that holds a repetition
_HELD: Mapping[tuple[LayoutName, str], range] = MappingProxyType(  # the bits that a layout holds of a kind
    {("plain", "int"): range(1, 9), ("plain", "float"): range(8, 9), ("packed", "int"): range(1, 9)}
)
_COMPRESSED = "compressed"
_LINEAR = "Linear"  # the class that is targeted nearly always


@dataclass(frozen=True, slots=True)
class Group:
    """Modules of one scheme. `targets` are names, `re:` patterns and classes; `scheme` is None where weights stay as they are."""

    targets: tuple[str, ...]
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """One weight that is stored in parts, by suffix. `scheme` is None where the config gives it none."""

    module: str
    parts: Mapping[str, StoredTensor]
    scheme: Scheme | None

    @property
    def name(self) -> str:
        """What the weight is called when it is not quantized."""
        return f"{self.module}.weight"

    @property
    def main(self) -> StoredTensor | None:
        """The part with the values, None when it is lost."""
        return next((self.parts[suffix] for suffix in MAIN_SUFFIXES if suffix in self.parts), None)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization of a release. `weights` is by the name the weight has when it is not quantized.

    `method` is "" where the config declares none. `unjudged` says why it is not judged, "" where it is; `unreadable` what cannot be
    understood in it. `cache` are the scales of the key-value cache, `has_cache` whether the config promises them. `status` is how far the
    config says the quantization went, "" where it says nothing. `encoded` are the names of all tensors that mean nothing by themselves.
    """

    method: str = ""
    groups: tuple[Group, ...] = ()
    ignored: tuple[str, ...] = ()
    unjudged: str = ""
    unreadable: str = ""
    has_cache: bool = False
    status: str = ""
    weights: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    cache: Mapping[str, StoredTensor] = field(default_factory=dict)
    encoded: frozenset[str] = frozenset()

    @property
    def is_compressed(self) -> bool:
        """Whether the config says that weights are stored quantized, or says nothing of it."""
        return self.status in ("", _COMPRESSED)

    @property
    def aside(self) -> frozenset[str]:
        """Scales, zero points and the like: what is encoded and holds no weight's values."""
        mains = {weight.main.name for weight in self.weights.values() if weight.main is not None}
        return self.encoded - mains

    def is_ignored(self, module: str) -> bool:
        """Return whether the config leaves a module out.

        Args:
            module: its name.

        Returns:
            Whether a pattern of its ignore list matches.
        """
        return module in self.ignored or any(self.matches(pattern, module) for pattern in self.ignored if not self.is_plain(pattern))

    def is_plain(self, pattern: str) -> bool:
        """Return whether a pattern means one module, of exactly its name.

        Args:
            pattern: of the ignore list.

        Returns:
            Whether it does.
        """
        return _MATCHERS.get(self.method, matches_name) is matches_name and not pattern.startswith("re:")

    def matches(self, pattern: str, module: str) -> bool:
        """Return whether a pattern means a module, as the method's loader understands patterns.

        Args:
            pattern: of the ignore list.
            module: a module's name.

        Returns:
            Whether it does.
        """
        return _MATCHERS.get(self.method, matches_name)(pattern, module)

    def group_of(self, module: str) -> Group | None:
        """Return the group that a module belongs to, ignored or not.

        Args:
            module: its name.

        Returns:
            The first whose targets name it, else the first that targets its class; None for none.
        """
        named = (group for group in self.groups if any(matches_name(target, module) for target in group.targets))
        kind = "Embedding" if module.rpartition(".")[2] in EMBEDDINGS else _LINEAR
        return next(named, None) or next((group for group in self.groups if kind in group.targets), None)


@dataclass(frozen=True, slots=True)
class _Declared:
    # A quantization_config as it was understood.
    groups: tuple[Group, ...] = ()
    ignored: tuple[str, ...] = ()
    unjudged: str = ""
    has_cache: bool = False
    status: str = ""


class _UnreadableError(ValueError):
    # What a quantization_config says makes no sense.
    pass


def read_quantization(release: Release) -> Quantization:
    """Return what a release says of its quantization, and what is stored of it.

    Args:
        release: headers and config.

    Returns:
        The quantization; one without weights for a release that has none.
    """
    stored, settings = _parts_by_module(release.stored()), _settings(release)
    if settings is None and not stored:
        return Quantization()
    declared, unreadable, method = _Declared(), "", ""
    if settings is not None:
        method = str(settings.get("quant_method") or ("compressed-tensors" if "config_groups" in settings else "unnamed"))
        try:
            _refuse_unnamed(release)
            declared = _PARSERS.get(method, _parse_unknown)(settings)
        except (_UnreadableError, re.error) as error:
            unreadable = str(error)
    said = Quantization(method, declared.groups, declared.ignored, declared.unjudged, unreadable, declared.has_cache, declared.status)
    return _with_stored(said, stored, release)


def _with_stored(said: Quantization, stored: Mapping[str, Mapping[str, StoredTensor]], release: Release) -> Quantization:
    weights: dict[str, QuantizedWeight] = {}
    cache: dict[str, StoredTensor] = {}
    encoded: set[str] = set()
    for module, parts in stored.items():
        encoded |= {tensor.name for suffix, tensor in parts.items() if suffix in SUFFIXES_AROUND}
        cache |= {tensor.name: tensor for suffix, tensor in parts.items() if suffix in CACHE_SUFFIXES or _is_cache_output(module, suffix)}
        if any(_is_telling(suffix, tensor) for suffix, tensor in parts.items()):
            group = said.group_of(module)
            kept = {suffix: tensor for suffix, tensor in parts.items() if not suffix.endswith("bias")}
            weights[f"{module}.weight"] = QuantizedWeight(module, kept, group.scheme if group else None)
    encoded |= {tensor.name for weight in weights.values() for tensor in weight.parts.values()} | set(cache)
    if said.unjudged:  # bitsandbytes puts its parts below the weight's own name
        encoded |= {tensor.name for tensor in release.stored() if tensor.name.partition(".weight.")[0] + ".weight" in weights}
    return replace(said, weights=weights, cache=cache, encoded=frozenset(encoded))


def encoded_names(release: Release) -> frozenset[str]:
    """Return the tensors that mean nothing by themselves: parts of quantized weights, and scales.

    Args:
        release: headers and config.

    Returns:
        Names; none for a release whose config declares no quantization.
    """
    return read_quantization(release).encoded if _settings(release) is not None else frozenset()


def _settings(release: Release) -> Mapping[str, object] | None:
    for name in _FIELDS:
        found = _declared_at(release, name)
        if found is not None:
            return found if isinstance(found, Mapping) else {}
    return next(({"quant_method": method} for name, method in DECLARING_FILES.items() if name in release.others), None)


def _declared_at(release: Release, name: str) -> object:
    text = release.config.get("text_config")
    levels = (release.config, text if isinstance(text, Mapping) else {})
    return next((level[name] for level in levels if level.get(name) is not None), None)


def _refuse_unnamed(release: Release) -> None:
    # No loader guesses the method; bitsandbytes' first configs told it by a field of their own.
    said = _declared_at(release, _FIELDS[0])
    if said is not None and not isinstance(said, Mapping):
        raise _UnreadableError(f"it is {type(said).__name__}, not an object")
    if said is not None and not said.get("quant_method") and _UNNAMED.isdisjoint(said):
        raise _UnreadableError("it names no quant_method")


def _parts_by_module(stored: Iterable[StoredTensor]) -> Mapping[str, dict[str, StoredTensor]]:
    # Only modules with a part of some kind: an ordinary release gives none.
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for tensor in stored:
        module, _, suffix = tensor.name.rpartition(".")
        modules[module][suffix] = tensor
    marks = TELLING_SUFFIXES | SUFFIXES_AROUND | CACHE_SUFFIXES
    return {
        module: parts
        for module, parts in modules.items()
        if not marks.isdisjoint(parts) or any(_is_telling(suffix, tensor) for suffix, tensor in parts.items())
    }


def _is_telling(suffix: str, tensor: StoredTensor) -> bool:
    return suffix in TELLING_SUFFIXES or (suffix == "weight" and tensor.dtype in _QUANTIZED_DTYPES)


def _is_cache_output(module: str, suffix: str) -> bool:
    # Until 2025 the cache's scales were those of what k_proj and v_proj put out.
    return suffix == "output_scale" and module.endswith((".k_proj", ".v_proj"))


def matches_name(pattern: str, module: str) -> bool:
    """Return whether a pattern means a module, as compressed-tensors understands patterns.

    Args:
        pattern: a name, or `re:` and a regular expression for its beginning.
        module: a module's name.

    Returns:
        Whether it does.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module


def _matches_part(pattern: str, module: str) -> bool:
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return module.endswith(pattern) or re.match(rf"(?:{pattern}){boundary}", module) is not None


_MATCHERS: Mapping[str, Callable[[str, str], bool]] = MappingProxyType(
    {"compressed-tensors": matches_name, "fp8": _matches_part, "fbgemm_fp8": _matches_part}
)


def _parse_compressed(settings: Mapping[str, object]) -> _Declared:
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping):
        raise _UnreadableError("config_groups is not an object")
    common = str(settings.get("format") or "")
    if common in NOT_COMPRESSED:
        return _Declared(unjudged=f"format {common!r}: weights are stored as they were")
    parsed = tuple(_parse_group(name, group, common) for name, group in groups.items())
    cache = settings.get("kv_cache_scheme")
    has_cache = isinstance(cache, Mapping) and cache.get("dynamic") is not True
    status = str(settings.get("quantization_status") or "").lower()
    return _Declared(parsed, _texts("ignore", settings.get("ignore")), has_cache=has_cache, status=status)


def _parse_group(name: str, group: object, common: str) -> Group:
    if not isinstance(group, Mapping):
        raise _UnreadableError(f"{name} is not an object")
    targets = _texts(f"{name}.targets", group.get("targets"))
    weights, inputs = group.get("weights"), group.get("input_activations")
    if weights is None:
        return Group(targets, None)
    if not isinstance(weights, Mapping):
        raise _UnreadableError(f"{name}.weights is not an object")
    form = str(group.get("format") or common)
    layout = LAYOUT_OF_FORMAT.get(form)
    if layout is None:
        return Group(targets, Scheme("", form))
    kind, bits = str(weights.get("type") or "int"), weights.get("num_bits", 8)
    if type(bits) is not int or bits not in _HELD.get((layout, kind), ()):
        raise _UnreadableError(f"{name}.weights: {bits} bits of type {kind!r} in format {form!r}")
    has_scale = isinstance(inputs, Mapping) and not inputs.get("dynamic", False)
    return Group(targets, Scheme(layout, form, kind, bits, _parse_block(name, weights), weights.get("symmetric") is not False, has_scale))


def _parse_block(name: str, weights: Mapping[str, object]) -> tuple[int, int]:
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if size is not None and (type(size) is not int or size < -1):
        raise _UnreadableError(f"{name}.weights.group_size is {size!r}")
    said = strategy or ("tensor" if size is None else "channel" if size == -1 else "group")
    if said == "group" and (size is None or size < 1):
        raise _UnreadableError(f"{name}.weights: groups of size {size!r}")
    if said == "block":
        return _two_sizes(f"{name}.weights.block_structure", weights.get("block_structure"))
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size or 0)}
    if said not in blocks:
        raise _UnreadableError(f"{name}.weights.strategy is {said!r}, known are {', '.join(blocks)}, block")
    return blocks[str(said)]


def _parse_fp8(settings: Mapping[str, object]) -> _Declared:
    sizes = settings.get("weight_block_size")
    layout: LayoutName = "fp8 tensors" if sizes is None else "fp8 blocks"
    block = (0, 0) if sizes is None else _two_sizes("weight_block_size", sizes)
    ignored = _texts("modules_to_not_convert", settings.get("modules_to_not_convert") or settings.get("ignored_layers"))
    is_static = sizes is None and settings.get("activation_scheme") == "static"
    scheme = Scheme(layout, layout, "float", 8, block, has_input_scale=is_static)
    return _Declared((Group((_LINEAR,), scheme),), ignored)


def _parse_unknown(settings: Mapping[str, object]) -> _Declared:
    return _Declared(unjudged=f"quant_method {str(settings.get('quant_method'))!r} is known by name at most")


def _two_sizes(where: str, value: object) -> tuple[int, int]:
    found = value.split("x") if isinstance(value, str) else value
    if not isinstance(found, Sequence) or len(found) != 2 or not all(str(n).isdecimal() and int(n) > 0 for n in found):
        raise _UnreadableError(f"{where} is {value!r}, not two sizes")
    return int(found[0]), int(found[1])


def _texts(where: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise _UnreadableError(f"{where} is not a list of names")
    for text in value:
        if _ENDLESS.search(text):
            raise _UnreadableError(f"{where}: {text} repeats what repeats, and can take forever to match")
        re.compile(text.removeprefix("re:"))
    return tuple(value)


_PARSERS: Mapping[str, Callable[[Mapping[str, object]], _Declared]] = MappingProxyType(
    {"compressed-tensors": _parse_compressed, "fp8": _parse_fp8, "fbgemm_fp8": _parse_fp8}
)
