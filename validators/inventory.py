"""The release holds exactly the tensors the config implies: none missing, none unexpected, none twice.

A name that is not expected is named for what it is where that is known: a wrapper's prefix left on, an adapter that was never merged, a
buffer that a module recomputes, experts under the fused names of a live model. The alias of a tied pair may be there though not expected.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from reports.codes import finding
from reports.model import Finding
from validators.check import Check, Outcome
from validators.expectation import Evidence, Expectation

# What wrappers put into names. Removed anywhere, until nothing changes.
WRAPPERS = (
    "_orig_mod.",  # torch.compile
    "_fsdp_wrapped_module.",  # FSDP1
    "_checkpoint_wrapped_module.",  # activation checkpointing
    "base_model.model.",  # peft
    "module.",  # DistributedDataParallel
)
# What an unexpected name is, by the first pattern that is found in it.
LEFTOVERS: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "inventory.lora-leftover": re.compile(r"\.lora_|\.base_layer\.|\.modules_to_save\."),  # peft layer names
        "inventory.saved-buffer": re.compile(  # rotary tables, causal masks, position ids, TransformerEngine's _extra_state
            r"inv_freq$|\.(cos|sin)_cached$|\.masked_bias$|\.attn\.bias$|\.attention\.bias$|position_ids$|_extra_state$"
        ),
        "inventory.fused-experts": re.compile(r"\.experts\.(gate_up_proj|down_proj)(\.weight)?$"),  # transformers >= 5 in memory
    }
)


def examine(evidence: Evidence) -> Outcome:
    """Compare the names stored (or planned) with those expected.

    Args:
        evidence: headers and expectation.

    Returns:
        Findings, and the number of names compared.
    """
    expected = evidence.expected
    assert expected is not None
    counts = Counter(tensor.name for tensor in evidence.release.stored())
    files = {tensor.name: tensor.file for tensor in evidence.release.stored()}
    required = list(expected.shapes)
    unexpected = sorted(set(counts) - set(required) - optional_names(expected))
    wrapped = {strip_wrappers(name) for name in unexpected}
    missing = [name for name in required if name not in counts and name not in wrapped]
    findings = [
        *(finding("inventory.missing", name, expected=f"shape {expected.shapes[name]}", found="no such tensor") for name in missing),
        *(_name_unexpected(name, files[name], expected) for name in unexpected),
        *_judge_twice(counts),
    ]
    measured = {"expected": len(required), "stored": len(counts), "missing": len(missing), "unexpected": len(unexpected)}
    return Outcome(tuple(findings), len(set(required) | set(counts)), measured)


def optional_names(expected: Expectation) -> frozenset[str]:
    """Return the names that may be stored though they are not expected: aliases of tied pairs.

    Args:
        expected: any expectation.

    Returns:
        Names; none for an untied model.
    """
    return frozenset(alias for _, alias in expected.tied) if expected.is_tied else frozenset()


def strip_wrappers(name: str) -> str:
    """Return a name without what wrappers put into it.

    Args:
        name: any tensor name.

    Returns:
        The name with all WRAPPERS removed, again and again until none is left.
    """
    before = ""
    while before != name:
        before = name
        for wrapper in WRAPPERS:
            name = re.sub(rf"(^|(?<=\.)){re.escape(wrapper)}", "", name)
    return name


def _name_unexpected(name: str, file: str, expected: Expectation) -> Finding:
    stripped = strip_wrappers(name)
    if stripped in expected.shapes:
        return finding("inventory.wrapper-prefix", name, expected=stripped, found=f"in {file}")
    for code, pattern in LEFTOVERS.items():
        if pattern.search(name):
            return finding(code, name, expected="not in a release", found=f"in {file}")
    return finding("inventory.unexpected", name, expected="not in this model", found=f"in {file}")


def _judge_twice(counts: Mapping[str, int]) -> Iterator[Finding]:
    for name, count in counts.items():
        if count > 1:
            yield finding("inventory.twice", name, expected="once", found=f"{count} times")


CHECK = Check("inventory", ("family",), examine)
