"""A process that writes blocks to the files of a KV tier until it is killed, for ``tests/long/kill_tier_writers.py``.

The content of a block is computed from its namespace and its number. So another process knows which bits a hit must
have.
"""

from __future__ import annotations

import hashlib
import random
import resource
import signal
import sys
from pathlib import Path

from llm_serving.block_moves.tier_moves import BlockKey
from llm_serving.kvstore.segments import SegmentFolder
from llm_serving.kvstore.shared import SharedFolder

NUM_KEYS = 200
MAX_BYTES = 1 << 20
SEGMENT_BYTES = 1 << 17


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.blake2b(b"%d" % number, digest_size=16).digest(), b"%064d" % number)


def content_of(namespace: bytes, number: int) -> bytes:
    """Returns the content of a block: 1 KiB to 32 KiB of bytes that depend on the namespace and the number."""
    seed = hashlib.sha256(namespace + b"%d" % number).digest()
    return seed * (32 + seed[0] * 4)


def open_folder(kind: str, folder: Path, namespace: bytes) -> SegmentFolder | SharedFolder:
    if kind == "ssd":
        return SegmentFolder(folder, namespace, MAX_BYTES, SEGMENT_BYTES)
    return SharedFolder(folder, namespace, MAX_BYTES)


def main() -> None:
    """Writes blocks without end. ``file_limit`` makes the system cut a write off, as a full disk does."""
    kind, folder, namespace, seed, file_limit = sys.argv[1], Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
    if file_limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    rng, name = random.Random(seed), bytes.fromhex(namespace)
    records = open_folder(kind, folder, name)
    print("ready", flush=True)
    while True:
        number = rng.randrange(NUM_KEYS)
        try:
            if (place := records.find(key_of(number).chained_hash)) is not None:
                records.read(place, key_of(number))
            records.append(key_of(number), content_of(name, number))
        except OSError:
            continue


if __name__ == "__main__":
    main()
