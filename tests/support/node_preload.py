"""Imports the modules of a node. The fork server of nodes imports this module once."""

from __future__ import annotations

import gc

import support.stub_agent  # noqa: F401

gc.freeze()
