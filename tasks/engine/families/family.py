"""What a family declares, and what follows from it: the expectation and the naming that fits a checkpoint.

A family is data: rows of published names with symbolic shapes, namings, patterns. Sizes are read from config.json by `Dims`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import groupby

from reports.errors import RequestError
from tasks.engine.families.dims import Config, Dims
from tasks.engine.families.prediction import MEGATRON, Prediction, numbered
from tasks.engine.tensors.rules import Drop, Naming, published
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


_COPY = "a prediction layer's copy of the embedding or head"


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
    prediction: Prediction | None = None
    num_predicted: int = 0  # prediction layers of this very model, and which of their copies it stores
    copies: tuple[Row, ...] = ()

    def predicting(self, config: Config, dims: Dims, stored: Collection[str]) -> "Family":
        """Return the family as it is of a model with the prediction layers that a checkpoint holds.

        Args:
            config: parsed config.json.
            dims: its sizes.
            stored: names in the checkpoint.

        Returns:
            The family itself where there are none.
        """
        layers = self.prediction.count(config, dims, stored) if self.prediction else 0
        if not self.prediction or not layers:
            return self
        copies = tuple(Row(*copy) for copy in self.prediction.copies if copy[0].format(layer=dims.num_layers) in stored)
        left_out = [name for name, _ in self.prediction.copies if name not in {row.name for row in copies}]
        names = [name for name, _ in self.prediction.own] + [row.name for row in copies]
        namings = tuple(
            numbered(naming, self.prediction.rules, layers, dims)
            if any(row.source.startswith(MEGATRON) for row in naming.rows)
            else Naming(naming.name, (*naming.rows, *published(names), *(Drop(name, _COPY) for name in left_out)))
            for naming in self.namings
        )
        return replace(self, namings=namings, num_predicted=layers, copies=copies)

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
        rows = (*_expand(self.rows, dims), *self._predicted(dims))
        shapes = {name: tuple(dims.size(d) for d in row.shape) for row, name in rows}
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

    def _predicted(self, dims: Dims) -> Iterator[tuple[Row, str]]:
        own = tuple(Row(*row) for row in self.prediction.own) if self.prediction else ()
        inner = tuple(row for row in self.rows if "{layer}" in row.name)
        for layer in range(dims.num_layers, dims.num_layers + self.num_predicted):
            yield from _layer_rows((*own, *self.copies, *inner), layer, dims)

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
            for layer in range(dims.num_layers + self.num_predicted)
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
            yield from _layer_rows(block, layer, dims)


def _layer_rows(rows: Iterable[Row], layer: int, dims: Dims) -> Iterator[tuple[Row, str]]:
    kinds = ("all", "sparse" if dims.is_sparse(layer) else "dense")
    for row in rows:
        if row.layers in kinds and (not row.when or dims.flag(row.when)):
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
