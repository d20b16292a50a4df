"""Progress of the bytes written: seldom sent, complete at the end, and never a reason to fail."""

import logging
import uuid

import httpx
import pytest

import tasks.artifacts
from tasks.artifacts import ProgressArtifact


class Sent:
    """Stands for Prefect's calls; keeps what it was told."""

    def __init__(self):
        self.percents, self.error = [], None

    def create(self, progress, key, description):
        self.percents.append(progress)
        return uuid.UUID(int=1)

    def update(self, artifact, progress):
        self.percents.append(progress)
        if self.error:
            raise self.error


@pytest.fixture
def sent(monkeypatch):
    calls = Sent()
    monkeypatch.setattr(tasks.artifacts, "create_progress_artifact", calls.create)
    monkeypatch.setattr(tasks.artifacts, "update_progress_artifact", calls.update)
    return calls


def test_updates_come_once_a_second_and_once_at_the_end(sent):
    now = [100.0]
    progress = ProgressArtifact(clock=lambda: now[0])
    progress.start(1000)
    for _ in range(1000):
        now[0] += 0.01
        progress.advance(1)
    progress.stop()
    assert 10 <= len(sent.percents) <= 12
    assert (sent.percents[0], sent.percents[-1]) == (0.0, 100.0)
    assert sent.percents == sorted(sent.percents)


def test_what_stops_early_shows_the_share_it_reached(sent):
    progress = ProgressArtifact()
    progress.start(1000)
    progress.advance(250)
    progress.stop()
    progress.stop()
    assert sent.percents == [0.0, 25.0]


def test_a_second_phase_starts_from_nothing(sent):
    progress = ProgressArtifact()
    for total in (10, 40):
        progress.start(total)
        progress.advance(10)
        progress.stop()
    assert sent.percents == [0.0, 100.0, 0.0, 25.0]


def test_more_bytes_than_announced_stay_at_a_hundred(sent):
    progress = ProgressArtifact()
    progress.start(10)
    progress.advance(99)
    progress.stop()
    assert sent.percents[-1] == 100.0


def test_nothing_to_write_is_all_written(sent):
    progress = ProgressArtifact()
    progress.start(0)
    progress.stop()
    assert sent.percents == [0.0, 100.0]


def test_a_server_that_does_not_answer_is_named_once_and_never_fails_the_export(sent, caplog):
    now = [0.0]
    progress = ProgressArtifact(clock=lambda: now[0])
    progress.start(10)
    sent.error = httpx.ConnectError("refused")
    with caplog.at_level(logging.WARNING, logger="tasks.artifacts"):
        for _ in range(10):
            now[0] += 5
            progress.advance(1)
        progress.stop()
    assert len(sent.percents) == 2
    assert [record.getMessage() for record in caplog.records] == ["Progress is no longer shown in Prefect: refused"]
    assert progress.percent() == 100.0
