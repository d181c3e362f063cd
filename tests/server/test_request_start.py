"""The start time that a request states: which values are accepted, and that its times count from there."""

from __future__ import annotations

import time

import pytest

from llm_serving.server.http_protocol import MAX_AGE_S, age_of

NOW = 1_763_740_800.5


@pytest.mark.parametrize(
    ("stamp", "age"),
    [
        (b"t=1763740800.125", 0.375),
        (b"1763740800.125", 0.375),
        (b"t=1763740800125", 0.375),
        (b"1763740800125000", 0.375),
        (b"t=1763740800", 0.5),
        (b"t=1763740740.5", MAX_AGE_S),
    ],
)
def test_ages(stamp, age):
    assert age_of(stamp, NOW) == pytest.approx(age, abs=1e-6)


@pytest.mark.parametrize(
    "stamp",
    [b"t=1763740801", b"t=1763740740.4", b"", b"t=", b"t=nan", b"inf", b"t=-1", b"12", b"t=1763740800.125 ", b"1e9",
     b"9" * 400, b"t=0.5", "t=１７６３７４０８００".encode()],
)  # fmt: skip
def test_start_times_that_are_ignored(stamp):
    assert age_of(stamp, NOW) == 0.0


@pytest.mark.parametrize(("age", "believed"), [(3.0, 3.0), (-3.0, 0.0)])
def test_times_count_from_the_stamp(server, engine, age, believed):
    before = time.monotonic()
    stamp = {"X-Request-Start": f"t={time.time() - age:.6f}"}
    assert server.http.post("/v1/completions", json={"prompt": "a"}, headers=stamp).status_code == 200
    assert before - 0.01 <= engine.submitted[0].arrival_time + believed <= time.monotonic() + 0.01
