"""The banner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxctx_server.banner import banner


@pytest.mark.parametrize(("kv_dtype", "warns"), [("float8_e4m3fn", True), ("int8", False), ("bfloat16", False)])
def test_the_banner_warns_of_keys_and_values_that_are_coarse_for_nothing(
    make_engine: Any, kv_dtype: str, warns: bool
) -> None:
    told = banner(replace(make_engine().info, kv_dtype=kv_dtype), ["127.0.0.1:1"], None, None, 1.0)
    assert ("WARNING" in told and "--kv-dtype int8" in told) == warns
