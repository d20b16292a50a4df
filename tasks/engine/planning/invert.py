"""A naming's rules read backwards: which tensors a checkpoint of that naming holds of a model, and what of them each published tensor is.

No rule is written twice: an op says which boxes of a source a published tensor is made of, so it says as well what fills those boxes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from reports.errors import UnmappedError, name_some
from tasks.engine.tensors.ops import Piece, Shape
from tasks.engine.tensors.rules import Naming, Rule
from validators.expectation import Expectation

# Names that one tensor has in checkpoints of a naming, and the names of all tensors → those that are written.
ChooseNames = Callable[[Sequence[str], Collection[str]], list[str]]


@dataclass(frozen=True, slots=True)
class Inverse:
    """One tensor of a checkpoint: its shape, and the published tensors that fill boxes of it."""

    name: str
    shape: Shape
    pieces: tuple[Piece, ...]


def invert_naming(
    naming: Naming, expected: Expectation, sizes: Mapping[str, int], num_layers: int, choose: ChooseNames
) -> tuple[Inverse, ...]:
    """Return what a checkpoint of a naming holds of a model.

    Args:
        naming: the rules.
        expected: the published tensors.
        sizes: the model's sizes by name.
        num_layers: of the decoder.
        choose: which of several names of one tensor is written.

    Returns:
        Tensors by the order of the rules, each layer's and expert's one after the other.

    Raises:
        UnmappedError: a published tensor that no rule gives, or that two give.
        ShapeError: shapes that do not fit an op.
    """
    found: dict[tuple[str, ...], list[tuple[str, Rule]]] = {}
    for rule in naming.rows:
        if isinstance(rule, Rule):
            for source, targets in _fill(rule, num_layers, sizes.get("num_experts", 0)):
                if all(target in expected.shapes for target in targets):
                    found.setdefault(targets, []).append((source, rule))
    present = {name for names in found.values() for name, _ in names}
    made = []
    for targets, candidates in found.items():
        rules = dict(candidates)
        for name in choose(list(rules), present):
            op = rules[name].op
            shape = op.source_shape([expected.shapes[target] for target in targets], sizes)
            made.append(Inverse(name, shape, op.pieces(name, shape, targets, sizes)))
    _refuse_incomplete(made, expected, naming)
    return tuple(made)


def _fill(rule: Rule, num_layers: int, num_experts: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    layers = range(num_layers if "{layer}" in rule.source else 1)
    experts = range(num_experts if "{expert}" in rule.source else 1)
    for layer, expert in product(layers, experts):

        def fill(text: str, layer: int = layer, expert: int = expert) -> str:
            return text.replace("{layer}", str(layer)).replace("{expert}", str(expert))

        yield fill(rule.source), tuple(map(fill, rule.targets))


def _refuse_incomplete(made: Sequence[Inverse], expected: Expectation, naming: Naming) -> None:
    targets = [piece.target for inverse in made for piece in inverse.pieces if piece.target]
    lacking = sorted(expected.shapes.keys() - set(targets))
    twice = sorted({target for target in targets if targets.count(target) > 1}) if len(targets) != len(set(targets)) else []
    if lacking or twice:
        what = f"no rule gives {name_some(lacking)}" if lacking else f"two rules give {name_some(twice)}"
        raise UnmappedError(
            f"naming {naming.name} of family {expected.family}: {what}",
            remedy=f"Correct the rules in tasks/engine/families/{expected.family}.py.",
        )
