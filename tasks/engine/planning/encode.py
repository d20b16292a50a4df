"""Third planning step: which dtype each target is written in."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from reports.errors import EncodingError
from tasks.engine.planning.plan import TensorPlan
from tasks.engine.planning.renames import Draft
from validators.expectation import FLOATS

CASTABLE = frozenset({"F64", "F32", "F16", "BF16"})  # fp8 values mean nothing without their scales


@dataclass(frozen=True, slots=True)
class DtypePolicy:
    """The dtype asked for ("" keeps the source's) and the patterns of names a cast leaves alone."""

    dtype: str = ""
    keep: tuple[str, ...] = ()

    def keeps(self, name: str) -> bool:
        """Return whether a cast leaves this tensor alone.

        Args:
            name: a released tensor.

        Returns:
            True when a pattern matches.
        """
        return any(fnmatchcase(name, pattern) for pattern in self.keep)


def plan_encodings(drafts: Sequence[Draft], policy: DtypePolicy) -> tuple[TensorPlan, ...]:
    """Give every target its dtype. Integers and booleans are never cast.

    Args:
        drafts: targets.
        policy: what was asked for.

    Returns:
        Targets without a place yet, in the same order.

    Raises:
        EncodingError: a cast of a quantized source is asked for, or one target's inputs differ in dtype.
    """
    planned = []
    for draft in drafts:
        dtypes = {source.dtype for source in draft.inputs}
        if len(dtypes) > 1:
            raise EncodingError(f"is fed by tensors of dtypes {sorted(dtypes)}", where=draft.name, remedy="Export from another step.")
        (source,) = dtypes
        cast = bool(policy.dtype) and source in FLOATS and source != policy.dtype and not policy.keeps(draft.name)
        if cast and source not in CASTABLE:
            raise EncodingError(
                f"is stored as {source}, which has no meaning without its scales", where=draft.name, remedy="Use --dtype source."
            )
        dtype = policy.dtype if cast else source
        planned.append(TensorPlan(draft.name, draft.shape, dtype, draft.inputs, draft.op, "cast" if cast else "copy"))
    return tuple(planned)
