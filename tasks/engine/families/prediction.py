"""Multi-token prediction layers: what lies behind the decoder's layers, and how a family that may have them becomes one that has.

They are published as the layers `model.layers.{num_layers}` and up: a decoder layer, and tensors of their own. Megatron calls them
`mtp.layers.{k}`. A config may promise layers that a checkpoint has not (transformers neither loads nor saves them), so those count that
both the config promises and the checkpoint holds. Their copies of embedding and head are published by some, and not by others.

Source: deepseek-ai/DeepSeek-V3 README_WEIGHTS.md; Megatron-LM core 0.12 to main, megatron/core/transformer/multi_token_prediction.py. Names
and their inverse are tested; no forward pass proves them.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tasks.engine.families.dims import Config, Dims
from tasks.engine.tensors.rules import Drop, Naming, Rule

MEGATRON = "mtp.layers."
# As in families.decoder, which imports the families' module, and that this one.
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COPIES: Mapping[re.Pattern[str], str] = {
    re.compile(r"model\.layers\.\d+\.embed_tokens\.weight"): EMBEDDING,
    re.compile(r"model\.layers\.\d+\.shared_head\.head\.weight"): HEAD,
}
_PROMISED = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a family's prediction layers hold beside a decoder layer's tensors.

    `own` and `copies` are (published name, shape) as in rows, `rules` Megatron's; a `{layer}` counts from the first prediction layer in
    sources, from the first decoder layer in targets. `mark` is the tensor, below the layer, by which they are known.
    """

    own: tuple[tuple[str, tuple[str, ...]], ...]
    copies: tuple[tuple[str, tuple[str, ...]], ...]
    rules: tuple[Rule, ...]
    mark: str = "eh_proj.weight"

    def count(self, config: Config, dims: Dims, stored: Collection[str]) -> int:
        """Return how many prediction layers a checkpoint holds of those its config promises.

        Args:
            config: parsed config.json.
            dims: its sizes.
            stored: names in the checkpoint.

        Returns:
            Layers.
        """
        promised = config.get(_PROMISED)
        for layer in range(promised if type(promised) is int else 0):
            if not {f"model.layers.{dims.num_layers + layer}.{self.mark}", f"{MEGATRON}{layer}.{self.mark}"} & set(stored):
                return layer
        return promised if type(promised) is int else 0


def copies_of_predictions(names: Iterable[str]) -> dict[str, str]:
    """Return which tensors are a prediction layer's copies, and of what.

    Args:
        names: published names.

    Returns:
        Copy → the model's own tensor.
    """
    return {name: of for name in names for pattern, of in _COPIES.items() if pattern.fullmatch(name)}


def numbered(naming: Naming, rules: tuple[Rule, ...], layers: int, dims: Dims) -> Naming:
    """Return Megatron's naming with rules for prediction layers in the place of their drops.

    Args:
        naming: of a family that has them not.
        rules: of Prediction.
        layers: how many there are.
        dims: the model's sizes.

    Returns:
        A naming whose new rules have no placeholder left but what their ops fill.
    """
    kept = tuple(row for row in naming.rows if not (isinstance(row, Drop) and row.source.startswith(MEGATRON)))
    return Naming(naming.name, (*kept, *(rule for layer in range(layers) for row in rules for rule in _fill(row, layer, dims))))


def _fill(rule: Rule, layer: int, dims: Dims) -> Iterator[Rule]:
    experts = range(dims.sizes.get("num_experts", 0)) if "{expert}" in rule.source else (0,)
    for expert in experts:
        source = rule.source.replace("{layer}", str(layer)).replace("{expert}", str(expert))
        at = str(dims.num_layers + layer)
        targets = tuple(target.replace("{layer}", at).replace("{expert}", str(expert)) for target in rule.targets)
        yield Rule(source, targets, rule.op)


def rules_of(rows: tuple[Rule | Drop, ...], prefix: str, to: str, names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return Megatron's rules of a prediction layer.

    Args:
        rows: those of the decoder's layers, which its inner layer repeats.
        prefix: of a decoder layer in their sources.
        to: of a layer in their targets.
        names: its own tensors, Megatron's name below the layer → the published one.

    Returns:
        Rules, under both names of the inner layer.
    """
    own = tuple(Rule(f"{MEGATRON}{{layer}}.{name}", (f"{to}.{target}",)) for name, target in names.items())
    inner = tuple(
        Rule(f"{MEGATRON}{{layer}}.{layer}{row.source.removeprefix(prefix)}", row.targets, row.op)
        for layer in ("transformer_layer", "mtp_model_layer")
        for row in rows
        if isinstance(row, Rule) and row.source.startswith(prefix)
    )
    return (*own, *inner)
