"""`flambeau inspect`: check every byte of a package, and show what is in it."""

from __future__ import annotations

import argparse

from rich.markup import escape

from flambeau.cli.subject import existing, new_table, page_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", type=existing)
    parser.add_argument("--texts", action="store_true", help="print the kernel sources")
    parser.add_argument("--verify", metavar="KEY", help="an Ed25519 public key (a PEM file): fail unless the package "
                        "was signed with its private key")


def run(args: argparse.Namespace) -> int:
    from flambeau.package.container import INDEX, KINDS, TEXT, hash_of, read
    from flambeau.package.index import read_index, the
    from flambeau.package.signature import verifier

    console = page_console()
    sections = read(args.package, verify=verifier(args.verify) if args.verify else None)
    index = read_index(the(sections, INDEX, "index").data)
    console.print(f"{args.package}  sha256 {hash_of(args.package)}")
    if args.verify:
        console.print(f"signed with the key of {args.verify}")
    for key, value in index.metadata.items():
        if key != "methods":
            console.print(escape(f"{key}: {value}"))
    for m in index.methods:
        given = ", ".join(f"{p.name}: {p.type}" for p in m.inputs)
        console.print(escape(f"{m.name}({given}) -> {', '.join(p.type for p in m.outputs)}"))
    for target, (features, _) in index.targets.items():
        console.print(f"target {target}: {features}")
    table = new_table("section", "name", "bytes", right=(2,))
    for s in sections:
        table.add_row(KINDS.get(s.kind, str(s.kind)), s.name, f"{len(s.data):,}")
    console.print(table)
    if args.texts:
        for s in sections:
            if s.kind == TEXT:
                console.print(escape(bytes(s.data).decode()))
    return 0
