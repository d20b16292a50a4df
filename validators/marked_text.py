"""YAML and JSON that owners write, read with the line of everything in it, so that a refusal can name the line.

Data only: no aliases, no tags, and a key stands once. Numbers may be written as 1e-3, which YAML 1.1 takes for text.

Source: PyYAML 6, compose() and the marks of its nodes; YAML 1.2.2, 10.3.2 for floats.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from reports.errors import RequestError

MAX_NBYTES = 1_000_000  # a policy of a hundred waivers has 20 kB
MAX_DEPTH = 30  # of lists and mappings in each other

Loc = tuple[int | str, ...]


class _Loader(yaml.SafeLoader):
    """YAML as data, with the floats of YAML 1.2."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def read_text(path: Path, remedy: str) -> str:
    """Return the text of a file.

    Args:
        path: the file.
        remedy: what to do when it is none.

    Returns:
        Its text.

    Raises:
        RequestError: it is absent, too long or no UTF-8.
    """
    try:
        if path.stat().st_size > MAX_NBYTES:
            raise RequestError(f"has more than {MAX_NBYTES} bytes", where=str(path), remedy=remedy)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot be read as text ({error})", where=str(path), remedy=remedy) from None


def read_marked(text: str, path: Path) -> tuple[yaml.Node | None, object]:
    """Return what a text says, with the nodes that know their lines.

    Args:
        text: YAML; JSON is a part of it.
        path: where it comes from, for messages.

    Returns:
        The root node and its value; None for an empty text.

    Raises:
        RequestError: not YAML, an alias, a tag, or a key that stands twice; names file and line.
    """
    try:
        loader = _Loader(text)
        _refuse_tangles(text, path)
        root = loader.get_single_node()
        _refuse_twice(root, path)
        return root, loader.construct_document(root) if root else None
    except RequestError:  # a ValueError too
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RequestError(f"not YAML: {error.problem or error.context}", where=where, remedy="Mend this line.") from None
    except (yaml.YAMLError, ValueError) as error:  # a character YAML has not; 2027-02-30
        words = (str(error).splitlines() or ["unreadable"])[0]
        raise RequestError(f"not YAML: {words}", where=str(path), remedy="Mend the file.") from None


def find_line(node: yaml.Node | None, loc: Loc) -> int:
    """Return the line of a place in a text; of the deepest node on the way there, where the place is absent.

    Args:
        node: the root.
        loc: keys and indices.

    Returns:
        The line, counted from 1.
    """
    line = node.start_mark.line if node else 0
    for part in loc:
        found = _step(node, part)
        if found is None:
            break
        mark, node = found
        line = mark.line
    return line + 1


def refuse(refused: ValidationError, root: yaml.Node | None, path: Path, allowed: Mapping[tuple[str, ...], Sequence[str]]) -> RequestError:
    """Return what to raise for a text that a model refused: the first place in the file, and where the others are.

    Args:
        refused: what pydantic said.
        root: the text's root node.
        path: where it comes from.
        allowed: keys that may stand at a place; places are keys without indices.

    Returns:
        The error.
    """
    errors = sorted(refused.errors(include_url=False), key=lambda error: find_line(root, error["loc"]))
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part != "[key]")
    said = {"extra_forbidden": "unknown", "missing": "missing"}.get(first["type"], first["msg"].removeprefix("Value error, "))
    others = [str(find_line(root, error["loc"])) for error in errors[1:]]
    more = f" Also wrong: line {', '.join(others[:5])}{', …' if len(others) > 5 else ''}." if others else ""
    names = tuple(part for part in first["loc"] if isinstance(part, str) and part != "[key]")
    keys = next(allowed[names[:cut]] for cut in range(len(names), -1, -1) if names[:cut] in allowed)
    return RequestError(
        f"{place}: {said}" if place else said,
        where=f"{path}:{find_line(root, first['loc'])}",
        remedy=f"Allowed here: {', '.join(keys)}.{more}",
    )


def _step(node: yaml.Node | None, part: int | str) -> tuple[yaml.Mark, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        return next(((key.start_mark, value) for key, value in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int):
        item = node.value[part]
        return item.start_mark, item
    return None


def _refuse_tangles(text: str, path: Path) -> None:
    # While the text is parsed: what is nested without end never gets as far as a node.
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        tangles = {
            "an alias": isinstance(event, yaml.AliasEvent),
            "a tag": getattr(event, "tag", None) is not None,
            f"nested more than {MAX_DEPTH} deep": depth > MAX_DEPTH,
        }
        for what in (what for what, is_so in tangles.items() if is_so):
            assert event.start_mark is not None
            raise RequestError(what, where=f"{path}:{event.start_mark.line + 1}", remedy="Write the plain value.")


def _refuse_twice(node: yaml.Node | None, path: Path) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_twice(item, path)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise RequestError("a key that is no name", where=where, remedy="Write a name.")
        if key.value in seen:
            raise RequestError(f"{key.value!r} stands twice", where=where, remedy="Leave one of them.")
        seen.add(key.value)
        _refuse_twice(value, path)
