"""Tests the start time that a client may state in a request.

The tests cover the values that are accepted. All measured times of the request count from this start time.
"""

from __future__ import annotations

import time

import pytest

from llm_serving.server.http.protocol import MAX_AGE_S, age_of
from llm_serving.server.http.proxies import TrustedProxies
from support.fake_engine import FakeEngine
from support.http_server import running

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


@pytest.mark.parametrize(
    ("networks", "client", "trusted"),
    [
        (["127.0.0.1"], ("127.0.0.1", 5), True),
        (["127.0.0.1"], ("127.0.0.2", 5), False),
        (["10.1.0.0/16"], ("10.1.2.3", 5), True),
        (["10.1.2.3/16"], ("10.1.9.9", 5), True),
        (["10.1.0.0/16"], ("10.2.2.3", 5), False),
        (["10.1.0.0/16"], ("::ffff:10.1.2.3", 5), True),
        (["fe80::/10"], ("fe80::1%eth0", 5), True),
        (["::1"], ("127.0.0.1", 5), False),
        ([], ("127.0.0.1", 5), False),
        (["0.0.0.0/0"], None, False),
        (["0.0.0.0/0"], ("/run/server.sock", 0), False),
    ],
)
def test_only_trusted_proxies_state_a_start(networks, client, trusted):
    assert TrustedProxies(networks).trusts(client) is trusted


def test_a_stranger_cannot_make_a_request_older(tokenizer):
    with running(FakeEngine(tokenizer), trusted_proxies=("10.0.0.1",)) as server:
        before = time.monotonic()
        stamp = {"X-Request-Start": f"t={time.time() - 30:.6f}"}
        assert server.http.post("/v1/completions", json={"prompt": "a"}, headers=stamp).status_code == 200
        assert server.engine.submitted[0].arrival_time >= before - 0.01
