"""Sound releases, built once per session."""

import pytest

from tests.builders.releases import MODELS, SoundRelease, build_release


@pytest.fixture(scope="session")
def sound(tmp_path_factory) -> dict[str, SoundRelease]:
    """The sound release of every model, by name."""
    return {name: build_release(name, tmp_path_factory.mktemp(name)) for name in MODELS}
