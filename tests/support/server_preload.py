"""Imports the modules of a server. The fork server of servers imports this module once."""

from __future__ import annotations

import gc

import uvloop  # noqa: F401

import llm_serving.access.setup
import llm_serving.engine.tokenizer_backends
import llm_serving.executor.agent_executor
import llm_serving.launcher
import llm_serving.registry.starting
import llm_serving.server.app
import llm_serving.server.batches.store
import llm_serving.server.models.lookup
import llm_serving.server.run
import llm_serving.telemetry.metrics
import llm_serving.telemetry.npu_metrics  # noqa: F401
from llm_serving.config import load_config
from llm_serving.flight.setup import code_digest

load_config("llama_tiny_cpu.yaml")  # fills the caches of the loader
code_digest()
gc.freeze()
