"""The section ``image_config`` of the configuration: images in chats."""

from __future__ import annotations

from dataclasses import dataclass

from llm_serving.config.schema import own

DECODING_THREADS = 2
"""Number of images that the server decodes at the same time, each in its own thread."""
DECODED_PIXEL_BYTES = 16
"""Maximum number of bytes of memory for each pixel of an image while it is decoded. A WebP needs all 16 bytes: two
images in its decoder, one copy for Pillow, and Pillow's own image. PNG and JPEG need 8 to 12 bytes."""


CACHED_ROWS_OF_ANY_SIZE = 64
"""If tiles may have an arbitrary size, this number of image tokens counts as one tile for the setting ``cached_tiles``.

A tile of SmolVLM has this number of tokens.
"""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """Images in chats, for models that read them, see `docs/images.md`. Other models ignore this section."""

    max_images: int = own(16, "Maximum number of images of a request.", low=1, high=1024)
    max_bytes: int = own(
        8 * 1024 * 1024,
        "Maximum size of an image's file. A data URL in a request also counts for `serving_config.max_body_bytes`.",
        unit="bytes",
        low=1024,
        high=1024 * 1024 * 1024,
    )
    max_pixels: int = own(
        16 * 1024 * 1024,
        "Maximum width times height of an image. It is read from the file's header before the image is decoded, which "
        "takes up to 16 bytes for each pixel. Two images are decoded at the same time.",
        unit="pixels",
        low=1024,
        high=128 * 1024 * 1024,
    )
    max_tile_pixels: int = own(
        1280 * 28 * 28,
        "Maximum width times height to which an image is resized, for models that take images of any size "
        "(Qwen2.5-VL). Such an image is one tile. Qwen2.5-VL makes a token of 28 x 28 pixels.",
        unit="pixels",
        low=1024,
        high=16 * 1024 * 1024,
    )
    max_tiles: int = own(
        128,
        "Number of tiles (square parts of images, or whole images) that all requests together may have. Their pixels "
        "are in `/dev/shm`, 768 KiB for each tile of 512 x 512 pixels.",
        unit="tiles",
        low=1,
        high=65_536,
    )
    cached_tiles: int = own(
        512,
        "Maximum number of encoded tiles that an agent keeps, so that an image that comes again is not encoded again. "
        "If tiles have any size (Qwen2.5-VL), 64 rows (tokens) count as a tile.",
        unit="tiles",
        low=1,
        high=1_048_576,
    )
    allowed_folders: tuple[str, ...] | None = own(
        None,
        "Folders whose files `file:` URLs may name. Symbolic links that lead out of them are refused.",
        null="`file:` URLs are refused",
    )
    allowed_hosts: tuple[str, ...] | None = own(
        None,
        "Names of hosts from which `http:` and `https:` URLs are read. Redirects are not followed.",
        null="`http:` and `https:` URLs are refused",
    )
