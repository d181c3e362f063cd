"""One agent of a group, in a process of its own: runs the same steps as the others through ModelRunner and, where it
answers, prints what came out as JSON.

python tests/agent/group_worker.py RANK EXCHANGE_NAME JSON

JSON: ``folders`` of models, ``dtype``, ``op_table``, ``weights``, ``kv``, ``tensor_parallel``, ``pipeline_parallel``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runner_worker import GOLDEN, run_golden, run_invariance  # noqa: E402
from step_config import make_config  # noqa: E402
from step_driver import StepDriver  # noqa: E402

from llm_serving.ipc.exchange import ExchangeLayout, ExchangeMemory  # noqa: E402


def main() -> None:
    rank, exchange_name, job = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    parallel = {f"parallel_config.{key}": job[key] for key in ("tensor_parallel", "pipeline_parallel")}
    folder = Path(job["folder"])
    options = (job["dtype"], job["op_table"], job["weights"], job["kv"])
    config = make_config(folder, *options, extra={**parallel, **job.get("extra", {})})
    layout = ExchangeLayout.of(config.shape, config.slot_limits(), config.parallel_config)
    exchange = ExchangeMemory.attach(exchange_name, layout)
    driver = StepDriver(config=config, rank=rank, exchange=exchange)
    result: dict[str, Any] = {"summary": driver.runner.summary()}
    if job["golden"] is not None:
        golden = json.loads((GOLDEN / job["golden"]).read_text(encoding="utf-8"))
        result |= {"golden": run_golden(driver, golden), "invariance": run_invariance(driver, golden)}
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
