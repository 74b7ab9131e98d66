"""Why tests fail that pass on the CPU: few rules, the first that fits is the reason.

A rule says whether the failure counts. It does not where a test looks at something that only its own device or backend
has; it does where the device does something else than the CPU, however well that is known.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

UNEXPLAINED = "unexplained"


class Rule(NamedTuple):
    reason: str
    counts: bool
    kinds: str = ".*"  # of files
    test: str = ".*"  # its name
    error: str = "(?s).*"  # its error and where it was raised


RULES: tuple[Rule, ...] = ()


def reason(kind: str, test: str, report: dict[str, Any], judges: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    """(the reason of a failure, whether it counts)."""
    for side, judged in judges.items():
        if judged["status"] in ("failed", "crashed", "hung"):
            return f"fails with {side} as well", False
    if report["status"] not in ("crashed", "hung"):
        text = f"{report['error']}\n{report.get('trace', '')}"
        for rule in RULES:
            if re.fullmatch(rule.kinds, kind) and re.search(rule.test, test) and re.search(rule.error, text):
                return rule.reason, rule.counts
    return UNEXPLAINED, True
