"""Tests the comparison of two source trees in alternating runs. A stub replaces the benchmark."""

import json
from pathlib import Path

import pytest

from performance.bench import engine_host
from performance.bench.against import compare_trees
from performance.program import LoadTestError

SCRIPT = """
import json, sys
from pathlib import Path

with open({record!r}, "a") as file:
    file.write({name!r} + " " + " ".join(sys.argv[1:-2]) + "\\n")
if "--fail" in sys.argv:
    sys.exit("no kernels")
number = sum(line.startswith({name!r}) for line in Path({record!r}).read_text().splitlines())
rows = [{{"sequences": 1, "us": {factor} * number}}, {{"sequences": 8, "us": {factor} * number * 4}}]
Path(sys.argv[-1]).write_text(json.dumps({{"rows": rows}}))
"""


def trees(folder: Path) -> tuple[Path, Path]:
    """Returns two trees with stub benchmarks. In run n, the first reports n us and the second 2 n us."""
    for name, factor in (("this", 1.0), ("other", 2.0)):
        (folder / name).mkdir()
        script = SCRIPT.format(record=str(folder / "record"), name=name, factor=factor)
        (folder / name / "bench.py").write_text(script)
    return folder / "this", folder / "other"


def test_runs_alternate_and_ratios_compare_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    this, other = trees(tmp_path)
    path = tmp_path / "ratios.json"
    arguments = ["--steps", "5", "--against", str(other), "--json", str(path), "--rounds", "3"]
    assert compare_trees("bench.py", arguments, "sequences", "us", root=this) == 0
    runs = (tmp_path / "record").read_text().split("\n")[:-1]
    assert runs == [f"{name} --steps 5" for name in ("this", "other", "other", "this", "this", "other")]
    content = json.loads(path.read_text())
    assert content["ratio"] == pytest.approx(0.5)
    assert content["rows"][1] == {"name": "8", "this": 8.0, "other": 16.0, "ratio": 0.5, "ratios": [0.5, 0.5, 0.5]}
    out = capsys.readouterr().out
    assert ["8", "8.00", "16.0", "0.500", "0.500", "0.500"] in [line.split() for line in out.splitlines()]
    assert "geometric mean of the rows: 0.500 (below 1 this tree is faster)" in out


def test_a_failed_run_is_reported_with_its_last_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    this, other = trees(tmp_path)
    with pytest.raises(LoadTestError, match="failed with 1:\nno kernels"):
        compare_trees("bench.py", ["--against", str(other), "--fail"], "sequences", "us", root=this)
    assert engine_host.main(["--against", str(tmp_path / "nowhere")]) == 2
    assert "nowhere has no performance/bench_engine_host.py" in capsys.readouterr().err
