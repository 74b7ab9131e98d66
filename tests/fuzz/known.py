"""Findings that are open: a signature, or a kind, and the reason. A run does not fail on them."""

KNOWN: dict[str, str] = {
    "strides of size one": "with symbolic sizes, in pieces and in training graphs they are those of torch's metadata",
    "gradient strides": "a gradient is laid out as the result that it belongs to, whatever layout arrives",
}


def reason(signature: str) -> str | None:
    """Why a finding is known; None if it is not."""
    return KNOWN.get(signature) or KNOWN.get(signature.partition(":")[0])
