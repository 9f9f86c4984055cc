#!/usr/bin/env python3
"""Pictures of the page for the README, taken from a running server: docs/_static/page.png and page-dark.png.

    jaxctx-serve --http-port 8123          # in another terminal: the bundled model
    scripts/page_screenshots.py http://127.0.0.1:8123 [--folder FOLDER] [--chromium PATH] [--phone]

Needs the extra `browser` and Chromium. What the pictures show is made here: contexts by prompts in the page itself, a
session of calls over HTTP. `--phone` takes pictures of a phone's width too, which are for looking at.
"""

from __future__ import annotations

import argparse
import json
import secrets
import threading
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).parents[1] / "docs" / "_static"
DESKTOP, PHONE = (1280, 1330), (390, 1100)  # width and height, in pixels
TIMEOUT_MS = 60_000
PROMPT = '''import json


def read_settings(path):
    """Read settings from a JSON file, with defaults for what is missing."""
'''


def post(base: str, path: str, body: dict[str, Any]) -> Any:
    """The JSON of an answer."""
    request = urllib.request.Request(
        base + path, json.dumps(body).encode(), {"content-type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def run_prompt(page: Page, text: str, target: str, branches: int = 1, tokens: int = 48) -> None:
    """Run a prompt in the page, and wait for its end."""
    page.locator(f"input[name=target][value={target}]").check(force=True)
    page.locator("#prompt-text").fill(text)
    page.locator("#max-tokens").fill(str(tokens))
    page.locator("#branches").fill(str(branches))
    page.locator("#send").click()
    page.locator("#send", has_text="Run").wait_for(timeout=TIMEOUT_MS)
    page.wait_for_timeout(1500)  # until the pages are drawn


def make_session(base: str) -> str:
    """A session of calls that need each other; returns the path of the text that runs them."""
    session_id = f"settings-{secrets.token_hex(2)}"
    post(base, "/v1/session", {"session_id": session_id, "ttl": "120s"})

    def output(name: str, tokens: int) -> dict[str, Any]:
        return {"name": name, "output": {"max_tokens": tokens, "sampling": {"temperature": 0.8}}}

    def submit(template: str, *parameters: dict[str, Any]) -> str:
        body = {"session_id": session_id, "template": template, "parameters": parameters}
        return str(post(base, "/v1/semantic_call", body)["outputs"][0]["variable_id"])

    bodies = [
        submit("def {{name}}(text):{{body}}", {"name": "name", "text": name}, output("body", 24))
        for name in ("shout", "first_word", "count")
    ]
    inputs = [{"name": f"part{i}", "variable_id": body} for i, body in enumerate(bodies)]
    template = "".join(f"{{{{part{i}}}}}\n" for i in range(3)) + "def test():{{test}}"
    test = submit(template, *inputs, output("test", 400))
    submit("{{test}}\n# In short: {{summary}}", {"name": "test", "variable_id": test}, output("summary", 24))
    return f"/v1/semantic_var/{test}/text?session_id={session_id}"


def clear(base: str, page: Page) -> None:
    """Close all contexts."""
    ids = page.locator("#tree > li").evaluate_all("rows => rows.map(row => row.dataset.id)")
    for context_id in ids:
        request = urllib.request.Request(f"{base}/page/context/{context_id}", method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()
    page.locator("#no-contexts").wait_for(timeout=TIMEOUT_MS)


def take(browser: Browser, base: str, path: Path, size: tuple[int, int], scheme: Any) -> None:
    """One picture, while the graph of a session moves, and an answer has come."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page = context.new_page()
    page.goto(base + "/")
    page.locator("#status[data-state=live]").wait_for(timeout=TIMEOUT_MS)
    page.wait_for_timeout(1500)
    clear(base, page)
    run_prompt(page, PROMPT * 2, "new", branches=3, tokens=40)
    page.locator(".branch-name").nth(1).click()
    page.wait_for_timeout(1500)  # until its text is there, which moves the prompt
    run_prompt(page, "\n\ndef write_settings(path, settings):\n", "fork", branches=2, tokens=44)
    url = base + make_session(base)
    page.locator(f"text={url.rpartition('=')[2]}").wait_for(timeout=TIMEOUT_MS)
    page.locator(f"text={url.rpartition('=')[2]}").click()
    reading = threading.Thread(target=lambda: urllib.request.urlopen(url, timeout=60).read())
    reading.start()
    page.locator("#graph rect.done").nth(2).wait_for(timeout=TIMEOUT_MS)
    page.locator("#prompt-text").fill("def merge(first, second):")
    page.mouse.move(5, 5)
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=path)
    reading.join()
    context.close()


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="where the server's HTTP is")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--phone", action="store_true")
    arguments = parser.parse_args()
    base = arguments.base.rstrip("/")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
        sizes = [("page", DESKTOP)] + ([("page-phone", PHONE)] if arguments.phone else [])
        for name, size in sizes:
            take(browser, base, arguments.folder / f"{name}.png", size, "light")
            take(browser, base, arguments.folder / f"{name}-dark.png", size, "dark")
        browser.close()


if __name__ == "__main__":
    main()
