"""Imports MindSpore as an agent does. The fork server of ``forked_programs`` imports this module once."""

from __future__ import annotations

import gc
import os

from agent.kernels.library import library_path

# MindSpore reads its log level during the import. ``agent.backends.runtime`` refuses another plugin path afterwards.
VARIABLES = {"GLOG_v": "3", "MS_OP_PLUGIN_PATH": str(library_path())}
os.environ.update(VARIABLES)

import mindspore  # noqa: E402, F401

gc.freeze()  # the forked programs do not walk MindSpore's objects at each compilation
