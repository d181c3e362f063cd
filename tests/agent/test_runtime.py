"""Tests of the import of MindSpore, with a module of that name that imports nothing."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from agent.backends.runtime import import_mindspore


@pytest.fixture
def frozen(tmp_path, monkeypatch):
    """Lets ``import mindspore`` run ``tmp_path / "mindspore.py"``, and collects the calls of ``gc.freeze``."""
    calls: list[bool] = []
    monkeypatch.syspath_prepend(tmp_path)
    # This entry lets ``monkeypatch`` remove the test's module after the test, also if no ``mindspore`` was imported
    # before.
    monkeypatch.setitem(sys.modules, "mindspore", ModuleType("mindspore"))
    monkeypatch.delitem(sys.modules, "mindspore")
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(True))
    return calls


def test_the_import_has_no_garbage_collection_and_later_ones_skip_its_objects(tmp_path, monkeypatch, frozen):
    (tmp_path / "mindspore.py").write_text("import gc\n\ncollects = gc.isenabled()\n")
    module = import_mindspore()
    assert not module.collects
    assert gc.isenabled()
    assert import_mindspore() is module
    assert frozen == [True]


def test_garbage_is_collected_after_a_failed_import(tmp_path, frozen):
    (tmp_path / "mindspore.py").write_text("raise ImportError('a library is missing')\n")
    with pytest.raises(ImportError, match="a library is missing"):
        import_mindspore()
    assert gc.isenabled()
    assert frozen == []
