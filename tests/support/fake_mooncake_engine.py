"""Replaces the module ``mooncake.engine``: the calls of ``TransferEngine`` that the project uses, over TCP.

The environment variable ``FAKE_MOONCAKE`` chooses a fault:

    refuses   the engine does not start
    stalls    the start never ends; the file ``engine.py.stalls`` beside this one shows that it has begun
    hangs     a read never ends
    crashes   a read ends the process
    flips     one bit of each block changes
"""

import ctypes
import os
import socket
import struct
import threading
import time

FAULT = os.environ.get("FAKE_MOONCAKE", "")
REQUEST = struct.Struct("<QQ")


class TransferEngine:
    def initialize(self, host, metadata_server, protocol, device):
        assert (metadata_server, protocol, device) == ("P2PHANDSHAKE", "tcp", "")
        assert os.environ["MC_FORCE_TCP"] == "1"
        if FAULT == "stalls":
            open(f"{__file__}.stalls", "w").close()
            time.sleep(3600)
        self._host, self._areas = host, []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()
        return -1 if FAULT == "refuses" else 0

    def get_rpc_port(self):
        return self._listener.getsockname()[1]

    def batch_register_memory(self, addresses, sizes):
        self._areas = [range(address, address + size) for address, size in zip(addresses, sizes, strict=True)]
        return 0

    def batch_transfer_sync_read(self, engine, buffers, peer_addresses, lengths):
        if FAULT == "hangs":
            time.sleep(3600)
        if FAULT == "crashes":
            os.abort()
        host, _, port = engine.rpartition(":")
        try:
            with socket.create_connection((host, int(port))) as link:
                for buffer, address, length in zip(buffers, peer_addresses, lengths, strict=True):
                    link.sendall(REQUEST.pack(address, length))
                    content = bytearray(_received(link, length))
                    if FAULT == "flips":
                        content[length // 2] ^= 1
                    ctypes.memmove(buffer, bytes(content), length)
        except OSError:
            return -1
        return 0

    def _serve(self):
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(link,), daemon=True).start()

    def _answer(self, link):
        with link:
            while request := link.recv(REQUEST.size, socket.MSG_WAITALL):
                address, length = REQUEST.unpack(request)
                if not any(address in area and address + length - 1 in area for area in self._areas):
                    return
                link.sendall(ctypes.string_at(address, length))


def _received(link, length):
    content = link.recv(length, socket.MSG_WAITALL)
    if len(content) != length:
        raise ConnectionError("the other engine closed the connection")
    return content
