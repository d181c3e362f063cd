"""Tests that an agent does not start if a primitive has no kernel. The error names the primitive."""

from __future__ import annotations

from pathlib import Path

from support.forked_programs import run_forked
from support.json_program import printed_json
from support.model_folders import write_model_folder

PROGRAM = Path(__file__).with_name("missing_primitive_program.py")


def test_the_missing_primitive_is_named(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    errors = printed_json(run_forked(PROGRAM, str(folder), folder=tmp_path))
    assert list(errors) == ["FastGeLU", "Exp2"], (
        "one primitive has a kernel for other types only, the other has none"
    )
    for name, error in errors.items():
        assert error.startswith(f"the graph needs the primitive {name}; this device has no kernel for it")
        assert "the model's types are BFloat16" in error
