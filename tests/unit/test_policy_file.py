"""A policy file says what is allowed, is refused with its line, and its default reads as the product's own policy."""

import json
import re
from pathlib import Path

import pytest

from reports.codes import CODES
from reports.errors import RequestError
from reports.model import Waiver
from validators.checks import CHECKS
from validators.policy import LIMITS, Policy
from validators.policy_file import default_policy_text, parse_policy, read_policy
from validators.suite import DEFAULT_SUITE

PATH = Path("policy.yaml")
WAIVER = {"code": "files.truncated", "owner": "Ada", "reason": "mirror", "expires": "2027-01-31"}


def refusal(text: str, path: Path = PATH) -> RequestError:
    """Why a policy is refused."""
    with pytest.raises(RequestError) as caught:
        parse_policy(text, path)
    return caught.value


def waiver(**changes: object) -> str:
    """A policy of one waiver; None leaves a key out."""
    row = {key: value for key, value in {**WAIVER, **changes}.items() if value is not None}
    return "waivers:\n  -\n" + "".join(f"    {key}: {json.dumps(value)}\n" for key, value in row.items())


def says_the_same(one: Policy, other: Policy) -> bool:
    """Whether two policies differ in nothing but where they are written."""
    return [getattr(one, name) for name in SAID] == [getattr(other, name) for name in SAID]


SAID = ("required", "witnesses", "limits", "suite", "waivers")


def test_default_text_reads_as_the_default_policy():
    assert says_the_same(parse_policy(default_policy_text(), PATH), Policy())


def test_default_text_names_every_check_and_every_limit():
    text = default_policy_text()
    assert [check.name for check in CHECKS if not re.search(rf"\b{check.name}\b", text)] == []
    commented = re.search(r"^# limits:\n(?:#   .*\n)+", text, re.MULTILINE)
    assert commented is not None
    written = re.sub(r"^# ", "", commented[0], flags=re.MULTILINE)
    assert parse_policy(written, PATH).limits == LIMITS


def test_the_waiver_in_the_default_text_can_be_uncommented():
    text = default_policy_text()
    shown = text[text.index("# waivers:") : text.rindex("waivers: []")]
    read = parse_policy(re.sub(r"^# ", "", shown, flags=re.MULTILINE), PATH)
    assert [(w.subject in CODES, w.expires) for w in read.waivers] == [(True, "2027-01-31")]


@pytest.mark.parametrize("text", ["", "\n", "# only a comment\n", "{}"])
def test_a_policy_that_says_nothing_is_the_default(text):
    assert says_the_same(parse_policy(text, PATH), Policy())


def test_what_is_written_is_read_with_its_places():
    policy = parse_policy("witnesses: 1\nrequired_checks:\n  - files\n  - logits\nlimits:\n  BF16: {mean_kl: 2e-3}\n" + waiver(), PATH)
    assert (policy.required, policy.witnesses) == (frozenset({"files", "logits"}), 1)
    assert policy.limits == {**LIMITS, "BF16": {**LIMITS["BF16"], "mean_kl": 0.002}}
    assert policy.waivers == (Waiver("files.truncated", "*", "Ada", "mirror", "2027-01-31", "policy.yaml:9"),)
    assert policy.places == {"witnesses": "policy.yaml:1", "files": "policy.yaml:3", "logits": "policy.yaml:4"}


@pytest.mark.parametrize("number", ["2e-3", "2.0e-3", "0.002", "2E-03"])
def test_a_limit_may_be_written_as_any_float(number):
    assert parse_policy(f"limits: {{F32: {{mean_kl: {number}}}}}", PATH).limits["F32"]["mean_kl"] == 0.002


@pytest.mark.parametrize("expires", ["2027-01-31", '"2027-01-31"'])
def test_a_day_may_be_quoted(expires):
    text = f"waivers: [{{check: files, owner: Ada, reason: mirror, expires: {expires}}}]"
    assert parse_policy(text, PATH).waivers[0].expires == "2027-01-31"


# text, line, words of the refusal, what is allowed there
REFUSED = {
    "unknown_key": ("witnesses: 0\nrequired: [files]\n", 2, "required: unknown", "required_checks, witnesses, limits, statistics, waivers"),
    "unknown_check": (
        "required_checks:\n  - files\n  - shape\n",
        3,
        "no check 'shape'; there are files, manifest, secrets",
        "required_checks",
    ),
    "unknown_row": ("limits:\n  F32: {mean_kl: 1}\n  FP4: {mean_kl: 1}\n", 3, "limits.FP4", "F32, F16, BF16"),
    "unknown_metric": ("limits:\n  F32:\n    mean_kld: 1\n", 3, "limits.F32.mean_kld", "mean_kl, p95_kl, cosine, top1"),
    "negative_limit": ("limits:\n  F32:\n    mean_kl: -1\n", 3, "greater than or equal to 0", "mean_kl"),
    "limit_of_infinity": ("limits:\n  F32:\n    mean_kl: .inf\n", 3, "finite number", "mean_kl"),
    "limit_of_text": ("limits:\n  F32:\n    mean_kl: small\n", 3, "valid number", "mean_kl"),
    "limit_of_truth": ("limits:\n  F32:\n    mean_kl: yes\n", 3, "valid number", "mean_kl"),
    "top1_in_percent": ("limits:\n  F32:\n    top1: 99\n", 3, "less than or equal to 1", "mean_kl"),
    "witnesses_as_text": ("witnesses: two\n", 1, "witnesses", "required_checks"),
    "a_list": ("- files\n", 1, "dictionary", "required_checks"),
    "no_owner": ("witnesses: 0\n" + waiver(owner=None), 4, "waivers.0.owner: missing", "check, code, where, owner, reason, expires"),
    "empty_reason": (waiver(reason=" "), 5, "one line of text", "reason"),
    "owner_of_two_lines": (waiver(owner="Ada\nnot accepted: all"), 4, "one line of text", "owner"),
    "not_a_day": (waiver(expires="soon"), 6, "valid date", "expires"),
    "no_subject": (waiver(code=None), 3, "either check or code", "check, code"),
    "two_subjects": (waiver(check="files"), 3, "either check or code", "check, code"),
    "unknown_code": (waiver(code="files.truncateds"), 3, "no code 'files.truncateds'; files has files.none", "code"),
    "code_of_no_check": (waiver(code="digest"), 3, "docs/faults.md", "code"),
    "a_warnings_code": (waiver(code="finite.constant"), 3, "a warning turns no verdict", "code"),
    "the_policys_own_code": (waiver(code="policy.waiver-expired"), 3, "cannot be waived", "code"),
    "the_policy_itself": (waiver(code=None, check="policy"), 6, "no check 'policy'", "check"),
    "a_key_twice": ("witnesses: 1\nlimits: {}\nwitnesses: 0\n", 3, "'witnesses' stands twice", "one of them"),
    "an_alias": ("limits: &all {}\nwaivers: *all\n", 2, "an alias", "the plain value"),
    "not_yaml": ("witnesses: 1\nlimits: {\n", 3, "not YAML", "Mend"),
    "a_tag": ("witnesses: !!python/object/apply:os.system ['true']\n", 1, "a tag", "plain value"),
}


@pytest.mark.parametrize(("text", "line", "words", "allowed"), REFUSED.values(), ids=REFUSED)
def test_a_bad_policy_is_refused_with_its_line(text, line, words, allowed):
    refused = refusal(text)
    assert refused.where == f"policy.yaml:{line}"
    assert words in refused.what
    assert allowed in refused.remedy


@pytest.mark.parametrize("text", ["waivers: [{check: files, expires: 2027-02-30}]", "a: \x07", "[" * 100_000, "? [a]\n: 1"])
def test_what_yaml_cannot_say_is_refused_without_a_traceback(text):
    assert "policy.yaml" in refusal(text).where


def test_all_wrong_lines_are_named_and_the_first_is_explained():
    refused = refusal("witnesses: -1\nlimits: {X: {}}\nrequired_checks: [nothing]\n")
    assert refused.where == "policy.yaml:1"
    assert "Also wrong: line 2, 3." in refused.remedy


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"#" * 1_000_001], ids=["absent", "binary", "huge"])
def test_a_file_that_is_no_text_is_refused(tmp_path, content):
    path = tmp_path / "policy.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError, match="policy init"):
        read_policy(path)


def test_a_suite_lies_beside_its_policy(tmp_path):
    (tmp_path / "ours.json").write_text(DEFAULT_SUITE.read_text())
    (tmp_path / "policy.yaml").write_text("statistics: ours.json\n")
    assert read_policy(tmp_path / "policy.yaml").suite == DEFAULT_SUITE.read_text()


def test_an_absent_suite_is_refused_at_the_policys_line(tmp_path):
    refused = refusal("witnesses: 0\nstatistics: ours.json\n", tmp_path / "policy.yaml")
    assert refused.where.endswith("policy.yaml:2")
    assert str(tmp_path / "ours.json") in refused.what


def test_the_examples_of_the_page_are_a_policy_and_its_suite(tmp_path):
    page = (Path(__file__).parents[2] / "docs/policy.md").read_text(encoding="utf-8")
    policy, suite = re.search(r"```yaml\n(.*?)```", page, re.DOTALL), re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert policy is not None
    assert suite is not None
    (tmp_path / "policy.yaml").write_text(policy[1])
    (tmp_path / "statistics.json").write_text(suite[1])
    read = read_policy(tmp_path / "policy.yaml")
    assert (read.suite, len(read.waivers), read.limits["BF16"]["mean_kl"]) == (suite[1], 1, 5e-4)
