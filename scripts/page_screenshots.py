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
import threading
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).parents[1] / "docs" / "_static"
DESKTOP, PHONE = (1280, 1240), (390, 1100)  # width and height, in pixels
TIMEOUT_MS = 60_000
PROMPT = '''import json


def read_settings(path):
    """Read settings from a JSON file, with defaults for what is missing."""
'''
OTHER_PROMPT = '''def parse_header(line):
    """Return name and value of a header line; the name in lower case."""
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def parse_headers(lines):
    """Return the headers as a dictionary. A name that comes twice keeps both values, with a comma."""
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
    session_id = post(base, "/v1/session", {})["session"]["session_id"]

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


def make_contexts(page: Page) -> None:
    """The contexts of the pictures; the last answer is open."""
    run_prompt(page, OTHER_PROMPT, "new", branches=2, tokens=80)
    run_prompt(page, PROMPT * 2, "new", branches=3, tokens=40)
    branch = page.locator(".branch-name").nth(1)
    branch.click()
    page.wait_for_timeout(1500)
    run_prompt(page, "\n\n\ndef write_settings(path, settings):\n", "fork", branches=2, tokens=56)


def take(browser: Browser, base: str, path: Path, size: tuple[int, int], scheme: Any) -> None:
    """One picture, while the session's graph moves and an answer is streamed."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page = context.new_page()
    page.goto(base + "/")
    page.wait_for_selector("#tree li", timeout=TIMEOUT_MS)
    reading = threading.Thread(target=lambda: urllib.request.urlopen(base + make_session(base), timeout=60).read())
    reading.start()
    page.locator("#tree li .name").nth(2).click()
    page.wait_for_timeout(1500)  # until its text is there, which moves the prompt
    page.locator("#branches").fill("2")
    page.locator("input[name=target][value=fork]").check(force=True)
    page.locator("#prompt-text").fill("\n\ndef write_settings(path, settings):\n")
    page.locator("#max-tokens").fill("36")
    page.locator("#send").click()
    page.wait_for_timeout(2500)
    page.locator("#prompt-text").fill("\n\ndef merge(first, second):")
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
        page = browser.new_page(viewport={"width": DESKTOP[0], "height": DESKTOP[1]})
        page.goto(base + "/")
        page.wait_for_selector("#status[data-state=live]", timeout=TIMEOUT_MS)
        if page.locator("#tree li").count() == 0:
            page.screenshot(path=arguments.folder / "page-empty.png") if arguments.phone else None
            make_contexts(page)
        page.close()
        sizes = [("page", DESKTOP)] + ([("page-phone", PHONE)] if arguments.phone else [])
        for name, size in sizes:
            take(browser, base, arguments.folder / f"{name}.png", size, "light")
            take(browser, base, arguments.folder / f"{name}-dark.png", size, "dark")
        browser.close()


if __name__ == "__main__":
    main()
