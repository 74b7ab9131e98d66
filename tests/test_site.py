"""The site and the reports as readers see them: a strict build, and the pages in headless Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import flambeau

ROOT = Path(__file__).parent.parent
LOOKS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
LOAD_MS, REPORT_MS, REPORT_BYTES = 1000, 2000, 5_000_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

no_mkdocs = pytest.mark.skipif(find_spec("mkdocs") is None, reason="no MkDocs: pip install 'flambeau[docs]'")
no_browser = pytest.mark.skipif(
    shutil.which("chromium") is None or find_spec("playwright") is None or find_spec("axe_playwright_python") is None,
    reason="Chromium or Playwright is not installed: make test-site")


@cache
def build(folder: Path) -> Path:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"))


@no_mkdocs
def test_it_builds_strictly_and_asks_the_network_for_nothing(site: Path) -> None:
    pages = sorted(p.relative_to(site) for p in site.rglob("*.html"))
    assert len(pages) >= 25
    for page in pages:
        text = (site / page).read_text()
        assert 'src="http' not in text and "unpkg.com" not in text, page
        assert 'rel="stylesheet" href="http' not in text, page


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        made = p.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        yield made
        made.close()


def look(browser: Any, file: Path, width: int, scheme: str, most_ms: float) -> list[str]:
    """The problems of a page."""
    from axe_playwright_python.sync_playwright import Axe

    wrong: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.on("console", lambda m: wrong.append(f"console: {m.text}") if m.type == "error" else None)
    page.on("pageerror", lambda e: wrong.append(f"error: {e}"))
    page.on("request", lambda r: wrong.append(f"network: {r.url}") if r.url.startswith("http") else None)
    times = []
    while not times or (times[-1] > most_ms and len(times) < 3):  # the machine may be busy with something else
        page.goto(file.as_uri())
        times.append(page.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart"))
    if min(times) > most_ms:
        wrong.append(f"loads in {min(times)} ms")
    beyond = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    if beyond > 0:
        wrong.append(f"is {beyond} pixels too wide")
    own = list(wrong)
    for v in Axe().run(page).response["violations"]:  # axe reads style sheets, which a page from disk may not
        if v["impact"] in ("serious", "critical"):
            own.append(f"{v['impact']}: {v['id']}: {v['nodes'][0]['html'][:160]} ({len(v['nodes'])})")
    context.close()
    return own


@no_mkdocs
@no_browser
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_pages(width: int, scheme: str, site: Path, browser: Any) -> None:
    found = {}
    for file in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # a server shows 404.html under any path
        if wrong := look(browser, file, width, scheme, LOAD_MS):
            found[str(file.relative_to(site))] = wrong
    assert not found, "\n".join(f"{page}: {w}" for page, wrong in found.items() for w in wrong)


@no_mkdocs
@no_browser
def test_searching_from_disk(site: Path, browser: Any) -> None:
    page = browser.new_page()
    page.goto((site / "guides" / "nvidia.html").as_uri())
    page.type(".md-search__input", "recompiled")
    page.wait_for_selector(".md-search-result__item")
    page.close()


@no_browser
@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_report_of_a_trace(width: int, scheme: str, browser: Any, tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
                                  for _ in range(4)))
    compiled = torch.compile(model, backend="flambeau", dynamic=False)
    compiled(torch.randn(8, 16)).sum().backward()
    with flambeau.debug.trace(tmp_path):
        compiled(torch.randn(8, 16)).sum().backward()
    report = tmp_path / "report.html"
    assert report.stat().st_size < REPORT_BYTES
    assert not look(browser, report, width, scheme, REPORT_MS)
