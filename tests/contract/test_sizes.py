"""The house's sizes: one idea a file, one level of abstraction a function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES, FUNCTION_LINES = 400, 50
# Option declarations: the command line's signatures are tables, one option a line.
DECLARATIONS = {"flows/cli.py": {"export"}, "flows/gate_command.py": {"gate"}, "flows/drill_commands.py": {"drill"}}
SOURCES = sorted(p for room in ("flows", "tasks", "validators", "reports", "tests") for p in (ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    assert text.count("\n") <= FILE_LINES, name
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in DECLARATIONS.get(name, ()):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < FUNCTION_LINES, f"{name}: {node.name}"
