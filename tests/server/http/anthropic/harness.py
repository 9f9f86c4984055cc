"""What tests of the Anthropic API share: the official client."""

from __future__ import annotations

import anthropic

from tests.server.http.client import HttpClient


def anthropic_client(web: HttpClient, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{web.port}", api_key=key, max_retries=0, timeout=120)
