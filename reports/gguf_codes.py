"""The finding codes of GGUF files."""

from collections.abc import Mapping
from types import MappingProxyType

from reports.code import Code

_AGAIN = "Export again; if it comes back, report it with the run folder."
_TOKENIZER = "Write both from the same tokenizer."
_METADATA = "Write the file again from the config the model was trained with."

GGUF_CODES: Mapping[str, Code] = MappingProxyType(
    {
        "gguf.architecture": Code("the file names another architecture than the config's", _METADATA),
        "gguf.metadata": Code("a key of the metadata contradicts the config: engines compute another model", _METADATA),
        "gguf.metadata-missing": Code("a key that engines need is absent", _METADATA),
        "gguf.missing": Code("a tensor the config implies is absent", _AGAIN),
        "gguf.head-missing": Code("the config does not tie the head, and no head is stored: engines take the embedding", _AGAIN),
        "gguf.unexpected": Code("a tensor the config does not imply, or under a name that engines do not look for", _AGAIN),
        "gguf.twice": Code("a name is stored more than once", _AGAIN),
        "gguf.shape": Code("a tensor has another shape than the config implies", _METADATA),
        "gguf.type": Code("a vector is not in fp32, as engines want it", _AGAIN),
        "gguf.file-type": Code(
            "the file type is neither the one that most bytes have nor the coarsest", "Set general.file_type to what is stored.", "warning"
        ),
        "gguf.layout": Code("a tensor is off its alignment, overlaps another, or the file ends before it", _AGAIN),
        "gguf.tokenizer": Code("the file's tokenizer is not the one beside it: text becomes other ids", _TOKENIZER),
        "gguf.merges": Code("the file's merges are not those of the tokenizer beside it: text becomes other ids", _TOKENIZER),
        "gguf.token-type": Code(
            "tokens have the wrong type: special ones are not found in text, or ordinary ones are not shown", _TOKENIZER
        ),
        "gguf.cut": Code("the file names another way to cut text than the tokenizer beside it has: text becomes other ids", _TOKENIZER),
        "gguf.special-id": Code("the file begins or ends a text with an id that neither tokenizer nor config names", _TOKENIZER),
        "gguf.around": Code("engines put a token around every text that transformers does not put there, or leave one out", _TOKENIZER),
        "gguf.chat-template": Code(
            "the file's chat template is not the one beside it", "Write the one that is meant in both places.", "warning"
        ),
        "gguf.no-tokenizer": Code(
            "the file holds no tokenizer: engines cannot encode text by themselves", "Hand ids to the engine, or add one.", "warning"
        ),
        "gguf.not-judged": Code(
            "the file, or some tensors of it, are of a kind that is not judged here", "Judge them by other means.", "warning"
        ),
        "gguf_values.differing": Code("values are not those of the source in the stored type", _AGAIN),
        "gguf_values.error": Code("dequantized values are further from the source than the type explains", _AGAIN),
        "gguf_values.unpermuted": Code("rows of queries or keys are in the published order, engines rotate pairs", _AGAIN),
        "gguf_values.exchanged": Code("a tensor holds another tensor's values", _AGAIN),
        "gguf_values.not-compared": Code("a stored tensor was not compared with the source", _AGAIN),
    }
)
