"""Turns the events of a parser into the output items of ``/v1/responses``, and into the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import orjson

from llm_serving.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from llm_serving.server.http.json_pieces import ITEMS_PER_PIECE, EncodedList, GrowingList
from llm_serving.server.responses.logprobs import MessageLogprobs, without_bytes

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ItemWriter:
    """Writes the output items of one response, one after the other: the start of an item, its deltas, and its end."""

    def __init__(
        self, response_id: str, call_id: Callable[[], str], logprobs: MessageLogprobs | None = None
    ) -> None:
        """``logprobs`` has the log-probabilities of the answer's tokens. None if the client does not ask for them."""
        self.items: list[dict[str, Any]] = []
        """The items that have been added. The text of the last item may be incomplete."""
        self._id = response_id.rpartition("-")[2]
        self._call_id = call_id
        self._logprobs = logprobs
        self._texts: list[str] = []
        self._full_logprobs, self._short_logprobs = GrowingList(), GrowingList()
        """Two lists with the log-probabilities of the open message: with and without the bytes of the tokens.

        The lists grow with each delta, which is encoded only once. At the end of the message, three events and the
        response contain all log-probabilities. Encoding them again would take long.
        """
        self._is_open = False

    def write(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Returns the stream's events for the next events of the parser. The caller adds the sequence numbers.

        The events and ``items`` may have an ``EncodedList``, so the caller must use ``encode_in_pieces``.
        """
        found: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, Content | Reasoning):
                kind = "message" if isinstance(event, Content) else "reasoning"
                if event.text:
                    found += self._text_item(kind)
                    found.append(self._text_delta(event))
            elif isinstance(event, CallBegin):
                found += self.end()
                found.append(self._begin("function_call", call_id=self._call_id(), name=event.name, arguments=""))
            elif isinstance(event, Arguments):
                if event.text:
                    found.append(self._delta("response.function_call_arguments.delta", event.text))
            else:
                assert isinstance(event, CallEnd)
                found += self.end()
        return found

    def end(self, *, is_cut: bool = False) -> list[dict[str, Any]]:
        """Returns the events that end the open item. ``is_cut`` is True if the token limit ended the output."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self.items[-1], "".join(self._texts)
        item["status"] = "incomplete" if is_cut else "completed"
        if item["type"] == "function_call":
            item["arguments"] = text
            done = {"type": "response.function_call_arguments.done", "arguments": text, "name": item["name"]}
            return [done | self._where(), self._item_event("response.output_item.done")]
        part = item["content"][0]
        part["text"] = text
        more: dict[str, Any] = {}
        if item["type"] == "message":
            part["logprobs"] = self._full_logprobs.encoded()
            more = {"logprobs": self._short_logprobs.encoded()}
        return [
            {"type": f"response.{part['type']}.done", "content_index": 0, "text": text} | more | self._where(),
            {"type": "response.content_part.done", "content_index": 0, "part": dict(part)} | self._where(),
            self._item_event("response.output_item.done"),
        ]

    def _text_item(self, kind: str) -> list[dict[str, Any]]:
        if self._is_open and self.items[-1]["type"] == kind:
            return []
        found = self.end()
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        found.append(self._begin(kind, **more, content=[]))
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"] = [part]
        added = {"type": "response.content_part.added", "content_index": 0, "part": dict(part)}
        return [*found, added | self._where()]

    def _begin(self, kind: str, **members: Any) -> dict[str, Any]:
        number = len(self.items)
        name = f"{_PREFIXES[kind]}_{self._id}_{number}"
        self.items.append({"id": name, "type": kind, "status": "in_progress", **members})
        self._texts, self._is_open = [], True
        self._full_logprobs, self._short_logprobs = GrowingList(), GrowingList()
        return self._item_event("response.output_item.added")

    def _item_event(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _text_delta(self, event: Content | Reasoning) -> dict[str, Any]:
        if isinstance(event, Reasoning):
            return self._delta("response.reasoning_text.delta", event.text, content_index=0)
        logprobs = self._take_logprobs(event)
        return self._delta("response.output_text.delta", event.text, content_index=0, logprobs=logprobs)

    def _take_logprobs(self, event: Content) -> EncodedList | list[object]:
        """Encodes the log-probabilities of the next text. Returns them for a delta: without the bytes of the tokens."""
        found = GrowingList()
        if self._logprobs is not None:
            entries = iter(self._logprobs.take(event.begin, event.end))
            # A text that is not streamed may have many tokens. Their objects are freed group by group: no other thread
            # runs during one call that encodes or frees many objects.
            while group := list(islice(entries, ITEMS_PER_PIECE)):
                self._full_logprobs.add(orjson.dumps(group)[1:-1])
                short = orjson.dumps(without_bytes(group))[1:-1]
                self._short_logprobs.add(short)
                found.add(short)
        return found.encoded()

    def _delta(self, kind: str, text: str, **more: Any) -> dict[str, Any]:
        self._texts.append(text)
        return {"type": kind, "delta": text} | more | self._where()

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
