"""The scheduler's state as data: what is read goes on as what was written would."""

from __future__ import annotations

import enum
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque

import msgspec
import pytest

from llm_serving.flight import state as state_module
from llm_serving.flight.disguise import StateDisguise
from llm_serving.flight.format import FlightRecordingError
from llm_serving.flight.state import first_difference, read_state, write_state
from llm_serving.request import Request
from llm_serving.scheduler.limits import Policy, PreemptionKind
from llm_serving.telemetry.receipt import Receipt
from support.fakes import make_limits, make_request
from support.simulation import Simulation


def as_it_is(owner, name, value):
    return value


def through_bytes(state):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b

    def method(self):
        return self.a


class Open:
    def __init__(self, **values):
        self.__dict__.update(values)


class Colour(enum.Enum):
    RED = "red"


def function():
    return "called"


@pytest.fixture
def ours(monkeypatch):
    """The classes of this file are among those that make up a state."""
    monkeypatch.setattr(state_module, "PACKAGES", (__name__,))


def test_every_kind_of_value_comes_back_the_same(ours):
    shared, key = [1, 2.5, None, True, b"x", "y"], Slotted(1, 2)
    count = itertools.count(5)
    next(count)
    ordered = OrderedDict([(3, "c"), (1, "a")])
    root = Open(
        shared=(shared, {"again": shared}),
        sets=[{1, 2}, frozenset({(1, "t")})],
        by_object={key: "value"},
        deque=deque([1, 2], maxlen=3),
        default=defaultdict(list, {"k": [1]}),
        counter=Counter("aab"),
        ordered=ordered,
        count=count,
        method=key.method,
        function=function,
        colour=Colour.RED,
        bytes=bytearray(b"ab"),
    )
    root.itself = root
    again = read_state(through_bytes(write_state(root, as_it_is)))[0]
    assert again.itself is again
    assert again.shared == (shared, {"again": shared})
    assert again.shared[0] is again.shared[1]["again"]
    assert again.sets == root.sets
    ((other, value),) = again.by_object.items()
    assert (other.a, other.b, value) == (1, 2, "value")
    assert again.method.__self__ is other
    assert (again.deque, again.deque.maxlen, again.default, again.counter) == (
        root.deque,
        3,
        root.default,
        root.counter,
    )
    assert list(again.ordered) == [3, 1]
    again.default["new"].append(1)
    del again.default["new"]
    assert (again.function, again.colour, again.bytes) == (function, Colour.RED, bytearray(b"ab"))
    assert first_difference(through_bytes(write_state(root, as_it_is)), write_state(again, as_it_is)) is None
    assert next(again.count) == 6


def test_what_is_not_known_is_refused_by_name(ours):
    with pytest.raises(FlightRecordingError, match=r"holds a random\.Random"):
        write_state(Open(generator=random.Random(1)), as_it_is)


@pytest.mark.parametrize(
    "node",
    [
        ["function", "os:system"],
        ["function", "llm_serving.scheduler.limits:dataclass"],
        ["enum", "subprocess:Popen", "x"],
        ["object", 0, []],
    ],
)
def test_nothing_foreign_is_made_or_found(node):
    state = {"classes": [["pathlib:Path", []]] if node[0] == "object" else [], "nodes": [node]}
    with pytest.raises(FlightRecordingError, match=r"which is not|fit this version"):
        read_state(state)


def test_a_class_that_has_changed_is_told(ours):
    written = through_bytes(write_state(Slotted(1, 2), as_it_is))
    written["classes"][0][1].append("gone")
    with pytest.raises(FlightRecordingError, match=r"gone.*Replay it with the version that recorded it"):
        read_state(written)
    written["classes"][0][1] = ["a"]
    with pytest.raises(FlightRecordingError, match="Slotted now has b, too"):
        read_state(written)


def test_the_first_difference_names_class_and_attribute(ours):
    one = through_bytes(write_state(Slotted(1, [2]), as_it_is))
    assert first_difference(one, write_state(Slotted(3, [2]), as_it_is)) == ("Slotted.a", 1, 3)
    assert first_difference(one, write_state(Slotted(1, [2, 3]), as_it_is)) == ("list", [[2]], [[2, 3]])


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("kind", list(PreemptionKind))
def test_a_scheduler_in_the_midst_of_work_goes_on_the_same(policy, kind):
    rng = random.Random(11)
    limits = make_limits(num_blocks=24, policy=policy, preemption=kind, num_host_blocks=20)
    simulation = Simulation(limits)
    for number in range(40):
        simulation.add(make_request(f"r{number}", rng.randint(1, 40), rng.randint(1, 20)))
    for _ in range(60):
        simulation.step()
    assert simulation.scheduler.figures.num_running
    state = through_bytes(write_state(simulation.scheduler, StateDisguise(lambda _: None, None)))
    objects = read_state(state)
    for thing in objects:
        if isinstance(thing, Request):
            thing.receipt = Receipt()
    copy = objects[0]
    copy.check_integrity()
    while not simulation.scheduler.is_idle:
        while (step := simulation.scheduler.schedule(simulation.now)) is not None:
            simulation.device.submit(step)
            assert _decisions(copy.schedule(simulation.now)) == _decisions(step)
        assert copy.schedule(simulation.now) is None
        result = simulation.device.run_next()
        simulation.scheduler.update(result, simulation.now)
        simulation.device.answered(result.seq)
        result.sampled_ids = [min(token, 0) for token in result.sampled_ids]  # the values of tokens do not matter
        copy.update(result, simulation.now)
    assert copy.is_idle
    copy.check_integrity()


def _decisions(step):
    return step.seq, step.kind, step.rows, step.starts, step.query_lens, step.block_tables, step.moves
