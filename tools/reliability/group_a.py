"""Defines the checks of group A: input of the HTTP API."""

from __future__ import annotations

from tools.reliability.registry import Check, Program, tests

_DISCONNECT, _BAD, _LOOP, _WORK = (
    f"server/test_{name}.py" for name in ("disconnect", "bad_input", "event_loop", "work")
)

CHECKS = (
    Check(
        "A1",
        "A body over the limit is refused before it is read",
        tests(
            f"{_DISCONNECT}::test_a_large_body_is_refused_before_it_is_sent",
            f"{_DISCONNECT}::test_a_chunked_body_is_bounded_while_it_is_read",
            f"{_LOOP}::test_the_bodies_of_all_requests_are_bounded_together",
            figure="kept_bytes",
            limit=65536.0,
        ),
        "bytes kept of a refused body",
    ),
    Check(
        "A2",
        "Endless headers, chunks and trailers are cut off",
        tests(
            f"{_DISCONNECT}::test_endless_headers_are_cut_off",
            f"{_DISCONNECT}::test_endless_trailers_are_cut_off",
            f"{_DISCONNECT}::test_one_trailer_is_refused",
            f"{_DISCONNECT}::test_endless_chunk_extensions_are_cut_off",
            f"{_DISCONNECT}::test_a_message_that_does_not_end_is_cut_off",
            figure="endless_mib",
            limit=16.0,
        ),
        "MiB accepted of an endless message",
    ),
    Check(
        "A3",
        "Invalid JSON gets a 400: depth, repeated keys, NaN, surrogates, UTF-8",
        tests(f"{_BAD}::test_a_bad_body", "server/test_json_structure.py", figure="wrong_statuses"),
        "of {total} bodies got a wrong status",
    ),
    Check(
        "A4",
        "Numbers out of range and contradictions get a 400",
        tests(
            f"{_BAD}::test_a_bad_request",
            f"{_BAD}::test_the_server_is_unharmed_by_all_of_it",
            figure="wrong_statuses",
        ),
        "of {total} requests got a wrong status",
    ),
    Check(
        "A6",
        "The work of one request is bounded before anything is allocated",
        tests(_WORK, figure="begun_sequences"),
        "sequences begun by {total} requests that were too large",
    ),
    Check(
        "A7",
        "Token ids outside the vocabulary are refused and disturb no other request",
        tests(
            f"{_BAD}::test_a_bad_request",
            "engine/test_async_engine.py::test_token_ids_outside_the_vocabulary_are_refused",
            figure="changed_neighbours",
        ),
        "of {total} neighbours got another text",
    ),
    Check(
        "A8",
        "No accepted request stops the event loop",
        Program(("tests/long/worst_requests.py",), "longest_stall_ms", 20.0, 1800.0),
        "ms was the longest stall",
    ),
    Check(
        "A9",
        "Requests from the OpenAPI document, changed values and raw bytes get no 5xx",
        Program(("tests/long/fuzz_http.py", "--requests", "20000", "--seed", "100000"), "5xx", 0.0, 1800.0),
        "of 20,000 requests got a 5xx",
    ),
    Check(
        "A10",
        "A stream is the response in pieces, with one end and equal usage",
        tests(
            "integration/test_openai_client.py::test_a_stream_is_the_answer_in_pieces_with_its_usage",
            "server/test_openai_client.py::test_streamed_completion",
            "server/test_openai_client.py::test_usage_in_a_stream",
            "server/test_openai_client.py::test_streams_of_random_tokens_equal_the_whole_texts",
            "server/test_openai_client.py::test_streamed_chat_with_several_answers",
            figure="other_streams",
        ),
        "of {total} streams differ from the whole text",
    ),
    Check(
        "A11",
        "No stream splits a character or leaks a stop string",
        tests(
            "engine_text/test_detokenizer.py",
            "server/test_openai_client.py::test_text_never_splits_a_character",
            figure="split_characters",
        ),
        "of {total} pieces have a broken character",
    ),
    Check(
        "A12",
        "Repeated and hostile request ids disturb no other request",
        tests(
            "engine/test_async_engine.py::test_an_id_in_use_is_refused_and_its_owner_is_not_disturbed",
            "engine/test_async_engine.py::test_an_id_just_left_can_be_used_again_and_gets_its_own_pieces",
            f"{_BAD}::test_a_hostile_request_id_changes_no_response",
            figure="wrong_responses",
        ),
        "of {total} responses were wrong",
    ),
)
