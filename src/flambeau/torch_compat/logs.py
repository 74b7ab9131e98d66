"""torch's logs: TORCH_LOGS="+flambeau" for our loggers, and artifact names for what we generate.

    log = artifact_log(__name__, "output_code")      # shown with TORCH_LOGS="output_code"

Torch has no public way for a backend to give its logger a handler, or to declare a message as an artifact.
"""

from __future__ import annotations

import logging
import os

from torch._logging import _internal as internal
from torch._logging import getArtifactLogger

NAME = "flambeau"


def _announce() -> None:
    """Register our logger with torch, as torch does for its own, but without resetting those."""
    wanted = os.environ.get("TORCH_LOGS", "")
    if NAME in wanted:  # torch does it itself, maybe later: it imports our modules first
        return
    internal.log_registry.register_log(NAME, NAME)
    log = logging.getLogger(NAME)
    if wanted and not log.handlers:  # FLAMBEAU_LOG may have set one
        internal._setup_handlers(logging.StreamHandler, log)
        log.propagate = False


def artifact_log(module: str, artifact: str) -> logging.Logger:
    """The log of an artifact; a plain logger of that name if this release does not have the artifact."""
    if artifact not in internal.log_registry.artifact_names:
        return logging.getLogger(f"{module}.{artifact}")
    return getArtifactLogger(module, artifact)


_announce()
