"""The page in Chromium, over a real server of the echo model: prompts, forks and shared pages, hostile texts, sizes."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

import jaxctx
from jaxctx.engine.config import EngineConfig
from jaxctx_server.auth import Key, Role
from tests.server.http.client import HttpClient, output_of
from tests.server.http.openai.harness import no_context_left

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

CHROMIUM = os.environ.get("JAXCTX_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
if importlib.util.find_spec("playwright") is None:
    REASON = "playwright is not installed (extra browser)"
elif CHROMIUM is None:
    REASON = "there is no Chromium (apt-get install chromium, or JAXCTX_CHROMIUM)"
else:
    REASON = ""
pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(REASON), reason=REASON)]

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script></pre><b>bold</b>'
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}


@pytest.fixture
def engine_config() -> EngineConfig:
    return EngineConfig(pages=256, max_batch=8, max_batch_tokens=64, max_context_tokens=1536)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


class Opened:
    """The page in a browser, with what went wrong in it."""

    def __init__(self, page: Page, web: HttpClient) -> None:
        self.page = page
        self.base = f"http://127.0.0.1:{web.port}"
        self.problems: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda said: self.problems.append(said.text) if said.type == "error" else None)
        page.on("request", lambda request: self.requests.append(request.url))

    async def run(self, text: str, target: str = "new", *, branches: int = 1, tokens: int = 24) -> None:
        """Run a prompt, and wait for its end."""
        await self.page.check(f"input[name=target][value={target}]", force=True)
        await self.page.fill("#prompt-text", text)
        await self.page.fill("#max-tokens", str(tokens))
        await self.page.fill("#temperature", "0.9")
        await self.page.fill("#branches", str(branches))
        await self.page.click("#send")
        await self.page.locator("#send", has_text="Run").wait_for()

    async def rows(self) -> list[str]:
        """The ids of the contexts that are drawn, in their order."""
        found: list[str] = await self.page.locator("#tree > li").evaluate_all("rows => rows.map(row => row.dataset.id)")
        return found

    async def wait_for_rows(self, count: int) -> None:
        await self.page.locator("#tree > li").nth(count - 1).wait_for()

    async def cells(self, context_id: str, kind: str) -> int:
        """How many cells of a kind the row of a context has."""
        found: int = await self.page.locator(f'#tree > li[data-id="{context_id}"] path.{kind}').evaluate_all(
            "paths => paths.reduce((sum, path) => sum + Number(path.dataset.cells), 0)"
        )
        return found

    async def colours(self, context_id: str, kind: str) -> set[str]:
        """The colours that cells of a kind have."""
        found = await self.page.locator(f'#tree > li[data-id="{context_id}"] path.{kind}').evaluate_all(
            "paths => paths.map(path => getComputedStyle(path).fill)"
        )
        return set(found)


@pytest.fixture
async def opened(browser: Browser, web: HttpClient) -> AsyncIterator[Opened]:
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(30_000)
    opened = Opened(page, web)
    await page.goto(opened.base + "/")
    await page.locator("#status[data-state=live]").wait_for()
    yield opened
    await page.close()
    assert opened.problems == []
    assert {url for url in opened.requests if not url.startswith(opened.base + "/")} == set()


async def close_all(client: jaxctx.aio.Client) -> None:
    for context in [each async for each in client.contexts()]:
        await context.close()
    await no_context_left(client)


async def test_a_prompt_is_streamed_and_forked(opened: Opened, client: jaxctx.aio.Client) -> None:
    page = opened.page
    await page.locator("#no-contexts").wait_for()
    assert "curl" in await page.inner_text("#no-contexts")
    await opened.run("A prompt that fills some pages of sixteen tokens each. " * 2)
    await opened.wait_for_rows(1)
    (parent,) = await opened.rows()
    made = await page.inner_text(".detail .made")
    (context,) = [each async for each in client.contexts()]
    assert made.strip()
    assert (await context.refresh()).seq_len > 24
    assert await opened.cells(parent, "shared") == 0

    await opened.run("More. ", "fork")
    await opened.wait_for_rows(2)
    await page.click(f'#tree > li[data-id="{parent}"] .name')
    await opened.run("Other. ", "fork")
    await opened.wait_for_rows(3)
    rows = await opened.rows()
    assert rows[0] == parent
    await page.locator(f'#tree > li[data-id="{rows[2]}"] path.shared').first.wait_for()
    await page.locator(f'#tree > li[data-id="{parent}"] path.shared').first.wait_for()
    shared = [await opened.cells(row, "shared") for row in rows]
    assert min(shared) > 3
    assert len(set(shared)) == 1
    assert [await opened.cells(row, "private") for row in rows[1:]] >= [1, 1]
    colours = [await opened.colours(row, "shared") for row in rows]
    assert colours[0] == colours[1] == colours[2]
    assert len(colours[0]) == 1
    assert await opened.colours(rows[1], "private") != await opened.colours(rows[2], "private")
    assert "fork of" in await page.inner_text(f'#tree > li[data-id="{rows[1]}"]')

    await page.click("text=Close")
    await page.locator("#tree > li").nth(2).wait_for(state="detached")
    assert len(await opened.rows()) == 2
    await close_all(client)
    await page.locator("#no-contexts").wait_for()


async def test_branches_stream_side_by_side(opened: Opened, client: jaxctx.aio.Client) -> None:
    await opened.run("Branches begin alike and go on by themselves. ", branches=3)
    await opened.wait_for_rows(4)
    branches = opened.page.locator(".branches .branch")
    assert await branches.count() == 3
    for i in range(3):
        assert "24 tokens" in await branches.nth(i).inner_text()
    await opened.page.locator(".branch-name").nth(1).click()
    await opened.page.locator("#tree > li.selected .detail").wait_for()
    parent, *children = await opened.rows()
    assert await opened.page.locator("#tree > li.selected").get_attribute("data-id") in children
    await opened.page.locator(f'#tree > li[data-id="{parent}"] path.join').first.wait_for()
    await close_all(client)


async def test_hostile_texts_are_only_text(opened: Opened, web: HttpClient, client: jaxctx.aio.Client) -> None:
    page = opened.page
    await opened.run(HOSTILE)
    assert HOSTILE in await page.inner_text(".detail .said")
    async with await client.create(HOSTILE, labels={HOSTILE[:60]: HOSTILE}) as context:
        await page.locator(f'#tree > li[data-id="{context.id}"] .name').click()
        await page.locator(".detail .text", has_text="onerror").wait_for()
        assert HOSTILE in await page.inner_text(".detail .text")
        assert HOSTILE in await page.inner_text(".detail .facts-line")
    session = str((await web("POST", "/v1/session", {"ttl": "60s"})).json["session"]["session_id"])
    await web.call(session, "{{a}}{{b}}", a={"text": HOSTILE}, b=output_of())
    variable = await web("POST", "/v1/semantic_var", {"session_id": session, "name": HOSTILE, "text": HOSTILE})
    used = {"variable_id": variable.json["variable"]["variable_id"]}
    await web.call(session, "{{a}}{{b}}", a=used, b=output_of())
    await page.locator("#graph svg svg", has_text="<img").first.wait_for()
    assert await page.locator("#tree img, .detail b, #graph img, #graph script, .detail script").count() == 0
    assert await page.title() == "jaxctx"
    await close_all(client)


async def test_the_policy_stops_code_in_the_page(opened: Opened) -> None:
    """What the tests of hostile texts rely on besides."""
    answer = await opened.page.evaluate(
        """() => {
            try { document.body.insertAdjacentHTML("beforeend", "<b>made</b>"); return "made" }
            catch (error) { return error.name }
        }"""
    )
    assert answer == "TypeError"
    opened.problems.clear()  # the browser reports what it stopped


async def test_the_graph_of_a_session_moves(opened: Opened, web: HttpClient) -> None:
    page = opened.page
    await page.locator("#no-sessions").wait_for()
    session = str(
        (await web("POST", "/v1/session", {"session_id": "mine", "ttl": "60s"})).json["session"]["session_id"]
    )
    made = await web.call(session, "{{a}}{{b}}", a={"text": "x"}, b=output_of(600))
    await page.locator(".chip", has_text="mine").wait_for()
    await page.locator("#graph rect.idle").wait_for()
    reading = asyncio.create_task(web("GET", f"/v1/semantic_var/{made['b']}/text?session_id=mine"))
    await page.locator("#graph rect.started, #graph rect.done").first.wait_for()
    await reading
    await page.locator("#graph rect.done").wait_for()


async def test_load_and_memory_are_shown(opened: Opened, client: jaxctx.aio.Client) -> None:
    page = opened.page
    assert "256 pages" in await page.inner_text("#memory")
    assert "256 free" in await page.inner_text("#memory")
    async with await client.create("x" * 100) as context:
        await page.locator("#memory", has_text="held").wait_for()
        await page.locator("#memory li", has_text=re.compile(r"^7 held")).wait_for()
        await context.complete(max_tokens=400, temperature=0, ignore_eos=True)
        await page.locator("#load .big", has_text=re.compile(r"[1-9]")).wait_for()


async def test_a_prompt_can_be_stopped(opened: Opened, client: jaxctx.aio.Client, engine: Any) -> None:
    page = opened.page
    await page.fill("#prompt-text", "Go on and on. ")
    await page.fill("#max-tokens", "1400")
    await page.click("#send")
    await page.locator(".detail .made.writing").wait_for()
    await page.locator("#send", has_text="Stop").click()
    await page.locator("#send", has_text="Run").wait_for()
    async with asyncio.timeout(60):
        while (await engine.stats()).running:
            await asyncio.sleep(0.01)
    assert len(await opened.rows()) == 1
    await close_all(client)


async def test_errors_are_shown_by_the_prompt(opened: Opened) -> None:
    await opened.run("")
    assert "text" in await opened.page.inner_text("#prompt-error")
    opened.problems.clear()  # the browser reports the status 400


async def test_all_of_it_by_keyboard(opened: Opened, client: jaxctx.aio.Client) -> None:
    page = opened.page
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.className") == "skip"
    await page.keyboard.press("Enter")
    await page.focus("#prompt-text")
    await page.keyboard.type("By keyboard. ")
    await page.keyboard.press("Control+Enter")
    await opened.wait_for_rows(1)
    await page.locator("#send", has_text="Run").wait_for()
    await opened.run("More. ", "fork")
    await opened.wait_for_rows(2)
    await page.focus("#tree .name")
    await page.keyboard.press("ArrowDown")
    assert await page.evaluate("document.activeElement.closest('li').dataset.id") == (await opened.rows())[1]
    await page.keyboard.press("Enter")
    await page.locator('.name[aria-expanded="true"]').wait_for(state="detached")
    await page.keyboard.press("Enter")
    await page.locator('.name[aria-expanded="true"]').wait_for()
    await close_all(client)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_sizes_and_schemes(opened: Opened, client: jaxctx.aio.Client, size: str, scheme: Any) -> None:
    """Nothing is cut off or scrolls sideways, and dark is dark."""
    page = opened.page
    width, height = SIZES[size]
    await page.emulate_media(color_scheme=scheme)
    await page.set_viewport_size({"width": width, "height": height})
    await opened.run("A" * 120 + " long_word " * 40, branches=3, tokens=40)
    await opened.wait_for_rows(4)
    for _ in range(3):
        await opened.run("deeper", "fork")
    await opened.wait_for_rows(7)
    assert await page.evaluate("document.documentElement.scrollWidth") <= width
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(number) for number in re.findall(r"\d+", background)[:3]) / 3
    assert brightness < 60 if scheme == "dark" else brightness > 200
    await page.locator("#send").scroll_into_view_if_needed()
    box = await page.locator("#send").bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= width
    await close_all(client)


async def test_a_page_that_is_not_seen_asks_for_nothing(opened: Opened, engine: Any) -> None:
    watches = engine._lifecycle.watches
    page = opened.page
    async with asyncio.timeout(60):
        while not any(watches.values()):
            await asyncio.sleep(0.01)
    hide = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true }); "
    change = "document.dispatchEvent(new Event('visibilitychange'))"
    await page.evaluate("() => {" + hide % "true" + change + "}")
    async with asyncio.timeout(60):
        while any(watches.values()):
            await asyncio.sleep(0.01)
    asked = len(opened.requests)
    await asyncio.sleep(1.0)
    assert len(opened.requests) == asked
    await page.evaluate("() => {" + hide % "false" + change + "}")
    async with asyncio.timeout(60):
        while not any(watches.values()):
            await asyncio.sleep(0.01)


class TestWithKeys:
    @pytest.fixture
    def keys(self) -> list[Key]:
        return [Key(name, hashlib.sha256(name.encode()).digest(), name, Role.USER) for name in ("alice", "bob")]

    async def test_a_key_is_asked_for_and_kept(self, browser: Browser, web: HttpClient, address: str) -> None:
        page = await browser.new_page()
        opened = Opened(page, web)
        await page.goto(opened.base + "/")
        await page.locator("#status", has_text="Needs a key").wait_for()
        await page.fill("#key", "wrong")
        await page.click("text=Use")
        await page.locator("#status", has_text="Key refused").wait_for()
        await page.fill("#key", "bob")
        await page.click("text=Use")
        await page.locator("#status[data-state=live]").wait_for()
        assert "role admin" in await page.inner_text("#memory")
        async with (
            jaxctx.aio.Client(address, api_key="alice", timeout_s=60) as alice,
            jaxctx.aio.Client(address, api_key="bob", timeout_s=60) as bob,
            await alice.create("of alice"),
            await bob.create("of bob") as own,
        ):
            await opened.wait_for_rows(1)
            assert await opened.rows() == [own.id]
            await page.reload()
            await opened.wait_for_rows(1)
        await page.close()
