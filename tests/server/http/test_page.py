"""The page."""

from __future__ import annotations

import re

from tests.server.http.client import HttpClient


async def test_the_page(web: HttpClient) -> None:
    """Works without outside resources, and runs nothing but its own script."""
    first, second = [await web("GET", "/") for _ in range(2)]
    nonces = [re.findall(r'<script nonce="([^"]+)">', each.text) for each in (first, second)]
    assert [len(each) for each in nonces] == [1, 1]
    assert nonces[0] != nonces[1]
    assert f"script-src 'nonce-{nonces[0][0]}'" in first.headers["content-security-policy"]
    assert "default-src 'none'" in first.headers["content-security-policy"]
    assert not re.search(r"(src|href)=|https?://|@import|url\(|innerHTML", first.text)
