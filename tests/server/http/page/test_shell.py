"""The page without data: its policy, its files, and that it needs nothing from elsewhere."""

from __future__ import annotations

import re

import pytest

from jaxctx_server.auth import CERTIFIED
from jaxctx_server.http.page.shell import CONTENT_SECURITY_POLICY, FOLDER, SHELL, STATIC_FILES
from jaxctx_server.key_store import KeyStore
from jaxctx_server.lifecycle import ServerLifecycle
from jaxctx_server.services import Backend
from tests.server.http.client import HttpClient, http_server

FILES = sorted(path.name for path in FOLDER.iterdir())
OWN_NAMESPACE = "http://www.w3.org/2000/svg"  # a name, which nothing is loaded from


async def test_the_page_runs_its_own_files_only(web: HttpClient) -> None:
    answer = await web("GET", "/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "'self'",
        "script-src": "'self'",
        "style-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_nothing_in_the_page_is_inline(web: HttpClient) -> None:
    html = (await web("GET", "/")).text
    assert re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL) == [""]
    assert "<style" not in html
    assert not re.search(r"\s(style|on\w+)=", html)
    assert "{{" not in html


async def test_every_file_that_the_page_names_is_served(web: HttpClient) -> None:
    html = (await web("GET", "/")).text
    names = set(re.findall(r'(?:src|href)="page/static/([^"]+)"', html))
    assert {"main.js", "page.css", "icon.svg"} <= names
    for name in sorted(STATIC_FILES):
        answer = await web("GET", f"/page/static/{name}")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith(STATIC_FILES[name])
        if name.endswith(".js"):
            names.update(re.findall(r'from "\./([^"]+)"', answer.text))
    assert names == set(STATIC_FILES)
    assert sorted([*STATIC_FILES, SHELL]) == FILES


@pytest.mark.parametrize("name", ["page.html", "nothing.js", "..%2Fshell.py", "%2e%2e/shell.py", "PAGE.CSS"])
async def test_no_other_file_is_served(web: HttpClient, name: str) -> None:
    assert (await web("GET", f"/page/static/{name}")).status == 404


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_place_or_parses_html(name: str) -> None:
    text = (FOLDER / name).read_text("utf-8").replace(OWN_NAMESPACE, "")
    assert not re.search(r"https?:|//[a-z0-9-]+\.[a-z]|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function", text)


async def test_the_page_says_whether_a_key_is_needed(web: HttpClient) -> None:
    assert 'data-needs-key="no"' in (await web("GET", "/")).text


async def test_with_certificates_of_callers_and_without_keys_it_asks_for_none() -> None:
    lifecycle = ServerLifecycle()
    async with http_server(Backend.make(lifecycle, KeyStore(None, without_keys=CERTIFIED), max_calls=4)) as web:
        assert 'data-needs-key="no"' in (await web("GET", "/")).text
    lifecycle.stop()


class TestWithKeys:
    @pytest.fixture
    def keys(self, two_tenants):
        return two_tenants

    async def test_the_page_and_its_files_need_no_key(self, web: HttpClient) -> None:
        answer = await web("GET", "/")
        assert answer.status == 200
        assert 'data-needs-key="yes"' in answer.text
        assert (await web("GET", "/page/static/main.js")).status == 200
