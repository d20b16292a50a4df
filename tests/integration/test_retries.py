"""A file system that does not answer is asked again; nothing else is."""

import errno
import os

import pytest

import tasks.write
from flows.export import export
from flows.requests import ExportRequest
from tests.builders.hf import write_shards
from tests.integration.line import request_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def failing(monkeypatch):
    """Lets the first write of a file fail with an error number; returns how often a write was tried."""
    tried = []
    honest = tasks.write.execute_file

    def fail_with(number):
        def execute(*args, **kwargs):
            tried.append(number)
            if len(tried) == 1:
                raise OSError(number, os.strerror(number))
            return honest(*args, **kwargs)

        monkeypatch.setattr(tasks.write, "execute_file", execute)
        return tried

    return fail_with


def asked(tmp_path):
    write_shards(tmp_path / "source")
    (tmp_path / "base").mkdir()
    return ExportRequest(**request_for(tmp_path / "source", tmp_path / "base", max_file="1GB"))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_file_system_that_fails_once_is_asked_again(tmp_path, failing, number):
    tried = failing(number)
    export(asked(tmp_path))
    assert (tmp_path / "base/out/shardwright.committed").is_file()
    assert len(tried) == 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EISDIR])
def test_what_will_not_pass_is_not_tried_again(tmp_path, failing, number):
    tried = failing(number)
    with pytest.raises(OSError, match=os.strerror(number)):
        export(asked(tmp_path))
    assert len(tried) == 1
    assert not (tmp_path / "base/out").exists()
