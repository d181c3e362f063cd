"""Compiles grammars with the library llguidance, and checks the tokens of each sequence against its grammar.

A grammar is compiled once, and each sequence gets a copy. The library's lexer and parser compute the set of allowed
next tokens. The library works on the bytes of tokens, so one token may contain parts of several grammar symbols.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from threading import Lock
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from llm_serving.constraints.compile_queue import CompileQueue
from llm_serving.constraints.grammar import (
    COMPOSED,
    JSON_SCHEMA,
    JSON_WHITESPACE,
    LARK,
    MAX_COMPOSED_BYTES,
    MAX_GRAMMAR_BYTES,
    REGEX,
    Grammar,
)
from llm_serving.constraints.large_stack import on_large_stack
from llm_serving.constraints.schema_keywords import rewritten_text
from llm_serving.constraints.work_limits import GrammarError, check_work
from llm_serving.engine.tokenizer import Tokenizer
from llm_serving.errors import RequestError
from llm_serving.request import ConstraintError

MAX_CACHED_GRAMMARS = 64
"""Maximum number of compiled schemas and grammars that are kept."""
TRIED_TOKENS = 8
"""Maximum number of tokens that are generated to test a grammar before it is accepted."""
_EVERY_WORD = np.uint32(0xFFFFFFFF)
_ABSENT = re.compile(r"Resource ('[^']*') is not present in a registry")
"""Matches llguidance's error for a reference to a schema that is not in the text."""
_IN_GRAMMAR = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: (.*)")
"""Matches the first line of llguidance's error for a schema within a grammar. Further lines show the grammar."""


LIMITS = {
    "max_grammar_size": (100_000, "symbols of the grammar"),
    "initial_lexer_fuel": (500_000, "units of work to prepare its regular expressions"),
    "max_lexer_states": (50_000, "states of its regular expressions"),
    "step_lexer_fuel": (200_000, "units of work for its regular expressions in one mask"),
    "step_max_items": (50_000, "parser items in one mask"),
    "max_items_in_row": (20_000, "parser items at one place of the text"),
}
"""Limits of the time and memory that llguidance may use to compile a grammar or to compute a mask, with descriptions.

They count work, so the answer to a request does not depend on the speed of the machine. ``work_limits`` bounds the
rest of the work.
"""
_EXCEEDED = {
    "grammar size": "max_grammar_size",
    "initial lexer configuration": "initial_lexer_fuel",
    "fuel exhausted when checking relevance": "initial_lexer_fuel",
    "too many states": "max_lexer_states",
    "too many expressions constructed": "step_lexer_fuel",
    "Too many items": "step_max_items",
    "Current row has": "max_items_in_row",
}
"""Maps a part of an error text of llguidance to the limit that was exceeded."""


class _Vocabulary:
    """The tokenizer in the form that llguidance reads. llguidance calls this object to tokenize a text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_token_id: int) -> None:
        """Reads the bytes of the tokens 0 to ``vocab_size`` - 1.

        An id without a token has no bytes, so no grammar allows it.
        """
        self.eos_token_id = end_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)
        self._tokenizer = tokenizer
        self._ids = {
            data: token_id for token_id, data in enumerate(self.tokens) if token_id not in tokenizer.special_token_ids
        }
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """Returns token ids whose bytes are exactly ``text``.

        If the tokenizer would change the text, for example add a space, the text is split into the longest matching
        tokens instead.
        """
        data = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode(data.decode("utf-8", "replace"), add_special_tokens=False)
        return ids if b"".join(self.tokens[i] for i in ids) == data else self._longest_matches(data)

    def _longest_matches(self, data: bytes) -> list[int]:
        """Splits ``data`` into the longest matching tokens, from left to right, and returns their ids.

        If the tokenizer lacks tokens for single bytes, stops at a byte with which no token begins.
        """
        ids, start = [], 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids


class GrammarConstraint:
    """The state of one sequence in a grammar. Implements ``llm_serving.request.Constraint``."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int, end_token_ids: frozenset[int]) -> None:
        self._end_token_ids = end_token_ids
        self._matcher = matcher
        self.error = ""
        """The reason why the grammar rejects the tokens so far, or allows no next token. Empty without an error."""
        self.num_words = num_words

    def ends_with(self, token_id: int) -> bool:
        """Returns True if this token ends the text."""
        return token_id in self._end_token_ids

    def advance(self, token_id: int) -> None:
        if not self.error and not self._matcher.consume_token(token_id):
            self.error = self._matcher.get_error() or f"token {token_id} does not fit the grammar"
        if self.error:
            raise ConstraintError(f"the grammar cannot be followed any further: {_one_line(self.error)}")

    @property
    def has_failed(self) -> bool:
        return bool(self.error)

    def fork(self) -> GrammarConstraint | None:
        if self.error:
            return None
        return GrammarConstraint(self._matcher.deep_copy(), self.num_words, self._end_token_ids)

    def forced_tokens(self) -> list[int]:
        return [] if self.error else self._matcher.compute_ff_tokens()

    def mask(self) -> npt.NDArray[np.uint32]:
        mask = np.zeros(self.num_words, np.uint32)
        if not self.error:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error() or not mask.any():
                self.error = self._matcher.get_error() or "no token may follow"
        if self.error:
            mask.fill(_EVERY_WORD)
        return mask


class CompiledGrammar:
    """A grammar for one tokenizer. Any thread may call ``start``."""

    def __init__(self, matcher: llguidance.LLMatcher, num_words: int, end_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._end_token_ids = frozenset(end_token_ids)

    def start(self) -> GrammarConstraint:
        """Returns a new constraint, for a sequence without output tokens."""
        return GrammarConstraint(self._matcher.deep_copy(), self._num_words, self._end_token_ids)


class _Compilation:
    """The compilation of a grammar for requests of one tenant."""

    task: asyncio.Task[CompiledGrammar]

    def __init__(self) -> None:
        self.num_waiters = 0
        """The number of requests that wait for the result."""
        self.has_begun = False
        """Whether the thread has started. The compilation can then no longer be dropped."""
        self.is_kept = False
        """Whether the result is cached."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer, in threads of an executor, and caches them.

    The first grammar takes longer, because the tokenizer must be converted to the library's format.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Sequence[int], queue: CompileQueue | None = None
    ) -> None:
        """``vocab_size`` is the number of logits for each token. ``end_token_ids`` are the tokens that end a text.

        ``queue`` is the queue of all models of the server. None: a queue of its own.
        """
        self._queue = queue or CompileQueue()
        self._model_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock = Lock()
        self._compiling: dict[tuple[str, Grammar], _Compilation] = {}
        """The compilations that wait or run, by tenant and grammar."""
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    async def compile(self, grammar: Grammar, param: str, tenant: str = "") -> CompiledGrammar:
        """Returns a compiled grammar. Raises RequestError if the grammar is too long, invalid or too complex. The error
        names ``param``, the field of the client's request.

        ``tenant`` is the tenant of the request (``scheduling.tenant_of``). Raises QueueFullError if too many grammars
        wait to be compiled.
        """
        if too_long := _too_long(grammar):
            raise RequestError(f"'{param}' {too_long}.", param=param, code="invalid_value")
        if not self._end_token_ids:
            raise RequestError(
                f"'{param}' needs a token that ends the text, and this model has none.", param=param, code="unsupported"
            )
        if (known := self._cached(grammar)) is not None:
            return known
        try:
            return await self._compile_elsewhere(grammar, tenant, is_kept=True)
        except GrammarError as error:
            text = f"'{param}' cannot be used: {error}. {_remedy(grammar)}"
            raise RequestError(text, param=param, code="invalid_value") from None

    async def problem_of(self, grammar: Grammar, tenant: str = "") -> str:
        """Returns the reason why ``grammar`` cannot be compiled, or "" if it can. Does not cache the grammar.

        ``compile`` describes ``tenant``. Raises QueueFullError if too many grammars wait to be compiled.
        """
        if too_long := _too_long(grammar):
            return f"its grammar {too_long}"
        try:
            await self._compile_elsewhere(grammar, tenant, is_kept=False)
        except GrammarError as error:
            return str(error)
        return ""

    def _cached(self, grammar: Grammar) -> CompiledGrammar | None:
        known = self._cache.get(grammar)
        if known is not None:
            self._cache.move_to_end(grammar)
        return known

    async def _compile_elsewhere(self, grammar: Grammar, tenant: str, *, is_kept: bool) -> CompiledGrammar:
        """Compiles ``grammar`` in a thread, so that the event loop is not blocked. Raises GrammarError.

        Several requests of a tenant for one grammar wait for the same compilation. If the clients of all of them leave
        before it has begun, it is dropped. Later it goes on, because its thread cannot be ended. With ``is_kept``, the
        result is cached, also if no request waits any more.
        """
        key = tenant, grammar
        compilation = self._compiling.get(key)
        if compilation is None:
            compilation = self._compiling[key] = _Compilation()
            compilation.task = asyncio.ensure_future(self._compile_in_turn(grammar, tenant, compilation))
            compilation.task.add_done_callback(partial(self._compiled, key, compilation))
        compilation.is_kept |= is_kept
        compilation.num_waiters += 1
        try:
            return await asyncio.shield(compilation.task)
        finally:
            compilation.num_waiters -= 1
            if not (compilation.num_waiters or compilation.has_begun or compilation.task.done()):
                # The task ends later. Until then, a new request for this grammar must not wait for it.
                self._forget(key, compilation)
                compilation.task.cancel()

    async def _compile_in_turn(self, grammar: Grammar, tenant: str, compilation: _Compilation) -> CompiledGrammar:
        async with self._queue.place(tenant):
            # Another tenant's request may have compiled the grammar during the wait.
            if (known := self._cached(grammar)) is not None:
                return known
            compilation.has_begun = True
            work = partial(on_large_stack, self._compile, grammar)
            compiled = await asyncio.get_running_loop().run_in_executor(None, work)
            if compilation.is_kept:
                self._cache[grammar] = compiled
                self._cache.move_to_end(grammar)
                if len(self._cache) > MAX_CACHED_GRAMMARS:
                    self._cache.popitem(last=False)
            return compiled

    def _compiled(
        self, key: tuple[str, Grammar], compilation: _Compilation, task: asyncio.Task[CompiledGrammar]
    ) -> None:
        self._forget(key, compilation)
        if not task.cancelled():
            task.exception()  # otherwise, asyncio logs an error for which no request waits any more

    def _forget(self, key: tuple[str, Grammar], compilation: _Compilation) -> None:
        if self._compiling.get(key) is compilation:
            del self._compiling[key]

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            limits: dict[str, Any] = {name: value for name, (value, _) in LIMITS.items()}
            matcher = llguidance.LLMatcher(
                self._prepared(), _library_grammar(grammar), log_level=0, limits=llguidance.LLParserLimits(**limits)
            )
        except ValueError as error:
            raise _refused(str(error)) from None
        if matcher.is_error():
            raise _refused(matcher.get_error())
        compiled = CompiledGrammar(matcher, -(-self._vocab_size // 32), self._end_token_ids)
        _try(compiled)
        return compiled

    def _prepared(self) -> llguidance.LLTokenizer:
        """Returns the tokenizer in the library's format. The conversion happens once, and takes a second for a large
        vocabulary.
        """
        with self._lock:
            if self._tokenizer is None:
                vocabulary = _Vocabulary(self._model_tokenizer, self._vocab_size, self._end_token_ids[0])
                self._tokenizer = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(vocabulary), n_vocab=self._vocab_size, eos_token=self._end_token_ids
                )
            return self._tokenizer


def _too_long(grammar: Grammar) -> str:
    """Returns a text about the length of ``grammar`` if it is above the maximum, and "" otherwise."""
    size = len(grammar.text.encode("utf-8", "surrogatepass"))
    limit = MAX_COMPOSED_BYTES if grammar.kind == COMPOSED else MAX_GRAMMAR_BYTES
    return f"has {size} bytes; the maximum is {limit}" if size > limit else ""


def _try(compiled: CompiledGrammar) -> None:
    """Checks a grammar by generating a few tokens that it allows.

    Raises GrammarError if the grammar is too complex or allows no text. The check also computes the grammar's first
    mask, which takes the most time. The copies of the grammar for each request then reuse this mask.
    """
    constraint = compiled.start()
    for _ in range(TRIED_TOKENS):
        words = constraint.mask()
        if constraint.error:
            raise _refused(constraint.error)
        word = int(words.nonzero()[0][0])
        token_id = 32 * word + (int(words[word]) & -int(words[word])).bit_length() - 1
        if constraint.ends_with(token_id):
            return
        try:
            constraint.advance(token_id)
        except ConstraintError:
            raise _refused(constraint.error) from None


def _library_grammar(grammar: Grammar) -> str:
    """Returns ``grammar`` in the form that llguidance reads. Raises GrammarError if compiling it may take too long."""
    if grammar.kind == JSON_SCHEMA:
        grammar = Grammar(JSON_SCHEMA, rewritten_text(grammar.text))
    check_work(grammar)
    if grammar.kind == JSON_SCHEMA:
        return llguidance.LLMatcher.grammar_from_json_schema(
            grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE}, overrides={"lenient": False}
        )
    if grammar.kind == COMPOSED:
        return grammar.text
    if grammar.kind == REGEX:
        return llguidance.LLMatcher.grammar_from_regex(grammar.text)
    return llguidance.LLMatcher.grammar_from_lark(grammar.text)


def _remedy(grammar: Grammar) -> str:
    """Returns the advice at the end of an error about a grammar."""
    # No part of the pattern matches a line break. Otherwise, a search over many empty lines would take their square.
    if grammar.kind == LARK and re.search(r"^[ \t]*[\w-]+[ \t]*::=", grammar.text, re.MULTILINE):
        return "'::=' belongs to GBNF; this server reads Lark, in which a rule is 'start: \"yes\" | \"no\"'."
    return "Change or remove this part."


def _refused(reason: str) -> GrammarError:
    return GrammarError(_one_line(_in_the_clients_words(reason)))


def _in_the_clients_words(reason: str) -> str:
    """Rewrites an error text of llguidance for clients. Leaves out options that clients cannot set, and names the
    keyword or the limit that caused the error.
    """
    if found := _IN_GRAMMAR.match(reason):
        reason = found[1]
    if reason.startswith("oneOf constraints are not supported"):
        return "Unimplemented keys: [\"oneOf\"], because its options may overlap; use anyOf"
    if found := _ABSENT.match(reason):
        return f"the $ref {found[1]} names a schema outside of the request"
    for text, name in _EXCEEDED.items():
        if text in reason:
            value, what = LIMITS[name]
            return f"it is too complex: it needs more than {value} {what}, the limit {name}"
    return reason


def _one_line(text: str) -> str:
    line = " ".join(text.partition("<state>")[0].split()).rstrip(".")
    return line if len(line) <= 300 else f"{line[:300]}..."
