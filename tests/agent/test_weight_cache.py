"""Tests the cache of converted weights.

Loaded weights equal the stored weights. The cache ignores a file that is damaged, outdated or of another model.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agent import model_start
from agent.model_start import ModelStart
from agent.weights.cache import entry, fingerprint, folder
from agent.weights.cache.folder import GIB, ArrayCache, WeightCache
from agent.weights.storage import Array
from llm_serving.config import Config, load_config
from support.model_folders import write_model_folder

WEIGHTS: dict[str, Array] = {
    "a": np.arange(5, dtype=np.float32),
    "empty": np.zeros((0, 3), np.int8),
    "blob": np.random.default_rng(0).integers(0, 256, (1 << 20) + 7, dtype=np.uint8),
    "bits": np.arange(600, dtype=np.uint16).reshape(20, 30),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chunks end inside arrays, and makes each written piece of the file contain parts of several arrays."""
    monkeypatch.setattr(entry, "CHUNK_BYTES", 100_000)
    monkeypatch.setattr(entry, "WRITE_BYTES", 12_288)


@pytest.fixture(params=["mapped", "copied"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the cache load its entries by mapping the file, or by copying it.

    Normally, these small test files would be copied, because they are not in huge pages.
    """
    monkeypatch.setattr(entry, "LEAST_HUGE", 0.0 if request.param == "mapped" else 1.1)
    return str(request.param)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path)


def config_of(tmp_path: Path, *overrides: str) -> Config:
    model = tmp_path / "model"
    if not model.exists():
        write_model_folder(model)
    keys = (f"model_config.model_path={model}", f"model_config.weight_cache_path={tmp_path / 'cache'}", *overrides)
    return load_config("llama_tiny_cpu.yaml", keys)


def cache_of(config: Config, rank: int = 0) -> WeightCache:
    return WeightCache(config, rank)


def store(cache: ArrayCache, weights: dict[str, Array] = WEIGHTS) -> None:
    """Stores weights as the loader stores them."""
    with cache.keeping(sum(array.nbytes for array in weights.values())) as keep:
        for name, array in weights.items():
            keep(name, array)


def entries(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").glob("*.weights"))


def the_entry(tmp_path: Path) -> Path:
    [path] = (tmp_path / "cache").glob("*.weights")
    return path


def test_what_was_stored_is_loaded(config: Config, way: str) -> None:
    cache = cache_of(config)
    assert cache.load() is None
    store(cache)
    loaded = cache_of(config).load()
    assert loaded is not None
    assert list(loaded) == list(WEIGHTS)
    for name, array in WEIGHTS.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()
        assert loaded[name].flags.writeable
        assert array.size == 0 or loaded[name].ctypes.data % 64 == 0


def own_file_mappings(path: Path) -> int:
    """Returns how many mappings of a file this process has."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(str(path))


def test_a_mapped_entry_is_writable_memory_that_leaves_the_file_alone(tmp_path: Path, config: Config, way: str) -> None:
    store(cache_of(config))
    path = the_entry(tmp_path)
    content = path.read_bytes()
    loaded = cache_of(config).load()
    assert loaded is not None
    assert own_file_mappings(path) == (way == "mapped")
    loaded["blob"][:] = 0
    assert path.read_bytes() == content
    again = cache_of(config).load()
    assert again is not None
    assert again["blob"].tobytes() == WEIGHTS["blob"].tobytes()
    del loaded, again
    assert own_file_mappings(path) == 0


def test_an_entry_that_is_replaced_or_deleted_keeps_the_weights_of_a_running_agent(
    tmp_path: Path, config: Config, way: str
) -> None:
    store(cache_of(config))
    loaded = cache_of(config).load()
    assert loaded is not None
    store(cache_of(config), {"blob": np.zeros_like(WEIGHTS["blob"])})
    the_entry(tmp_path).unlink()
    assert loaded["blob"].tobytes() == WEIGHTS["blob"].tobytes()


def test_a_file_that_cannot_be_mapped_is_copied(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "LEAST_HUGE", 0.0)
    # Populating fails, as on Linux before 5.14, which cannot populate the pages of a mapping.
    monkeypatch.setattr(entry, "populate", lambda pages, *, write: False)
    store(cache_of(config))
    loaded = cache_of(config).load()
    assert loaded is not None
    assert own_file_mappings(the_entry(tmp_path)) == 0
    assert loaded["blob"].tobytes() == WEIGHTS["blob"].tobytes()


def test_an_entry_can_be_read_in_the_background(config: Config) -> None:
    store(cache_of(config))
    cache = cache_of(config)
    assert cache.has_entry
    cache.begin_load()
    loaded = cache.load()
    assert loaded is not None
    assert loaded["blob"].tobytes() == WEIGHTS["blob"].tobytes()
    again = cache.load()
    assert again is not None
    assert again["blob"] is not loaded["blob"]


def test_nothing_is_kept_if_the_weights_cannot_be_made(tmp_path: Path, config: Config) -> None:
    def fail() -> None:
        with cache_of(config).keeping(1 << 20) as keep:
            keep("a", WEIGHTS["a"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert entries(tmp_path) == []
    assert list((tmp_path / "cache").glob("*.tmp")) == []


def test_a_disk_that_fails_is_logged_and_the_weights_are_used(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, data: memoryview, position: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(entry, "_write_all", full)
    store(cache_of(config))
    assert "cannot be written to" in caplog.text
    assert entries(tmp_path) == []
    assert list((tmp_path / "cache").glob("*.tmp")) == []


def flip(position: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        at = position % len(content)
        return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]

    return damage


def promise_a_large_header(content: bytes) -> bytes:
    return content[:16] + struct.pack("<Q", 1 << 40) + content[24:]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip(0), "another version"),
        (flip(26), "checksum of its header"),
        (flip(-1), "checksum of its header"),
        (flip(500_000), "the checksums of 1 of 13 pieces are wrong"),
        (flip(4096), "the checksums of 1 of 13 pieces are wrong"),
        (promise_a_large_header, "its beginning states"),
        (lambda content: content[:-1], "its beginning states"),
        (lambda content: content + b"x", "its beginning states"),
        (lambda content: content[:5], "has only 5 bytes"),
        (lambda content: b"", "has only 0 bytes"),
    ],
)
def test_a_damaged_file_is_found_deleted_and_made_again(
    tmp_path: Path,
    config: Config,
    caplog: pytest.LogCaptureFixture,
    way: str,
    damage: Callable[[bytes], bytes],
    reason: str,
) -> None:
    store(cache_of(config))
    path = the_entry(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert cache_of(config).load() is None
    assert reason in caplog.text
    assert "they are made again" in caplog.text
    assert not path.exists()
    store(cache_of(config))
    assert cache_of(config).load() is not None


def test_a_changed_checkpoint_replaces_the_entry(
    tmp_path: Path, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    store(cache_of(config))
    before = entries(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"other")
    assert cache_of(config).load() is None
    assert "the checkpoint, the settings or the program have changed" in caplog.text
    store(cache_of(config))
    assert entries(tmp_path) == before


@pytest.mark.parametrize(
    "override", ["model_config.weight_format=int8", "model_config.model_dtype=float32", "model_config.weight_group=128"]
)
def test_other_settings_have_their_own_entry(tmp_path: Path, override: str) -> None:
    base = config_of(tmp_path, "model_config.model_dtype=bfloat16")
    store(cache_of(base))
    other = config_of(tmp_path, "model_config.model_dtype=bfloat16", override)
    assert cache_of(other).load() is None
    assert cache_of(base).load() is not None


def test_a_file_is_written_in_large_pieces(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write is large, because the system keeps small writes in small pages, and then every start copies the file.
    """
    written, write = [], os.pwrite

    def noted(descriptor: int, data: memoryview, position: int) -> int:
        written.append((position, data.nbytes))
        return write(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", noted)
    store(cache_of(config))
    pieces, last, header, prefix = written[:-3], *written[-3:]
    assert pieces == [(at * entry.WRITE_BYTES, entry.WRITE_BYTES) for at in range(len(pieces))]
    assert len(pieces) > 50
    assert last[0] == len(pieces) * entry.WRITE_BYTES
    assert header[0] == sum(last)
    assert prefix[0] == 0


def test_each_agent_of_a_group_has_its_own_entry_and_replicas_share_one(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "parallel_config.tensor_parallel=2",
        "parallel_config.data_parallel=2",
        "serving_config.agent_ports=[0]",
    )
    store(cache_of(config, rank=0))
    assert cache_of(config, rank=1).load() is None
    assert cache_of(config, rank=2).load() is not None


def test_a_limit_of_0_writes_nothing(tmp_path: Path) -> None:
    off = cache_of(config_of(tmp_path, "model_config.weight_cache_gib=0"))
    store(off)
    assert not off.is_on
    assert off.load() is None
    assert not (tmp_path / "cache").exists()


def test_the_entry_that_was_not_used_for_the_longest_time_makes_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "GIB", 1 << 20)  # the limit of 3 GiB becomes 3 MiB, which holds two entries of 1.01 MiB
    configs = [
        config_of(tmp_path, "model_config.weight_cache_gib=3", f"model_config.model_name=m{n}") for n in range(3)
    ]
    for number, each in enumerate(configs[:2]):
        store(cache_of(each))
        os.utime(next((tmp_path / "cache").glob(f"m{number}-*")), (number + 1, number + 1))
    assert cache_of(configs[0]).load() is not None  # this use makes the other entry the least recently used one
    store(cache_of(configs[2]))
    assert [name[:2] for name in entries(tmp_path)] == ["m0", "m2"]


def test_weights_beyond_the_limit_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder, "GIB", 1 << 19)
    store(cache_of(config_of(tmp_path, "model_config.weight_cache_gib=1")))
    assert "model_config.weight_cache_gib is 1; they are not kept" in caplog.text
    assert entries(tmp_path) == []


@pytest.mark.parametrize("scarce", ["limit", "disk"])
def test_a_draft_model_does_not_replace_the_files_of_its_own_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, scarce: str
) -> None:
    """The folder or the disk has space for one of two files. Each start would otherwise convert both models again."""

    def free_disk(cache: ArrayCache) -> int:
        return folder.FREE_DISK_BYTES + 2 * folder.GIB - sum(path.stat().st_size for path in cache._folder.iterdir())

    monkeypatch.setattr(folder, "GIB", 1 << 20)  # each file has 1.01 MiB
    monkeypatch.setattr(model_start, "start_runtime", lambda config, rank: None)
    if scarce == "disk":
        monkeypatch.setattr(ArrayCache, "_free_disk", free_disk)
    limit = f"model_config.weight_cache_gib={2 if scarce == 'limit' else 9}"
    model, draft = (config_of(tmp_path, limit, f"model_config.model_name={name}") for name in ("model", "draft"))
    for number in range(2):
        start = ModelStart(model, 0, keeps_files=True)
        assert start._weights is not None
        if number == 0:
            store(start._weights)
        else:
            assert start._weights.load() is not None
        drafting = start.of_draft_model(draft)
        assert drafting._weights is not None
        assert drafting._weights.load() is None
        caplog.clear()
        store(drafting._weights)
        assert "the converted weights for draft-" in caplog.text
        assert "beside 1.02 GiB of other files of this start" in caplog.text
        assert "they are not kept" in caplog.text
        assert [name[:6] for name in entries(tmp_path)] == ["model-"]
    store(cache_of(draft))
    assert [name[:6] for name in entries(tmp_path)] == ["draft-"], "another start may replace the file"


def test_the_program_of_a_start_does_not_replace_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do the weights of a draft model replace the program."""
    monkeypatch.setattr(folder, "GIB", 1 << 20)
    monkeypatch.setattr(model_start, "start_runtime", lambda config, rank: None)
    config = config_of(tmp_path, "model_config.weight_cache_gib=2")
    draft = config_of(tmp_path, "model_config.weight_cache_gib=2", "model_config.model_name=draft")
    start = ModelStart(config, 0, keeps_files=True)
    assert start._weights is not None
    assert start._program is not None
    program = start._program._store
    store(program)
    store(start._weights)
    assert (program._path.exists(), start._weights._path.exists()) == (True, False)
    drafting = start.of_draft_model(draft)
    assert drafting._weights is not None
    store(drafting._weights)
    assert (program._path.exists(), drafting._weights._path.exists()) == (True, False)


def test_a_full_disk_is_left_alone(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder, "FREE_DISK_BYTES", 1 << 60)
    store(cache_of(config))
    assert "GiB free; they are not kept" in caplog.text
    assert entries(tmp_path) == []
    assert list((tmp_path / "cache").glob("*.tmp")) == []


def test_leftovers_of_ended_agents_are_deleted_and_files_being_written_stay(tmp_path: Path, config: Config) -> None:
    store(cache_of(config))
    leftover = tmp_path / "cache" / "new-dead.tmp"
    leftover.write_bytes(b"x")
    store(cache_of(config))
    assert not leftover.exists()


def test_a_folder_that_others_can_write_to_is_not_trusted(
    tmp_path: Path, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    store(cache_of(config))
    (tmp_path / "cache").chmod(0o777)
    assert cache_of(config).load() is None
    assert "no other user may write to it" in caplog.text
    assert len(entries(tmp_path)) == 1


def _store_and_load(config_json: str, number: int) -> None:
    """Stores one cache entry and loads it, several times. Several processes call this function at the same time."""
    cache = cache_of(Config.from_json(config_json))
    for _ in range(5):
        store(cache)
        loaded = cache.load()
        assert loaded is not None, number
        assert loaded["blob"].tobytes() == WEIGHTS["blob"].tobytes()


def test_several_agents_may_store_and_load_one_entry_at_the_same_time(
    tmp_path: Path, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    context = multiprocessing.get_context("spawn")
    agents = [context.Process(target=_store_and_load, args=(config.to_json(), number)) for number in range(3)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    assert [agent.exitcode for agent in agents] == [0, 0, 0]
    assert len(entries(tmp_path)) == 1
    assert list((tmp_path / "cache").glob("*.tmp")) == []
    assert GIB == 1 << 30


@pytest.mark.parametrize("place", [*fingerprint._PROGRAM, *fingerprint._ARITHMETIC])
def test_the_digests_of_the_program_read_every_place(place: str) -> None:
    assert fingerprint.code_digest((place,)) != fingerprint.code_digest(())


def test_the_digest_of_keys_and_values_covers_the_order_of_the_cache() -> None:
    """``KVCache`` decides whether the operators may store the elements of a block in another order."""
    assert "agent/kv_cache.py" in fingerprint._ARITHMETIC
