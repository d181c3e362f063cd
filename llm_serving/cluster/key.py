"""The cluster key: a file that the server and all nodes share. With it, they prove to each other that they belong
together.

The file has a private key and a self-signed certificate. In the TLS handshake, each end shows this certificate, proves
that it has the private key, and accepts no other certificate. Certificate authorities and host names are not checked.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
import subprocess
from pathlib import Path

from llm_serving.errors import ConfigError

MAX_KEY_BYTES = 64 * 1024
"""Maximum size of the file with the cluster key."""
BLOCKS_PROTOCOL = "llm-serving-blocks"
"""Protocol name (ALPN) in the TLS handshake of a node that connects to send blocks. A link has no protocol name."""
HOST_BLOCKS_PROTOCOL = "llm-serving-host-blocks"
"""Protocol name of a server that connects to read and write the host blocks of KV tiers."""
EXCHANGE_PROTOCOL = "llm-serving-exchange"
"""Protocol name of a node that connects to send the data of agents whose group spans both nodes."""
_VALID_DAYS = "36500"


class ClusterKey:
    """The TLS settings of both ends of a link, from a key file. Raises ConfigError if the file cannot be used."""

    def __init__(self, path: str) -> None:
        _check_file(path)
        self.server = _context(path, ssl.PROTOCOL_TLS_SERVER)
        """TLS settings of a node (``agent_host``), which accepts connections."""
        self.server.set_alpn_protocols([BLOCKS_PROTOCOL, HOST_BLOCKS_PROTOCOL, EXCHANGE_PROTOCOL])
        self.client = _context(path, ssl.PROTOCOL_TLS_CLIENT)
        """TLS settings of a server that connects to a node for a link."""
        self.blocks = _context(path, ssl.PROTOCOL_TLS_CLIENT)
        """TLS settings of a node that connects to another node to send blocks."""
        self.blocks.set_alpn_protocols([BLOCKS_PROTOCOL])
        self.host_blocks = _context(path, ssl.PROTOCOL_TLS_CLIENT)
        """TLS settings of a server that connects to read and write host blocks."""
        self.host_blocks.set_alpn_protocols([HOST_BLOCKS_PROTOCOL])
        self.exchange = _context(path, ssl.PROTOCOL_TLS_CLIENT)
        """TLS settings of a node that connects to another node of the same group."""
        self.exchange.set_alpn_protocols([EXCHANGE_PROTOCOL])


def make_key(path: Path) -> None:
    """Writes a new cluster key to ``path``. Only the file's owner can read it.

    Raises ConfigError if the file exists, if it cannot be written, or if the program ``openssl`` fails.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write a new cluster key to {path}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_new_key())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _new_key() -> bytes:
    """Returns a new private key on the curve P-256 and its certificate, both in PEM format."""
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    certificate = ("-x509", "-days", _VALID_DAYS, "-subj", "/CN=llm-serving cluster")
    command = ["openssl", "req", *curve, *certificate, "-nodes", "-keyout", "-", "-out", "-"]
    try:
        made = subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL, timeout=60)
    except FileNotFoundError:
        raise ConfigError("a cluster key needs the program openssl, which is not installed") from None
    except (subprocess.SubprocessError, OSError) as error:
        text = getattr(error, "stderr", None) or b""
        raise ConfigError(f"openssl made no cluster key: {text.decode(errors='replace').strip() or error}") from None
    return made.stdout


def _check_file(path: str) -> None:
    """Raises ConfigError unless the file exists, is small, and only its owner can read it."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"cannot read the cluster key {path}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_KEY_BYTES:
        raise ConfigError(f"the cluster key {path} must be a file of at most {MAX_KEY_BYTES} bytes")
    if found.st_mode & 0o077:
        mode = oct(stat.S_IMODE(found.st_mode))
        raise ConfigError(f"the cluster key {path} has the mode {mode}: other users can use it; run: chmod 600 {path}")


def _context(path: str, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET  # a ticket would let a peer in again without its key
    try:
        context.load_cert_chain(path, password=_no_password)
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"cannot use the cluster key {path}: {reason}; it needs a private key without a password and its "
            "certificate, as llm-serving cluster key writes them"
        ) from None
    return context


def _no_password() -> str:
    """Raises ValueError for a key with a password. Without this function, OpenSSL would ask for the password on the
    terminal.
    """
    raise ValueError("the key has a password")
