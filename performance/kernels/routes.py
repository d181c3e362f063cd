"""Records the experts that each token chooses, or makes tokens use the experts of an earlier run (``routes.cc``)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from performance.kernels.library import load_testing_library


@dataclass
class Routes:
    """The ids of the experts that the tokens of a run chose."""

    chosen: list[int] = field(default_factory=list)
    """The experts of each row, layer after layer and step after step."""
    widest_margin: float = 0.0
    """How far replaced choices were from a tie: the maximum over all rows. 0 if no choice was replaced.

    The distance of a row is the smallest router logit of its own choice, minus the smallest router logit of the
    replacement.
    """


@contextmanager
def recorded_routes(follow: Sequence[int] = ()) -> Iterator[Routes]:
    """Records the experts that tokens choose while the body of a ``with`` statement runs. Yields a ``Routes`` object,
    which is complete when the body ends.

    The process must use the testing library (``replace_product_library``). ``follow`` has the expert ids that an
    earlier run chose for the same rows in the same order. If it is given, the tokens use these experts instead of their
    own choice.
    """
    library, routes = load_testing_library(), Routes()
    library.llmk_test_begin_routes.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.llmk_test_end_routes.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)]
    library.llmk_test_end_routes.restype = ctypes.c_int64
    followed, margin = np.array(follow, np.int32), ctypes.c_float()
    library.llmk_test_begin_routes(followed.ctypes.data, len(followed))
    yield routes
    chosen = np.empty(library.llmk_test_end_routes(None, ctypes.byref(margin)), np.int32)
    library.llmk_test_end_routes(chosen.ctypes.data, ctypes.byref(margin))
    routes.chosen, routes.widest_margin = chosen.tolist(), margin.value
