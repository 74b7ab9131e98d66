"""FLAMBEAU_DEBUG=1, 2 or 3: watch the process from the first use of Flambeau, and print a report when it ends."""

from __future__ import annotations

import atexit
import os
import sys
from functools import cache

from flambeau.config import config

from .session import Session


@cache
def start() -> None:
    session = Session()
    session.__enter__()
    atexit.register(show, session, os.getpid())


def show(session: Session, process: int) -> None:
    from rich.console import Console

    from flambeau.report.session import overview_of
    from flambeau.report.session import show as show_overview

    if os.getpid() != process:  # a forked child ends, not the program
        return
    overview = overview_of(session)
    if overview.graphs or overview.compiled:
        sys.stdout.flush()
        console = Console(stderr=True, highlight=False)
        if not console.is_terminal:
            console.width = WIDTH
        show_overview(console, overview, config.debug)


WIDTH = 160  # columns, if the output is not a terminal
