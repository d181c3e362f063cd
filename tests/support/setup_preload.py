"""Imports what setup.py imports. The fork server of the tests of setup.py imports this module once."""

from __future__ import annotations

import gc

import setuptools.command.bdist_wheel
import setuptools.command.build
import setuptools.command.build_ext
import setuptools.command.build_py
import setuptools.dist  # noqa: F401

gc.freeze()
