"""Whether the training step that --resume names is there, found without importing it: what it imports may want the ranks' own setting."""

import ast
import importlib.util
import os
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

from reports.errors import RequestError


def refuse_unfound(spec: str) -> None:
    """Raise if the training step is nowhere; nothing of it is imported.

    Args:
        spec: module:function.

    Raises:
        RequestError: no such module on Python's path or in the working directory, where the ranks look; its text is no Python; or it
            names no such function. A module that fills its names while it runs, or is not written in Python, may hold any.
    """
    module, _, function = spec.partition(":")
    remedy = "Give module:function, importable from here."
    found = _find(module)
    if found is None:
        raise RequestError(f"no module named {module!r}", where=f"--resume {spec}", remedy=remedy)
    if not isinstance(found.loader, SourceFileLoader):
        return
    path = Path(found.loader.path)
    try:
        names = _names(ast.parse(path.read_bytes(), path.name))
    except SyntaxError as error:
        raise RequestError(f"{path} is not Python: {error.msg}, line {error.lineno}", where=f"--resume {spec}", remedy=remedy) from error
    if not names & {function, "*", "__getattr__"}:
        raise RequestError(f"{path} defines no {function!r}", where=f"--resume {spec}", remedy=remedy)


def _find(module: str) -> ModuleSpec | None:
    # As an import would, but the packages on the way stay unimported. `__main__` would be this program.
    package, *below = module.split(".")
    found = None if package == "__main__" else importlib.util.find_spec(package) or PathFinder.find_spec(package, [os.getcwd()])
    for depth in range(len(below)):
        if found is None:
            return None
        found = PathFinder.find_spec(".".join((package, *below[: depth + 1])), found.submodule_search_locations or ())
    return found


def _names(tree: ast.Module) -> set[str]:
    # What the module's own statements bind at any depth outside of functions and classes; "*" where only running it tells.
    found: set[str] = set()
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("globals", "exec", "setattr"):
            found.add("*")
        waiting += ast.iter_child_nodes(node)
    return found
