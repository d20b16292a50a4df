"""How the parts of tensor-parallel ranks join into whole parameters.

The writer says it in `universal_checkpoint_info` of the model states (Megatron-DeepSpeed, AutoTP). Where a save has none, a file
`universal_checkpoint_info.json` in one of its roots says it in the same words. Patterns are regular expressions, matched from the beginning
of a name; a geometric map counts first, then the first key of KEYS with a pattern that matches; a parameter that none matches is stacked
along dim 0, as DeepSpeed does.

Refused: parts that no rule describes (the writer's own list of unsupported ones, maps that cut inside rows or scale), parts whose shapes
contradict their rule, and patterns that could take for ever to match.

Source: deepspeed 0.19.8, checkpoint/ds_to_universal.py (`merge_tp_slices`), checkpoint/affine.py, module_inject/layers.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from reports.errors import FormatError
from tasks.engine.formats.zero_homes import Home, Part, Placement
from tasks.engine.formats.zero_walk import Extent, Shape

AFFINE_VERSION = 1
AFFINE, UNSUPPORTED = "affine_map", "autotp_unsupported_parameter_patterns"
SUB_PARAMS, SUB_WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
VOCABULARY, VOCABULARY_ROWS = "vocabulary_parameter_patterns", "original_vocab_size"
_MAX_REPEATS = 6  # in one pattern; a name is short, so that many cannot hold anybody up
_REPEATED_GROUP = re.compile(r"\)[*+?{]")


@dataclass(frozen=True, slots=True)
class Band:
    """Rows [first, stop) of a rank's part are the box of the whole that begins at `at`."""

    rank: int
    first: int
    stop: int
    at: Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole parameter: its shape, and the bands that tile it. `is_replicated` says that every rank holds it."""

    shape: Shape
    bands: tuple[Band, ...]
    is_replicated: bool = False


Shapes = Sequence[Shape]  # of the ranks' parts
Arrange = Callable[[Shapes], Layout]


def _replicated(shapes: Shapes) -> Layout:
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"replicated parts have shapes {', '.join(map(str, shapes))}")
    return Layout(shapes[0], (_whole(0, shapes[0], (0,) * len(shapes[0])),), is_replicated=True)


def _stacked(shapes: Shapes, dim: int = 0) -> Layout:
    first = shapes[0]
    if dim >= len(first) or any((*shape[:dim], *shape[dim + 1 :]) != (*first[:dim], *first[dim + 1 :]) for shape in shapes):
        raise ValueError(f"parts of shapes {', '.join(map(str, shapes))} do not join along dim {dim}")
    bands, at = [], 0
    for rank, shape in enumerate(shapes):
        bands.append(_whole(rank, shape, tuple(at if d == dim else 0 for d in range(len(shape)))))
        at += shape[dim]
    return Layout((*first[:dim], at, *first[dim + 1 :]), tuple(bands))


def _interleaved(shapes: Shapes, widths: Sequence[Sequence[int]]) -> Layout:
    # Several parameters in one, one behind the other; every rank holds a piece of each. `widths` are rows per sub-parameter and rank.
    whole = _stacked(shapes)
    if any(sum(own[rank] for own in widths) != shape[0] for rank, shape in enumerate(shapes)):
        raise ValueError(f"parts of shapes {', '.join(map(str, shapes))} are not sub-parameters of {[list(own) for own in widths]} rows")
    bands, at, taken = [], 0, [0] * len(shapes)
    for own in widths:
        for rank, rows in enumerate(own):
            bands.append(Band(rank, taken[rank], taken[rank] + rows, (at, *(0 for _ in whole.shape[1:]))))
            taken[rank] += rows
            at += rows
    return replace(whole, bands=tuple(bands))


def _halves(shapes: Shapes) -> Layout:
    return _interleaved(shapes, [[shape[0] // 2 for shape in shapes]] * 2)


# Keys of the writer's record that list patterns, in the order they count → how the parts of a parameter lie
KEYS: Mapping[str, Arrange] = MappingProxyType(
    {
        "tp_replicated_parameter_patterns": _replicated,
        "parameter_to_average_patterns": _replicated,  # averaged by DeepSpeed; here the ranks must agree
        "parameter_with_2_sub_params_cat_dim_0": _halves,
        SUB_PARAMS: _stacked,  # its entries say how, see _Rules
        "parameter_with_row_parallelism_patterns": lambda shapes: _stacked(shapes, 1),
    }
)


class Joiner:
    """Joins the parts of one save's tensor-parallel ranks.

    Args:
        told: the writer's record.
        where: the file that holds it, for messages.

    Raises:
        FormatError: the record is not what DeepSpeed writes.
    """

    def __init__(self, told: Mapping[object, object], where: str) -> None:
        self._where = where
        try:
            self._rules = list(_rules(told))
            self._unsupported = [(_pattern(key), str(why)) for key, why in _mapping(told.get(UNSUPPORTED, {})).items()]
            self._maps = [(_pattern(key), _mapping(value)) for key, value in _maps(_mapping(told.get(AFFINE, {}))).items()]
            self._vocabulary = [_pattern(key) for key in _items(told.get(VOCABULARY, ()))]
            rows = told.get(VOCABULARY_ROWS)
            self._rows = rows if rows is None else _count(rows)
        except (TypeError, KeyError, IndexError, ValueError, re.error) as error:
            raise FormatError(
                f"universal_checkpoint_info is not what DeepSpeed writes: {error}",
                where=where,
                remedy="Save the model without tensor parallelism, or mend the record.",
            ) from None

    def join(self, name: str, parts: Sequence[Home]) -> tuple[Home, tuple[Home, ...]]:
        """Return a whole parameter.

        Args:
            name: its name.
            parts: its part on every rank, in order.

        Returns:
            Its home, and those of its other copies where every rank holds it.

        Raises:
            FormatError: the parts do not join.
        """
        try:
            layout = self._layout(name, [part.shape for part in parts])
            if layout.is_replicated:
                return parts[0], tuple(parts[1:])
            return Home(layout.shape, tuple(_placed(layout, parts))), ()
        except (ValueError, TypeError, KeyError) as error:
            raise FormatError(
                f"{name} of {len(parts)} tensor-parallel ranks: {error}",
                where=self._where,
                remedy="Save the model without tensor parallelism, or as a universal checkpoint.",
            ) from None

    def _layout(self, name: str, shapes: Shapes) -> Layout:
        why = next((why for pattern, why in self._unsupported if pattern.match(name)), None)
        if why is not None:
            raise ValueError(f"the writer could not describe its parts ({why})")
        pieces = next((held for pattern, held in self._maps if pattern.match(name)), None)
        arrange = next((arrange for pattern, arrange in self._rules if pattern.match(name)), _stacked)
        layout = _mapped(pieces, shapes) if pieces is not None else arrange(shapes)
        if self._rows is None or layout.is_replicated or not any(pattern.match(name) for pattern in self._vocabulary):
            return layout
        rows = min(self._rows, layout.shape[0])  # behind them lies padding
        bands = [replace(band, stop=min(band.stop, band.first + max(0, rows - band.at[0]))) for band in layout.bands]
        return replace(layout, shape=(rows, *layout.shape[1:]), bands=tuple(bands))


def _maps(held: Mapping[object, object]) -> Mapping[object, object]:
    if _count(held.get("version", AFFINE_VERSION)) > AFFINE_VERSION:
        raise TypeError(f"{AFFINE} of version {held['version']}, {AFFINE_VERSION} is known")
    return _mapping(held.get("params", {}))


def _rules(told: Mapping[object, object]) -> Iterator[tuple[re.Pattern[str], Arrange]]:
    for key, arrange in KEYS.items():
        if key != SUB_PARAMS:
            yield from ((_pattern(text), arrange) for text in _items(told.get(key, ())))
            continue
        widths = _mapping(told.get(SUB_WIDTHS, {}))
        for entry in map(_mapping, _items(told.get(key, ()))):
            yield from ((_pattern(text), _sub_params(entry, widths.get(text))) for text in _items(entry["patterns"]))


def _sub_params(entry: Mapping[object, object], recorded: object) -> Arrange:
    # How many rows of each sub-parameter every rank holds; before version 0.4 not recorded, and always an equal share.
    if entry["partition_dim"] != 0:
        raise TypeError(f"{SUB_PARAMS} along dim {entry['partition_dim']}")
    told = _items(entry["shape"])[0]

    def arrange(shapes: Shapes) -> Layout:
        if recorded is not None:
            return _interleaved(shapes, [[_count(rows) for rows in _items(own)] for own in _items(recorded)])
        total = sum(shape[0] for shape in shapes)
        sizes = [total // _count(told)] * _count(told) if isinstance(told, int) else [_count(size) for size in _items(told)]
        if sum(sizes) != total or any(size % len(shapes) for size in sizes):
            raise ValueError(f"{total} rows are not sub-parameters of {sizes} in equal shares")
        return _interleaved(shapes, [[size // len(shapes)] * len(shapes) for size in sizes])

    return arrange


def _mapped(held: Mapping[object, object], shapes: Shapes) -> Layout:
    # The writer's geometric map: boxes of the whole that are rows of a rank's part. Those on several ranks are read from the first.
    shape = tuple(_count(n) for n in _items(held["logical_shape"]))
    bands, is_replicated = [], True
    for rank, own in sorted((_count(rank), _mapping(own)) for rank, own in _mapping(held["ranks"]).items()):
        if tuple(_items(own["shard_shape"])) != shapes[rank]:
            raise ValueError(f"rank {rank} holds shape {shapes[rank]}, its map says {own['shard_shape']}")
        for piece in map(_mapping, _items(own["pieces"])):
            holders = {_count(holder) for holder in _items(piece["locations"])}
            is_replicated = is_replicated and holders == set(range(len(shapes))) and tuple(_items(piece["shape"])) == shape
            if min(holders) == rank:
                bands.append(_band(rank, piece, shapes[rank], shape))
    return Layout(shape, tuple(bands), is_replicated)


def _band(rank: int, piece: Mapping[object, object], part: Shape, whole: Shape) -> Band:
    (at, steps), (first, part_steps) = _items(piece["source"]), _items(piece["dest"])
    own = tuple(_count(n) for n in _items(piece["shape"]))
    if piece.get("scale", 1.0) != 1.0:
        raise ValueError("its parts are scaled")
    if (own[1:], _items(steps), _items(part_steps)) != (part[1:], _strides(whole), _strides(part)):
        raise ValueError("its parts are cut inside rows")
    row = _count(first) // max(1, prod(part[1:]))
    return Band(rank, row, row + (own[0] if own else 1), _unravel(_count(at), whole))


def _placed(layout: Layout, parts: Sequence[Home]) -> Iterator[Part]:
    for band in layout.bands:
        home = parts[band.rank]
        row_numel = prod(home.shape[1:])
        shift = tuple(at - (band.first if dim == 0 else 0) for dim, at in enumerate(band.at))
        for part in map(_as_vector, home.parts):
            assert part.extent is not None
            start, stop = max(part.extent.start, band.first * row_numel), min(part.extent.stop, band.stop * row_numel)
            if start < stop:
                extent = replace(part.extent, at=part.extent.at + start - part.extent.start, start=start, stop=stop)
                yield replace(part, extent=extent, placement=Placement(home.shape, shift))


def _as_vector(part: Part) -> Part:
    # A tensor stored whole is a range of its own values.
    if part.extent is not None:
        return part
    tensor = part.tensor
    if tensor.strides != tuple(_strides(tensor.shape)):
        raise ValueError("a part is stored with strides")
    numel = prod(tensor.shape)
    return replace(part, tensor=replace(tensor, shape=(numel,), strides=(1,)), extent=Extent(0, 0, 0, numel))


def _whole(rank: int, shape: Shape, at: Shape) -> Band:
    return Band(rank, 0, shape[0] if shape else 1, at)


def _strides(shape: Shape) -> list[object]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _unravel(flat: int, shape: Shape) -> Shape:
    return tuple(flat // prod(shape[dim + 1 :]) % max(1, shape[dim]) for dim in range(len(shape)))


def _pattern(text: object) -> re.Pattern[str]:
    if not isinstance(text, str):
        raise TypeError(f"a pattern that is a {type(text).__name__}")
    if _REPEATED_GROUP.search(text) or sum(text.count(sign) for sign in "*+{?") > _MAX_REPEATS:
        raise TypeError(f"pattern {text[:60]!r} repeats a group, or has more than {_MAX_REPEATS} repeats")
    return re.compile(text)


def _mapping(value: object) -> Mapping[object, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"a {type(value).__name__} in place of a mapping")
    return value


def _items(value: object) -> list[object]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"a {type(value).__name__} in place of a list")
    return list(value)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r}"[:40] + " in place of a number")
    return value
