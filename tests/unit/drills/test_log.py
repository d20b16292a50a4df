"""The drill's log: what a line lacks is said, and a line that is being written is not read."""

import pytest

from reports.errors import RequestError
from validators.drills.log import read_log

LINE = '{"step": 1, "rank": 0, "loss": 2.5}\n'


def test_a_last_line_that_is_being_written_is_not_read(tmp_path):
    (tmp_path / "log.jsonl").write_text(LINE + '{"step": 2, "ra')
    assert [line.step for line in read_log(tmp_path / "log.jsonl")] == [1]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"rank": 0}\n', "line 2 is no step: step: .*required"),
        ('{"step": "x", "rank": 0}\n', "line 2 is no step: step: .*integer"),
        ("[1]\n", "line 2 is no step: "),
        ('{"step": 2, "ra\n', "line 2 is no JSON"),
    ],
)
def test_what_a_line_lacks_is_said(tmp_path, line, told):
    (tmp_path / "log.jsonl").write_text(LINE + line)
    with pytest.raises(RequestError, match=f"{told}.*docs/drills.md"):
        read_log(tmp_path / "log.jsonl")
