"""Imports MindSpore as an agent does. The fork server of ``forked_programs`` imports this module once."""

from __future__ import annotations

import gc
import os

from agent.kernels.library import library_path

# MindSpore reads its log level during the import. After the import, ``agent.backends.runtime`` refuses to set another
# plugin path.
VARIABLES = {"GLOG_v": "3", "MS_OP_PLUGIN_PATH": str(library_path())}
os.environ.update(VARIABLES)

import mindspore  # noqa: E402, F401

gc.freeze()  # the garbage collector of forked programs then skips MindSpore's objects, also during compilation
