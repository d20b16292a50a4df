"""Progress of the bytes written: seldom sent, complete at the end, and never a reason to fail."""

import logging

import httpx

import tasks.artifacts
from tasks.artifacts import ProgressArtifact


class Sent:
    """Stands for Prefect's update call; keeps what it was told."""

    def __init__(self, error=None):
        self.percents, self.error = [], error

    def __call__(self, artifact, progress):
        self.percents.append(progress)
        if self.error:
            raise self.error


def test_updates_come_once_a_second_and_once_at_the_end(monkeypatch):
    sent, now = Sent(), [0.0]
    monkeypatch.setattr(tasks.artifacts, "update_progress_artifact", sent)
    progress = ProgressArtifact(None, 1000, lambda: now[0])
    for _ in range(999):
        now[0] += 0.01
        progress.advance(1)
    assert len(sent.percents) == 9
    progress.advance(1)
    progress.advance(1)
    assert sent.percents[-1] == 100.0
    assert len(sent.percents) == 10


def test_a_server_that_does_not_answer_is_named_once_and_never_fails_the_export(monkeypatch, caplog):
    sent, now = Sent(httpx.ConnectError("refused")), [0.0]
    monkeypatch.setattr(tasks.artifacts, "update_progress_artifact", sent)
    progress = ProgressArtifact(None, 10, lambda: now[0])
    with caplog.at_level(logging.WARNING, logger="tasks.artifacts"):
        for _ in range(10):
            now[0] += 5
            progress.advance(1)
    assert len(sent.percents) == 1
    assert [record.getMessage() for record in caplog.records] == ["Progress is no longer shown in Prefect: refused"]
    assert progress.percent() == 100.0


def test_nothing_to_write_is_all_written():
    assert ProgressArtifact(None, 0, lambda: 0.0).percent() == 100.0
