"""What several of a tokenizer's files say of one thing must be the same: loaders read one file or another. A part of the `tokenizer` check.

Three things are said more than once: a token's id (tokenizer.json with its post-processor, vocab.json, added_tokens.json,
tokenizer_config.json), which token is the special one (tokenizer_config.json, special_tokens_map.json), and the chat template
(chat_template.jinja, chat_template.json, tokenizer_config.json, processor_config.json).

Ids are compared only where tokenizer.json is among them: a SentencePiece model's own ids are shifted by some tokenizers, on purpose.

Sources: tokenizers 0.23 (TemplateProcessing, BertProcessing, RobertaProcessing); transformers' tokenization_utils_base and
processing_utils (file names, `added_tokens_decoder`, named templates).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from reports.errors import name_some
from validators.check import Judgement, judge
from validators.vocabulary import Ids, ids_of, parse_object

Json = Mapping[str, object]

# Code by special token: a wrong padding token is masked in most uses, any other changes what the model reads.
SPECIALS: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "tokenizer.specials-differ",
        "eos_token": "tokenizer.specials-differ",
        "unk_token": "tokenizer.specials-differ",
        "pad_token": "tokenizer.padding-differs",
    }
)
TEMPLATE_SETTINGS = ("tokenizer_config.json", "chat_template.json", "processor_config.json")


def judge_token_files(folder: Path) -> Iterator[Judgement]:
    """Hold a tokenizer's files against each other.

    Args:
        folder: the tokenizer's.

    Yields:
        One judgement per thing that is said more than once.

    Raises:
        FormatError: a file is damaged.
    """
    settings = parse_object(folder / "tokenizer_config.json")
    yield from _judge_specials(settings, parse_object(folder / "special_tokens_map.json"))
    yield from _judge_ids(folder, settings)
    templates = dict(templates_of(folder))
    if len(templates) > 1:
        found = ", ".join(f"{name} ({len(template)} characters)" for name, template in templates.items())
        right = len(set(templates.values())) == 1
        yield judge("tokenizer.chat-templates-differ", "chat_template", right=right, expected="one template", found=found)


def content_of(value: object) -> str | None:
    """Return the text of a special token, however it is written.

    Args:
        value: a text, or an object with `content`.

    Returns:
        The text; None for anything else.
    """
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _judge_specials(settings: Json, special_map: Json) -> Iterator[Judgement]:
    for key, code in SPECIALS.items():
        ours, theirs = content_of(settings.get(key)), content_of(special_map.get(key))
        if ours is not None and theirs is not None:
            expected = f"{ours} (tokenizer_config.json)"
            yield judge(code, f"special_tokens_map.json: {key}", right=ours == theirs, expected=expected, found=theirs)


def _judge_ids(folder: Path, settings: Json) -> Iterator[Judgement]:
    fast = parse_object(folder / "tokenizer.json")
    if not fast:
        return
    standard = ids_of(fast)
    tokens = {index: token for token, index in standard.items()}
    claims = {
        "tokenizer.json: post_processor": dict(_post_processed(fast.get("post_processor"))),
        "vocab.json": parse_object(folder / "vocab.json"),
        "added_tokens.json": parse_object(folder / "added_tokens.json"),
        "tokenizer_config.json: added_tokens_decoder": dict(_decoded(settings.get("added_tokens_decoder"))),
    }
    for where, claimed in claims.items():
        wrong = sorted(token for token, index in claimed.items() if _contradicts(token, index, standard, tokens))
        found = f"{len(wrong)} other: {name_some(f'{token} = {claimed[token]}' for token in wrong)}"
        if claimed:
            yield judge("tokenizer.ids-differ", where, right=not wrong, expected="the ids of tokenizer.json", found=found)


def _contradicts(token: str, index: object, standard: Ids, tokens: Mapping[int, str]) -> bool:
    # A token may be missing from tokenizer.json; its id may then belong to no other.
    if token in standard:
        return standard[token] != index
    return isinstance(index, int) and index in tokens


def _decoded(decoder: object) -> Iterator[tuple[str, object]]:
    for index, token in decoder.items() if isinstance(decoder, Mapping) else ():
        content = content_of(token)
        if content is not None:
            yield content, int(index) if str(index).isdecimal() else index


def _post_processed(processor: object) -> Iterator[tuple[str, object]]:
    # Template processing has {token: {"ids": [...], "tokens": [...]}}, Bert's and Roberta's have "cls" and "sep" as [token, id].
    if not isinstance(processor, Mapping):
        return
    nested = processor.get("processors")
    for each in nested if isinstance(nested, list) else ():
        yield from _post_processed(each)
    named = processor.get("special_tokens")
    for entry in named.values() if isinstance(named, Mapping) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("tokens"), list) and isinstance(entry.get("ids"), list):
            yield from zip(entry["tokens"], entry["ids"], strict=False)
    for pair in (processor.get("cls"), processor.get("sep")):
        if isinstance(pair, list) and len(pair) == 2:
            yield str(pair[0]), pair[1]


def templates_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Find the chat templates in a tokenizer's files.

    Args:
        folder: the tokenizer's.

    Yields:
        File and template, settled; of several named ones, the default.

    Raises:
        FormatError: a file is damaged.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        yield path.name, settle_template(path.read_text(encoding="utf-8"))
    for name in TEMPLATE_SETTINGS:
        template = parse_object(folder / name).get("chat_template")
        if isinstance(template, list):  # several, by name; the one loaders take is called default
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
            template = named.get("default")
        if isinstance(template, str):
            yield name, settle_template(template)


def settle_template(text: str) -> str:
    """Return a chat template without what does not count: space at the end, and the kind of line ends.

    Args:
        text: the template.

    Returns:
        What is compared.
    """
    return "\n".join(text.splitlines()).rstrip()
