"""What a finished folder of weights shows: what its config implies, its digests, its values, its logits against recorded ones."""

import re
from collections import Counter
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from reports.errors import ShapeError, name_some
from tasks.digests import digest_all
from tasks.engine.planning.choose import NONE, choose_family
from tasks.forward import ForwardError
from tasks.handover import Compared, Described
from tasks.logits_line import Subject, compare, not_compared
from tasks.reshard import describe_unknown
from validators.check import has_tokenizer
from validators.expectation import Expectation, expectation_from_json, expectation_to_json
from validators.gguf_file import coarsest_type
from validators.quantized_names import expect_stored
from validators.release import Release, open_release
from validators.shapes import whole_tensors

# Classes with a head over the vocabulary; others hold other names.
_IS_CAUSAL = re.compile(r"CausalLM|LMHead|ConditionalGeneration")


@task(name="describe release", cache_policy=NO_CACHE)
def describe_release(folder: Path, family: str, run_folder: Path) -> Described:
    """Read a release's headers and config, and derive what it should hold.

    Args:
        folder: the release.
        family: "auto", "none" or a family's name.
        run_folder: for the stored expectation.

    Returns:
        What was found. A config that no family understands leaves `expected` None, with the reason.

    Raises:
        RequestError: no such family, or not the config's.
    """
    release = open_release(folder)
    stored = release.by_name()
    expected, reason = _expect(release, folder, family, frozenset(stored))
    expected = expect_stored(expected, release) if expected else None
    path = run_folder / "expected_as_stored.json" if expected else None  # the planner writes the model's own beside it
    if path is not None and expected is not None:
        path.write_text(expectation_to_json(expected))
    nbytes: Counter[str] = Counter()
    for tensor in whole_tensors(release):
        nbytes[tensor.dtype] += tensor.stop - tensor.start
    dtype = max(sorted(nbytes), key=lambda code: nbytes[code], default="")
    holds_head = expected is not None and expected.head in stored
    nbytes_all = sum(release.weight_files().values())
    may = expected.may_keep_fp32 if expected else frozenset()
    kept = tuple(sorted(name for name in may if name in stored and stored[name].dtype == "F32"))
    return Described(folder, path, reason, dtype, holds_head, bool(release.config), nbytes_all, kept, tuple(sorted(stored)))


def _expect(release: Release, folder: Path, family: str, stored: frozenset[str]) -> tuple[Expectation | None, str]:
    if family == NONE:
        return None, "--family none"
    if not release.config:
        return None, "no config.json"
    classes = release.config.get("architectures")
    if isinstance(classes, list) and classes and not any(_IS_CAUSAL.search(str(name)) for name in classes):
        return None, f"{name_some(map(str, classes))} is no causal language model"
    try:
        choice = choose_family(family, release.config, keep_tied_head=False, describe=lambda _: describe_unknown(folder), stored=stored)
        if choice.family is None or choice.dims is None or choice.expected is None:
            return choice.expected, ""
        holds_head = choice.expected.is_tied and any(alias in stored for _, alias in choice.expected.tied)
        return choice.family.expectation(choice.dims, keep_tied_head=holds_head), ""
    except ShapeError as error:
        return None, f"config.json does not describe a model: {error}"


@task(name="digest files", cache_policy=NO_CACHE)
def digest_files(folder: Path, workers: int) -> dict[str, str]:
    """Hash the weight files of a release.

    Args:
        folder: the release.
        workers: files read at a time.

    Returns:
        sha256 in hex, by file name.
    """
    return digest_all(folder, open_release(folder).weight_files(), workers)


@task(name="compare recorded logits", cache_policy=NO_CACHE)
def compare_recorded(described: Described, run_folder: Path, golden: Path, memory: int) -> Compared:
    """Run a release and hold its logits against recorded ones, without any other reference.

    Args:
        described: the release.
        run_folder: for scratch space that is removed again.
        golden: recorded logits.
        memory: bytes that the model may take.

    Returns:
        The comparisons.

    Raises:
        FormatError: the golden file cannot be this model's.
    """
    folder = described.folder
    expected = expectation_from_json(described.expected.read_text()) if described.expected else None
    stored = open_release(folder)
    subject = Subject(
        release=folder,
        merged=folder,
        source_format="no checkpoint",
        source_roots=(),
        source_dtype=described.dtype,
        gguf=coarsest_type(stored.ggufs[0]) if stored.is_gguf else "",
        release_dtype=described.dtype,
        is_moe=bool(expected and expected.experts),
        golden=golden,
        tokenizer=folder if has_tokenizer(folder) else None,
        memory_limit=memory,
        scratch=run_folder / "scratch",
    )
    try:
        found = compare(subject)
    except ForwardError as error:
        return Compared((not_compared(subject, str(error)),))
    return Compared(found.comparisons, found.witnesses, found.reason)
