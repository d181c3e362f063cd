"""Tests of the sessions that a server remembers: limits, tenants, and the end of old ones."""

from __future__ import annotations

from llm_serving.sessions.book import Session, SessionBook, session_salt


def session(name: str, num_tokens: int = 4, **changes: object) -> Session:
    values: dict = {"model": "m", "tokens": bytes(4 * num_tokens), "salt": b"", "adapter": b"", "updated": 0.0}
    return Session(name, **{**values, **changes})


def test_a_tenant_loses_its_oldest_session_and_no_other_tenant_does():
    book = SessionBook(2, lambda: 0.0)
    book.put("b", session("x"))
    for name in ("x", "y", "x", "z"):
        book.put("a", session(name))
    assert [each.session_id for each in book.of_tenant("a")] == ["z", "x"]
    assert [each.session_id for each in book.of_tenant("b")] == ["x"]
    assert book.find("b", "z") is None


def test_the_tokens_of_all_sessions_have_a_limit():
    book = SessionBook(10, lambda: 0.0, max_bytes=100)
    for number in range(5):
        book.put("a", session(str(number), num_tokens=10))
    assert (len(book), book.num_bytes) == (2, 80)
    book.put("a", session("4", num_tokens=1))
    assert book.num_bytes == 44
    assert book.remove("a", "4")
    assert not book.remove("a", "4")
    assert (len(book), book.num_bytes) == (1, 40)
    book.put("a", session("large", num_tokens=30))
    assert len(book) == 0
    assert book.num_bytes == 0


def test_no_session_is_kept_with_a_limit_of_zero():
    book = SessionBook(0, lambda: 0.0)
    book.put("a", session("x"))
    assert book.find("a", "x") is None


def test_two_imports_have_different_salts():
    assert session_salt(b"1") != session_salt(b"2")
