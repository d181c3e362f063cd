"""Makes certificates for tests of TLS, with the command ``openssl``."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30")


def make_authority(folder: Path, name: str) -> Path:
    """Makes ``NAME.pem`` and ``NAME.key`` of a certificate authority. Returns the path of the certificate."""
    _openssl(folder, name, "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign")
    return folder / f"{name}.pem"


def make_certificate(folder: Path, name: str, authority: Path) -> tuple[Path, Path]:
    """Makes a certificate for 127.0.0.1 and localhost. Returns the paths of the certificate and of its key."""
    issuer = ("-CA", str(authority), "-CAkey", str(authority.with_suffix(".key")))
    names = ("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-addext", "basicConstraints=CA:FALSE")
    _openssl(folder, name, "-subj", f"/CN={name}", *issuer, *names)
    return folder / f"{name}.pem", folder / f"{name}.key"


def client_context(authority: Path, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """Returns the TLS settings of a client that trusts an authority. The client may have a certificate of its own."""
    context = ssl.create_default_context(cafile=str(authority))
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


def _openssl(folder: Path, name: str, *options: str) -> None:
    files = ("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem"))
    subprocess.run(["openssl", "req", "-x509", *_KEY, *files, *options], check=True, capture_output=True)
    (folder / f"{name}.key").chmod(0o600)
