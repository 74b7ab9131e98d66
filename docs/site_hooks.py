"""Hooks of MkDocs: includes files of the repository, turns links to other files into plain text, sets the layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
INCLUDED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
SHIM = re.compile(r"https://unpkg\.com/iframe-worker/shim")  # ours is assets/file_worker.js
SEARCH = '<div class="md-search" data-md-component="search" role="dialog"'
HIDE = {"index.md": ["navigation", "toc"]}  # sidebars that a page does without; wide tables do without the right one
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = page.file.src_uri
    page.meta.setdefault("hide", HIDE.get(source, ["toc"] if source.startswith("results/") else []))
    if source in INCLUDED:
        markdown = (ROOT / INCLUDED[source]).read_text().replace("](docs/", "](")
    folder = (ROOT / "docs" / source).parent

    def link(found: re.Match[str]) -> str:
        """Files outside docs/ are not on the site."""
        there = (folder / found[2].partition("#")[0]).resolve()
        return found[0] if there.is_relative_to(ROOT / "docs") and there.exists() else found[1]

    return LINK.sub(link, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    output = output.replace(SEARCH, f'{SEARCH} aria-label="Search"')
    return SHIM.sub("../" * page.url.count("/") + "assets/file_worker.js", output)


def on_post_template(output_content: str, **_: Any) -> str:
    return SHIM.sub("assets/file_worker.js", output_content)  # the error page
