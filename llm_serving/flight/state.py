"""The scheduler's state as plain data, and back: what lets a segment of a recording stand on its own.

The scheduler is a graph of objects without clock, files or threads, so its attributes are all there is to it. They are
written as a list of nodes, the first being the scheduler; a value is a number, a text, bytes, true, false or null, or a
reference ``[node]``. Nothing is called when a state is read: objects are made without their constructors, and only of
classes in ``PACKAGES`` and of the containers named here. That is what pickle cannot promise.

Token ids are not written. What stands in their place is told by ``Disguise``.
"""

from __future__ import annotations

import enum
import importlib
import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Protocol

from llm_serving.flight.format import FlightRecordingError

__all__ = ["PACKAGES", "Disguise", "first_difference", "read_state", "write_state"]

PACKAGES = (
    "llm_serving.scheduler",
    "llm_serving.kvcache",
    "llm_serving.request",
    "llm_serving.telemetry.receipt",
    "llm_serving.ipc.shm",
)
"""Modules whose objects make up the state."""

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_DICTS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES: dict[str, Callable[[], Any]] = {"list": list, "int": int, "dict": dict, "set": set, "deque": deque}
_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Disguise(Protocol):
    """Gives what is written in place of an attribute."""

    def __call__(self, owner: object, name: str, value: Any) -> Any: ...


def write_state(root: object, disguise: Disguise) -> dict[str, Any]:
    """The state of ``root`` and all it refers to. Raises FlightRecordingError when it holds what is not known here."""
    return _Writer(disguise).write(root)


def read_state(state: Any) -> list[Any]:
    """The objects that were written, the one that was asked for first.

    Raises FlightRecordingError when the classes are not what they were.
    """
    try:
        return _Reader(state).read()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise FlightRecordingError(
            f"the recorded state does not fit this version of the scheduler ({type(error).__name__}: {error})."
            " Replay it with the version that recorded it."
        ) from error


class _Writer:
    def __init__(self, disguise: Disguise) -> None:
        self._disguise = disguise
        self._classes: dict[type, int] = {}
        self._names: list[tuple[str, tuple[str, ...]]] = []
        self._indices: dict[int, int] = {}
        self._kept: list[object] = []
        self._nodes: list[Any] = []

    def write(self, root: object) -> dict[str, Any]:
        self._value(root)
        done = 0
        while done < len(self._kept):
            self._nodes.append(self._node(self._kept[done]))
            done += 1
        return {"classes": self._names, "nodes": self._nodes}

    def _value(self, value: object) -> Any:
        if type(value) in _SCALARS:
            return value
        index = self._indices.get(id(value))
        if index is None:
            index = self._indices[id(value)] = len(self._kept)
            self._kept.append(value)
        return (index,)

    def _values(self, values: Any) -> list[Any]:
        if _SCALARS.issuperset(map(type, values)):
            return list(values)
        return [self._value(value) for value in values]

    def _node(self, value: Any) -> list[Any]:
        kind = type(value)
        if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
            return [kind.__name__, self._values(value)]
        if kind.__name__ in _DICTS and kind is _DICTS[kind.__name__]:
            return [kind.__name__, self._values(value.keys()), self._values(value.values())]
        if kind is deque:
            return ["deque", self._values(value), value.maxlen]
        if kind is defaultdict and value.default_factory.__name__ in _FACTORIES:
            factory = value.default_factory.__name__
            return ["defaultdict", self._values(value.keys()), self._values(value.values()), factory]
        if kind is itertools.count:
            return ["count", value.__reduce__()[1][0]]
        if kind is bytearray:
            return ["bytearray", bytes(value)]
        return self._object(value, kind)

    def _object(self, value: Any, kind: type) -> list[Any]:
        if isinstance(value, MethodType):
            return ["method", self._value(value.__self__), value.__name__]
        if isinstance(value, FunctionType) and _is_ours(value.__module__) and "<" not in value.__qualname__:
            return ["function", f"{value.__module__}:{value.__qualname__}"]
        if isinstance(value, type) and _is_ours(value.__module__):
            return ["function", f"{value.__module__}:{value.__qualname__}"]
        if not _is_ours(kind.__module__):
            raise FlightRecordingError(f"the scheduler's state holds a {kind.__module__}.{kind.__qualname__}")
        if isinstance(value, enum.Enum):
            return ["enum", f"{kind.__module__}:{kind.__qualname__}", value.name]
        code = self._classes.get(kind)
        if code is None:
            code = self._classes[kind] = len(self._names)
            self._names.append((f"{kind.__module__}:{kind.__qualname__}", _attributes(kind, value)))
        disguise = self._disguise
        names = self._names[code][1]
        return ["object", code, [self._value(disguise(value, name, getattr(value, name))) for name in names]]


class _Reader:
    def __init__(self, state: Any) -> None:
        self._nodes = state["nodes"]
        self._classes = [(_find(path), names) for path, names in state["classes"]]
        for kind, names in self._classes:
            _check_class(kind, names)
        self._made: list[Any] = [None] * len(self._nodes)
        self._is_made = bytearray(len(self._nodes))

    def read(self) -> list[Any]:
        for index in range(len(self._nodes)):
            self._make(index)
        # Objects first: what is a key or in a set must be whole to be hashed.
        for filled in (("object",), ("list", "deque"), ("set", *_DICTS, "defaultdict")):
            for index, node in enumerate(self._nodes):
                if node[0] in filled:
                    self._fill(self._made[index], node)
        return self._made

    def _value(self, value: Any) -> Any:
        return self._make(value[0]) if type(value) is list else value

    def _make(self, index: int) -> Any:
        """The node's object; one that can be changed is still empty."""
        if not self._is_made[index]:
            self._made[index] = self._new(self._nodes[index])
            self._is_made[index] = 1
        return self._made[index]

    def _new(self, node: list[Any]) -> Any:
        kind = node[0]
        if kind == "object":
            return object.__new__(self._classes[node[1]][0])
        if kind in ("tuple", "frozenset"):
            return _SEQUENCES[kind](self._value(value) for value in node[1])
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]()
        if kind in _DICTS:
            return _DICTS[kind]()
        if kind == "deque":
            return deque(maxlen=node[2])
        if kind == "defaultdict":
            return defaultdict(_FACTORIES[node[3]])
        if kind == "count":
            return itertools.count(node[1])
        if kind == "bytearray":
            return bytearray(node[1])
        if kind == "enum":
            return _find(node[1])[node[2]]
        if kind == "function":
            return _find(node[1])
        if kind == "method":
            return getattr(self._value(node[1]), node[2])
        raise ValueError(f"node of an unknown kind {kind!r}")

    def _fill(self, made: Any, node: list[Any]) -> None:
        kind = node[0]
        if kind == "object":
            for name, value in zip(self._classes[node[1]][1], node[2], strict=True):
                object.__setattr__(made, name, self._value(value))
        elif kind in ("list", "deque"):
            made.extend(map(self._value, node[1]))
        elif kind == "set":
            made.update(map(self._value, node[1]))
        else:
            for key, value in zip(node[1], node[2], strict=True):
                made[self._value(key)] = self._value(value)


def _is_ours(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in PACKAGES)


def _find(path: str) -> Any:
    module, _, qualname = path.partition(":")
    if not _is_ours(module):
        raise FlightRecordingError(f"the recorded state names {path!r}, which is not of {', '.join(PACKAGES)}")
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    if getattr(found, "__module__", None) != module:
        raise FlightRecordingError(f"the recorded state names {path!r}, which is not defined there")
    return found


def _slots(kind: type) -> list[str]:
    names: list[str] = []
    for base in reversed(kind.__mro__):
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _attributes(kind: type, value: object) -> tuple[str, ...]:
    """Names of all that an object holds, which is the same for all objects of its class."""
    slots = [name for name in _slots(kind) if hasattr(value, name)]
    return (*slots, *getattr(value, "__dict__", {}))


def _check_class(kind: type, names: list[str]) -> None:
    slots = set(_slots(kind))
    if not isinstance(kind, type) or (not kind.__dictoffset__ and not set(names) <= slots):
        raise ValueError(f"{kind!r} has not the attributes {', '.join(names)}")
    missing = slots.difference(names)
    if missing:
        raise ValueError(f"{kind.__qualname__} now has {', '.join(sorted(missing))}, too")


def first_difference(recorded: Any, replayed: dict[str, Any]) -> tuple[str, object, object] | None:
    """Where two states differ first: class and attribute, and what stands there; None when they are equal."""
    ours, theirs = _as_lists(replayed), _as_lists(recorded)
    if ours == theirs:
        return None
    if ours["classes"] != theirs["classes"]:
        return "classes", theirs["classes"], ours["classes"]
    for before, after in zip(theirs["nodes"], ours["nodes"], strict=False):
        if before != after:
            return _difference_in(before, after, ours["classes"])
    return "number of objects", len(theirs["nodes"]), len(ours["nodes"])


def _difference_in(before: list[Any], after: list[Any], classes: list[Any]) -> tuple[str, object, object]:
    if before[0] != "object" or after[0] != "object" or before[1] != after[1]:
        return before[0], before[1:], after[1:]
    path, names = classes[before[1]]
    for name, one, other in zip(names, before[2], after[2], strict=True):
        if one != other:
            return f"{path.partition(':')[2]}.{name}", one, other
    raise AssertionError("equal nodes differ")


def _as_lists(value: Any) -> Any:
    """What MessagePack makes of tuples."""
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value
