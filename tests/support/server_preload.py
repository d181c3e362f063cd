"""Imports the modules of a server. The fork server of servers imports this module once."""

from __future__ import annotations

import gc

import llm_serving.access.setup
import llm_serving.engine.tokenizer_backends
import llm_serving.launcher
import llm_serving.registry.starting
import llm_serving.server.app
import llm_serving.server.batches.store
import llm_serving.server.models.lookup
import llm_serving.server.run
import llm_serving.telemetry.metrics  # noqa: F401

gc.freeze()
