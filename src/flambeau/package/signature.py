"""Ed25519 signatures of packages: they show who made a file. Checksums only show that it is complete.

    flambeau.export(model, args, "model.flam", sign="private.pem")
    flambeau.load("model.flam", verify="public.pem")

Keys are PEM files, as `openssl genpkey -algorithm ed25519` writes them. The signature itself is made and checked by the
library `cryptography`; docs/reference/package-format.md says what is signed, and where it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from flambeau.errors import Error, OptionError

Key: TypeAlias = str | os.PathLike[str] | bytes  # the path of a PEM file, or its content


class SignatureError(Error):
    """The package was not signed with the given key."""


def signer(key: Key) -> Callable[[bytes], bytes]:
    """A function that signs messages with a private key."""
    one = loaded(key, "private")
    return lambda message: one.sign(message)


def verifier(key: Key) -> Callable[[bytes, bytes | None], None]:
    """A function that takes a message and its signature (None: unsigned), and raises SignatureError unless the private
    key of this public key made the signature."""
    one = loaded(key, "public")
    from cryptography.exceptions import InvalidSignature

    def verify(message: bytes, signature: bytes | None) -> None:
        if signature is None:
            raise SignatureError("the package is not signed", hint="flambeau export --sign KEY signs one")
        try:
            one.verify(signature, message)
        except InvalidSignature:
            raise SignatureError("the package was not signed with this key, or changed since") from None

    return verify


def loaded(key: Key, kind: str) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as e:
        raise OptionError("signatures of packages need the library cryptography",
                          hint="pip install 'flambeau[sign]'") from e
    shown = "the key" if isinstance(key, bytes) else f"the key {os.fspath(key)}"
    try:
        data = key if isinstance(key, bytes) else Path(key).read_bytes()
        found: Any = (serialization.load_pem_private_key(data, None) if kind == "private"
                      else serialization.load_pem_public_key(data))
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as e:  # TypeError: it has a password
        raise OptionError(f"{shown} cannot be read as a {kind} key in PEM without a password: {e}") from e
    if not isinstance(found, ed25519.Ed25519PrivateKey if kind == "private" else ed25519.Ed25519PublicKey):
        raise OptionError(f"{shown} is not of Ed25519", hint="openssl genpkey -algorithm ed25519 -out private.pem")
    return found
