"""Fixtures of the store's tests."""

import pytest

from jaxctx.store.objects import open_objects
from tests.jaxctx.store.builders import MemoryObjects


@pytest.fixture(params=["directory", "file url", "memory url", "all of memory", "dictionary"])
def objects(request, tmp_path):
    urls = {"directory": f"{tmp_path}/a b/deep", "file url": f"file://{tmp_path}/%C3%A9", "memory url": "memory://x"}
    urls["all of memory"] = "memory://"  # as README has it
    if request.param == "dictionary":
        yield MemoryObjects()
    else:
        opened = open_objects(urls[request.param])
        yield opened
        opened.close()
