"""Tests reading checkpoint folders: exact values, and errors that name the file, the tensor and the remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agent.weights import WeightPart, WeightSpec, load_weights, open_weights
from agent.weights.seeded import SeededWeights
from agent.weights.storage import Array, allocate, from_float32, to_float32
from llm_serving.errors import CheckpointError
from performance.models.folders import write_safetensors

SPECS = (
    WeightSpec("embedding.weight", (WeightPart("embed", (6, 4)),)),
    WeightSpec("qkv.weight", (WeightPart("q", (4, 4)), WeightPart("k", (2, 4)), WeightPart("v", (2, 4)))),
    WeightSpec("norm.weight", (WeightPart("norm.weight", (4,)),)),
)
SHAPES = {part.name: part.shape for spec in SPECS for part in spec.parts}


def values(name: str, dtype: str = "float32") -> Array:
    array = allocate(SHAPES[name], dtype)
    SeededWeights(7, std=1.0).read_into(name + " values", array, dtype)
    return array


def write_folder(folder: Path, dtype: str = "float32") -> Path:
    write_safetensors(folder / "model.safetensors", {name: values(name, dtype) for name in SHAPES})
    return folder


def write_shards(folder: Path) -> Path:
    first = {name: values(name) for name in ("embed", "k")}
    second = {name: values(name) for name in ("q", "v", "norm.weight")}
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    write_safetensors(folder / "a.safetensors", first)
    write_safetensors(folder / "b.safetensors", second)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load(folder: Path, dtype: str = "float32") -> dict[str, Array]:
    source = open_weights(folder, SPECS, seed=None, ignorable=("inv_freq",))
    try:
        return load_weights(SPECS, source, dtype, lambda done, of: None)
    finally:
        source.close()


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_every_type_converts_to_every_type(tmp_path: Path, stored: str, wanted: str) -> None:
    weights = load(write_folder(tmp_path, stored), wanted)
    fused = np.concatenate([to_float32(values(name, stored), stored) for name in ("q", "k", "v")])
    np.testing.assert_array_equal(weights["qkv.weight"], from_float32(fused, wanted))
    assert weights["embedding.weight"].shape == (6, 4)
    assert weights["embedding.weight"].ctypes.data % 64 == 0


def test_shards_give_the_same_weights_as_one_file(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = load(write_folder(tmp_path / "one")), load(write_shards(tmp_path / "two"))
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


def test_loaded_weights_do_not_need_the_files(tmp_path: Path) -> None:
    weights = load(write_folder(tmp_path))
    before = {name: array.copy() for name, array in weights.items()}
    os.truncate(tmp_path / "model.safetensors", 0)
    for name in weights:
        np.testing.assert_array_equal(weights[name], before[name])


def test_ignorable_tensors_are_allowed(tmp_path: Path) -> None:
    tensors = {name: values(name) for name in SHAPES} | {"layers.0.rotary.inv_freq": np.ones(2, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert load(tmp_path).keys() == {"embedding.weight", "qkv.weight", "norm.weight"}


def test_bfloat16_rounds_to_nearest_even() -> None:
    exact, half, above, negative = 0x3F80_0000, 0x3F80_8000, 0x3F81_8000, 0xBF80_8001
    bits = np.array([exact, half, above, negative, 0x7FC0_0001], np.uint32)
    rounded = from_float32(bits.view(np.float32), "bfloat16")
    assert rounded.tolist() == [0x3F80, 0x3F80, 0x3F82, 0xBF81, 0x7FC0]


def rewrite(change: Callable[[dict[str, Array]], object]) -> Callable[[Path], None]:
    """Returns a function that changes the tensors of a folder with one weight file."""

    def break_it(folder: Path) -> None:
        tensors = {name: values(name) for name in SHAPES}
        change(tensors)
        write_safetensors(folder / "model.safetensors", tensors)

    return break_it


def rewrite_header(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], None]:
    """Returns a function that changes the header of a folder's only weight file and keeps its data."""

    def break_it(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        change(header)
        write_raw(path, json.dumps(header).encode(), content[8 + length :])

    return break_it


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def rewrite_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    """Returns a function that changes the index of a folder with several weight files."""

    def break_it(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        path = write_shards(folder) / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return break_it


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 5)


def make_pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def duplicate_in_other_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    write_shards(folder)
    write_safetensors(folder / "a.safetensors", {name: values(name) for name in ("embed", "k", "q")})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "other names": (
        lambda f: (f / "model.safetensors").rename(f / "consolidated.safetensors"),
        "(only consolidated.safetensors)",
    ),
    "truncated data": (truncate, "the tensors need 240 bytes of data, the file has 235: it is truncated"),
    "empty file": (lambda f: os.truncate(f / "model.safetensors", 0), "0 bytes are too few"),
    "a pipe": (make_pipe, "not a regular file"),
    "huge header": (
        lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"),
        "the header claims 18446744073709551615 bytes",
    ),
    "header not JSON": (lambda f: write_raw(f / "model.safetensors", b"{not json"), "the header is not valid JSON"),
    "header a list": (lambda f: write_raw(f / "model.safetensors", b"[1, 2]"), "must be a JSON object, not list"),
    "nested header": (lambda f: write_raw(f / "model.safetensors", b"[" * 100_000), "not valid JSON"),
    "tensor twice": (
        lambda f: write_raw(f / "model.safetensors", b'{"q": {}, "q": {}}'),
        "duplicate key 'q'",
    ),
    "malformed entry": (
        rewrite_header(lambda h: h["q"].update(shape="4x4")),
        "entry of tensor 'q' is malformed",
    ),
    "negative shape": (rewrite_header(lambda h: h["q"].update(shape=[-4, -4])), "entry of tensor 'q' is malformed"),
    "wrong size": (
        rewrite_header(lambda h: h["q"].update(shape=[4, 5])),
        "tensor q of shape [4, 5] and type F32 cannot have 64 bytes",
    ),
    "overlap": (
        rewrite_header(lambda h: h["q"].update(data_offsets=[8, 72])),
        "lies at bytes 8 to 72, over another",
    ),
    "wrong shape": (
        rewrite(lambda t: t.update(q=np.zeros((5, 4), np.float32))),
        "tensor q has shape [5, 4]; config.json requires [4, 4]",
    ),
    "wrong type": (
        rewrite_header(lambda h: h["q"].update(dtype="I32")),
        "tensor q has type I32; weights must be one of F32, F16, BF16",
    ),
    "missing tensor": (rewrite(lambda t: t.pop("k")), "tensor k is missing from the weights"),
    "missing tensors": (
        rewrite(lambda t: [t.pop("k"), t.pop("embed")]),
        "tensors embed, k are missing from the weights",
    ),
    "unexpected tensor": (
        rewrite(lambda t: t.update({"lm_head.weight": np.zeros(2, np.float32)})),
        "tensor lm_head.weight is in the weights but not in a model of this config.json",
    ),
    "index outside the folder": (
        rewrite_index(lambda m: m.update(q="../b.safetensors")),
        "tensor q is in '../b.safetensors'; a shard must be a *.safetensors file of this folder",
    ),
    "index with an absolute path": (
        rewrite_index(lambda m: m.update(q="/etc/b.safetensors")),
        "tensor q is in '/etc/b.safetensors'",
    ),
    "index of pickles": (rewrite_index(lambda m: m.update(q="b.bin")), "tensor q is in 'b.bin'"),
    "index not text": (rewrite_index(lambda m: m.update(q=3)), "tensor q is in 3"),
    "index of a missing shard": (
        rewrite_index(lambda m: m.update(q="c.safetensors")),
        "c.safetensors: cannot be opened: No such file",
    ),
    "index names the wrong shard": (
        rewrite_index(lambda m: m.update(q="a.safetensors")),
        "tensor q should be in a.safetensors, but is not",
    ),
    "empty index": (rewrite_index(lambda m: m.clear()), "there is no weight_map"),
    "tensor in two shards": (duplicate_in_other_shard, "tensor q is in both b.safetensors and a.safetensors"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused(tmp_path: Path, case: str) -> None:
    break_it, expected = BROKEN[case]
    break_it(write_folder(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_value_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    tensors = {name: values(name) for name in SHAPES}
    tensors["v"][1, 2] = 70_000.0
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"tensor v: 70000 does not fit float16; use model_config\.model_dtype"):
        load(tmp_path, "float16")
    assert load(tmp_path, "bfloat16")["qkv.weight"].shape == (8, 4)


def test_progress_is_reported_for_each_parameter() -> None:
    seen: list[tuple[int, int]] = []
    load_weights(SPECS, SeededWeights(0), "bfloat16", lambda done, of: seen.append((done, of)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
