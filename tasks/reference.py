"""What a release is held against beside its source: a folder with the config and tokenizer it should have, or an earlier release."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from prefect import task
from prefect.cache_policies import NO_CACHE

from reports.moment import Moment
from tasks.forward import defaults_of
from tasks.handover import Referred
from tasks.measure import measure
from tasks.reshard import read_config
from validators.expectation import Reference
from validators.release import MANIFEST_NAME
from validators.tables import TensorTable, read_table, write_table


@task(name="read reference", cache_policy=NO_CACHE)
def read_reference(folder: Path, earlier: Path | None, run_folder: Path, workers: int) -> Referred:
    """Look at a reference, and measure the weights of an earlier release.

    Args:
        folder: of config and tokenizer.
        earlier: an earlier release, whose weights are others; None where there is none.
        run_folder: for the table.
        workers: tensors read at a time.

    Returns:
        What was found.

    Raises:
        RequestError: its config is not a JSON object.
    """
    config = read_config(folder)
    read_config(folder, "generation_config.json")
    model_type = config.get("model_type")
    defaults = defaults_of(model_type) if isinstance(model_type, str) else {}
    if earlier is None:
        return Referred(folder, defaults)
    found = measure(earlier, plan_path=None, source_roots=(), workers=workers)
    return Referred(folder, defaults, write_table(TensorTable, found.tensors, run_folder / "earlier.csv"))


def reference_of(referred: Referred) -> Reference:
    """Return a reference as the checks take it.

    Args:
        referred: by the task before.

    Returns:
        With config and table read.
    """
    tensors = read_table(TensorTable, referred.tensors) if referred.tensors else None
    config, generation_config = read_config(referred.folder), read_config(referred.folder, "generation_config.json")
    return Reference(referred.folder, config, generation_config, referred.defaults, tensors)


def is_earlier_release(release: Path, other: Path) -> bool:
    """Return whether the manifests of two folders say that they were exported from different steps.

    Args:
        release: a folder.
        other: another one.

    Returns:
        False where one of them does not say which step it is of.
    """
    ours, theirs = moment_of_release(release).step, moment_of_release(other).step
    return None not in (ours, theirs) and ours != theirs


def moment_of_release(release: Path) -> Moment:
    """Return where in its training run the checkpoint of a release was made, as its manifest says.

    Args:
        release: a folder.

    Returns:
        The moment; nothing in it where the manifest does not say, or there is none.
    """
    source = read_config(release, MANIFEST_NAME).get("source")
    told = source if isinstance(source, Mapping) else {}
    step, tokens = (told.get(name) if type(told.get(name)) is int else None for name in ("step", "consumed_tokens"))
    return Moment(step, tokens)


def weights_of(release: Path) -> Literal["stored", "master"]:
    """Return which of a checkpoint's weights a release was made of, as its manifest says.

    Args:
        release: a folder.

    Returns:
        "stored" where it does not say.
    """
    source = read_config(release, MANIFEST_NAME).get("source")
    return "master" if isinstance(source, Mapping) and source.get("weights") == "master" else "stored"
