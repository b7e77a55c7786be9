"""The chat page in a browser without a window."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_engine import FakeEngine, served

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ENGINE = FakeEngine()


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright: pip install playwright")
    if BROWSER is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with served(ENGINE) as port, playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        made = browser.new_page(viewport={"width": 360, "height": 700})
        made.set_default_timeout(15_000)
        made.faults = []
        made.on("pageerror", lambda error: made.faults.append(str(error)))
        made.on("console", lambda line: made.faults.append(line.text) if line.type in ("error", "warning") else None)
        made.goto(f"http://127.0.0.1:{port}/")
        yield made
        browser.close()


def test_a_conversation(page: Any) -> None:
    ENGINE.reset()
    ENGINE.delay = 0.01
    page.get_by_text("letters under h2o, 64 slots per head").wait_for()
    page.get_by_text("Settings").click()
    page.get_by_label("Tokens of an answer").fill("60")
    page.get_by_label("System").fill("Be <b>kind</b>.")
    page.get_by_text("Settings").click()
    page.get_by_label("Your turn").fill("first")
    page.get_by_label("Your turn").press("Enter")
    page.locator(".assistant:not(.writing)").wait_for()
    answer = page.locator(".assistant").inner_text()
    assert len(answer) == 60
    prompt = bytes(ENGINE.requests[0].prompt).decode()
    assert prompt == "system: Be <b>kind</b>.\nuser: first\n"
    assert page.locator("#seen-count").inner_text() == f"{len(prompt) + 60} tokens"
    assert page.locator("#kept-count").inner_text() == "64 per head"
    assert page.locator("#bytes").inner_text() == "4.1 kB"

    page.get_by_label("Your turn").fill("second")
    page.get_by_role("button", name="Send").click()
    page.locator(".assistant:not(.writing)").nth(1).wait_for()
    assert bytes(ENGINE.requests[1].prompt).decode() == f"{prompt}assistant: {answer}\nuser: second\n"
    assert page.locator("#kept-count").inner_text() == "64 per head"
    assert page.evaluate("document.documentElement.scrollWidth") == 360  # nothing beyond a phone's width
    assert page.faults == []


def test_an_answer_that_is_stopped_and_one_that_fails(page: Any) -> None:
    ENGINE.reset()
    ENGINE.delay = 0.05
    page.get_by_role("button", name="New").click()
    assert page.locator(".turn").count() == 0
    page.get_by_label("Your turn").fill("third")
    page.get_by_role("button", name="Send").click()
    page.locator(".assistant", has_text=re.compile("[a-z]{3}")).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()
    assert ENGINE.ended(1) and ENGINE.ends[0].reason == "cancelled"

    ENGINE.fails_after = 0
    page.get_by_label("Your turn").fill("fourth")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("the dispatch failed.").wait_for()
    assert page.get_by_label("Your turn").input_value() == "fourth"  # to be sent again
    assert page.locator(".turn").count() == 2


def test_a_server_with_a_key_asks_for_it_in_its_field(page: Any) -> None:
    ENGINE.reset()
    with served(ENGINE, keys=["secret"]) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_label("Your turn").fill("first")
        page.get_by_label("Your turn").press("Enter")
        page.get_by_text("This server needs an API key: enter it above.").wait_for()
        assert page.evaluate("document.activeElement.id") == "key" and page.get_by_label("API key").is_visible()
        page.get_by_label("Tokens of an answer").fill("60")
        page.get_by_label("API key").fill("wrong")
        page.get_by_label("Your turn").press("Enter")
        page.get_by_text("The API key is wrong.").wait_for()
        page.get_by_label("API key").fill("secret")
        page.get_by_label("Your turn").press("Enter")
        page.locator(".assistant:not(.writing)").wait_for()
        assert len(ENGINE.requests) == 1
