"""Tests the thread of the SSD tier, which reads and writes its blocks."""

from __future__ import annotations

import threading

from llm_serving.kvstore.mover import Mover
from support.time_limits import time_limit


def started(errors):
    mover = Mover(errors.append)
    mover.start()
    return mover


def test_urgent_jobs_run_first_and_all_jobs_run_before_the_end():
    ran, begun, go_on = [], threading.Event(), threading.Event()
    mover = started([])
    mover.submit(lambda: (begun.set(), go_on.wait(time_limit(10))))
    begun.wait(time_limit(10))
    for number in range(3):
        mover.submit(lambda number=number: ran.append(number))
    mover.submit(lambda: ran.append("read"), urgent=True)
    mover.end()
    mover.submit(lambda: ran.append("too late"))
    go_on.set()
    mover._thread.join(time_limit(10))
    assert ran == ["read", 0, 1, 2]
    assert not mover.is_busy
    mover.close()


def test_a_job_that_fails_is_reported_and_the_next_one_runs():
    errors, done = [], threading.Event()
    mover = started(errors)
    mover.submit(lambda: 1 / 0)
    mover.submit(done.set)
    assert done.wait(time_limit(10))
    mover.close()
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert not mover.is_busy


def test_a_repeated_job_runs_beside_the_others_until_the_end():
    ran, others, enough = [], [], threading.Event()

    def repeated():
        ran.append(len(ran))
        if len(ran) >= 3:
            enough.set()
        if len(ran) == 2:
            raise ZeroDivisionError

    errors = []
    mover = Mover(errors.append, 0.001, repeated)
    mover.start()
    assert enough.wait(time_limit(10))
    mover.submit(lambda: others.append(1))
    mover.end()
    mover._thread.join(time_limit(10))
    assert (others, [type(error) for error in errors]) == ([1], [ZeroDivisionError])
    mover.close()


def test_close_drops_jobs_that_have_not_begun():
    ran, begun, go_on = [], threading.Event(), threading.Event()
    mover = started([])
    mover.submit(lambda: (begun.set(), go_on.wait(time_limit(10))))
    begun.wait(time_limit(10))
    mover.submit(lambda: ran.append(1))
    closing = threading.Thread(target=mover.close)
    closing.start()
    while mover.num_waiting:
        pass
    go_on.set()
    closing.join(time_limit(10))
    assert ran == []
