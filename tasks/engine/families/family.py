"""What a family declares, and what follows from it: the expectation and the naming that fits a checkpoint.

A family is data: rows of published names with symbolic shapes, namings, patterns. Sizes are read from config.json by `Dims`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby

from reports.errors import RequestError
from tasks.engine.families.dims import Config, Dims
from tasks.engine.tensors.rules import Naming
from validators.expectation import Expectation, ExpertGroup


@dataclass(frozen=True, slots=True)
class Row:
    """One published tensor: its name with placeholders, its shape as names of `Dims` sizes, and when it exists.

    `when` names a Dims flag. `layers` is "all", "dense" or "sparse".
    """

    name: str
    shape: tuple[str, ...]
    when: str = ""
    layers: str = "all"


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How an MoE layer is published: the router, and one expert's tensors."""

    router: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConfigKeys:
    """Where config.json keeps a family's sizes, where that differs from Llama's keys, and what keys left out mean.

    `hidden_multiples` gives a size as a multiple of the hidden size.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int | bool] = field(default_factory=dict)
    hidden_multiples: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """One model family. `namings` are tried in order; the first is the published one.

    `ignore` are the linear layers that no quantizer touches, as compressed-tensors writes them: names, or `re:` patterns. `not_linear`
    says why none can be quantized, "" where they can.
    """

    name: str
    model_types: tuple[str, ...]
    rows: tuple[Row, ...]
    namings: tuple[Naming, ...]
    embedding: str
    head: str
    config: ConfigKeys = ConfigKeys()
    experts: ExpertNames | None = None
    keep_fp32: tuple[str, ...] = ()
    may_keep_fp32: tuple[str, ...] = ()  # that other writers leave in fp32 as well; a release may
    ignore: tuple[str, ...] = ("lm_head",)
    not_linear: str = ""

    def dims(self, config: Config) -> Dims:
        """Return the model's sizes.

        Args:
            config: parsed config.json.

        Returns:
            The sizes.

        Raises:
            RequestError: a size is missing or makes no sense.
        """
        keys = self.config
        return Dims.read(config, keys.keys, keys.defaults, keys.hidden_multiples, where=f"config.json ({self.name})")

    def expectation(self, dims: Dims, *, keep_tied_head: bool = False) -> Expectation:
        """Return what a release of these sizes holds, in the model's order.

        Args:
            dims: the model's sizes.
            keep_tied_head: whether a tied head is written as well.

        Returns:
            Names, shapes, ties and experts.
        """
        shapes = {name: tuple(dims.size(d) for d in row.shape) for row, name in _expand(self.rows, dims)}
        if dims.is_tied and not keep_tied_head:
            shapes.pop(self.head, None)
        keep, may_keep = (
            frozenset(name for name in shapes for pattern in patterns if fnmatchcase(name, pattern))
            for patterns in (self.keep_fp32, self.may_keep_fp32)
        )
        return Expectation(
            self.name,
            shapes,
            dims.is_tied,
            ((self.embedding, self.head),),
            self._groups(dims),
            self.embedding,
            self.head,
            keep,
            may_keep_fp32=may_keep,
        )

    def _groups(self, dims: Dims) -> tuple[ExpertGroup, ...]:
        if self.experts is None:
            return ()
        names = self.experts
        return tuple(
            ExpertGroup(
                layer,
                names.router.format(layer=layer),
                tuple(tuple(t.format(layer=layer, expert=e) for t in names.tensors) for e in range(dims.size("num_experts"))),
            )
            for layer in range(dims.num_layers)
            if dims.is_sparse(layer)
        )

    def naming(self, sources: Iterable[str]) -> Naming:
        """Return the naming that takes most of a checkpoint's tensors; the earlier one where two tie.

        Args:
            sources: the checkpoint's tensor names.

        Returns:
            The naming. What it does not take is the planner's to report.
        """
        names = list(sources)
        return min(self.namings, key=lambda naming: len(naming.unmatched(names)))


def _expand(rows: tuple[Row, ...], dims: Dims) -> Iterator[tuple[Row, str]]:
    # Rows stand in the model's order; a run of layer rows is written layer by layer.
    for per_layer, run in groupby((row for row in rows if not row.when or dims.flag(row.when)), key=lambda row: "{layer}" in row.name):
        if not per_layer:
            yield from ((row, row.name) for row in run)
            continue
        block = list(run)
        for layer in range(dims.num_layers):
            kinds = ("all", "sparse" if dims.is_sparse(layer) else "dense")
            for row in block:
                if row.layers in kinds:
                    yield from ((row, name) for name in _fill(row.name, layer, dims))


def _fill(name: str, layer: int, dims: Dims) -> Iterator[str]:
    if "{expert}" not in name:
        yield name.format(layer=layer)
        return
    for expert in range(dims.size("num_experts")):
        yield name.format(layer=layer, expert=expert)


def described(names: Mapping[str, tuple[int, ...]], *, is_tied: bool, embedding: str, head: str, model_type: str) -> Expectation:
    """Return the expectation of an architecture without a family, as transformers' meta-device model describes it.

    Args:
        names: shape per parameter, in the model's order.
        is_tied: the config's tie flag.
        embedding: name of the input embedding.
        head: name of the output projection.
        model_type: config.json's model_type.

    Returns:
        An expectation whose family is `auto:<model_type>`.

    Raises:
        RequestError: no names.
    """
    if not names:
        raise RequestError(f"transformers describes no parameter of model type {model_type!r}", remedy="Use --family none.")
    kept = {name: shape for name, shape in names.items() if not (is_tied and name == head)}
    return Expectation(f"auto:{model_type}", kept, is_tied, ((embedding, head),), embedding=embedding, head=head)
