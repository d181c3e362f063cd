"""What the launcher hands to an agent it starts: an inherited descriptor with the secret and the config.

The launcher writes one frame and keeps its end open for as long as it lives, so the end of the file is the
news that the server is gone, however it ended.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Annotated

import msgspec

from llm_serving.errors import ProtocolError
from llm_serving.ipc.channel import FrameBuffer, frame


class Bootstrap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The one frame on the inherited descriptor."""

    secret: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    rank: Annotated[int, msgspec.Meta(ge=0)]
    config_json: str


@dataclass(frozen=True, slots=True)
class BootstrapPipe:
    """The agent's end of the inherited descriptor."""

    descriptor: int

    def read(self) -> Bootstrap:
        """Wait for the frame. Raises ProtocolError when the launcher goes away first or sends something else."""
        buffer = FrameBuffer()
        while True:
            data = os.read(self.descriptor, 64 * 1024)
            if not data:
                raise ProtocolError("the launcher went away before it had sent the bootstrap frame")
            for payload in buffer.feed(data):
                try:
                    return msgspec.msgpack.decode(payload, type=Bootstrap)
                except msgspec.DecodeError as error:
                    raise ProtocolError(f"the bootstrap frame is not valid: {error}") from error

    def exit_when_launcher_goes(self) -> None:
        """Start a thread that ends this process, whatever it is doing, as soon as the launcher is gone."""

        def watch() -> None:
            while os.read(self.descriptor, 4096):
                pass
            os._exit(0)

        threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def encode_bootstrap(bootstrap: Bootstrap) -> bytes:
    """The bytes the launcher writes, frame included."""
    return frame(msgspec.msgpack.encode(bootstrap))
