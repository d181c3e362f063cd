"""Tests LoRA adapters for stub agents on nodes: their bytes travel through the link, or come from the node's cache."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from llm_serving.agent_host.adapter_cache import AdapterCache
from llm_serving.cluster import messages as link
from llm_serving.cluster.adapters import AdapterSender
from llm_serving.errors import ProtocolError
from llm_serving.executor.base import AdapterAnswered, AgentLost, AgentReady
from llm_serving.ipc.adapters import AdapterMemory
from llm_serving.ipc.messages import AdapterLoad
from llm_serving.lora.loading import largest_memory_bytes
from support.executor_steps import events_until, prefill, results
from support.server_process import shm_entries
from support.small_configs import small_config
from support.stub_agent import BAD_ADAPTER, stub_token
from support.time_limits import time_limit

SLOTS = ("lora_config.max_adapters=2", "lora_config.max_rank=512", "serving_config.agent_restart_limit=20")
SIZE = 2 * link.PIECE_BYTES + 12345


@pytest.fixture
def make_memory():
    """Makes adapters with random bytes after ``beginning``."""
    made = []

    def make(seed, beginning=b"", size=SIZE):
        memory = AdapterMemory.create_empty(size)
        made.append(memory)
        memory.write(0, beginning + np.random.default_rng(seed).bytes(size - len(beginning)))
        return memory

    yield make
    for memory in made:
        memory.close()


@pytest.fixture
def sent(monkeypatch):
    """Records the first byte of each piece of an adapter that was sent to a node."""
    begins, send_piece = [], AdapterSender.send_piece

    def note(sender, wanted):
        begins.append(wanted.begin)
        send_piece(sender, wanted)

    monkeypatch.setattr(AdapterSender, "send_piece", note)
    return begins


def content_of(memory):
    return memory.read(0, memory.num_bytes)


def token_of(executor, seq, slot):
    """Runs a step of a sequence with an adapter, and returns its token."""
    step = prefill(seq, 5)
    step.requests[0].adapter_slot = slot
    executor.submit(step)
    [result] = results(executor, 1)
    [token] = result.sampled_ids
    return token


def load(executor, slot, memory):
    number = executor.load_adapter(slot, memory)
    [*_, answer] = events_until(executor, AdapterAnswered)
    assert answer.number == number
    return answer


def files_of(node, count):
    """Waits until the cache of a node has this number of files. The node writes them after the agents' replies."""
    until = time.monotonic() + time_limit(20)
    while len(found := sorted((node.folder / "adapters").glob("*.adapter"))) != count:
        assert time.monotonic() < until, found
        time.sleep(0.02)
    return found


def test_adapters_reach_all_agents_of_a_node_and_those_that_replace_them(
    make_node, make_executor, pool, make_memory, sent
):
    node = make_node()
    pool.add(node.address)
    executor = make_executor(*SLOTS, "parallel_config.tensor_parallel=2")
    events_until(executor, AgentReady)
    first, second, third = (make_memory(seed) for seed in range(3))
    assert not load(executor, 0, first).error
    assert sent == [0, link.PIECE_BYTES, 2 * link.PIECE_BYTES]
    assert not load(executor, 1, second).error
    contents = [content_of(each) for each in (first, second, third)]
    assert len(set(contents)) == 3
    assert [token_of(executor, slot, slot) for slot in range(2)] == [stub_token(1, 0, each) for each in contents[:2]]
    assert shm_entries(node.pid) == set(), "the agents have copied the adapters"

    files_of(node, 2)
    sent.clear()
    node.agents()[0].kill()
    events_until(executor, AgentLost)
    executor.drop_adapter(0)
    assert executor.load_adapter(0, third) is None, "the agents are not ready, so there is no answer"
    events = events_until(executor, AgentReady)
    assert not any(isinstance(event, AdapterAnswered) for event in events)
    assert sent == [0, link.PIECE_BYTES, 2 * link.PIECE_BYTES], "only the new one, because the node has the other one"
    assert [token_of(executor, 4, 0), token_of(executor, 5, 1)] == [stub_token(1, 0, contents[each]) for each in (2, 1)]


def test_a_node_that_joins_later_has_the_adapters_before_its_first_step(
    make_node, make_executor, pool, make_memory, sent
):
    executor, memory = make_executor(*SLOTS), make_memory(1)
    executor.poll(0.0)
    executor.load_adapter(1, memory)
    node = make_node("--adapter-folder", "/proc/no/folder")
    pool.add(node.address)
    events_until(executor, AgentReady)
    assert token_of(executor, 0, 1) == stub_token(1, 0, content_of(memory))
    assert len(sent) == 3
    until = time.monotonic() + time_limit(20)
    while "an adapter is not kept for later starts" not in node.stderr():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_damaged_file_of_the_cache_is_received_again(make_node, make_executor, pool, make_memory, sent):
    node = make_node()
    pool.add(node.address)
    executor, memory = make_executor(*SLOTS), make_memory(1)
    events_until(executor, AgentReady)
    load(executor, 0, memory)
    [file] = files_of(node, 1)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_bytes() == content_of(memory)
    for damage in (b"x", b"\0" * SIZE, content_of(memory) + b"x"):
        sent.clear()
        file.write_bytes(damage)
        load(executor, 0, memory)
        assert len(sent) == 3
        assert token_of(executor, len(damage), 0) == stub_token(1, 0, content_of(memory))
        until = time.monotonic() + time_limit(20)
        while not file.exists() or file.read_bytes() != content_of(memory):
            assert time.monotonic() < until
            time.sleep(0.02)
    sent.clear()
    load(executor, 0, memory)
    assert sent == []


def test_an_adapter_that_the_agents_refuse_leaves_the_others(make_node, make_executor, pool, make_memory):
    pool.add(make_node().address)
    executor = make_executor(*SLOTS, "parallel_config.tensor_parallel=2")
    events_until(executor, AgentReady)
    good = make_memory(1)
    load(executor, 0, good)
    assert load(executor, 1, make_memory(2, BAD_ADAPTER)).error == "the adapter is made of cheese"
    assert token_of(executor, 0, 0) == stub_token(1, 0, content_of(good))


def test_wrong_messages_about_adapters_and_tiles_end_the_link(make_node, make_executor, pool, tmp_path, monkeypatch):
    monkeypatch.setattr(AdapterSender, "send_piece", lambda *_: None)  # the node may ask for bytes before its error
    node = make_node()
    pool.add(node.address)
    executor = make_executor(*SLOTS)
    most = largest_memory_bytes(small_config(tmp_path, SLOTS))
    first, other = link.LoadAdapter(1, 0, bytes(32), 100), link.LoadAdapter(2, 0, bytes(32), 200)
    for messages, problem in (
        ([link.LoadAdapter(1, 0, bytes(32), most + 1)], f"of {most + 1} bytes; the largest of this model has at most"),
        ([first, other, first], "loads more than 2 adapters at the same time"),
        ([link.AdapterPart(7, 0, b"x")], "sent bytes of adapter message 7, which the node did not ask for"),
        ([link.TilePart(0, 0, b"x")], "sent TilePart; the model reads no images"),
        ([link.SendBlocks(1, "h", 1, bytes(32), link.pack_pairs([(0, 0)]))], "SendBlocks; the replicas have no roles"),
    ):
        events_until(executor, AgentReady)
        for message in messages:
            executor._group._send(link.control(message))
        events_until(executor, AgentLost)
        assert problem in node.stderr()


def test_bytes_of_an_adapter_are_checked_by_both_ends(make_node, make_executor, pool, make_memory, monkeypatch):
    """The server sends other bytes than announced, and then the node asks for bytes that the adapter does not have."""
    node = make_node()
    pool.add(node.address)
    executor, memory = make_executor(*SLOTS), make_memory(1)
    events_until(executor, AgentReady)
    monkeypatch.setattr(memory, "digest", lambda: bytes(32))
    executor.load_adapter(0, memory)
    events_until(executor, AgentLost)
    assert "have another digest than announced" in node.stderr()
    monkeypatch.undo()
    events_until(executor, AgentReady)
    sender = AdapterSender(1, lambda frame: None)
    for wanted, problem in (
        (link.WantAdapter(3, 0, 1), "which it does not load"),
        (link.WantAdapter(4, memory.num_bytes, 1), f"which has {memory.num_bytes} bytes"),
    ):
        sender.load(AdapterLoad(seq=4, adapter_slot=0, shm_name=memory.name, num_bytes=memory.num_bytes), memory)
        with pytest.raises(ProtocolError, match=problem):
            sender.send_piece(wanted)


def test_the_cache_removes_old_and_unfinished_files(tmp_path, make_memory):
    folder = tmp_path / "cache"
    cache = AdapterCache(folder, max_bytes=250)
    memories = [make_memory(seed, size=100) for seed in range(3)]
    for age, memory in enumerate(memories[:2]):
        cache.keep(memory, memory.digest())
        os.utime(folder / f"{memory.digest().hex()}.adapter", (age, age))
    assert cache.fill(AdapterMemory.attach(make_memory(9, size=100).name, 100, np.uint8), memories[0].digest())
    unfinished = folder / "a.part"
    unfinished.write_bytes(b"x")
    os.utime(unfinished, (0, 0))
    cache.keep(memories[2], memories[2].digest())
    kept = {f"{memories[each].digest().hex()}.adapter" for each in (0, 2)}
    assert {path.name for path in folder.iterdir()} == kept, "the file that was used last stays"
    assert not cache.fill(make_memory(10, size=100), memories[1].digest())


def test_the_cache_never_has_more_than_its_limit(tmp_path, make_memory, monkeypatch):
    folder = tmp_path / "cache"
    cache = AdapterCache(folder, max_bytes=250)
    first, second, large = make_memory(0, size=100), make_memory(1, size=100), make_memory(2, size=251)
    cache.keep(first, first.digest())
    with pytest.raises(OSError, match="251 bytes; the folder keeps at most 250"):
        cache.keep(large, large.digest())
    [kept] = folder.iterdir()
    assert kept.name == f"{first.digest().hex()}.adapter", "an adapter that cannot be kept removes no other one"

    (folder / "b.part").write_bytes(bytes(100))  # another node writes an adapter
    sizes = []

    def note_sizes(file):
        sizes.extend(path.stat().st_size for path in folder.iterdir())

    monkeypatch.setattr(second, "write_to", note_sizes)
    cache.keep(second, second.digest())
    assert sizes == [100, 100], "the old adapter made room, and the new file has its final size from the start"


def test_a_node_that_is_killed_while_an_adapter_travels_is_replaced(make_node, make_executor, pool, make_memory, sent):
    """The node is stopped before it asks for the first bytes."""
    node = make_node()
    pool.add(node.address, "first")
    executor, memory = make_executor(*SLOTS), make_memory(1)
    events_until(executor, AgentReady)
    node.send_signal(signal.SIGSTOP)
    pool.add(make_node().address, "second")
    executor.load_adapter(0, memory)
    node.send_signal(signal.SIGKILL)
    events_until(executor, AgentLost)
    [*_, ready] = events_until(executor, AgentReady)
    assert ready.summary["node"] == "second"
    assert len(sent) == 3
    assert token_of(executor, 0, 0) == stub_token(1, 0, content_of(memory))
