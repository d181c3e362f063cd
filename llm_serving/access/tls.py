"""Encrypted connections: the server's certificate, and the certificates of clients (mTLS)."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from llm_serving.access.key_store import KeyLog, file_signature
from llm_serving.access.periodic import Periodic
from llm_serving.config.serving_section import ServingConfig
from llm_serving.errors import ConfigError


class ServerTls:
    """The TLS settings of the server's listeners. If the certificate file is renewed, new connections use the new
    certificate.

    The constructor raises ConfigError if a file cannot be used. ``client_ca`` is the file of a certificate authority.
    With it, only clients with a certificate of this authority can connect.
    """

    def __init__(self, cert: str, key: str, client_ca: str | None, log: KeyLog) -> None:
        self._cert, self._key = cert, key
        self._log = log
        self._seen = self._signature()
        self.context = _context(cert, key)
        if client_ca is not None:
            _require_client_certificates(self.context, client_ca)
        if os.stat(key).st_mode & 0o044:
            message = f"others can read the private key {key}; use 'chmod 600'"
            log.event("tls_key_readable", level="warning", message=message)
        self.watch = Periodic(self.refresh)

    def refresh(self) -> bool:
        """Loads the certificate if its files have changed. Returns True if there is a new certificate. If the files
        have an error, the old certificate stays in use.
        """
        seen = self._signature()
        if seen == self._seen:
            return False
        self._seen = seen
        try:
            # First load the files into a temporary context, to test them. If loading into ``self.context`` failed
            # halfway, new connections would have no key.
            _context(self._cert, self._key)
            self.context.load_cert_chain(self._cert, self._key)
        except (ConfigError, OSError) as error:
            self._log.error(f"{error}; the earlier certificate stays in use", event="tls_cert_refused")
            return False
        self._log.event("tls_cert_loaded", file=self._cert)
        return True

    def _signature(self) -> tuple[object, object]:
        return file_signature(self._cert), file_signature(self._key)


def open_tls(serving: ServingConfig, log: KeyLog) -> ServerTls | None:
    """Returns the TLS settings of a config, or None if it has none. Raises ConfigError."""
    if serving.tls_cert is None or serving.tls_key is None:
        return None
    return ServerTls(serving.tls_cert, serving.tls_key, serving.tls_client_ca, log)


def _context(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _check_readable("tls_cert", cert)
    _check_readable("tls_key", key)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"serving_config.tls_cert, tls_key: cannot use {cert} with {key}: {reason}. Both must be PEM files that "
            "belong together, and the key must have no password"
        ) from None
    return context


def _require_client_certificates(context: ssl.SSLContext, client_ca: str) -> None:
    _check_readable("tls_client_ca", client_ca)
    try:
        context.load_verify_locations(client_ca)
    except OSError as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(f"serving_config.tls_client_ca: {client_ca} has no certificates in PEM: {reason}") from None
    context.verify_mode = ssl.CERT_REQUIRED


def _check_readable(setting: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"serving_config.{setting}: cannot read {path}: {error.strerror}") from None


def _no_password() -> str:
    """Raises ValueError for a key with a password. Without this function, OpenSSL would ask for the password on the
    terminal.
    """
    raise ValueError("the key has a password")
