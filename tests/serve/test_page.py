"""The web page in a real Chromium, with a real model behind it."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.http_server import HttpServer, serving

pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
]
SCREENSHOT = Path(__file__).parents[2] / "docs" / "page.png"
"""The picture in the docs; `TRIMARAN_WRITE_SCREENSHOT=1` takes it anew."""


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser")
    assert found, "Chromium isn't installed; on Debian: apt-get install chromium"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture
def page(browser, server: HttpServer) -> Iterator[object]:  # type: ignore[no-untyped-def]
    """The page, opened; whatever it complains of fails the test, and so does any request to
    another server."""
    opened = browser.new_page(viewport={"width": 1280, "height": 860})
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    opened.on(
        "request",
        lambda request: None if request.url.startswith(server.url) else wrong.append(request.url),
    )
    opened.goto(server.url)
    yield opened
    opened.close()
    assert wrong == []


def _until(page, expression: str) -> None:  # type: ignore[no-untyped-def]
    """Waits for an expression to hold. (Playwright's own way evaluates text within the page,
    which the page's policy forbids.)"""
    deadline = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"it never holds: {expression}"
        page.wait_for_timeout(50)


def _ask(page, text: str, tokens: int) -> None:  # type: ignore[no-untyped-def]
    """Types a message and sends it, by the keyboard alone."""
    page.get_by_label("Tokens at most").evaluate("(box, n) => (box.value = n)", tokens)
    page.locator("#temperature").evaluate("(box) => (box.value = 0)")
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def test_a_chat_by_keyboard_and_the_pictures_of_it(page, server: HttpServer) -> None:  # type: ignore[no-untyped-def]
    expected = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "Name three colours."}],
            "temperature": 0,
            "max_tokens": 24,
        },
        timeout=60,
    ).json()["choices"][0]["message"]["content"]
    _ask(page, "Name three colours.", 24)
    _until(page, "document.getElementById('rate').textContent.includes('24 out')")
    assert page.locator("#messages li.assistant span").inner_text() == expected.strip()
    _until(page, "document.getElementById('ttft').getAttribute('aria-label')?.includes('values')")
    assert "of decode" in page.locator("#steps").get_attribute("aria-label")
    _until(
        page,
        "/ [1-9]\\d* cached/.test(document.getElementById('blocks').getAttribute('aria-label'))",
    )
    words = page.locator("#blocks").get_attribute("aria-label")
    found = re.fullmatch(r"Of (\d+) blocks (\d+) are held, (\d+) cached, (\d+) free\.", words)
    assert found
    total, held, cached, free = map(int, found.groups())
    assert total == held + cached + free


def test_escape_stops_the_answer_and_frees_the_engine(page, server: HttpServer) -> None:  # type: ignore[no-untyped-def]
    _ask(page, "Write a long story about the sea.", 1500)
    page.locator("#messages li.assistant").wait_for()
    page.keyboard.press("Escape")
    _until(page, "document.getElementById('running').textContent === '0'")
    assert server.metric("vllm:num_requests_running") == 0
    assert page.locator("#send").is_enabled()
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#messages li").count() == 0


def test_light_and_dark(page) -> None:  # type: ignore[no-untyped-def]
    def paper() -> str:
        found: str = page.evaluate(
            "getComputedStyle(document.querySelector('header')).backgroundColor"
        )
        return found

    page.emulate_media(color_scheme="dark")
    assert paper() == "rgb(26, 33, 42)"
    page.get_by_role("button", name="Light").press("Enter")
    assert paper() == "rgb(255, 255, 255)"
    page.reload()
    assert paper() == "rgb(255, 255, 255)", "the choice is kept"


def test_what_runs_is_seen_while_it_runs(page, server: HttpServer) -> None:  # type: ignore[no-untyped-def]
    prompt = "A long prompt that every request begins with. " * 30

    def load(i: int) -> None:
        body = {"prompt": f"{prompt}{i}:", "max_tokens": 160, "ignore_eos": True}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    _ask(page, "Why is the sky blue?", 200)
    _until(page, "document.querySelectorAll('#requests tr').length >= 7")
    _until(page, "document.querySelectorAll('#messages li.assistant').length === 1")
    page.wait_for_timeout(1200)
    picture = page.screenshot()
    assert picture.startswith(b"\x89PNG")
    if os.environ.get("TRIMARAN_WRITE_SCREENSHOT"):
        SCREENSHOT.write_bytes(picture)
    for thread in threads:
        thread.join()


def test_the_reference_of_the_api(page, server: HttpServer) -> None:  # type: ignore[no-untyped-def]
    page.get_by_role("link", name="API").click()
    _until(page, "document.getElementById('operations').getAttribute('aria-busy') === 'false'")
    shown = page.locator("main code").all_inner_texts()
    assert set(shown) == set(httpx.get(f"{server.url}/openapi.json").json()["paths"])


def test_a_key_is_asked_for_and_used(browser, smollm2_path: Path) -> None:  # type: ignore[no-untyped-def]
    flags = ("--api-key", "secret", "--max-model-len", "512", "--kv-cache-bytes", "64MiB")
    with serving(*flags) as server:
        page = browser.new_page()
        page.goto(server.url)
        _until(page, "document.getElementById('trouble').textContent.includes('API key')")
        page.locator("#key").evaluate("(box) => (box.value = 'secret')")
        _until(page, "document.getElementById('trouble').textContent === ''")
        page.close()
