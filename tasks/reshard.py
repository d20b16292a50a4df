"""Plan what will be written: merge, rename, cast, pack. Reads metadata only; the plan goes into the run folder as JSON."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd
from prefect import task
from prefect.cache_policies import NO_CACHE

from reports.errors import RequestError, name_some
from reports.model import Change, Omission
from tasks.compressed import quantization_config, refuse_absent, why_unloadable
from tasks.engine.families.family import described
from tasks.engine.planning.choose import NONE, Choice, choose_family, expectation_for
from tasks.engine.planning.derive import derive_config
from tasks.engine.planning.plan import ExportPlan, Input, Quantized, plan_to_json
from tasks.engine.planning.planner import PlanRequest, make_plan
from tasks.engine.planning.quantize import QuantizeRule, in_words, split_fusions
from tasks.engine.planning.stated import check_stated
from tasks.engine.tensors.catalog import Catalog
from tasks.engine.writing.sidecars import planned_config, release_dtype
from tasks.forward import describe_architecture
from tasks.gguf_release import plan_file
from tasks.handover import ModelRequest, Planned, SourceRef
from tasks.sources import opened
from validators.expectation import Expectation, expectation_to_json
from validators.tables import PlanTable, format_shape, write_table


@task(name="reshard", cache_policy=NO_CACHE)
def reshard(ref: SourceRef, request: ModelRequest, folder: Path) -> Planned:
    """Plan an export.

    Args:
        ref: the checkpoint.
        request: how it should be released.
        folder: the run folder.

    Returns:
        Where the plan is, and what later steps need to know of it.
    """
    catalog = opened(ref).catalog
    given = read_config(request.assets)
    config = given or ({} if request.family == NONE else derive_config(catalog.stated))
    choice = _choose(request, config, catalog)
    check_stated(catalog.stated, config, choice.dims)
    if request.quantize:
        _check_quantizing(config)
    asked = _plan_request(request, choice)
    plan = make_plan(catalog, asked)
    groups = plan.quantized.groups if plan.quantized is not None else ()
    whole = make_plan(catalog, replace(asked, quantize=())) if groups else plan
    path = _store_plan(plan, folder / "plan.json")
    is_tied = choice.expected.is_tied if choice.expected else bool(config.get("tie_word_embeddings"))
    written, changes = planned_config(config, whole, is_tied=is_tied) if config else ({}, ())
    changes = (*_derived({} if given else config), *changes)
    if plan.quantized is not None and groups:
        written = {**written, "quantization_config": quantization_config(plan.quantized)}
        changes = (*changes, Change("config.json: quantization_config", "absent", _groups_in_words(plan.quantized), "--quantize"))
    unloadable = why_unloadable([group.encoding for group in groups], _expert_encodings(plan, whole, choice.expected)) if groups else ""
    planned = Planned(
        path,
        _store_plan(whole, folder / "plan_whole.json") if groups else path,
        plan.digest,
        write_table(PlanTable, _plan_table(whole), folder / "plan.csv"),
        _store_expectation(expectation_for(plan, choice), folder),
        _store_config(written, folder),
        tuple((file.name, file.nbytes) for file in plan.files),
        plan.nbytes,
        _store_uncast(plan, catalog, request, choice, folder),
        _source_dtype(whole),
        release_dtype(whole),
        changes,
        _omissions(plan, catalog),
        _notes(plan, unloadable),
        unloadable,
    )
    return _as_gguf(planned, plan, choice, written, request, folder) if request.gguf else planned


def _choose(request: ModelRequest, config: Mapping[str, object], catalog: Catalog) -> Choice:
    return choose_family(
        request.family,
        config,
        keep_tied_head=request.keep_tied_head,
        describe=lambda _: describe_unknown(request.assets),
        stored=catalog.tensors if request.like is None else request.like,
    )


def read_config(assets: Path | None, name: str = "config.json") -> Mapping[str, object]:
    """Return a config of a folder.

    Args:
        assets: the folder, or None.
        name: the file.

    Returns:
        The parsed config; empty when there is none.

    Raises:
        RequestError: it is not a JSON object.
    """
    path = assets / name if assets is not None else None
    if path is None or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot be read: {error}", where=str(path), remedy=f"Give a folder with a sound {name}.") from error
    if not isinstance(config, dict):
        raise RequestError("is not a JSON object", where=str(path), remedy=f"Give a folder with a sound {name}.")
    return config


def describe_unknown(assets: Path | None) -> Expectation:
    """Return what transformers' own model of a config holds, for an architecture that no family describes.

    Args:
        assets: folder of config.json.

    Returns:
        Names and shapes; of an untied model the embedding is the first tensor, and the head the last with its shape.
    """
    assert assets is not None  # only asked with a config
    found = describe_architecture(assets)
    kept, alias = found.tied[0] if found.tied else (next(iter(found.shapes), ""), "")
    alike = [name for name, shape in found.shapes.items() if name != kept and shape == found.shapes.get(kept)]
    head = alias or (alike[-1] if alike else "")
    model_type = str(read_config(assets).get("model_type"))
    return described(found.shapes, is_tied=bool(found.tied), embedding=kept, head=head, model_type=model_type)


def _as_gguf(
    planned: Planned, whole: ExportPlan, choice: Choice, config: Mapping[str, object], request: ModelRequest, folder: Path
) -> Planned:
    # One file under GGUF's names in the place of the ordinary plan's, which the source is compared with.
    made = plan_file(whole, request, choice, config, folder)
    return replace(
        planned,
        path=_store_plan(made.plan, folder / "plan_gguf.json"),
        digest=made.plan.digest,
        files=tuple((file.name, file.nbytes) for file in made.plan.files),
        nbytes=made.plan.nbytes,
        uncast=planned.path,
        omissions=(*planned.omissions, *made.omissions),
        notes=_notes(made.plan, ""),
        header=made.header,
    )


def _plan_request(request: ModelRequest, choice: Choice) -> PlanRequest:
    return PlanRequest(
        choice.family,
        choice.dims,
        choice.expected,
        request.dtype,
        request.drops,
        request.keep_tied_head,
        request.max_file_bytes,
        request.keep,
        tuple(QuantizeRule(*rule) for rule in request.quantize),
    )


def _plan_table(plan: ExportPlan) -> pd.DataFrame:
    rows = [
        (t.name, f.name, t.dtype, format_shape(t.shape), t.spec.nbytes, t.op.name, t.encoding, ";".join(_box(b) for b in t.inputs))
        for f, t in plan.tensors()
    ]
    return pd.DataFrame(rows, columns=["name", "file", "dtype", "shape", "nbytes", "op", "encoding", "sources"])


def _box(box: Input) -> str:
    return f"{box.name}[{','.join(f'{o}:{o + n}' for o, n in zip(box.offset, box.shape, strict=True))}]"


def _store_uncast(plan: ExportPlan, catalog: Catalog, request: ModelRequest, choice: Choice, folder: Path) -> Path | None:
    if all(tensor.encoding == "copy" for _, tensor in plan.tensors()):
        return None
    uncast = make_plan(catalog, _plan_request(replace(request, dtype="", quantize=()), choice))
    return _store_plan(uncast, folder / "plan_uncast.json")


def _store_plan(plan: ExportPlan, path: Path) -> Path:
    path.write_text(plan_to_json(plan))
    return path


def _store_expectation(expected: Expectation | None, folder: Path) -> Path | None:
    if expected is None:
        return None
    path = folder / "expected.json"
    path.write_text(expectation_to_json(expected))
    return path


def _store_config(config: Mapping[str, object], folder: Path) -> Path | None:
    if not config:
        return None
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _source_dtype(plan: ExportPlan) -> str:
    nbytes: dict[str, int] = {}
    for _, tensor in plan.tensors():
        dtype = tensor.inputs[0].dtype
        nbytes[dtype] = nbytes.get(dtype, 0) + tensor.spec.numel
    return max(sorted(nbytes), key=lambda dtype: nbytes[dtype], default="")


def _derived(config: Mapping[str, object]) -> tuple[Change, ...]:
    return tuple(Change(f"config.json: {key}", "no config.json", json.dumps(value), "derived from args") for key, value in config.items())


def _check_quantizing(config: Mapping[str, object]) -> None:
    refuse_absent()
    if "quantization_config" in config:
        raise RequestError(
            "says that the model is quantized already",
            where="config.json: quantization_config",
            remedy="Export without --quantize, or from a checkpoint of the unquantized model.",
        )


def _expert_encodings(plan: ExportPlan, whole: ExportPlan, expected: Expectation | None) -> frozenset[str]:
    names = {name for group in (expected.experts if expected else ()) for expert in group.experts for name in expert}
    encodings = {tensor.part.weight: tensor.encoding for _, tensor in plan.tensors() if tensor.part is not None}
    return frozenset(encodings.get(tensor.name, "") for _, tensor in whole.tensors() if tensor.name in names and len(tensor.shape) == 2)


def _groups_in_words(quantized: Quantized) -> str:
    return "; ".join(f"{group.encoding}: {name_some(group.targets)}" for group in quantized.groups)


def _notes(plan: ExportPlan, unloadable: str) -> tuple[str, ...]:
    if plan.quantized is None:
        return ()
    none = () if plan.quantized.groups else ("no weight could be quantized: this release is not quantized",)
    split = split_fusions((tensor for _, tensor in plan.tensors()), plan.quantized)
    return (*none, *in_words(plan.quantized), *split, *((unloadable,) if unloadable else ()))


def _omissions(plan: ExportPlan, catalog: Catalog) -> tuple[Omission, ...]:
    left_out = [Omission(drop.name, drop.because, drop.asked_by) for drop in plan.dropped]
    left_out += [Omission(alias.name, alias.because, "rule") for alias in plan.aliases]
    if catalog.num_state_items:
        left_out.append(Omission(f"training state, {catalog.num_state_items} items", "a release holds weights only", "format"))
    return tuple(left_out)
