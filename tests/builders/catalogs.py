"""Catalogs made by hand: each tensor is one fragment, or fragments of equal rows."""

from tasks.engine.families.family import Family
from tasks.engine.planning.planner import PlanRequest
from tasks.engine.tensors.catalog import Catalog, SourceTensor, TableBuilder

Shape = tuple[int, ...]
LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}
_L = "model.layers.0"
LLAMA_SHAPES: dict[str, Shape] = {
    "model.embed_tokens.weight": (10, 8),
    f"{_L}.input_layernorm.weight": (8,),
    f"{_L}.post_attention_layernorm.weight": (8,),
    f"{_L}.self_attn.q_proj.weight": (8, 8),
    f"{_L}.self_attn.k_proj.weight": (4, 8),
    f"{_L}.self_attn.v_proj.weight": (4, 8),
    f"{_L}.self_attn.o_proj.weight": (8, 8),
    f"{_L}.mlp.gate_proj.weight": (12, 8),
    f"{_L}.mlp.up_proj.weight": (12, 8),
    f"{_L}.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
    "lm_head.weight": (10, 8),
}


def catalog_of(shapes: dict[str, Shape], dtypes: dict[str, str] | None = None, *, rows: int = 0, records_shapes: bool = True) -> Catalog:
    """A catalog of F32 tensors (or `dtypes`), each in fragments of `rows` rows where that is not 0."""
    builder, tensors = TableBuilder(), {}
    for name, shape in shapes.items():
        first = builder.nrows
        step = rows if rows and shape else (shape[0] if shape else 1) or 1
        for start in range(0, shape[0] if shape else 1, step):
            offset = (start, *[0] * (len(shape) - 1)) if shape else ()
            extent = (min(step, shape[0] - start), *shape[1:]) if shape else ()
            builder.add(offset, extent, "part.bin", 0, 0)
        dtype = (dtypes or {}).get(name, "F32")
        tensors[name] = SourceTensor(name, shape if records_shapes else None, dtype, first, builder.nrows)
    return Catalog("fake", "/ckpt", 7, tensors, builder.build(), (), "digest", 0)


def request_of(family: Family, config: dict[str, object], **changed: object) -> PlanRequest:
    """A request for a family's release."""
    dims = family.dims(config)
    expected = family.expectation(dims, keep_tied_head=bool(changed.get("keep_tied_head")))
    return PlanRequest(family, dims, expected, **changed)
