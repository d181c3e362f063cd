"""Tests the access to a node: the cluster key, the program, one link at a time, and bounds on every frame."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import struct
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from llm_serving.cluster import messages as link
from llm_serving.cluster.dialling import Address, NodeBusyError, NodeRefusedError, dial, read_address
from llm_serving.cluster.key import ClusterKey, make_key
from llm_serving.cluster.nodes import NodeState
from llm_serving.cluster.program import difference, model_difference, own_program
from llm_serving.cluster.remote_group import RemoteGroup
from llm_serving.errors import AgentStartError, ConfigError, ProtocolError
from llm_serving.ipc import messages
from llm_serving.telemetry.node_metrics import NodeCollector
from support.block_node import wait_for
from support.cluster import new_key
from support.small_configs import small_config
from support.time_limits import time_limit


def address_of(node) -> Address:
    return read_address(node.address)


def read_all(connection) -> bytes:
    connection.settimeout(time_limit(10.0))
    read = b""
    try:
        while data := connection.recv(4096):
            read += data
    except (ConnectionError, ssl.SSLError):
        pass
    return read


def test_a_link_needs_the_same_cluster_key(make_node, key, tmp_path):
    node = make_node()
    other = new_key(tmp_path, "other.key")
    with pytest.raises(OSError, match="no TLS with this cluster key: CERTIFICATE_VERIFY_FAILED"):
        dial(address_of(node), ClusterKey(str(other)))
    channel, welcome = dial(address_of(node), ClusterKey(str(key)))
    channel.close()
    assert (welcome.program, welcome.pid) == (own_program(), node.pid)


def test_a_server_without_a_certificate_gets_nothing(make_node):
    """This client has no certificate and does not check the node's, so only the node can refuse the connection."""
    node = make_node()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address_of(node)) as plain, context.wrap_socket(plain) as connection:
        hello = link.control(link.Hello(own_program()))
        with contextlib.suppress(OSError):  # the node may have closed the connection already
            connection.sendall(struct.pack("<I", len(hello)) + hello)
        assert read_all(connection) == b""


def test_a_node_sends_nothing_in_plaintext(make_node):
    with socket.create_connection(address_of(make_node())) as plain:
        hello = link.control(link.Hello(own_program()))
        plain.sendall(struct.pack("<I", len(hello)) + hello)
        answer = read_all(plain)
        assert b"welcome" not in answer
        assert len(answer) < 16, "at most an alert of TLS"


def test_a_node_of_another_program_is_refused_with_the_difference(make_node, key, monkeypatch):
    program = own_program()
    other = link.Program("9.9.9", program.link, program.protocol + 1, "0" * 16)
    monkeypatch.setattr("llm_serving.cluster.dialling.own_program", lambda: other)
    with pytest.raises(NodeRefusedError) as refused:
        dial(address_of(make_node()), ClusterKey(str(key)))
    assert str(refused.value) == (
        f"the node has another program: version {program.version}, the server has 9.9.9; protocol version "
        f"{program.protocol}, the server has {program.protocol + 1}; code {program.code}, the server has {'0' * 16}"
    )
    assert difference(program, program) is None


def test_a_node_serves_one_link(make_node, key):
    node = make_node()
    channel, _ = dial(address_of(node), ClusterKey(str(key)))
    with pytest.raises(NodeBusyError, match="serves another link"):
        dial(address_of(node), ClusterKey(str(key)))
    channel.close()


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<I", 1 << 30),
        struct.pack("<I", 3) + b"\x07\x00\x00",
        struct.pack("<I", 8) + struct.pack("<BBI", 1, 0, 1 << 20) + b"xx",
        struct.pack("<I", 4) + b"\x00\xc1\xc1\xc1",
        struct.pack("<I", len(link.control(link.End())) - 1) + link.control(link.End())[:-1],
    ],
)
def test_a_wrong_frame_ends_the_link_and_not_the_node(make_node, key, frame):
    node = make_node()
    channel, _ = dial(address_of(node), ClusterKey(str(key)))
    sock = channel._socket
    sock.setblocking(True)
    sock.sendall(frame)
    read_all(sock)
    channel.close()
    for _ in range(100):
        try:
            channel, _ = dial(address_of(node), ClusterKey(str(key)))
        except NodeBusyError:
            continue
        channel.close()
        break
    assert "the link is lost" in node.stderr()


def test_a_node_sends_no_blocks_without_roles(make_node, key):
    node = make_node()
    channel, _ = dial(address_of(node), ClusterKey(str(key)))
    message = link.SendBlocks(1, "127.0.0.1", node.port, bytes(32), link.pack_pairs([(0, 0)]))
    channel.send(link.control(message))
    channel._socket.setblocking(True)
    read_all(channel._socket)
    channel.close()
    assert "the server sent SendBlocks; the replicas have no roles" in node.stderr()
    cut = link.read_at_node(link.control(msgspec.structs.replace(message, packed_pairs=bytes(12))))
    with pytest.raises(ProtocolError, match="have 12 bytes"):
        print(cut.pairs)


def test_a_node_without_agents_receives_no_blocks(make_node, key):
    with socket.create_connection(address_of(make_node())) as plain:
        connection = ClusterKey(str(key)).blocks.wrap_socket(plain)
        assert read_all(connection) == b""


def test_a_message_for_agents_that_do_not_run_is_refused():
    carried = link.carry(messages.encode(messages.Status(seq=1)), 0, b"contents")
    read = link.read_at_node(carried)
    assert isinstance(read, link.Carried)
    assert (bytes(read.payload), bytes(read.contents)) == (messages.encode(messages.Status(seq=1)), b"contents")
    for damaged in (b"", carried[:5], carried[:8], bytes((1, 0)) + struct.pack("<I", 1 << 31) + b"x"):
        with pytest.raises(ProtocolError):
            link.read_at_node(damaged)
    with pytest.raises(ProtocolError):
        link.read_at_server(link.control(link.End()))


class ReadyChannel:
    """The link of a node that reports ready agents with ``secret``."""

    events = selectors.EVENT_READ

    def __init__(self, secret):
        self._sockets = socket.socketpair()
        self._frames = [link.control(link.GroupReady([{}], [1], secret))]

    def fileno(self):
        return self._sockets[0].fileno()

    def receive_available(self):
        return self._frames

    def send(self, frame):
        pass

    def flush(self):
        pass

    def allow(self, num_bytes):
        pass

    def close(self):
        for each in self._sockets:
            each.close()


@pytest.mark.parametrize("num_bytes", [0, 31])
def test_a_node_without_a_whole_secret_for_handed_blocks_is_refused(num_bytes, tmp_path):
    roles = ("parallel_config.data_parallel=2", "parallel_config.roles=[prefill, decode]")
    channel = ReadyChannel(bytes(num_bytes))
    node = SimpleNamespace(name="far", channel=channel, address="far:1", leave_at=None)
    ignored = SimpleNamespace(arithmetic_difference=lambda *_: None, give_back=lambda *_, **__: None)
    group = RemoteGroup(small_config(tmp_path, roles), 0, node, ignored, {}, lambda *_: None)
    with pytest.raises(AgentStartError, match=f"node far: .*secret .* has {num_bytes} bytes; roles need 32"):
        group._receive()
    group.kill()


def test_silence_is_noticed_within_three_seconds():
    assert link.SERVER_PATIENCE_S + link.BEAT_S <= 3.0
    assert link.NODE_PATIENCE_S > link.SERVER_PATIENCE_S > 3 * link.BEAT_S


def test_a_key_file_is_refused_unless_only_its_owner_can_read_it(tmp_path):
    path = new_key(tmp_path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    ClusterKey(str(path))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"has the mode 0o640: other users can use it; run: chmod 600 {path}"):
        ClusterKey(str(path))
    with pytest.raises(ConfigError, match="cannot write a new cluster key"):
        make_key(path)
    with pytest.raises(ConfigError, match="No such file"):
        ClusterKey(str(tmp_path / "missing"))
    wrong = tmp_path / "wrong"
    wrong.write_text("no key")
    wrong.chmod(0o600)
    with pytest.raises(ConfigError, match="needs a private key without a password"):
        ClusterKey(str(wrong))


@pytest.mark.parametrize("text", ["", "host", "host:", ":7450", "host:0", "host:65536", "a:b:1", "[::1]", "a b:1"])
def test_a_wrong_address_is_refused(text):
    with pytest.raises(ConfigError, match="is not the address of a node"):
        read_address(text)


def test_addresses():
    assert read_address("node-1.example:7450") == Address("node-1.example", 7450)
    assert str(read_address("[::1]:7450")) == "[::1]:7450"


def test_differences_of_model_files_are_named():
    files = {"a.safetensors": "5 bytes, digest 1", "config.json": "2 bytes, digest 2"}
    assert model_difference(files, dict(files)) is None
    assert model_difference(files, {}) == "the node's model lacks a.safetensors, config.json"
    changed = {**files, "a.safetensors": "5 bytes, digest 9"}
    assert model_difference(files, changed) == (
        "a.safetensors differs: it is 5 bytes, digest 9 on the node, 5 bytes, digest 1 on the server"
    )


def test_metrics_count_the_nodes_of_each_state(make_node, pool):
    registry = CollectorRegistry()
    nodes = [None]
    registry.register(NodeCollector(lambda: nodes[0]))
    assert registry.get_sample_value("llm_serving_nodes", {"state": "free"}) is None
    nodes[0] = pool
    pool.add(make_node().address)
    pool.drain(pool.add("127.0.0.1:9").name, 0.0)
    wait_for(lambda: registry.get_sample_value("llm_serving_nodes", {"state": "free"}) == 1)
    states = [each.value for each in NodeState]
    counts = {each: registry.get_sample_value("llm_serving_nodes", {"state": each}) for each in states}
    assert counts == {each: float(each in ("free", "drained")) for each in states}
