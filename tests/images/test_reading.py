"""Tests images from URLs.

Each refusal names its limit. The bounds are checked before pixels are decoded.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import re
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from llm_serving.config.image_section import DECODED_PIXEL_BYTES, ImageConfig
from llm_serving.images.decoding import decode
from llm_serving.images.urls import FetchTime, ImageError, read_url
from support.chat_images import data_url, png_of, sample_png

SETTINGS = ImageConfig()


def png_header(width: int, height: int) -> bytes:
    """Returns a PNG file that states a size and has no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    whole = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + whole + struct.pack(">I", 64) + b"IDAT"


def webp_header(width: int, height: int) -> bytes:
    """Returns a WebP file that states a size and has no pixels."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size


@pytest.mark.parametrize(
    ("url", "phrase"),
    [
        ("iVBORw0KGgo=", "must be a data URL"),
        ("ftp://example.org/a.png", "must be a data URL"),
        ("data:image/png,abc", "without ';base64,'"),
        ("data:image/png;base64,ab*c", "not valid base64"),
        ("data:image/png;base64,abc", "not valid base64"),
        ("file:///etc/hostname", "reads no files"),
        ("http://example.org/a.png", "image_config.allowed_hosts"),
        ("https://user@localhost:1/a.png", "image_config.allowed_hosts"),
        ("http://[", "image_config.allowed_hosts"),
    ],
)
def test_other_urls_are_refused_by_default(url: str, phrase: str) -> None:
    with pytest.raises(ImageError, match=re.escape(phrase)) as refused:
        read_url(url, SETTINGS, "field")
    assert refused.value.param == "field"


def test_the_size_of_a_file_is_checked_before_it_is_decoded_from_base64() -> None:
    settings = replace(SETTINGS, max_bytes=3000)
    assert read_url(data_url(bytes(3000)), settings, "field") == bytes(3000)
    for data in (bytes(3001), bytes(9000)):
        with pytest.raises(ImageError, match="the maximum is 3000") as refused:
            read_url(data_url(data), settings, "field")
        assert refused.value.code == "image_too_large"
    with pytest.raises(ImageError, match="the maximum is 3000"):
        read_url("data:;base64," + "*" * 5000, settings, "field")


def test_base64_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding holds the interpreter lock. A whole file in one piece would block the event loop."""
    lengths: list[int] = []
    decode_piece = base64.b64decode

    def watched(piece: str, **options: bool) -> bytes:
        lengths.append(len(piece))
        return decode_piece(piece, **options)

    monkeypatch.setattr(base64, "b64decode", watched)
    for size in (1_000_000, 196_608, 196_609):
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
        assert read_url(data_url(data), SETTINGS, "field") == data
    assert max(lengths) == 1 << 18
    padded = "A" * ((1 << 18) - 1) + "=" + "AAAA"
    with pytest.raises(ImageError, match="not valid base64: Excess data"):
        read_url(f"data:;base64,{padded}", SETTINGS, "field")


def test_files_are_read_only_inside_allowed_folders(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "an image.png").write_bytes(sample_png(0))
    (inside / "link.png").symlink_to(outside / "an image.png")
    settings = replace(SETTINGS, allowed_folders=(str(inside),), max_bytes=100_000)
    assert read_url(f"file://{inside}/an%20image.png", settings, "field") == sample_png(0)
    for path in (outside / "an%20image.png", inside / "link.png", inside / ".." / "out" / "an%20image.png"):
        with pytest.raises(ImageError, match="outside the folders"):
            read_url(f"file://{path}", settings, "field")
    with pytest.raises(ImageError, match="outside the folders"):
        read_url(f"file://elsewhere{inside}/an%20image.png", settings, "field")
    for path, phrase in ((inside, "does not name a file"), (inside / "missing", "cannot be read")):
        with pytest.raises(ImageError, match=phrase):
            read_url(f"file://{path}", settings, "field")
    with pytest.raises(ImageError, match="the maximum is 100"):
        read_url(f"file://{inside}/an%20image.png", replace(settings, max_bytes=100), "field")


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/moved.png":
            self.send_response(302)
            self.send_header("Location", "/a.png")
        else:
            self.send_response(200)
        if self.path == "/slow-header.png":
            self._drip(b"X-Slow: ", b"\r\n")
        self.end_headers()
        if self.path == "/slow-body.png":
            self._drip(b"", b"")
        with contextlib.suppress(OSError):  # a reader may close its connection early
            self.wfile.write(sample_png(0))

    def _drip(self, begin: bytes, end: bytes) -> None:
        """Sends a byte repeatedly, for 3 s or until the reader closes the connection."""
        self.flush_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(begin)
            for _ in range(60):
                self.wfile.write(b"x")
                threading.Event().wait(0.05)
            self.wfile.write(end)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def host() -> Iterator[str]:
    """Provides the host and port of an HTTP server that has an image."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_hosts_are_read_only_if_they_are_allowed(host: str) -> None:
    settings = replace(SETTINGS, allowed_hosts=("127.0.0.1",))
    assert read_url(f"http://{host}/a.png", settings, "field") == sample_png(0)
    with pytest.raises(ImageError, match="status 302"):
        read_url(f"http://{host}/moved.png", settings, "field")
    with pytest.raises(ImageError, match="the maximum is 1024"):
        read_url(f"http://{host}/a.png", replace(settings, max_bytes=1024), "field")
    with pytest.raises(ImageError, match="reads no images"):
        read_url(f"http://{host}/a.png", SETTINGS, "field")
    with pytest.raises(ImageError, match="cannot be read"):
        read_url("http://127.0.0.1:1/a.png", settings, "field")


def test_the_host_of_the_request_that_is_sent_must_be_allowed(host: str) -> None:
    """The URL is ambiguous: some parsers find the allowed host in it, but a request would go to the host before it."""
    settings = replace(SETTINGS, allowed_hosts=("localhost",))
    urls = [f"http://{host}{mark}@localhost/a.png" for mark in ("\\", "/\\", "\t", " ", "\x00", "\u2028")]
    for url in (*urls, f"http://{host}\\@localhost:{host.partition(':')[2]}/a.png", f"http://user@{host}/a.png"):
        with pytest.raises(ImageError, match="reads no images"):
            read_url(url, settings, "field")
    with pytest.raises(ImageError, match="reads no images"):
        read_url(f"http://user:word@{host}/a.png", replace(SETTINGS, allowed_hosts=("127.0.0.1",)), "field")


@pytest.mark.parametrize("part", ["header", "body"])
def test_a_host_that_sends_a_byte_from_time_to_time_is_left(host: str, part: str) -> None:
    left = FetchTime(0.3)
    with pytest.raises(ImageError, match="did not arrive within"):
        read_url(f"http://{host}/slow-{part}.png", replace(SETTINGS, allowed_hosts=("127.0.0.1",)), "field", left)
    assert left.seconds <= 0
    with pytest.raises(ImageError, match="did not arrive within"):
        read_url(f"http://{host}/slow-body.png", replace(SETTINGS, allowed_hosts=("127.0.0.1",)), "field", left)


@pytest.mark.parametrize("url", ["file:///a%00b", "file://[/x", "file:///\ud800"])
def test_a_damaged_file_url_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ImageError, match="is not a valid file: URL"):
        read_url(url, replace(SETTINGS, allowed_folders=(str(tmp_path),)), "field")


@pytest.mark.parametrize("data", [png_header(1000, 3000), webp_header(1000, 3000)], ids=["PNG", "WEBP"])
def test_pixels_are_counted_from_the_header(data: bytes) -> None:
    """The file has no pixels, so decoding would fail with another error."""
    with pytest.raises(ImageError, match="1000 x 3000 = 3000000 pixels; the maximum is 2999999") as refused:
        decode(data, replace(SETTINGS, max_pixels=2_999_999), "field")
    assert refused.value.code == "image_too_large"
    with pytest.raises(ImageError, match="damaged"):
        decode(data, replace(SETTINGS, max_pixels=3_000_000), "field")


def test_a_webp_has_a_limit_of_its_own() -> None:
    """The WebP decoder copies all pixels in one call, which blocks the event loop. So WebP has a lower limit than PNG.
    """
    with pytest.raises(ImageError, match="a WebP of 2048 x 2049 = 4196352 pixels; the maximum of a WebP is 4194304"):
        decode(webp_header(2048, 2049), SETTINGS, "field")
    with pytest.raises(ImageError, match="damaged"):
        decode(webp_header(2048, 2048), SETTINGS, "field")
    advice = "Send it as a JPEG or a PNG, whose maximum is 16777216, or reduce it to 2364 x 1773."
    with pytest.raises(ImageError, match=advice):
        decode(webp_header(4000, 3000), SETTINGS, "field")
    with pytest.raises(ImageError, match="damaged"):
        decode(webp_header(2364, 1773), SETTINGS, "field")
    with pytest.raises(ImageError, match="damaged"):  # the size is permitted for a PNG
        decode(png_header(4000, 3000), SETTINGS, "field")


def test_an_image_beyond_the_limit_of_the_library_is_too_large() -> None:
    with pytest.raises(ImageError, match="pixels") as refused:
        decode(png_header(60_000, 60_000), SETTINGS, "field")
    assert refused.value.code == "image_too_large"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_three_kinds_of_images_are_decoded_and_damaged_ones_refused(kind: str) -> None:
    data = png_of(Image.new("RGB", (20, 10), (200, 100, 0)), kind)
    image = decode(data, SETTINGS, "field")
    assert (image.mode, image.size) == ("RGB", (20, 10))
    assert np.abs(np.asarray(image)[5, 5].astype(int) - (200, 100, 0)).max() < 8
    for cut in range(0, len(data) // 2, max(1, len(data) // 60)):
        with pytest.raises(ImageError):
            decode(data[:cut], SETTINGS, "field")


def test_other_kinds_and_animations_are_refused() -> None:
    image = Image.new("RGB", (8, 8))
    for kind in ("GIF", "BMP", "TIFF", "PPM"):
        with pytest.raises(ImageError, match="PNG, JPEG, WEBP"):
            decode(png_of(image, kind), SETTINGS, "field")
    file = io.BytesIO()
    image.save(file, "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")])
    with pytest.raises(ImageError, match="animation"):
        decode(file.getvalue(), SETTINGS, "field")


MODES = [*(("PNG", mode) for mode in ("L", "LA", "P", "RGB", "RGBA", "I;16")),
         *(("JPEG", mode) for mode in ("L", "RGB", "CMYK")), ("WEBP", "RGB")]  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_pillow_never_fills_the_memory_of_an_image(monkeypatch: pytest.MonkeyPatch, kind: str, mode: str) -> None:
    """If Pillow filled new memory with zeros, it would block the event loop. The pixels still equal those of usual
    memory.
    """
    made = Image.fromarray(np.random.default_rng(3).integers(0, 255, (57, 91, 3), np.uint8))
    made = Image.fromarray(np.array(made)[:, :, 0].astype(np.uint16) * 257) if mode == "I;16" else made.convert(mode)
    data = png_of(made, kind)
    expected = Image.open(io.BytesIO(data))
    assert expected.mode == mode
    expected.load()

    def refuse(*arguments: object) -> None:
        raise AssertionError("Pillow allocates and fills the memory of an image")

    monkeypatch.setattr(Image.core, "new", refuse)  # type: ignore[attr-defined]
    found = decode(data, ImageConfig(), "x")
    assert np.array_equal(np.array(found), np.array(expected.convert("RGB")))


def test_an_image_is_turned_and_gets_a_white_background() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    file = io.BytesIO()
    Image.new("RGB", (20, 10)).save(file, "JPEG", exif=exif)
    assert decode(file.getvalue(), SETTINGS, "field").size == (10, 20)
    transparent = decode(png_of(Image.new("RGBA", (2, 2), (0, 0, 0, 0))), SETTINGS, "field")
    assert np.asarray(transparent).min() == 255


def test_a_half_transparent_image_is_mixed_with_white_as_transformers_does() -> None:
    """For all colours and all alphas, the pixels equal those of ``alpha_composite`` on a white image."""
    pixels = np.zeros((256, 256, 4), np.uint8)
    pixels[..., :3], pixels[..., 3] = np.arange(256)[:, None, None], np.arange(256)
    image = Image.fromarray(pixels)
    expected = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    assert np.array_equal(np.asarray(decode(png_of(image), SETTINGS, "field")), np.asarray(expected))


_DECODE = """
import io
from PIL import Image
from llm_serving.config.image_section import ImageConfig
from llm_serving.images.decoding import decode

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

small = io.BytesIO()
Image.new("RGBA", (8, 8)).save(small, KIND, lossless=True)
decode(small.getvalue(), ImageConfig(), "field")  # imports the decoder
with open(PATH, "rb") as file:
    data = file.read()
before = memory("VmRSS")
decode(data, ImageConfig(), "field")
print((memory("VmHWM") - before) / 2000**2)
"""


@pytest.mark.parametrize(("kind", "mode", "most"), [("PNG", "LA", 12), ("WEBP", "RGBA", DECODED_PIXEL_BYTES)])
def test_decoding_takes_no_more_memory_than_the_plan_counts(tmp_path: Path, kind: str, mode: str, most: int) -> None:
    path = tmp_path / "image"
    Image.new(mode, (2000, 2000)).save(path, kind, lossless=True)
    code = f"KIND, PATH = {kind!r}, {str(path)!r}\n{_DECODE}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 4 < float(run.stdout) < most + 0.8
