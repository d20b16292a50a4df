"""The classes that `.metadata` of Megatron's torch_dist names beside DCP's own, as inert stand-ins.

Newer cores keep every rank's save plan in it; core 0.14 names Megatron's own plan class, so that torch's loader cannot read the file where
Megatron is not installed. Nothing looks into plans.

Source: torch 2.13, torch/distributed/checkpoint/planner.py; Megatron-LM core 0.14 to main, dist_checkpointing/strategies/torch.py.
"""

from types import MappingProxyType

from tasks.engine.containers.pickles import Allowed, Opaque, state_fields
from tasks.engine.formats.dcp_metadata import METADATA_GLOBALS, MetadataRecord
from tasks.engine.formats.megatron_args import MegatronGlobals


class DistMetadataRecord(MetadataRecord):
    """Stand-in for `Metadata` with Megatron's additions: `mcore_data` is kept, others are left aside."""

    __slots__ = ("mcore_data",)

    def __setstate__(self, state: object) -> None:
        for name, value in state_fields(state):
            if name in MetadataRecord.__slots__ or name == "mcore_data":
                setattr(self, name, value)


_PLANNER = "torch.distributed.checkpoint.planner"
_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
DIST_GLOBALS: Allowed = MegatronGlobals(
    MappingProxyType(
        {
            **METADATA_GLOBALS,
            ("torch.distributed.checkpoint.metadata", "Metadata"): DistMetadataRecord,
            **{(_PLANNER, name): Opaque for name in _PLANS},
        }
    )
)
