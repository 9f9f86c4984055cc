"""Which trace contexts are passed on."""

import pytest

from jaxctx_server.call_trace import TRACEPARENT

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_trace_context_of_version_00_is_passed_on() -> None:
    assert TRACEPARENT.fullmatch(f"00-{TRACE}-{SPAN}-01")


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_is_no_trace_context_is_not(wrong: str) -> None:
    assert not TRACEPARENT.fullmatch(wrong)
