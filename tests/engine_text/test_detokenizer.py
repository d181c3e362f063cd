"""Compares streamed text with the text of all tokens, for real tokenizers of every kind."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_serving.engine.detokenizer import IncrementalDetokenizer, StopMatcher
from llm_serving.sampling_params import SamplingParams

KINDS = ("llama2", "sentencepiece", "no_prefix", "byte_level", "tiny_llama")
TEXTS = ("hello the fox", "größer naïve", "你好，世界", "🙂👩‍👩‍👧 ok", "  two  spaces ", "\n\tline\n", "a\u0000b")

fast = settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
any_ids = st.lists(st.one_of(st.integers(0, 420), st.integers(0, 5000)), max_size=40)
any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


def stream(detokenizer, ids):
    pieces = [detokenizer.append((token,))[0] for token in ids]
    return [*pieces, detokenizer.flush()]


def without_unfinished_character(data: bytes) -> bytes:
    """Removes an incomplete character from the end of the bytes."""
    for cut in range(1, 4):
        tail = data[-cut:]
        try:
            tail.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return data[:-cut]
    return data


@pytest.mark.parametrize("kind", KINDS)
@given(ids=any_ids, skip=st.booleans())
@fast
def test_streamed_text_is_the_decoded_text_but_for_an_unfinished_last_character(tokenizers, kind, ids, skip):
    tokenizer = tokenizers[kind]
    text = "".join(stream(IncrementalDetokenizer(tokenizer, skip_special_tokens=skip), ids))
    decoded = tokenizer.decode(ids, skip_special_tokens=skip)
    kept = [token for token in ids if not (skip and token in tokenizer.special_token_ids)]
    data = b"".join(tokenizer.token_bytes(token) for token in kept)
    if without_unfinished_character(data) == data:
        assert text == decoded
    else:
        assert decoded == text + "\ufffd"


@pytest.mark.parametrize("data", [b"\xed\xa0", b"\xed\xbf", b"a\xed\xa0\x80b", b"\xed\xa0\xed\x9f\xbf"])
def test_half_a_surrogate_is_no_unfinished_character(tokenizers, data):
    tokenizer = tokenizers["llama2"]
    ids = [byte + 6 for byte in data]
    assert b"".join(map(tokenizer.token_bytes, ids)) == data
    pieces = stream(IncrementalDetokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids) == data.decode(errors="replace")


@pytest.mark.parametrize("kind", KINDS)
@given(text=any_text)
@fast
def test_a_text_survives_encoding_and_streaming_without_replacement_characters(tokenizers, kind, record_property, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    # End tokens are not skipped, because the text may contain their spelling.
    pieces = stream(IncrementalDetokenizer(tokenizer, skip_special_tokens=False), ids)
    expected = text.replace("\u2581", " ") if kind != "byte_level" else text
    split = 0 if "\ufffd" in text else sum("\ufffd" in piece for piece in pieces)
    record_property("split_characters", f"{split} of {len(pieces)}")
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert split == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters(tokenizers, kind, text, record_property):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(IncrementalDetokenizer(tokenizer), ids)
    split = sum("\ufffd" in piece for piece in pieces)
    record_property("split_characters", f"{split} of {len(pieces)}")
    assert "".join(pieces) == text
    assert split == 0


@pytest.mark.parametrize("kind", KINDS)
@given(ids=any_ids, cuts=st.lists(st.integers(1, 5), max_size=40), stops=st.lists(any_text.filter(bool), max_size=3))
@fast
def test_how_tokens_are_cut_into_pieces_changes_nothing(tokenizers, kind, ids, cuts, stops):
    def run(groups):
        detokenizer = IncrementalDetokenizer(tokenizers[kind], stops)
        text, stop = "", None
        for group in groups:
            piece, stop = detokenizer.append(group)
            text += piece
            if stop is not None:
                return text, stop, detokenizer.num_tokens
        return text + detokenizer.flush(), stop, detokenizer.num_tokens

    groups, rest = [], list(ids)
    for cut in [*cuts, len(ids) or 1]:
        groups.append(rest[:cut])
        rest = rest[cut:]
    assert run(groups) == run([[token] for token in ids])


def reference_stop(text, stops):
    """Returns the text before the first complete stop string, and that stop string.

    If several stop strings end at the same place, the longest counts.
    """
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text("ab", max_size=25)


@given(text=letters, stops=st.lists(letters.filter(bool).map(lambda s: s[:5]), min_size=1, max_size=4), data=st.data())
@settings(max_examples=200, deadline=None)
def test_stop_strings_match_as_soon_as_they_are_complete_and_never_leak(text, stops, data):
    matcher = StopMatcher(stops)
    out, position = "", 0
    while position < len(text) and matcher.matched is None:
        size = data.draw(st.integers(1, 6))
        piece = matcher.feed(text[position : position + size])
        out += piece
        position += size
        assert reference_stop(text, stops)[0].startswith(out)
    if matcher.matched is None:
        out += matcher.flush()
    assert (out, matcher.matched) == reference_stop(text, stops)


def test_a_stop_string_over_several_tokens_is_held_back_and_cut(tokenizers):
    tokenizer = tokenizers["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer, ("\n\n", "END"))
    ids = tokenizer.encode("one E two EN three\nEND four")
    pieces = []
    for token in ids:
        text, stop = detokenizer.append((token,))
        pieces.append(text)
        if stop is not None:
            break
    assert stop == "END"
    assert "".join(pieces) == "one E two EN three\n"
    assert detokenizer.num_tokens < len(ids)


def test_held_back_text_comes_with_the_flush(tokenizers):
    tokenizer = tokenizers["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer, ("fox!",))
    ids = tokenizer.encode("the fox")
    text = "".join(detokenizer.append((token,))[0] for token in ids)
    assert text == "the "
    assert detokenizer.flush() == "fox"
    assert detokenizer.flush() == ""


def test_a_stop_string_counts_only_after_the_minimum_of_tokens(tokenizers):
    tokenizer = tokenizers["llama2"]
    ids = tokenizer.encode("a b a b", add_special_tokens=False)
    for min_tokens in range(len(ids) + 1):
        sampling = SamplingParams(stop=("b",), min_tokens=min_tokens)
        detokenizer = IncrementalDetokenizer.for_request(tokenizer, [300], sampling)
        pieces = [detokenizer.append([one]) for one in ids]
        before = tokenizer.decode(ids[:min_tokens])
        later = tokenizer.decode(ids)[len(before) :]
        ended = [index for index, (_, stop) in enumerate(pieces) if stop is not None]
        assert bool(ended) == ("b" in later)
        assert all(index >= min_tokens for index in ended)


def test_the_stop_string_can_be_kept(tokenizers):
    tokenizer = tokenizers["byte_level"]
    sampling = SamplingParams(stop=("fox",), include_stop_str_in_output=True)
    detokenizer = IncrementalDetokenizer.for_request(tokenizer, [], sampling)
    assert detokenizer.append(tokenizer.encode("the fox said")) == ("the fox", "fox")
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", ["llama2", "sentencepiece"])
def test_the_tokenizers_own_space_goes_and_a_real_one_stays(tokenizers, kind):
    tokenizer = tokenizers[kind]
    prompt = tokenizer.encode("Once upon")
    answer = tokenizer.encode("hello fox", add_special_tokens=False)
    assert tokenizer.piece(answer[0]) == "\u2581hello"

    def text(**options):
        return "".join(stream(IncrementalDetokenizer(tokenizer, **options), answer))

    assert text() == "hello fox"
    assert text(prompt_token_ids=prompt) == " hello fox"
    assert text(prompt_token_ids=[*prompt, *tokenizer.encode("<|assistant|>", False)]) == "hello fox"
    assert tokenizer.decode([*prompt, *answer]) == "Once upon hello fox"


def test_an_unfinished_character_at_the_end_is_dropped_and_a_broken_one_is_replaced(tokenizers):
    tokenizer = tokenizers["no_prefix"]
    first, second, third = tokenizer.encode("你", add_special_tokens=False)[-3:]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.append((token,))[0] for token in (first, second, third, first)] == ["", "", "你", ""]
    assert detokenizer.flush() == ""
    assert tokenizer.decode([first, second]) == "\ufffd"
    detokenizer = IncrementalDetokenizer(tokenizer)
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    assert [detokenizer.append((token,))[0] for token in (first, second, letter)] == ["", "", "\ufffda"]


def test_special_and_added_tokens(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("<|begin|>hello<tool call>fox<|eot|>")
    assert "".join(stream(IncrementalDetokenizer(tokenizer), ids)) == "hello<tool call>fox"
    shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(stream(shown, ids)) == "<|begin|>hello<tool call>fox<|eot|>"


def test_ids_outside_the_vocabulary_are_no_text(tokenizers):
    for tokenizer in tokenizers.values():
        outside = [tokenizer.vocab_size, tokenizer.vocab_size + 1000]
        assert tokenizer.decode(outside) == ""
        assert stream(IncrementalDetokenizer(tokenizer), outside) == ["", "", ""]
