"""Findings that are open: a signature, or a kind, and the reason. A run does not fail on them."""

KNOWN: dict[str, str] = {
    "layout of nothing": "ATen's kernels give what has no elements strides of several kinds, and no element tells; "
                         "where its views begin follows from them",
}


def reason(signature: str) -> str | None:
    """Why a finding is known; None if it is not."""
    return KNOWN.get(signature) or KNOWN.get(signature.partition(":")[0])
