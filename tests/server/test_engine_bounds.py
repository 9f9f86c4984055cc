"""How many engines there may be, as text."""

from __future__ import annotations

import pytest

from jaxctx_server.engine_bounds import EngineBounds


@pytest.mark.parametrize("text", ["", "0", "0:2", "3:2", "two", "1:2:3"])
def test_numbers_of_engines_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|^\d:\d$|^0$"):
        EngineBounds.parse(text)
