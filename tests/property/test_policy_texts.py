"""Whatever a policy file holds, it is read or refused; no other error escapes."""

import contextlib
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from reports.errors import RequestError
from validators.policy_file import default_policy_text, parse_policy

PATH = Path("policy.yaml")
LINES = [
    *(
        "witnesses: 1",
        "required_checks:",
        "  - files",
        "limits:",
        "  F32: {mean_kl: 1e-3}",
        "waivers:",
        "  - code: files.truncated",
        "    owner: Ada",
    ),
    *(
        "    reason: mirror",
        "    expires: 2027-01-31",
        "statistics:",
        "<<: {a: 1}",
        "<<: [1]",
        "? {a: b}",
        "- 1:2:3",
        "!!binary x",
        "!!set {a}",
    ),
    *(
        "1: 1",
        "~: 1",
        "2027-01-01: x",
        "!!timestamp x: 1",
        "--- 2",
        "%YAML 1.1",
        "...",
        "&a x",
        "*a",
        "'",
        '"\\x',
        "|",
        ">",
        "\t",
        "{",
        "]",
    ),
    *(
        "witnesses: 0x",
        "witnesses: 1_0",
        "witnesses: .nan",
        f"witnesses: {'9' * 5000}",
        "witnesses: 1e999",
        "expires: 2027-99-99",
        "!!int x",
        "!!float",
    ),
]


def read_or_refuse(text: str) -> None:
    """Read a policy, or take its refusal."""
    with contextlib.suppress(RequestError):
        parse_policy(text, PATH)


@given(st.text())
def test_any_text(text):
    read_or_refuse(text)


@given(st.lists(st.tuples(st.sampled_from(["", " ", "  "]), st.sampled_from(LINES)), max_size=12))
def test_lines_of_yaml_in_any_order(lines):
    read_or_refuse("\n".join(indent + line for indent, line in lines))


@given(st.data())
def test_the_default_with_a_piece_replaced(data):
    text = default_policy_text()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 40)))
    read_or_refuse(text[:start] + data.draw(st.text(max_size=20)) + text[stop:])
