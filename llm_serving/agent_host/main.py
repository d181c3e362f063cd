"""Runs a node: accepts links, checks the cluster key and the program, and serves one link at a time."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from llm_serving.access.listening import bound_socket
from llm_serving.agent_host.session import Session
from llm_serving.agent_host.settings import NodeSettings
from llm_serving.cluster.channel import SecureChannel
from llm_serving.cluster.dialling import read_listen_address
from llm_serving.cluster.key import BLOCKS_PROTOCOL, EXCHANGE_PROTOCOL, HOST_BLOCKS_PROTOCOL, ClusterKey
from llm_serving.cluster.messages import HANDSHAKE_TIMEOUT_S, Hello, Refused, Welcome, control, read_at_node
from llm_serving.cluster.program import difference, own_program
from llm_serving.config.pool_checks import problem_of_name
from llm_serving.errors import ConfigError, ProtocolError
from llm_serving.ipc.segment import remove_leftovers
from llm_serving.planning.machine import Machine

EXIT_USAGE = 2
"""Exit code of a wrong command line."""
DEFAULT_LISTEN = "127.0.0.1:7450"
MAX_HANDSHAKES = 16
"""Maximum number of connections that are in the handshake at the same time."""
_ACCEPT_PAUSE_S = 0.2
"""Seconds that a node waits for a link before it checks whether it must end. Also the pause after a failed accept."""


class AgentHost:
    """The process of a node. ``serve`` runs until ``stop`` is called."""

    def __init__(self, listener: socket.socket, key: ClusterKey, settings: NodeSettings) -> None:
        self._listener = listener
        self._key = key
        self._settings = settings
        self._session: Session | None = None
        """The link that the node serves. None while the node is free."""
        self._is_used = threading.Lock()
        """The lock that is held while the node serves a link."""
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._stop_descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_stopping = False

    def stop(self) -> None:
        """Ends the link and its agents, and lets ``serve`` return. Any thread and any signal handler may call this
        method.
        """
        self._is_stopping = True
        os.eventfd_write(self._stop_descriptor, 1)

    def serve(self) -> None:
        """Accepts links until ``stop``. When this method returns, the agents have ended."""
        self._listener.settimeout(_ACCEPT_PAUSE_S)
        while not self._is_stopping:
            try:
                plain, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # for example, too many files are open
                note(f"cannot accept connections: {error}")
                time.sleep(_ACCEPT_PAUSE_S)
                continue
            if not self._handshakes.acquire(blocking=False):
                plain.close()
                continue
            threading.Thread(target=self._welcome, args=(plain, peer), name="link", daemon=True).start()
        with self._is_used:  # waits until the present link has ended
            pass

    def _welcome(self, plain: socket.socket, peer: tuple[str, int]) -> None:
        """Does the handshake of a new connection, and then serves it. The peer must have the same cluster key.

        If the peer is a server and the node is free, the connection is a link, and this method serves it. Other
        connections carry data: handed blocks or activations from another node, or host blocks for the server.
        """
        try:
            plain.settimeout(HANDSHAKE_TIMEOUT_S)
            secure = self._key.server.wrap_socket(plain, server_side=True)
            protocol = secure.selected_alpn_protocol()
            channel = None if protocol else SecureChannel(secure)
        except OSError as error:
            self._handshakes.release()
            note(f"refused {peer[0]}: {getattr(error, 'reason', None) or error}")
            plain.close()
            return
        if channel is None:
            self._handshakes.release()
            self._receive_data(secure, protocol)
            return
        is_free = self._is_used.acquire(blocking=False)
        try:
            self._serve(channel, peer, is_free=is_free)
        finally:
            channel.close()
            if is_free:
                self._is_used.release()

    def _receive_data(self, link: ssl.SSLSocket, protocol: str | None) -> None:
        """Passes a data connection to the object that serves its ``protocol``, or closes it if no object does."""
        session, receiver = self._session, None
        if session is not None:
            receivers = {
                BLOCKS_PROTOCOL: session.handed_blocks,
                HOST_BLOCKS_PROTOCOL: session.host_blocks,
                EXCHANGE_PROTOCOL: session.bridge,
            }
            receiver = receivers.get(protocol or "")
        if receiver is None:
            link.close()
        else:
            receiver.receive(link)

    def _serve(self, channel: SecureChannel, peer: tuple[str, int], *, is_free: bool) -> None:
        try:
            is_welcome = greet(channel, socket.gethostname(), is_busy=not is_free, pool=self._settings.pool)
        except (OSError, ProtocolError) as error:
            note(f"refused {peer[0]}: {error}")
            return
        finally:
            self._handshakes.release()
        if is_welcome:
            note(f"linked to {peer[0]}")
            self._session = Session(channel, self._settings, note, self._key)
            self._session.run(self._stop_descriptor)
            self._session = None


def greet(channel: SecureChannel, host: str, *, is_busy: bool, pool: str = "") -> bool:
    """Replies to the first message of a server. If the node cannot serve this server, sends the reason and returns
    False. ``pool`` is the pool by prompt length that the node serves, or empty.

    Raises OSError and ProtocolError.
    """
    hello = read_at_node(channel.receive_one(HANDSHAKE_TIMEOUT_S))
    if not isinstance(hello, Hello):
        raise ProtocolError(f"the first message is {type(hello).__name__}; it must be Hello")
    if (other := difference(hello.program, own_program())) is not None:
        channel.send(control(Refused(other)))
        return False
    if is_busy:
        channel.send(control(Refused("the node serves another link", is_busy=True)))
        return False
    machine = Machine.detect()
    memory = machine.available_bytes, machine.available_from, machine.num_cores
    channel.send(control(Welcome(own_program(), host, os.getpid(), *memory, pool)))
    return True


def note(text: str) -> None:
    """Writes a line to standard error."""
    sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} agent_host: {text}\n")
    sys.stderr.flush()


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of ``llm-serving cluster host``."""
    parser = argparse.ArgumentParser(
        prog="llm-serving cluster host",
        description="Run a node: a process that starts agents on this machine for a server on another machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--key-file", required=True, metavar="FILE", help="the cluster key, as `cluster key` writes it")
    parser.add_argument(
        "--listen", default=DEFAULT_LISTEN, metavar="IP:PORT", help="where servers connect; port 0 is any free one"
    )
    parser.add_argument(
        "--log-folder", default="output/agent_host", metavar="FOLDER", help="folder for the logs of the agents"
    )
    parser.add_argument(
        "--adapter-folder", metavar="FOLDER", help="folder that keeps LoRA adapters from servers, with at most 4 GiB "
        "(default: `adapters` in the log folder)"
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="PATH", help="model folder or GGUF file on this machine (default: the server's path)"
    )
    parser.add_argument(
        "--first-device", type=int, metavar="N", help="number of the first Ascend of the agents (default: the server's)"
    )
    parser.add_argument(
        "--pool", default="", metavar="NAME", help="only serve replicas of this pool by prompt length "
        "(parallel_config.pools of the server; default: of the pools that no node names)"
    )  # fmt: skip
    parser.add_argument(
        "--with-stdin", action="store_true", help="end when standard input ends, so that the process never outlives "
        "the one that started it"
    )  # fmt: skip
    parser.add_argument("--agent-module", default="agent", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a node until SIGTERM or SIGINT. Returns the exit code, 2 for wrong usage."""
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.pool and (problem := problem_of_name(arguments.pool)) is not None:
            raise ConfigError(f"--pool: {problem}")
        address = read_listen_address(arguments.listen)
        key = ClusterKey(arguments.key_file)
        folder = Path(arguments.log_folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        listener = bound_socket(address.host, address.port)
        listener.listen(MAX_HANDSHAKES)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    remove_leftovers()
    model = None if arguments.model is None else str(Path(arguments.model).absolute())
    adapters = Path(arguments.adapter_folder or folder / "adapters").absolute()
    more = arguments.agent_module, arguments.pool
    settings = NodeSettings(folder, adapters, model, arguments.first_device, *more)
    host = AgentHost(listener, key, settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.stop())
    if arguments.with_stdin:
        threading.Thread(target=_stop_at_end_of_input, args=(host,), name="stdin", daemon=True).start()
    bound = listener.getsockname()
    sys.stdout.write(f"ready {address._replace(port=bound[1])}\n")
    sys.stdout.flush()
    with contextlib.closing(listener):
        host.serve()
    return 0


def _stop_at_end_of_input(host: AgentHost) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    host.stop()
