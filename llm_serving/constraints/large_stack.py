"""Runs a function in a thread with a large stack.

llguidance follows references of a schema, and rules of a grammar, by recursion. With the usual stack of 8 MB, a request
with a chain of 1200 references would end the whole process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

STACK_BYTES = 128 << 20
"""Size of the stack. The longest accepted grammars need less than 24 MB. Only used parts of a stack take memory."""
_SIZE_LOCK = threading.Lock()

P = ParamSpec("P")
T = TypeVar("T")


def on_large_stack(work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Calls ``work`` in a thread with a large stack, waits for the end, and returns the result or raises the error."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(*arguments, **named))
        except BaseException as error:
            errors.append(error)

    with _SIZE_LOCK:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="large stack")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors.pop()  # no variable keeps the error, because its traceback refers to this frame
    return results.pop()
