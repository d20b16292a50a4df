"""Sound releases, built once per session."""

import pytest

from tests.builders.quantized import build_all
from tests.builders.releases import SoundRelease


@pytest.fixture(scope="session")
def sound(tmp_path_factory) -> dict[str, SoundRelease]:
    """The sound release of every model, by name."""
    return build_all(tmp_path_factory.mktemp("sound"))
