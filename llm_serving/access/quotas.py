"""Counts the use of a key's quotas: requests in flight, requests per minute and tokens per minute. The caller passes
the time in seconds.
"""

from __future__ import annotations

from llm_serving.access.keys import KeyRights
from llm_serving.errors import QuotaExceededError, RequestError
from llm_serving.waiting.drain_rate import DrainRate

MINUTE_S = 60.0
"""Seconds in which a quota per minute is refilled completely."""


class Allowance:
    """An amount that may be used in each minute (a token bucket).

    The bucket begins full. A key may use the whole amount immediately. An empty bucket refills evenly within a minute.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._as_of = now

    def resize(self, per_minute: int) -> None:
        """Changes the amount per minute. The use before the change still counts."""
        self._left += per_minute - self._per_minute
        self._per_minute = per_minute

    def wait_s(self, amount: int, now: float) -> float:
        """Returns the seconds until ``amount`` may be used. 0 if it may be used now."""
        refilled = (now - self._as_of) * self._per_minute / MINUTE_S
        self._left = min(float(self._per_minute), self._left + max(0.0, refilled))
        self._as_of = now
        return max(0.0, amount - self._left) * MINUTE_S / self._per_minute

    def take(self, amount: int) -> None:
        """Uses ``amount`` of the allowance. A negative amount returns the unused part of a reservation."""
        self._left = min(float(self._per_minute), self._left - amount)


class KeyUsage:
    """The use of the quotas by all keys with one name: requests in flight, and requests and tokens per minute."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._requests: Allowance | None = None
        self._tokens: Allowance | None = None
        self._drain_rate = DrainRate()

    def enter(self, name: str, rights: KeyRights, now: float) -> None:
        """Counts a request that begins. If a quota is exceeded, raises QuotaExceededError and does not count the
        request.
        """
        limit = rights.requests_in_flight
        if limit is not None and self.in_flight >= limit:
            raise QuotaExceededError(
                f"The key {name!r} has {self.in_flight} requests in flight; its limit is {limit}. Wait until one ends.",
                quota="requests_in_flight",
                retry_after_s=self._drain_rate.retry_after_s(self.in_flight - limit + 1, 0),
            )
        self._requests = _fitting(self._requests, rights.requests_per_minute, now)
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now)
            if wait_s > 0.0:
                raise QuotaExceededError(
                    f"The key {name!r} has sent its {rights.requests_per_minute} requests per minute; try again later.",
                    quota="requests_per_minute",
                    retry_after_s=wait_s,
                )
            self._requests.take(1)
        if self.in_flight == 0:
            self._drain_rate.start(now)
        self.in_flight += 1

    def leave(self, now: float, *, was_refused: bool = False) -> None:
        """Counts the end of a request that ``enter`` has counted.

        ``was_refused``: the queue of the server was full. Then the request does not count for the requests per minute.
        A request beyond the key's own tokens per minute does count, because the server has read and tokenized it.
        """
        if was_refused and self._requests is not None:
            self._requests.take(-1)
        self.in_flight -= 1
        self._drain_rate.note(0, now)
        if self.in_flight == 0:
            self._drain_rate.stop()

    def reserve(self, name: str, rights: KeyRights, prompt: int, output: int, now: float) -> int:
        """Reserves the maximum number of tokens of a request, and returns this number. Returns 0 if the key has no
        token limit.

        Raises RequestError if the request needs more tokens than the limit of a whole minute. Raises QuotaExceededError
        if it needs more tokens than are left now.
        """
        self._tokens = _fitting(self._tokens, rights.tokens_per_minute, now)
        if self._tokens is None:
            return 0
        limit, total = rights.tokens_per_minute or 0, prompt + output
        arithmetic = f"{prompt} prompt + {output} output tokens = {total} tokens"
        if total > limit:
            raise RequestError(
                f"The request may take {arithmetic}; the key {name!r} has {limit} tokens per minute. Ask for fewer "
                "output tokens, or shorten the prompt.",
                param="max_tokens",
                code="request_too_large",
            )
        wait_s = self._tokens.wait_s(total, now)
        if wait_s > 0.0:
            raise QuotaExceededError(
                f"The request may take {arithmetic}; the key {name!r} has used most of its {limit} tokens per minute. "
                "Try again later, or ask for fewer output tokens.",
                quota="tokens_per_minute",
                retry_after_s=wait_s,
            )
        self._tokens.take(total)
        return total

    def settle(self, reserved: int, used: int) -> None:
        """Replaces a reservation by the number of tokens that the request really used."""
        if self._tokens is not None and reserved:
            self._tokens.take(used - reserved)


def _fitting(allowance: Allowance | None, per_minute: int | None, now: float) -> Allowance | None:
    """Returns the allowance for the limit ``per_minute``, or None if there is no limit.

    If ``allowance`` is None, creates a new one. Otherwise resizes it, because the key file may have a new limit.
    """
    if per_minute is None:
        return None
    if allowance is None:
        return Allowance(per_minute, now)
    allowance.resize(per_minute)
    return allowance
