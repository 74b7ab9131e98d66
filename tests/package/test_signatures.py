"""Signatures of packages, which show who made a file. The keys are generated for each run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import flambeau
from flambeau.cli import main
from flambeau.errors import OptionError
from flambeau.package import container
from flambeau.package.container import DamagedPackage, Section
from flambeau.package.machine_code import quick_checksum
from flambeau.package.signature import SignatureError, verifier

pytest.importorskip("cryptography", reason="signatures are made by the library cryptography (the extra `sign`)")

from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, ed25519  # noqa: E402

ONES = np.ones(8, np.float32)


def pair(folder: Path, name: str, key: object = None) -> tuple[Path, Path]:
    """The files of a private key and of its public key."""
    one = key or ed25519.Ed25519PrivateKey.generate()
    pem = serialization.Encoding.PEM
    private, public = folder / f"{name}.pem", folder / f"{name}.public.pem"
    private.write_bytes(one.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(one.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_a_package_is_verified_with_the_key_that_signed_it(tmp_path: Path) -> None:
    private, public = pair(tmp_path, "ours")
    _, other = pair(tmp_path, "theirs")
    linear, x, path = torch.nn.Linear(8, 4), torch.ones(8), tmp_path / "signed.flam"
    flambeau.export(linear, (x,), path, debug=False, sign=private)
    first = path.read_bytes()
    flambeau.export(linear, (x,), path, debug=False, sign=private.read_bytes())
    assert path.read_bytes() == first
    with flambeau.load(path) as anyhow, flambeau.load(path, verify=public) as sure:
        assert np.array_equal(anyhow(ONES), sure(ONES))
    with pytest.raises(SignatureError, match="was not signed with this key"):
        flambeau.load(path, verify=other)
    flambeau.export(linear, (x,), tmp_path / "plain.flam", debug=False)
    with pytest.raises(SignatureError, match="is not signed"):
        flambeau.load(tmp_path / "plain.flam", verify=public)

    # Another file with correct checksums, but with our signature.
    sections = container.read(path)
    weights = bytearray(sections[1].data)
    weights[-1] ^= 1
    changed = [Section(s.kind, s.name, weights if s.kind == container.WEIGHTS else s.data) for s in sections]
    container.write(tmp_path / "changed.flam", changed, quick_checksum)
    flambeau.load(tmp_path / "changed.flam").unload()
    with pytest.raises(SignatureError, match="changed since"):
        flambeau.load(tmp_path / "changed.flam", verify=public)
    for sections in (changed[:-1], [], [*changed, changed[0]], [*changed[:-1], Section(container.SIGNATURE, "", b"")]):
        container.write(tmp_path / "changed.flam", sections, quick_checksum)
        with pytest.raises(SignatureError, match="is not signed"):
            flambeau.load(tmp_path / "changed.flam", verify=public)

    # Changed weights with a correct quick checksum: verifying does not rely on that.
    data = bytearray(first)
    at = first.index(bytes(container.read(path)[1].data))
    data[at + len(weights) - 1] ^= 1
    (tmp_path / "changed.flam").write_bytes(data)
    with pytest.raises(DamagedPackage, match="checksum of its section 'weights'"):
        flambeau.load(tmp_path / "changed.flam", verify=public)


def test_keys_that_are_none_are_refused(tmp_path: Path) -> None:
    private, public = pair(tmp_path, "ours")
    curve, _ = pair(tmp_path, "curve", ec.generate_private_key(ec.SECP256R1()))
    relu, args, path = torch.nn.ReLU(), (torch.ones(8),), tmp_path / "relu.flam"
    for key, message in ((curve, "is not of Ed25519"), (public, "cannot be read as a private key"),
                         (tmp_path / "none.pem", "cannot be read as a private key"), (b"", "the key cannot be read")):
        with pytest.raises(OptionError, match=message):
            flambeau.export(relu, args, path, sign=key)
    assert not path.exists()
    flambeau.export(relu, args, path, debug=False, sign=private)
    with pytest.raises(OptionError, match="cannot be read as a public key"):
        flambeau.load(path, verify=private)


def test_the_command_line_signs_and_verifies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    private, public = (str(p) for p in pair(tmp_path, "ours"))
    other = str(pair(tmp_path, "theirs")[1])
    (tmp_path / "f.py").write_text("import torch\ndef f(x): return x.relu()\ndef f_inputs(): return (torch.ones(8),)\n")
    np.save(tmp_path / "x.npy", ONES)
    package = str(tmp_path / "f.flam")
    assert main(["export", f"{tmp_path}/f.py:f", "-o", package, "--sign", private]) == 0
    assert main(["inspect", package, "--verify", public]) == 0 and "signed with the key" in capsys.readouterr().out
    assert main(["run", package, "--verify", public, "--input", f"{tmp_path}/x.npy"]) == 0
    for command in ("inspect", "run"):
        assert main([command, package, "--verify", other]) == 1
        assert "was not signed with this key" in capsys.readouterr().err


def test_without_the_library_it_is_named(tmp_path: Path) -> None:
    text = ("import sys; sys.modules['cryptography'] = sys.modules['torch'] = None; import flambeau\n"
            "try: flambeau.load('model.flam', verify='key.pem')\nexcept flambeau.Error as e: print(e)")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=tmp_path,
                          env={"PATH": "", "PYTHONPATH": str(Path(flambeau.__file__).parents[1]), "HOME": "/nowhere"})
    assert "signatures of packages need the library cryptography" in done.stdout, done.stderr
    assert "flambeau[sign]" in done.stdout


def test_a_signed_file_of_an_earlier_time_is_verified() -> None:
    fixture = Path(__file__).parent / "fixtures" / "format-1.2.flam"
    assert container.read(fixture, verify=verifier(fixture.with_suffix(".pem")))[-1].kind == container.SIGNATURE
