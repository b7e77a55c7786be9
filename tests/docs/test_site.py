"""The site is built without a warning, and its pages fit a desk and a phone."""

from __future__ import annotations

import functools
import html
import http.server
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvjax
from tests.paths import ROOT
from tests.serving.test_page import BROWSER

SAMPLE = (
    "index.html",
    "start.html",
    "glossary.html",
    "reference.html",
    "serving.html",
    "guides/reading.html",
    "parts/index.html",
    "parts/policies/h2o.html",
    "parts/plans/pyramid.html",
    "parts/codecs/int8.html",
    "project/notebooks/quickstart.html",
    "results/chips.html",
)
"""A page of each kind; the slow test looks at all."""
WIDTHS = {"desk": 1280, "phone": 390}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    for name in ("myst_nb", "sphinx_book_theme"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("there is no Sphinx with its theme: pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(out)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert made.returncode == 0, made.stderr
    return out


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    serves = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=serves.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serves.server_address[1]}"
    serves.shutdown()
    serves.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright: pip install playwright")
    if BROWSER is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as tools:
        made = tools.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield made
        made.close()


CUT = "[...document.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
"""Code that goes on beyond the edge of its block."""


def look_at(browser: Any, address: str, names: list[str], folder: Path) -> dict[str, Any]:
    """What is wrong with pages at each width; screenshots go to a folder."""
    wrong: dict[str, Any] = {}
    for device, width in WIDTHS.items():
        page = browser.new_page(viewport={"width": width, "height": 900})
        faults: list[str] = []
        page.on("pageerror", lambda error, faults=faults: faults.append(str(error)))
        page.on("console", lambda line, faults=faults: faults.append(line.text) if line.type == "error" else None)
        page.on("request", lambda asked, faults=faults: faults.append(asked.url) if address not in asked.url else None)
        for name in names:
            faults.clear()
            page.goto(f"{address}/{name}", wait_until="load")
            beyond = page.evaluate("document.documentElement.scrollWidth") - width
            unseen = page.evaluate("[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)")
            cut = page.evaluate(CUT)
            if beyond > 0 or faults or unseen or cut:
                wrong[f"{device}: {name}"] = (beyond, list(faults), unseen, cut)
            page.screenshot(path=folder / f"{device}_{name.replace('/', '_').removesuffix('.html')}.png")
        page.close()
    return wrong


def screenshots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("KVJAX_ARTIFACTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


SMOLLM2 = ROOT / "docs" / "results" / "smollm2"


def test_every_member_has_a_page(site: Path) -> None:
    tables = {
        "policies": kvjax.methods.REGISTRY,
        "plans": kvjax.methods.PLANS,
        "residuals": kvjax.methods.RESIDUALS,
        "codecs": kvjax.methods.CODECS,
        "selections": kvjax.methods.SELECTIONS,
    }
    rows = [json.loads(line) for file in SMOLLM2.glob("**/perplexity.jsonl") for line in file.read_text().splitlines()]
    measured = {name for row in rows for name in re.findall(r"\w+", row["policy"])}
    for folder, table in tables.items():
        assert {page.stem for page in (site / "parts" / folder).glob("*.html")} == set(table)
        for name in table:
            text = (site / "parts" / folder / f"{name}.html").read_text(encoding="utf-8")
            assert "<math" in text and "When to take it" in text and "From:" in text, name
            assert name not in measured or "Perplexity of SmolLM2 against the bytes" in text, name
            assert not re.search(r"[ˆˉ]</mo>\s*</munderover>", text), name  # the index of an accented letter


def test_the_overview_tells_its_curves_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    site_figures = importlib.import_module("site_figures")
    found = site_figures.rows(ROOT / "docs" / "results" / "smollm2")
    assert {row["policy"] for row in found} > set(site_figures.CHOICES)
    site_figures.overview(found, "wikitext2_valid", tmp_path / "quality.svg")
    drawn = (tmp_path / "quality.svg").read_text(encoding="utf-8")
    colours = re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: 1.8", drawn)  # each in its curve and in the legend
    assert len(set(colours)) == len(site_figures.CHOICES) == len(colours) // 2
    assert (ROOT / "docs" / "quality.svg").is_file()


def test_notebooks_open_in_colab_once_the_repository_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx", reason="the site needs the docs extra")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    site_pages = importlib.import_module("site_pages")
    notebook = (ROOT / "notebooks" / "quickstart.ipynb").read_text(encoding="utf-8")
    assert site_pages.with_badge(notebook, "quickstart.ipynb", "") == notebook
    first, *others = json.loads(site_pages.with_badge(notebook, "quickstart.ipynb", "someone/kvjax"))["cells"]
    address = "https://colab.research.google.com/github/someone/kvjax/blob/main/notebooks/quickstart.ipynb"
    assert f"]({address})" in "".join(first["source"]) and others == json.loads(notebook)["cells"]


def test_public_names_are_in_the_reference(site: Path) -> None:
    text = (site / "reference.html").read_text(encoding="utf-8")
    missing = [
        name
        for name in kvjax.__all__
        if f'id="kvjax.{name}"' not in text and name not in ("methods", "policies", "testing")
    ]
    assert not missing
    said = " ".join(html.unescape(re.sub(r"<[^>]+>", "", text)).split())
    assert "token: Int[Array, 'b'] | ArrayLike | Sequence[int]" in said and "Float[Array, 'b vocab']" in said


def test_pages_fit(site: Path, address: str, browser: Any, tmp_path: Path) -> None:
    assert look_at(browser, address, list(SAMPLE), screenshots(tmp_path)) == {}


@pytest.mark.slow
def test_all_pages_fit(site: Path, address: str, browser: Any, tmp_path: Path) -> None:
    names = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if "_static" not in page.parts)
    assert look_at(browser, address, names, screenshots(tmp_path)) == {}
