"""Imports MindSpore and the modules of an agent. The fork server of agents imports this module once."""

from __future__ import annotations

import gc

import agent.model_runner
import agent.process
import agent.server
import agent.worker  # noqa: F401
import support.mindspore_preload  # noqa: F401 - it sets variables that MindSpore reads, so it comes first

gc.freeze()
