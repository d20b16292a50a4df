"""Which part of a saved state dict is the model, and what its tensors are called without wrappers.

A *path* is an item's place in the nested state dict, one component per level; a model's own dotted names are one component. Trainers save
the model under a key of MODEL_KEYS beside the training state, or (torchtitan) its tensors at the root.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from reports.errors import FormatError, name_some

Path = tuple[str, ...]

# First path component → what it holds. Never a model's tensors.
STATE_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "optim": "optimizer state (torch's state-dict API examples, OLMo-core)",
        "optims": "optimizer states",
        "optimizer": "optimizer state (torchtitan, accelerate)",
        "optimizers": "optimizer states (Composer)",
        "optimizer_state": "optimizer state",
        "optimizer_states": "optimizer states (Lightning)",
        "optimizer_state_dict": "optimizer state",
        "lr_scheduler": "learning rate schedule (torchtitan)",
        "lr_schedulers": "learning rate schedules (Lightning)",
        "scheduler": "learning rate schedule",
        "schedulers": "learning rate schedules (Composer)",
        "sched": "learning rate schedule",
        "opt_param_scheduler": "learning rate and weight decay schedule",
        "dataloader": "data position (torchtitan)",
        "data_loader": "data position",
        "dataset_state": "data position (Composer)",
        "sampler": "data position",
        "rng": "random number state",
        "rng_state": "random number state",
        "rng_states": "random number states",
        "train_state": "step and token counts (torchtitan)",
        "trainer": "trainer's counters",
        "trainer_state": "trainer's counters",
        "progress": "trainer's counters",
        "loops": "trainer's counters (Lightning)",
        "callbacks": "callbacks' state (Lightning, Composer)",
        "timestamp": "trainer's clock (Composer)",
        "metrics": "running metrics",
        "scaler": "loss scale",
        "grad_scaler": "loss scale",
        "ema": "averaged weights, which are not the model trained; export them from a checkpoint that names them the model",
        "extra_state": "trainer's own values",
        "extra": "trainer's own values",
        "args": "command line",
        "config": "run configuration",
        "step": "step count",
        "epoch": "epoch count",
        "iteration": "step count",
        "global_step": "step count",
    }
)

# First path component → who saves a model's state dict under it.
MODEL_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "model": "torch's state-dict API examples, accelerate, OLMo-core, Lightning, Composer",
        "state_dict": "Lightning",
        "model_state_dict": "hand-written trainers",
        "model_state": "hand-written trainers",
        "module": "DeepSpeed-like trainers",
    }
)

# First path component → why there is one more level around model and optimizer.
NEST_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "app": "torch's DCP tutorial: one Stateful around model and optimizer",
        "state": "Composer: model and optimizers under the trainer's state",
        "checkpoint": "hand-written trainers",
    }
)

# Components that wrappers put into names. Source: torch 2.13: distributed/fsdp/_common_utils.py, checkpoint_wrapper.py, _dynamo.
_WRAPPER = re.compile(r"(?:(?<=\.)|^)(?:_fsdp_wrapped_module|_fpw_module|_checkpoint_wrapped_module|_orig_mod)\.")
_LEADING = re.compile(r"^(?:module\.)+")  # DataParallel, DistributedDataParallel
_FLAT = re.compile(r"(?:^|\.)_?flat_param(?:_\d+)?$")  # FSDP1's concatenation of a module's parameters
_NUMBER = re.compile(r"_\d+$")  # optimizer_0


def is_state_key(component: str) -> bool:
    """Return whether a first path component names training state, a trailing `_<number>` aside.

    Args:
        component: a path's first component.

    Returns:
        Whether STATE_KEYS has it.
    """
    return component in STATE_KEYS or base_key(component) in STATE_KEYS


def base_key(component: str) -> str:
    """Return a path's component without a trailing `_<number>`.

    Args:
        component: such as `optimizer_0`.

    Returns:
        `optimizer`.
    """
    return _NUMBER.sub("", component)


def find_model(paths: Collection[Path], where: str) -> Path:
    """Return the path of the model's part.

    Args:
        paths: all items' paths.
        where: the file, for messages.

    Returns:
        The components above the model's own names; empty when they lie at the root beside the training state.

    Raises:
        FormatError: two parts could be the model.
    """
    prefix: Path = ()
    while True:
        depth = len(prefix)
        nested = {path[depth] for path in paths if len(path) > depth + 1 and path[:depth] == prefix}
        models = sorted(nested & MODEL_KEYS.keys())
        if len(models) > 1:
            raise FormatError(
                f"holds {len(models)} parts that could be the model: {name_some(models)}",
                where=where,
                remedy="Save the one to be released by itself.",
            )
        if models:
            return (*prefix, models[0])
        nests = sorted(nested & NEST_KEYS.keys())
        if len(nests) != 1:
            return prefix
        prefix = (*prefix, nests[0])


def name_in_model(path: Path, model: Path) -> str | None:
    """Return what an item is called inside the model, as saved.

    Args:
        path: an item's path.
        model: what `find_model` returned.

    Returns:
        Its dotted name; None for training state.
    """
    rest = path[len(model) :]
    if path[: len(model)] != model or not rest:
        return None
    at_root = not model or model[-1] not in MODEL_KEYS
    return None if at_root and is_state_key(rest[0]) else ".".join(rest)


def strip_wrappers(name: str) -> str:
    """Return a name without the components that FSDP, activation checkpointing, torch.compile and DDP put into it.

    Args:
        name: as saved.

    Returns:
        The name the model class knows.
    """
    while True:
        shorter = _LEADING.sub("", _WRAPPER.sub("", name))
        if shorter == name:
            return name
        name = shorter


def strip_all(names: Iterable[str], where: str) -> dict[str, str]:
    """Return the names without wrappers, and prove that they stay apart and are no flat parameters.

    Args:
        names: as saved, each once.
        where: the file, for messages.

    Returns:
        Name as saved → name without wrappers.

    Raises:
        FormatError: two names become one, or one names a flat parameter.
    """
    stripped: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        short = strip_wrappers(name)
        if _FLAT.search(short):
            raise FormatError(
                f"{name} is a flat parameter (FSDP1 LOCAL_STATE_DICT): the original shapes are in no file",
                where=where,
                remedy="Load it in the training code and save with SHARDED_STATE_DICT or FULL_STATE_DICT.",
            )
        if short in taken:
            raise FormatError(
                f"{taken[short]} and {name} are both {short} without wrapper prefixes",
                where=where,
                remedy="The save holds two copies of one tensor; save it again from the unwrapped model.",
            )
        stripped[name] = short
        taken[short] = name
    return stripped
