"""Saves and restores the state of a scheduler as plain data: numbers, texts, bytes, lists and dicts.

Each part of the scheduler that has state is ``Stateful``: its ``STATE`` names the attributes that a snapshot contains.
A snapshot does not contain references between the parts. ``restore`` works on a new scheduler, whose constructor has
created the parts and their references. The flight recorder writes a snapshot at the start of each segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

from llm_serving.ipc.shm import MoveKind
from llm_serving.kvcache.block_pool import BlockCopy
from llm_serving.kvcache.kv_cache_manager import KVCacheManager
from llm_serving.kvcache.prefix_cache import PrefixMatch
from llm_serving.kvcache.prefix_chain import PrefixChain
from llm_serving.kvcache.prefix_index import PrefixIndex
from llm_serving.request import Request
from llm_serving.scheduler.output import BlockMove, ScheduledStep, StepKind, StepReason
from llm_serving.scheduler.sequence import HandOverState, InFlightStep, Sequence, SequenceState

Sequences = dict[int, Sequence]
"""Type of a dict with the sequences of a restored scheduler. The keys are the arrival indices."""

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_SEQUENCE, _STEP, _TUPLE, _DICT = "sequence", "step", "tuple", "dict"
"""``save`` writes values that are not plain data as a dict with one of these keys, for example ``{"tuple": [...]}``."""
_SEQUENCE_STATE = (
    *("arrival_index", "max_output_tokens", "on_host", "is_decoding", "restarts", "notes_tokens", "drop_tokens"),
    *("num_inflight_steps", "num_inflight_decodes", "num_inflight_drafts", "last_chosen", "block_table", "host_table"),
    *("asked_from", "waits_for_load", "handed_blocks", "num_handed"),
)


class RequestCodec(Protocol):
    """Converts requests and tokens to plain data for a snapshot, and back."""

    def save_request(self, request: Request) -> Any:
        """Returns a request as plain data."""

    def load_request(self, state: Any) -> Request:
        """Returns the request that ``save_request`` saved."""

    def block_contents(self, index: PrefixIndex) -> list[bytes]:
        """Returns the tokens of each cached block, packed as bytes."""

    def chain_tokens(self, chain: PrefixChain, request: Request) -> bytes:
        """Returns the tokens of a request's prefix chain, packed as bytes."""


class Stateful:
    """Base class of the scheduler's parts. It saves and restores the attributes that ``STATE`` names."""

    __slots__ = ()

    STATE: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that a snapshot contains: plain data, sequences, steps in flight, other parts, or
    containers of these.

    A class with other attributes overrides ``snapshot`` and ``restore``. A subclass adds its attributes to those of its
    base class.
    """

    def snapshot(self) -> Any:
        """Returns the state as plain data. Later changes of the part do not change the result."""
        return {name: save(getattr(self, name)) for name in self.STATE}

    def restore(self, state: Any, sequences: Sequences) -> None:
        """Restores the state that ``snapshot`` returned into a new part.

        The caller must not use ``state`` afterwards, because the part may keep and change its lists and dicts.
        """
        self.restore_attributes(self.STATE, state, sequences)

    def restore_attributes(self, names: Iterable[str], state: Any, sequences: Sequences) -> None:
        """Restores only the attributes in ``names``, which are some of ``STATE``."""
        for name in names:
            present = getattr(self, name)
            if isinstance(present, Stateful):
                present.restore(state[name], sequences)
            else:
                setattr(self, name, load(state[name], sequences))


def save(value: Any) -> Any:
    """Returns an attribute of a scheduler part as plain data.

    A sequence that the scheduler has removed is saved as None.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Sequence):
        return None if value.state is SequenceState.REMOVED else {_SEQUENCE: value.arrival_index}
    if isinstance(value, Stateful):
        return value.snapshot()
    if isinstance(value, InFlightStep):
        return {_STEP: _save_step(value)}
    if isinstance(value, tuple):
        return {_TUPLE: [save(item) for item in value]}
    if isinstance(value, dict):
        return {_DICT: [[save(key), save(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return value.copy() if _SCALARS.issuperset(map(type, value)) else [save(item) for item in value]
    raise TypeError(f"a snapshot cannot contain a {type(value).__name__}")


def load(state: Any, sequences: Sequences) -> Any:
    """Returns the value that ``save`` converted to plain data. The value must not contain a ``Stateful`` part."""
    if isinstance(state, list):
        return [load(item, sequences) for item in state]
    if not isinstance(state, dict):
        return state
    ((kind, content),) = state.items()
    if kind == _SEQUENCE:
        return sequences[content]
    if kind == _STEP:
        return _load_step(content, sequences)
    if kind == _TUPLE:
        return tuple(load(item, sequences) for item in content)
    if kind == _DICT:
        return {load(key, sequences): load(item, sequences) for key, item in content}
    raise ValueError(f"a snapshot has a value of the unknown kind {kind!r}")


def save_sequence(sequence: Sequence, codec: RequestCodec, version: int) -> dict[str, Any]:
    """Returns a sequence as plain data. ``version`` is the present version of the block supply.

    The sequence's prefix match is saved only if it was found at this version, because an older match is never used.
    """
    chain, match = sequence.prefix_chain, sequence.prefix_match
    return {
        "request": codec.save_request(sequence.request),
        "state": sequence.state.name,
        "copies": [[copy.source, copy.destination] for copy in sequence.copies],
        "prefix_chain": None if chain is None else chain.snapshot(codec.chain_tokens(chain, sequence.request)),
        "prefix_match": None if match is None or match[0] != version else match[1].snapshot(),
        "num_drafts": len(sequence.draft),
        "hand_over": int(sequence.hand_over),
        **{name: save(getattr(sequence, name)) for name in _SEQUENCE_STATE},
    }


def load_sequence(state: dict[str, Any], codec: RequestCodec, kv_cache: KVCacheManager, version: int) -> Sequence:
    """Returns the sequence that ``save_sequence`` saved. ``version`` is the present version of the block supply."""
    request = codec.load_request(state["request"])
    sequence = Sequence(request, state["arrival_index"], state["max_output_tokens"])
    sequence.state = SequenceState[state["state"]]
    sequence.copies = [BlockCopy(source, destination) for source, destination in state["copies"]]
    if state["prefix_chain"] is not None:
        sequence.prefix_chain = kv_cache.prefixes.restore_chain(state["prefix_chain"], request.cache_salt)
    if state["prefix_match"] is not None:
        sequence.prefix_match = (version, PrefixMatch.restored(state["prefix_match"]))
    sequence.draft = [0] * state["num_drafts"]
    sequence.hand_over = HandOverState(state["hand_over"])
    for name in _SEQUENCE_STATE:
        setattr(sequence, name, state[name])
    return sequence


def _save_step(flight: InFlightStep) -> dict[str, Any]:
    """Returns a step in flight as plain data, without its token ids.

    The scheduler does not need them after it has sent the step.
    """
    step = flight.step
    return {
        "seq": step.seq,
        "kind": step.kind.name,
        "reason": step.reason.name,
        "rows": step.rows.copy(),
        "query_lens": step.query_lens.copy(),
        "starts": step.starts.copy(),
        "do_sample": step.do_sample.copy(),
        "sample_positions": step.sample_positions.copy(),
        "num_drafts": step.num_drafts,
        "overtakes": step.overtakes,
        "moves": [[move.kind.name, move.source, move.destination] for move in step.moves],
        "sequences": [sequence.arrival_index for sequence in flight.sequences],
        "first_chunk": flight.first_chunk,
        "copies": [[copy.source, copy.destination] for copy in flight.copies],
    }


def _load_step(state: dict[str, Any], sequences: Sequences) -> InFlightStep:
    """Returns the step that ``_save_step`` saved. Its token ids are zeros."""
    kind, in_flight = StepKind[state["kind"]], [sequences[index] for index in state["sequences"]]
    in_step = [] if kind is StepKind.MOVE else in_flight
    step = ScheduledStep(
        state["seq"],
        kind,
        requests=[sequence.request for sequence in in_step],
        rows=state["rows"],
        token_ids=[0] * sum(state["query_lens"]),
        query_lens=state["query_lens"],
        starts=state["starts"],
        block_tables=[sequence.block_table for sequence in in_step],
        do_sample=state["do_sample"],
        sample_positions=state["sample_positions"],
        restarts=[False] * len(state["rows"]),
        moves=[BlockMove(MoveKind[name], source, target) for name, source, target in state["moves"]],
        num_drafts=state["num_drafts"],
        reason=StepReason[state["reason"]],
        overtakes=state.get("overtakes", False),  # older recordings do not have this field
    )
    return InFlightStep(step, in_flight, state["first_chunk"], [BlockCopy(*pair) for pair in state["copies"]])
