"""Tests every GGUF type with every architecture: weights and tokens equal those of the float32 values in the file.

The oracle is a Hugging Face folder with the values that the ``gguf`` library reads from the file. Tests of the families
compare folders of the same families with transformers (test_families.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from agent.models.names import ignorable_suffixes, weight_specs
from agent.weights import load_weights, open_weights
from llm_serving.gguf.header import TENSOR_TYPES
from llm_serving.model.shape import ModelShape
from support.forked_programs import run_forked
from support.gguf_models import WIDE_FAMILIES
from support.gguf_oracle import write_pair
from support.json_program import printed_json
from support.sweeps import with_sweeps

WORKER = Path(__file__).with_name("gguf_worker.py")
TYPES = tuple(kind.name for kind in TENSOR_TYPES.values())
CELLS = tuple(itertools.product(WIDE_FAMILIES, TYPES))
NEAR = 0.95
"""Minimum fraction of the tokens, generated in the served format, that are among the oracle's best four."""
MOST = 0.95
"""Minimum fraction of the elements of a file's matrices that have the type of the cell. The other elements are in
routers, or in rows that are not a whole number of blocks.
"""
TOKEN_CELLS = {("llama", "Q4_K"), ("qwen3moe", "Q6_K"), ("gpt-oss", "MXFP4"), ("deepseek2", "Q5_K")}
"""The cells (pairs of architecture and GGUF type) whose tokens ``make test`` computes."""


def fraction_of(kind: str, file: Path) -> float:
    """Returns the fraction of a file's matrix elements that have the type ``kind``."""
    sizes: dict[str, int] = {}
    for tensor in GGUFReader(file).tensors:
        if len(tensor.shape) > 1:
            sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    return sizes.get(kind, 0) / sum(sizes.values())


def is_swept(family: str, kind: str) -> bool:
    """Returns whether only ``make test-sweeps`` reads the weights of a cell. ``make test`` reads each type once."""
    return tuple(WIDE_FAMILIES).index(family) != TYPES.index(kind) % len(WIDE_FAMILIES)


@pytest.mark.parametrize(("family", "kind"), with_sweeps(CELLS, is_swept))
def test_weights_are_those_that_the_file_stores(tmp_path: Path, family: str, kind: str) -> None:
    folder, file = write_pair(family, kind, tmp_path)
    assert fraction_of(kind, file) > MOST, "the cell would test another type"
    shape = ModelShape.from_path(file)
    specs = [spec for spec in weight_specs(shape) if not spec.packed_only]
    found = []
    for path in (folder, file):
        source = open_weights(path, specs, seed=None, ignorable=ignorable_suffixes(shape))
        found.append(load_weights(specs, source, "float32", lambda done, of: None))
        source.close()
    oracle, ours = found
    assert oracle.keys() == ours.keys()
    for parameter, values in oracle.items():
        np.testing.assert_array_equal(ours[parameter], values, parameter)


Run = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that runs the models of a cell. One process runs all cells of ``make test``, another the
    others.
    """

    @cache
    def printed(cells: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        scratch = tmp_path_factory.mktemp("gguf")
        names = ["/".join(cell) for cell in cells]
        answer: dict[str, Any] = printed_json(run_forked(WORKER, str(scratch), *names, folder=scratch, timeout=600))
        return answer

    def of_cell(family: str, kind: str) -> dict[str, Any]:
        swept = (family, kind) not in TOKEN_CELLS
        group = tuple(cell for cell in CELLS if (cell not in TOKEN_CELLS) == swept and (not swept or cell[0] == family))
        found: dict[str, Any] = printed(group)[f"{family}/{kind}"]
        return found

    return of_cell


@pytest.mark.parametrize(
    ("family", "kind"), with_sweeps(CELLS, lambda family, kind: (family, kind) not in TOKEN_CELLS)
)
def test_tokens_are_those_of_the_stored_values(results: Run, family: str, kind: str) -> None:
    """In float32, tokens and logits equal the oracle's. In the served format, most tokens are among the oracle's best
    four.
    """
    result = results(family, kind)
    assert len(set(itertools.chain.from_iterable(result["oracle"]))) >= 5, "a constant text would test little"
    assert result["float32"] == result["oracle"]
    assert result["digests"] == result["oracle_digests"]
    near = [
        token in best
        for tokens, tops in zip(result["served"], result["tops"], strict=True)
        for token, best in zip(tokens, tops, strict=True)
    ]
    print(f"{family} {kind}: {result['equal']} of {len(near)} tokens equal, {sum(near)} among the best four")
    assert sum(near) >= NEAR * len(near)
