"""Tests the reading of JSON files. A repeated key is refused, in a time proportional to the size of the file."""

from __future__ import annotations

import pytest

from llm_serving.errors import CheckpointError
from llm_serving.formats.small_files import no_duplicate_keys, read_json_object

NUM_KEYS = 2000


class CountingKey(str):
    """A key that counts how often it is compared with another key."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountingKey.comparisons += 1
        return str.__eq__(self, other)


def test_the_search_for_a_repeated_key_takes_linear_work():
    CountingKey.comparisons = 0
    pairs = [(CountingKey(f"key {i}"), None) for i in range(NUM_KEYS)]
    with pytest.raises(ValueError, match=f"duplicate key 'key {NUM_KEYS - 1}', 2 times"):
        no_duplicate_keys([*pairs, (CountingKey(f"key {NUM_KEYS - 1}"), None)])
    assert CountingKey.comparisons < 10 * NUM_KEYS


def test_a_long_key_is_shortened(tmp_path):
    file = tmp_path / "config.json"
    key = "k" * 5000
    file.write_text(f'{{"{key}": 1, "{key}": 2}}')
    with pytest.raises(CheckpointError, match=r"duplicate key 'k{80}', 2 times in one object") as error:
        read_json_object(file, 1 << 20, CheckpointError)
    assert len(str(error.value)) < 400
