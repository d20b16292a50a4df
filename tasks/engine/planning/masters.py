"""Weights out of the optimizer: a catalog whose tensors are the fp32 masters instead of the model's low-precision ones.

Masters are taken for all tensors or for none: one that lacks its master, and is not stored in high precision itself, is refused by name. A
copy of a weight on another rank is no copy of its master, so copies of tensors that were exchanged are not compared.
"""

import hashlib
from dataclasses import replace

from reports.errors import RequestError, name_some
from tasks.engine.formats.optimizer_state import slot_key
from tasks.engine.tensors.catalog import MASTER, Catalog, SourceTensor

_HIGH = frozenset({"F32", "F64"})
_MASTERS_ALREADY = frozenset({"zero", "universal"})  # formats whose tensors are masters


def take_masters(catalog: Catalog) -> Catalog:
    """Return a catalog of the same checkpoint whose tensors are the optimizer's masters.

    Args:
        catalog: as its reader made it.

    Returns:
        The same tensors by name; a note says how many were taken. The catalog itself where its tensors are masters already, or all fp32.

    Raises:
        RequestError: the optimizer's masters are not there, or not for every tensor.
    """
    if catalog.format in _MASTERS_ALREADY:
        return catalog
    tensors: dict[str, SourceTensor] = {}
    lacking = []
    for name, stored in catalog.tensors.items():
        master = catalog.state_tensors.get(slot_key(MASTER, name))
        if master is not None and master.shape == stored.shape:
            tensors[name] = master
        elif stored.dtype in _HIGH:
            tensors[name] = stored
        else:
            lacking.append(name)
    if lacking:
        why = f" ({'; '.join(catalog.notes)})" if catalog.notes else ""
        raise RequestError(
            f"the optimizer's masters of {len(lacking)} of {len(catalog.tensors)} tensors cannot be told: {name_some(lacking)}{why}",
            where=f"--weights {MASTER}",
            remedy="Export the stored weights (--weights stored), or save the optimizer in a layout that names its parameters.",
        )
    taken = {name for name, tensor in tensors.items() if tensor is not catalog.tensors[name]}
    if not taken:
        return replace(catalog, notes=(*catalog.notes, "weights are stored in fp32, so there are no other masters to take"))
    kept = f"; {len(tensors) - len(taken)} are stored in fp32 themselves" if len(taken) < len(tensors) else ""
    return replace(
        catalog,
        tensors=tensors,
        state_tensors={key: held for key, held in catalog.state_tensors.items() if key.removeprefix(f"{MASTER}/") not in taken},
        digest=hashlib.sha256(f"{catalog.digest} {MASTER}".encode()).hexdigest(),
        replicas=tuple(copy for copy in catalog.replicas if copy.fqn not in taken),
        notes=(*catalog.notes, f"weights are the optimizer's fp32 masters of {len(taken)} tensors{kept}"),
        weights=MASTER,
    )
