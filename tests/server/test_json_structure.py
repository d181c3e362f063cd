"""Tests the count of values, keys and brackets in a JSON text.

It agrees with the parser, wherever the slices of the text end.
"""

from __future__ import annotations

import json
import random

import pytest

from llm_serving.server.http import json_structure
from llm_serving.server.http.json_structure import count_keys, count_values, structure_of

TEXTS = ["", '"', "\\", '\\"', "a\\\\", "[{,:}]", "é😀", "a" * 9]


def random_value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(5 if depth else 3)
    if kind == 0:
        return rng.choice([1, -2.5, True, None])
    if kind <= 2:
        return rng.choice(TEXTS)
    members = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 3:
        return members
    return {f"{i}{rng.choice(TEXTS)}": member for i, member in enumerate(members)}


def values_in(value: object) -> int:
    members = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + sum(map(values_in, members))


def depth_of(value: object) -> int:
    members = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return int(isinstance(value, dict | list)) + max(map(depth_of, members), default=0)


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 7, 64 * 1024])
def test_counts_are_those_of_the_parser(monkeypatch, slice_bytes):
    monkeypatch.setattr(json_structure, "SLICE_BYTES", slice_bytes)
    rng = random.Random(slice_bytes)
    for _ in range(300):
        value = random_value(rng, 4)
        structure = structure_of(json.dumps(value, ensure_ascii=rng.random() < 0.5).encode())
        assert structure.num_keys == count_keys(value)
        assert values_in(value) <= structure.num_values <= 2 * values_in(value)
        depth = depth_of(value)
        assert not structure.is_deeper_than(depth)
        assert depth == 0 or structure.is_deeper_than(depth - 1)


def test_a_repeated_key_counts_twice():
    text = b'{"a": 1, "b": {"c": 1, "c": 2}}'
    assert structure_of(text).num_keys == 4
    assert count_keys(json.loads(text)) == 3


@pytest.mark.parametrize("text", [b"", b'"', b"\\", b'{"a', b"]]][", b'"\\', b"[" * 99])
def test_invalid_texts_are_left_to_the_parser(text):
    assert not structure_of(text).is_deeper_than(32)


@pytest.mark.parametrize(
    ("value", "count"), [(1, 0), ("text", 0), ([], 0), ([1, 2], 2), ([[1, 2], 3], 4), ({"a": [1], "b": {"c": 2}}, 4)]
)
def test_the_values_inside_a_value_are_counted(value, count):
    assert count_values(value, 4) == count


def test_counting_values_stops_above_the_limit():
    class Unread(list):
        """A list whose elements must not be read."""

        def __iter__(self):
            raise AssertionError("the list was read")

    assert count_values([Unread([1] * 10)], 5) > 5
    assert count_values([1, [2, Unread([1] * 10)]], 5) > 5
