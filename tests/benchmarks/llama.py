"""Names and shapes of a Llama model without grouped queries, for the benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama:
    """Sizes of a model."""

    hidden: int
    intermediate: int
    heads: int
    vocab: int

    def layer(self) -> dict[str, tuple[int, ...]]:
        """One layer's tensors."""
        h, i = self.hidden, self.intermediate
        attention = {f"self_attn.{x}_proj.weight": (h, h) for x in "qkvo"}
        mlp = {"mlp.gate_proj.weight": (i, h), "mlp.up_proj.weight": (i, h), "mlp.down_proj.weight": (h, i)}
        return attention | mlp | {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}

    def outer(self) -> dict[str, tuple[int, ...]]:
        """The tensors outside layers."""
        table = (self.vocab, self.hidden)
        return {"model.embed_tokens.weight": table, "model.norm.weight": (self.hidden,), "lm_head.weight": table}

    def shapes(self, layers: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model."""
        return self.outer() | {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in self.layer().items()}

    def config(self, layers: int) -> dict[str, object]:
        """What config.json says of the sizes."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_hidden_layers": layers,
            "vocab_size": self.vocab,
            "tie_word_embeddings": False,
        }
