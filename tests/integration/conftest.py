"""One Prefect server for all tests that run flows; it takes ten seconds to start."""

import pytest


@pytest.fixture(scope="session")
def prefect_server():
    """A Prefect server with an empty database, for the whole session."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=300):
        yield
