"""`flambeau size`: show how many bytes each part of a package takes."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from html import escape

from flambeau.cli.subject import existing, new_table, output, page_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", type=existing)
    parser.add_argument("--html", type=output, metavar="FILE", help="write a web page with a treemap")


def run(args: argparse.Namespace) -> int:
    from flambeau.package.container import CODE, DEVICE, INDEX, KINDS, WEIGHTS, read
    from flambeau.package.index import read_index, the

    sections = read(args.package)
    index = read_index(the(sections, INDEX, "index").data)
    rows: list[tuple[str, str, int]] = []
    kernels = json.loads(index.metadata.get("kernels", "{}"))  # missing if exported with --drop-debug
    for s in sections:
        if s.kind in (CODE, DEVICE) and kernels.get(s.name):
            found = [(f"{operators} ({dtypes})", size) for operators, dtypes, size in kernels[s.name]]
            rows += [(f"kernels of {s.name}", of, size) for of, size in sorted(found, key=lambda x: -x[1])]
            rows.append((f"kernels of {s.name}", "tables and shared code", len(s.data) - sum(n for _, n in found)))
        elif s.kind == WEIGHTS:
            by_dtype: Counter[str] = Counter()
            for w in index.weights:
                by_dtype[w.dtype] += w.bytes
            rows += [("weights", dtype, size) for dtype, size in by_dtype.most_common()]
            rows.append(("weights", "header and padding", len(s.data) - sum(by_dtype.values())))
        else:
            rows.append(("kernel code" if s.kind == CODE else KINDS.get(s.kind, "?"), s.name, len(s.data)))
    table = new_table("part", "of", "bytes", right=(2,))
    for part, of, size in rows:
        table.add_row(part, of, f"{size:,}")
    table.add_row("all", "", f"{sum(size for *_, size in rows):,}")
    page_console().print(table)
    if args.html:
        args.html.write_text(treemap(rows))
    return 0


def treemap(rows: list[tuple[str, str, int]]) -> str:
    """A page of boxes with areas like bytes: parts side by side, and what they are made of on top of each other."""
    parts: dict[str, list[tuple[str, int]]] = {}
    for part, of, size in rows:
        parts.setdefault(part, []).append((of, size))
    least = sum(size for *_, size in rows) // 200 or 1  # as wide as can be seen
    columns = ""
    for part, inside in sorted(parts.items(), key=lambda p: -sum(size for _, size in p[1])):
        total = sum(size for _, size in inside)
        boxes = "".join(f'<div style="flex:{size} 0 0" title="{size:,} bytes">{escape(of)}<br>{size:,}</div>'
                        for of, size in sorted(inside, key=lambda x: -x[1]) if size)
        columns += (f'<section style="flex:{max(total, least)} 0 0" title="{escape(part)}: {total:,} bytes">'
                    f"<b>{escape(part)}</b>{boxes}</section>")
    return ("<!doctype html><meta charset=utf-8><style>body{font:13px sans-serif;margin:0;display:flex;height:100vh}"
            "section{display:flex;flex-direction:column;min-width:0;overflow:hidden;border:1px solid #fff}"
            "div{background:#dde7f3;border-top:1px solid #fff;overflow:hidden;min-height:1px}</style>" + columns)
