"""A fake of Ray."""

import pytest

from tests.server.deploy.ray.fake_ray import FakeRay, install_fake_ray


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return install_fake_ray(monkeypatch)
