"""The finding codes: one table of code, meaning and remedy.

A code is `<check>.<what>`; it never changes its meaning and is never reused. A test asserts that each has a planted fault.
"""

from collections.abc import Mapping
from types import MappingProxyType

from reports.code import Code
from reports.codes_of_drift import CODES_OF_DRIFT
from reports.codes_of_sources import CODES_OF_SOURCES
from reports.drill_codes import DRILL_CODES
from reports.gguf_codes import GGUF_CODES
from reports.model import Finding
from reports.retention_codes import RETENTION_CODES

_EXPORT_AGAIN = "Export again into an empty folder."
_FROM_COMPLETE = "Export again from a complete checkpoint."
_SOURCE = "Look at this tensor in the checkpoint; if it is so there, export another step."
_REPORT = "Do not publish. Export again; if it comes back, report it with the run folder."
_CONFIG = "Use the config.json the model was trained with."
_GENERATION = "Mend generation_config.json."
_TOKENIZER = "Hand in the tokenizer the model was trained with (--assets)."
_UNTRAINED = "Look at this tensor in the checkpoint: it may never have been loaded or trained."
_COPIED = "A rank was read twice, or a layer offset is wrong: export again."
_MAPPING = "The weights are not where the model looks for them: check --family and the source's naming, then export again."

_FILES: dict[str, Code] = {
    "files.none": Code("the folder holds no weight file", _EXPORT_AGAIN),
    "files.malformed": Code("a file cannot be parsed", _EXPORT_AGAIN),
    "files.zero-length": Code("a file has no bytes", "Look for a full disk or a broken upload; export again."),
    "files.truncated": Code("a weight file ends before its last tensor", "Look for a full disk or a broken upload; export again."),
    "files.trailing-bytes": Code("a weight file goes on after its last tensor; strict loaders refuse it", _EXPORT_AGAIN),
    "files.hole": Code("bytes between two tensors belong to none", _EXPORT_AGAIN),
    "files.overlap": Code("two tensors claim the same bytes", _EXPORT_AGAIN),
    "files.size-mismatch": Code("a tensor has not as many bytes as its shape and dtype need", _EXPORT_AGAIN),
    "files.unknown-dtype": Code("a dtype that is no safetensors code we know", "Export to fp32, bf16 or fp16."),
    "files.no-format": Code("the header's metadata lacks `format: pt`; older loaders refuse the file", "Save with metadata format=pt."),
    "files.empty-tensor": Code("a tensor has no elements: a stub, as ZeRO-3 leaves them", "Gather the parameters before saving."),
    "files.name-in-two-files": Code("two files hold a tensor of the same name", "Empty the folder before exporting."),
    "files.index-invalid": Code("the index has no valid weight_map", _EXPORT_AGAIN),
    "files.index-missing": Code("several weight files, or one under an unknown name, and no index", _EXPORT_AGAIN),
    "files.index-shard-missing": Code("the index names a file that is not there", "Copy the missing file, or export again."),
    "files.index-wrong-shard": Code("the index names a file that lacks the tensor", _EXPORT_AGAIN),
    "files.index-unlisted": Code("a stored tensor is not in the index, so no loader reads it", _EXPORT_AGAIN),
    "files.total-size": Code("the index's total_size is not the sum of the tensors' bytes", _EXPORT_AGAIN),
    "files.stray-weights": Code("weights lie beside those the index names; some loaders read both", "Remove the file."),
    "files.lfs-pointer": Code("the pointer that git keeps in place of a large file", "Fetch the file itself: git lfs pull."),
    "files.duplicate-key": Code("a key stands twice in a header, the index or a config; readers choose different ones", _EXPORT_AGAIN),
    "files.pickle": Code("a pickle format, which can run code when loaded", "Remove the file; publish safetensors only."),
    "files.executable": Code("a program: no part of a release", "Remove the file."),
    "files.half-written": Code("what a writer left when it was stopped", "Remove it, and look whether the file it was meant for is whole."),
    "files.adapter": Code("an adapter beside merged weights; loaders put it on top of them", "Remove it, or publish it by itself."),
    "files.adapter-tensor": Code("a tensor under an adapter's name, in a model of no known family", "Merge the adapter first.", "warning"),
    "files.link-broken": Code("a link that leads nowhere", "Copy the file itself."),
    "files.link-outside": Code(
        "a link out of the folder: it breaks, or changes, when the folder is copied", "Copy the file itself.", "warning"
    ),
    "files.remote-code": Code(
        "loading this model runs code that is not the loader's", "Read that code before anyone trusts it.", "warning"
    ),
    "files.script": Code("code that loading does not need", "Remove the file, or name it in auto_map.", "warning"),
    "files.training-state": Code("state of a training run", "Remove it: it is large, and tells of the run.", "warning"),
    "files.other-format": Code("weights in a format that is not judged here", "Publish them by themselves.", "warning"),
    "files.leftover": Code("a leftover of an editor or a system", "Remove the file.", "warning"),
}

_MANIFEST: dict[str, Code] = {
    "manifest.invalid": Code("the manifest is absent or no manifest", _EXPORT_AGAIN),
    "manifest.uncommitted": Code(
        "no commit marker: the export did not finish, or the copy did not", "Copy the whole release, or export again."
    ),
    "manifest.replaced": Code("the manifest is not the one that was committed", _EXPORT_AGAIN),
    "manifest.missing": Code("a file the manifest lists is absent", "Fetch the release again."),
    "manifest.size": Code("a file has not the manifest's size", "The file was changed after the export: fetch it again."),
    "manifest.digest": Code("a file's sha256 is not the manifest's", "The file was changed after the export: fetch it again."),
    "manifest.unlisted": Code("a file that the manifest does not list", "Remove the file: it is no part of what was checked."),
}

_SECRETS: dict[str, Code] = {
    "secrets.credential": Code("a credential in a text file", "Revoke it, then remove it from the file and its history."),
    "secrets.machine-path": Code(
        "a path of somebody's machine or storage in a setting", "Set the field to the model's public name.", "warning"
    ),
}

_INVENTORY: dict[str, Code] = {
    "inventory.missing": Code("a tensor the config implies is absent", _FROM_COMPLETE),
    "inventory.unexpected": Code("a tensor the config does not imply", "Check the config's layer and expert counts, or --drop it."),
    "inventory.twice": Code("a name is stored more than once", _EXPORT_AGAIN),
    "inventory.wrapper-prefix": Code("a name carries a wrapper's prefix, so loaders leave the parameter at random", _EXPORT_AGAIN),
    "inventory.lora-leftover": Code("an adapter's tensor: the adapter was not merged", "Merge the adapter before exporting."),
    "inventory.saved-buffer": Code("a buffer that the model recomputes", "Leave it out: --drop NAME='recomputed buffer'."),
    "inventory.fused-experts": Code("experts under the fused names of a live model; serving engines drop them", _MAPPING),
}

_SHAPES: dict[str, Code] = {
    "shapes.wrong": Code("a tensor has another shape than the config implies", _CONFIG),
    "shapes.transposed": Code("a tensor is transposed", _MAPPING),
    "shapes.vocabulary-short": Code("embedding or head has fewer rows than the vocabulary", _FROM_COMPLETE),
    "shapes.vocabulary-padded": Code("embedding or head has more rows than the vocabulary", "Remove the padding, or set vocab_size to it."),
    "shapes.dtype": Code("a tensor is not in the dtype asked for", _EXPORT_AGAIN),
    "shapes.kept-cast": Code("a tensor that must keep its precision was cast", "Keep it in fp32: router biases lose their order in bf16."),
    "shapes.mixed-dtypes": Code("float tensors differ in dtype and nothing declares it", "Export with one --dtype."),
    "shapes.mixed-source": Code("the source itself mixes float dtypes", "Export with one --dtype if a loader objects.", "warning"),
}

_FINITE: dict[str, Code] = {
    "finite.nonfinite": Code("NaN or infinity among the values", _SOURCE),
    "finite.all-zero": Code("every value is zero: never filled, or lost", _SOURCE),
    "finite.source-zero": Code("every value is zero, in every layer and in the source too", _SOURCE, "warning"),
    "finite.zero-bias": Code("a bias is all zero where others of its role are not, or where it steers routing", _SOURCE, "warning"),
    "finite.constant-outlier": Code("all values are equal, in other layers they are not", _SOURCE),
    "finite.constant": Code("all values are equal in every layer", _SOURCE, "warning"),
}

_TIED: dict[str, Code] = {
    "tied.head-differs": Code("the config ties the head to the embedding, the stored head differs", "Set tie_word_embeddings to false."),
    "tied.head-missing": Code("the config does not tie the head, and no head is stored", "Set tie_word_embeddings as it was trained."),
    "tied.head-is-embedding": Code(
        "the config does not tie the head, yet it equals the embedding", "A trained head was replaced: export again."
    ),
    "tied.source-head-is-embedding": Code(
        "head and embedding are equal in the source too, untied", "Tie them to save the bytes.", "warning"
    ),
    "tied.kept-missing": Code("of a tied pair only the alias is stored; loaders start the embedding at random", _EXPORT_AGAIN),
    "tied.flag-wrong": Code("the config's tie flag is not that of the model exported", "Set tie_word_embeddings as it was trained."),
    "tied.flags-disagree": Code("the tie flags of config and text_config differ; loaders read one or the other", "Set both alike."),
    "tied.flag-nested-only": Code("only text_config has a tie flag; some loaders read the top level", "Set it at both levels.", "warning"),
}

_EXPERTS: dict[str, Code] = {
    "experts.missing": Code("experts of a layer are absent", "An expert-parallel rank was not merged: export again."),
    "experts.unexpected-id": Code("an expert id beyond the config's count", "Check num_experts, or the merge of expert-parallel ranks."),
    "experts.shape": Code("experts of a layer differ in shape", _MAPPING),
    "experts.router-missing": Code("a layer with experts has no router", _FROM_COMPLETE),
    "experts.router-rows": Code("the router has not one row per expert", _CONFIG),
    "experts.router-equal": Code("all rows of a router are equal, so that it chooses no expert", _SOURCE),
    "experts.router-repeats": Code("rows of a router are zero or equal: it cannot tell these experts apart", _SOURCE, "warning"),
    "experts.top-k": Code("more experts per token than there are", _CONFIG),
    "experts.identical": Code("two experts hold the same values", "An expert-parallel rank was read twice: export again."),
    "experts.exchanged": Code("an expert holds another expert's values", _MAPPING),
    "experts.wrong-source": Code("the plan feeds an expert from another expert", _MAPPING),
    "experts.undeclared": Code("expert tensors in a model whose config declares none", _CONFIG),
}

_DUPLICATES: dict[str, Code] = {
    "duplicates.unit": Code("a layer or expert is a copy of another", _COPIED),
    "duplicates.near-unit": Code("a layer or expert is a copy of another but for rounding", _COPIED),
    "duplicates.matrix": Code("a matrix is a copy of the same one in another layer or expert", _COPIED),
    "duplicates.near": Code("nearer to a sibling than training explains", "Look whether the model was grown from copies.", "warning"),
    "duplicates.shared": Code("all layers hold about the same matrix", "Look whether the model shares it by design.", "warning"),
    "duplicates.source": Code("a copy in the source too", "Look whether the model was grown from copies.", "warning"),
}

_ROWS: dict[str, Code] = {
    "rows.zero": Code(
        "rows of tokens the tokenizer produces are zero", "A vocabulary shard was not merged, or padded inside: export again."
    ),
    "rows.zero-reserved": Code(
        "rows of special or reserved tokens are zero; fine-tuning on them gives infinities", "Fill them before others train.", "warning"
    ),
    "rows.block": Code("a block of rows repeats another", "A vocabulary shard was read twice: export again."),
    "rows.equal": Code("tokens share the same row", "Look whether they were added and never trained.", "warning"),
    "rows.source": Code("zero or repeated rows in the source too", _SOURCE, "warning"),
}

_OUTLIERS: dict[str, Code] = {
    "outliers.norms-centred": Code(
        "the norms centre on zero in a family that centres on one", "Add the trainer's 1 to its zero-centred gammas."
    ),
    "outliers.norm-lean": Code(
        "norm weights centre on zero where others do not", "Look whether the trainer keeps them less one, or lost them.", "warning"
    ),
    "outliers.norm-untouched": Code("the norms of a role are all ones, those of others are not", _UNTRAINED, "warning"),
    "outliers.rms": Code("a matrix is much larger or smaller than its siblings", _UNTRAINED, "warning"),
    "outliers.zeros": Code(
        "a part of a matrix or of fused experts is zero, of its siblings none is", "A shard was not merged, or never filled: export again."
    ),
    "outliers.zeros-of-some": Code(
        "many of a role have zeros, the others none", "Look whether these layers were pruned on purpose, or a shard is lost.", "warning"
    ),
    "outliers.source-zeros": Code("a part is zero in the source too, of its siblings none is", _SOURCE, "warning"),
    "outliers.fresh": Code("a matrix looks freshly drawn, its siblings look trained", _UNTRAINED, "warning"),
}

_VALUES: dict[str, Code] = {
    "values.differing": Code("values are not those of the source after the declared mapping and cast", _REPORT),
    "values.exchanged": Code("a tensor holds another tensor's values", _MAPPING),
    "values.duplicated": Code("a tensor holds a copy of another tensor's values", _MAPPING),
    "values.copy-differs": Code(
        "a weight, rounded, is not the copy that the trainer computed with: master and copy have parted, or ranks are mixed up",
        "Export another step; if the trainer changes one of the two on purpose, --skip values=REASON.",
    ),
    "values.not-compared": Code("a stored tensor was not compared with the source", _REPORT),
    "values.partial": Code("only some elements of a tensor were compared", _REPORT),
    "values.flushed": Code("the cast turned too many small values into zero", "Export to bf16 or fp32."),
}

_AGAIN = "Quantize again from the unquantized weights."
_IGNORE = "Make targets and ignore list say what is stored: name the modules as the files do."

_QUANTIZED: dict[str, Code] = {
    "quantized.undeclared": Code("a tensor is quantized, and the config declares no quantization", "Add the quantization_config."),
    "quantized.config-unreadable": Code("the quantization_config makes no sense", "Write it as the quantizer's own library does."),
    "quantized.status": Code(
        "weights are stored quantized, and the config says they are not yet; transformers then takes them for whole ones",
        "Set quantization_status to compressed.",
        "warning",
    ),
    "quantized.not-judged": Code(
        "quantized in a way that is not judged here", "Look at these weights with the quantizer's tools.", "warning"
    ),
    "quantized.nothing": Code("the config declares a quantization, and no tensor is quantized", _IGNORE),
    "quantized.not-quantized": Code("the config wants this weight quantized, and it is stored whole", _IGNORE),
    "quantized.ignored": Code("a weight is quantized though the config ignores it; loaders look for it whole", _IGNORE),
    "quantized.untargeted": Code("a weight is quantized though the config targets it nowhere", _IGNORE),
    "quantized.must-not": Code(
        "a router, a norm or an embedding nobody targeted is quantized", "Add it to the ignore list, and quantize again."
    ),
    "quantized.ignore-unmatched": Code("the ignore list names a module that is not there", _IGNORE),
    "quantized.pattern-unmatched": Code("a pattern of the ignore list matches no module", _IGNORE, "warning"),
    "quantized.part-missing": Code("of a quantized weight, a scale or another part is absent", _AGAIN),
    "quantized.part-unexpected": Code("a quantized weight has a part its scheme does not know, so that loaders drop it", _AGAIN),
    "quantized.dtype": Code("a part is not of the dtype its scheme says", "Check num_bits, type and format of the quantization_config."),
    "quantized.shape": Code(
        "a part has another shape than weight and scheme imply", "Check strategy and sizes of the quantization_config."
    ),
    "quantized.transposed": Code("a part is transposed", _AGAIN),
    "quantized.listed-shape": Code("the shape a weight writes down is not its own", _AGAIN),
    "quantized.scale-nonfinite": Code("a scale is NaN or infinite", _AGAIN),
    "quantized.scale-sign": Code("a scale is zero or negative", _AGAIN),
    "quantized.scale-size": Code(
        "a scale makes weights larger than models have them, as one that is stored inverted does",
        "See whether the format multiplies by what is stored.",
        "warning",
    ),
    "quantized.zero-point": Code("a zero point is out of the range of its bits", _AGAIN),
    "quantized.error": Code(
        "the dequantized weight is further from the source than its encoding explains",
        "Quantize again from the unquantized weights, or leave this one whole.",
    ),
    "quantized.calibrated-error": Code(
        "the dequantized weight is further from the source than rounding explains; calibration may", "Compare the outputs.", "warning"
    ),
    "quantized.not-compared": Code("a quantized weight was not compared with the source", _REPORT),
    "quantized.cache-missing": Code("the config promises scales of the key-value cache, and some are absent", "Calibrate the cache."),
    "quantized.cache-ones": Code("all scales of the key-value cache are one, as when never calibrated", "Calibrate the cache."),
}

_TOKENIZER_CODES: dict[str, Code] = {
    "tokenizer.unreadable": Code("the tokenizer does not load", _TOKENIZER),
    "tokenizer.too-big": Code("the tokenizer makes ids that the embedding has no row for", "Resize the embedding, or use its tokenizer."),
    "tokenizer.special-out-of-range": Code("a special id has no row in the embedding", _CONFIG),
    "tokenizer.special-unknown": Code("a special token is not in the vocabulary", _TOKENIZER),
    "tokenizer.eos-mismatch": Code(
        "config, generation config and tokenizer end on different ids: it never stops", "Set eos_token_id alike."
    ),
    "tokenizer.bos-mismatch": Code("config, generation config and tokenizer begin with different ids", "Set bos_token_id alike."),
    "tokenizer.pad-mismatch": Code("config, generation config and tokenizer pad with different ids", "Set pad_token_id alike.", "warning"),
    "tokenizer.ids-differ": Code("two of the tokenizer's files give a token different ids; loaders read one or the other", _TOKENIZER),
    "tokenizer.specials-differ": Code("two of the tokenizer's files name different special tokens", "Write the same token in both."),
    "tokenizer.padding-differs": Code(
        "two of the tokenizer's files name different padding tokens", "Write the same token in both.", "warning"
    ),
    "tokenizer.max-length": Code("the tokenizer allows more positions than the config", "Check max_position_embeddings.", "warning"),
    "tokenizer.chat-template-lost": Code("chat tokens, but no chat template", "Add chat_template.jinja if it is a chat model.", "warning"),
    "tokenizer.chat-templates-differ": Code(
        "the chat template stands in two files and differs; loaders read one or the other", "Keep chat_template.jinja, remove the other."
    ),
    "tokenizer.chat-template-broken": Code("the chat template does not render", "Mend chat_template.jinja."),
}

_CONFIG_CODES: dict[str, Code] = {
    "config.absent": Code("no config.json: no loader knows what the weights are", _CONFIG),
    "config.model-type": Code("no model_type: no loader knows the architecture", _CONFIG),
    "config.architectures": Code("no architectures: serving engines cannot choose the model class", _CONFIG, "warning"),
    "config.architecture-differs": Code("architectures and model_type name different models; engines run one or the other", _CONFIG),
    "config.spellings": Code("two spellings of a field disagree; loaders read one or the other", "Write the same value in both."),
    "config.layers": Code("num_hidden_layers is not the number of layers stored", _CONFIG),
    "config.hidden": Code("hidden_size is not the embedding's width", _CONFIG),
    "config.vocabulary": Code("vocab_size is not the embedding's row count", _CONFIG),
    "config.heads": Code("heads x head_dim is not what the attention weights have", _CONFIG),
    "config.kv-heads": Code("key-value heads x head_dim is not what the key or value weights have", _CONFIG),
    "config.intermediate": Code("the intermediate size is not that of the feed-forward weights", _CONFIG),
    "config.experts": Code("the number of experts is not what the weights have", _CONFIG),
    "config.rope-spellings": Code(
        "rope_theta and rope_parameters disagree; loaders read one or the other", "Write the same value in both."
    ),
    "config.rope-theta": Code("the RoPE base is not a positive number", _CONFIG),
    "config.rope-one-spelling": Code(
        "only rope_parameters has the RoPE base; transformers 4 falls back to 10000", "Write rope_theta too.", "warning"
    ),
    "config.rope-type": Code("a RoPE type that no loader knows", _CONFIG),
    "config.rope-field-missing": Code("RoPE lacks a field that its type needs", _CONFIG),
    "config.rope-range": Code("a RoPE field is out of range, or contradicts another", _CONFIG),
    "config.activation": Code("an activation that no loader knows", _CONFIG),
    "config.layer-types": Code("layer_types does not name as many layers as there are", _CONFIG),
    "config.expert-groups": Code("expert groups do not divide the experts, or more are chosen than there are", _CONFIG),
    "config.token-id-type": Code("a special id is no whole number", "Write the token's id, not its text."),
    "config.forced-token": Code("generation forces a token that is not in the vocabulary", _GENERATION),
    "config.generation-range": Code("a sampling field is out of range: engines refuse it, or sample nonsense", _GENERATION),
    "config.generation-lengths": Code("generation must be longer than it may be", _GENERATION),
    "config.eps": Code("the norms' epsilon is out of range", _CONFIG),
    "config.max-position": Code("max_position_embeddings is not a positive number", _CONFIG),
    "config.dtype": Code("the config names another dtype than was written", "Set dtype to what was written."),
    "config.dtype-spellings": Code("dtype and torch_dtype disagree; loaders read one or the other", "Write the same value in both."),
}

_LOGITS: dict[str, Code] = {
    "logits.mean-kl": Code("mean KL over its limit", _MAPPING),
    "logits.p95-kl": Code("the 95th percentile of KL is over its limit", _MAPPING),
    "logits.cosine": Code("cosine of the logits under its limit", _MAPPING),
    "logits.top1": Code("the likeliest token differs at too many positions", _MAPPING),
    "logits.nonfinite": Code(
        "a logits metric is NaN or infinite", "Look at the finite check; then whether the source's own logits are numbers."
    ),
    "logits.no-positions": Code("no position was compared", "See why the model could not be run, or give a batch of at least one token."),
}

_SENSITIVITY: dict[str, Code] = {
    "sensitivity.missed": Code(
        "a fault planted into the evidence was caught by no check",
        "Do not rely on this verdict: run the checks that were skipped, and hand in what they need.",
    ),
}

_STATISTICS: dict[str, Code] = {
    "statistics.rule-broken": Code("a tensor breaks a rule of the statistics suite", _SOURCE),
    "statistics.rule-warned": Code("a tensor breaks a rule of the statistics suite that only warns", _SOURCE, "warning"),
}

_RENEW = "Mend the fault, or let the waiver's owner renew it."

_POLICY: dict[str, Code] = {
    "policy.waiver-expired": Code("a waiver's last day is over", _RENEW),
    "policy.waiver-unused": Code("a waiver let nothing pass: a hole in the gate that nobody needs", "Remove the waiver.", "warning"),
    "policy.check-skipped": Code("a check that the policy requires was skipped", "Hand in what it needs."),
    "policy.witnesses": Code("fewer witnesses prove the mapping than the policy wants", "Name another witness: --against, --golden."),
}

_APPROVAL: dict[str, Code] = {
    "approval.changed": Code(
        "while somebody was asked, files that were checked were changed, added or lost",
        "Find out what writes into the staging folder beside the destination, and export again.",
    ),
    "approval.rejected": Code("a person said that this is not to be published", "Mend what they name, and export again."),
    "approval.unanswered": Code("nobody answered in time whether this may be published", "Export again, and answer the form."),
}

CODES: Mapping[str, Code] = MappingProxyType(
    _FILES
    | _MANIFEST
    | _SECRETS
    | _INVENTORY
    | _SHAPES
    | _FINITE
    | _TIED
    | _EXPERTS
    | _DUPLICATES
    | _ROWS
    | _OUTLIERS
    | _VALUES
    | _QUANTIZED
    | dict(GGUF_CODES)
    | _TOKENIZER_CODES
    | _CONFIG_CODES
    | dict(CODES_OF_DRIFT)
    | _LOGITS
    | _SENSITIVITY
    | _STATISTICS
    | _POLICY
    | _APPROVAL
    | dict(CODES_OF_SOURCES)
    | dict(DRILL_CODES)
    | dict(RETENTION_CODES)
)


def finding(code: str, where: str, *, expected: str = "", found: str = "") -> Finding:
    """Return a finding with the severity and remedy of its code.

    Args:
        code: a key of CODES.
        where: tensor, file or field.
        expected: what should have been there.
        found: what was.

    Returns:
        The finding.

    Raises:
        KeyError: no such code.
    """
    row = CODES[code]
    return Finding(code, row.severity, where, expected, found, row.remedy)
