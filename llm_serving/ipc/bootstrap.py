"""The pipe through which the launcher, a part of the server, gives a new agent the launch secret and the config.

The agent inherits the reading end. The launcher writes one frame and keeps the writing end open. If the server ends for
any reason, the agent reads the end of the file, and can end itself.
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
    """The content of the only frame that the launcher sends to a new agent."""

    secret: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    rank: Annotated[int, msgspec.Meta(ge=0)]
    config_json: str


@dataclass(frozen=True, slots=True)
class BootstrapPipe:
    """The agent's end of the pipe through which the server sends the launch secret and the config."""

    descriptor: int

    def read(self) -> Bootstrap:
        """Waits for the frame and returns its content.

        Raises ProtocolError if the launcher ends before it has sent the frame, or sends another message.
        """
        buffer = FrameBuffer()
        while True:
            data = os.read(self.descriptor, 64 * 1024)
            if not data:
                raise ProtocolError("the launcher ended before it sent the bootstrap frame")
            for payload in buffer.feed(data):
                try:
                    return msgspec.msgpack.decode(payload, type=Bootstrap)
                except msgspec.DecodeError as error:
                    raise ProtocolError(f"the bootstrap frame is not valid: {error}") from error

    def exit_when_launcher_goes(self) -> None:
        """Starts a thread that ends this process immediately when the launcher ends."""

        def watch() -> None:
            while os.read(self.descriptor, 4096):
                pass
            os._exit(0)

        threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def encode_bootstrap(bootstrap: Bootstrap) -> bytes:
    """Returns the bytes that the launcher writes to the pipe: the length of the content, then the content."""
    return frame(msgspec.msgpack.encode(bootstrap))
