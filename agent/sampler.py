"""Samples tokens. Stores the last token of each batch row and, if the sequence has penalties, all of its tokens.

If the logits are on a device (``DeviceScores``), the sampler fetches as little as possible. First it fetches the best
token of each sequence. If a sequence is not greedy, it also fetches the candidates. It fetches all logits of a sequence
only if the candidates do not determine the sampled token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from agent.kernels import SAMPLE_INPUTS, SampleCall, SampleOutputs
from agent.logits_processors import LogitsProcessor, process
from agent.mask_gate import LogitBias
from agent.scores import DeviceScores, StepLogits
from agent.step_inputs import check_range
from llm_serving.errors import GroupDownError, ProtocolError, SamplingFailedError
from llm_serving.ipc.drafts import REJECTED, rejected_entries
from llm_serving.ipc.shm import StepSlot
from llm_serving.sampling_params import MAX_TOP_LOGITS, SAMPLER_PARAMETERS

Int32Array = npt.NDArray[np.int32]
_NO_TOKEN = -1


class RowTable:
    """Stores the sampled tokens of the sequence in each batch row. A batch row has one sequence at a time.

    Every batch row has its last sampled token. If its sequence has penalties, the batch row also has the history:
    prompt and output. The server sends the known tokens with the first step of the sequence, and the sampler appends
    each sampled token.
    """

    def __init__(self, num_rows: int, max_model_len: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.last_token: Int32Array = np.full(num_rows, _NO_TOKEN, np.int32)
        """[num_rows]: the token that each batch row sampled last, or a negative number if it has not sampled."""
        self.history = np.zeros((num_rows, max_model_len + 1), np.int32)
        self.history_len = np.zeros(num_rows, np.int32)
        self.prompt_len = np.zeros(num_rows, np.int32)

    def reset(self) -> None:
        """Forgets the last tokens and histories of all batch rows."""
        self.last_token.fill(_NO_TOKEN)
        self.history_len.fill(0)

    def start_rows(self, slot: StepSlot) -> None:
        """Copies the histories that the server has sent with a step. Raises ProtocolError if they are not valid."""
        if slot.history_len == 0:
            return
        seqs, tokens = slot.num_seqs, slot.history[: slot.history_len]
        lens, prompt_lens = slot.history_lens[:seqs], slot.history_prompt_lens[:seqs]
        check_range("history", tokens, 0, self._vocab_size)
        check_range("history_lens", lens, 0, self.history.shape[1])
        if int(lens.sum()) != tokens.size or (prompt_lens < 0).any() or (prompt_lens > lens).any():
            raise ProtocolError("a step's history_lens and history_prompt_lens do not fit its history")
        start = 0
        for index in np.flatnonzero(lens):
            row, length = slot.rows[index], int(lens[index])
            self.history[row, :length] = tokens[start : start + length]
            self.history_len[row], self.prompt_len[row] = length, prompt_lens[index]
            start += length

    def write_drafts(self, rows: Int32Array, token_ids: Int32Array, num_before: Int32Array) -> None:
        """Writes drafts after the last token of the histories of their batch rows. The lengths of the histories stay
        the same.

        The arguments have an element for each input token of a step that verifies drafts. ``num_before`` is 0 for the
        last known token of a sequence, which is not written. It is 1 for the sequence's first draft, 2 for its second
        draft, and so on.
        """
        drafted = np.flatnonzero(num_before)
        places = self.history_len[rows[drafted]] + num_before[drafted] - 1
        if (places >= self.history.shape[1] - 1).any():
            raise ProtocolError(
                f"a step has drafts up to position {places.max()} of a sequence; the last possible position is "
                f"{self.history.shape[1] - 2}"
            )
        self.history[rows[drafted], places] = token_ids[drafted]

    def take_last(self, slot: StepSlot) -> None:
        """Replaces each sampled token of a step by REJECTED if a draft before it was wrong.

        Then stores, for each batch row, the last sampled token that is not REJECTED.
        """
        seqs = slot.num_seqs
        rows, sampled_ids = slot.rows[:seqs], slot.sampled_ids[:seqs]
        sampled_ids[rejected_entries(rows.tolist(), slot.token_ids[:seqs].tolist(), sampled_ids.tolist())] = REJECTED
        counts = sampled_ids != REJECTED
        self.last_token[rows[counts]] = np.maximum(sampled_ids[counts], 0)

    def append(self, rows: Int32Array, sampled_ids: Int32Array) -> None:
        """Appends one sampled token to the history of each batch row in ``rows``. These rows must have penalties."""
        self.history[rows, self.history_len[rows]] = sampled_ids
        self.history_len[rows] += 1


class Sampler:
    """Chooses the next token of each sequence from its scores. Writes the tokens into the step slot, which also has the
    sampling parameters.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        vocab_size: int,
        wait_for_masks: Callable[[int], Mapping[int, LogitBias]] | None = None,
        processors: Sequence[tuple[str, LogitsProcessor]] = (),
    ) -> None:
        """``wait_for_masks`` takes the number of a step and waits until the step slot has its token masks.

        It then returns the logit biases of the step by batch row. If ``wait_for_masks`` is None, a step with masks is
        refused. ``processors`` are logits processors with their names (``agent.logits_processors``). They need the
        history of every sequence.
        """
        self._vocab_size = vocab_size
        self.rows = RowTable(num_rows, max_model_len, vocab_size)
        self._wait_for_masks = wait_for_masks
        self._processors = processors

    def sample(self, scores: StepLogits | DeviceScores, slot: StepSlot) -> None:
        """Samples a token for each sequence whose ``do_sample`` is set. Every other sequence gets -1.

        Raises ProtocolError if a batch row with penalties has no history, or if the history's length is wrong. Raises
        AgentError if the token masks of the step do not arrive in time, or if a logits processor fails. Raises
        RuntimeError if the device fails.
        """
        biases = self._await_masks(slot)
        self._choose(scores, slot, biases)
        if slot.num_masks and slot.top_allowed[: slot.num_seqs].any():
            _report_allowed(scores, slot)

    def _choose(
        self, scores: StepLogits | DeviceScores, slot: StepSlot, biases: Mapping[int, LogitBias]
    ) -> None:
        """Samples a token for each sequence of a step whose masks are in its slot."""
        seqs, call = slot.num_seqs, self._call_of(slot)
        drafts = _num_drafts_before(slot) if slot.num_drafts else None
        processes = bool(self._processors) and bool(self._is_processed(slot).any())
        if not call.has_penalties(seqs) and not processes:
            self._run(call, scores, slot)
            if biases:
                self._sample_changed(call, scores, slot, biases)
            if drafts is not None:
                self.rows.take_last(slot)
            return
        needs_history = _has_penalties(slot, seqs) | self._is_processed(slot)
        rows, penalised = slot.rows[:seqs], needs_history & (slot.do_sample[:seqs] != 0)
        if drafts is not None:
            self.rows.write_drafts(rows, slot.token_ids[:seqs], np.where(penalised, drafts, 0))
        histories, prompt_lens = self._histories(slot, penalised, drafts), self.rows.prompt_len[rows]
        self._run(call, scores, slot, histories, prompt_lens)
        if biases or processes:
            self._sample_changed(call, scores, slot, biases, histories, prompt_lens)
        if drafts is not None:
            self.rows.take_last(slot)
            for index in np.flatnonzero(penalised & (slot.sampled_ids[:seqs] != REJECTED)):
                self.rows.append(rows[index : index + 1], np.maximum(slot.sampled_ids[index : index + 1], 0))
            return
        # If a sequence's logits are not finite, its sampled id is negative. Its history then gets token 0. The next
        # step may have been sent already and may use this token, but no client sees the result.
        self.rows.append(rows[penalised], np.maximum(slot.sampled_ids[:seqs][penalised], 0))

    def _is_processed(self, slot: StepSlot) -> npt.NDArray[np.bool_]:
        """Returns, for each sequence, whether logits processors change its logits: bool [sequences].

        With logits processors, the server sends a mask for every request. So a sequence without a mask belongs to the
        warm-up, and the processors leave it unchanged.
        """
        seqs = slot.num_seqs
        return _has_mask(slot, seqs) if self._processors else np.zeros(seqs, np.bool_)

    def _await_masks(self, slot: StepSlot) -> Mapping[int, LogitBias]:
        """Waits until the token masks of the step are in its slot. Returns the logit biases of the step by batch row.

        Raises ProtocolError if the number of masks is wrong.
        """
        highest = int(slot.mask_number[: slot.num_seqs].max())
        if highest != slot.num_masks:
            raise ProtocolError(f"a step has {slot.num_masks} masks, and its sequences use {highest} of them")
        if highest:
            if self._wait_for_masks is None:
                raise ProtocolError(f"a step has {highest} masks, but this sampler takes none")
            return self._wait_for_masks(slot.seq)
        return {}

    def _sample_changed(
        self,
        call: SampleCall,
        scores: StepLogits | DeviceScores,
        slot: StepSlot,
        biases: Mapping[int, LogitBias],
        histories: list[Int32Array | None] | None = None,
        prompt_lens: Int32Array | None = None,
    ) -> None:
        """Samples a second time each sequence that has a logit bias, or whose logits the logits processors change.

        Adds the bias to all logits of the sequence, then runs the processors, then samples. The slot keeps the
        logsumexp and the best tokens that the first sampling has written, because they describe the raw logits.
        """
        seqs = slot.num_seqs
        changes = (slot.do_sample[:seqs] != 0) & (slot.sampled_ids[:seqs] >= 0)
        is_processed = self._is_processed(slot)
        changes &= is_processed | np.isin(slot.rows[:seqs], list(biases))
        indices = np.flatnonzero(changes).astype(np.int32)
        if not indices.size:
            return
        raw = scores.values[indices] if isinstance(scores, StepLogits) else scores.rows(indices)
        logits = raw.copy()
        for place, index in enumerate(indices):
            bias = biases.get(int(slot.rows[index]))
            if bias is not None:
                check_range("logit bias", bias.token_ids, 0, self._vocab_size)
                logits[place, bias.token_ids] += bias.values
            if is_processed[index]:
                assert histories is not None
                assert prompt_lens is not None
                history = histories[index]
                assert history is not None
                process(self._processors, history, int(prompt_lens[index]), logits[place])
        width = MAX_TOP_LOGITS * seqs
        reports = (slot.logsumexp[:seqs], slot.top_ids[:width], slot.top_logits[:width])
        kept = [report.copy() for report in reports]
        places = np.full(seqs, _NO_TOKEN, np.int32)
        places[indices] = np.arange(indices.size)
        call.run_rows(logits, places, histories, prompt_lens)
        for report, values in zip(reports, kept, strict=True):
            report[:] = values
        slot.sampled_logit[indices] = raw[np.arange(indices.size), slot.sampled_ids[indices]]

    def _run(
        self,
        call: SampleCall,
        scores: StepLogits | DeviceScores,
        slot: StepSlot,
        histories: list[Int32Array | None] | None = None,
        prompt_lens: Int32Array | None = None,
    ) -> None:
        if isinstance(scores, StepLogits):
            call.run(scores.values, scores.best_ids, histories, prompt_lens)
            return
        finds = find_candidates(scores, slot)
        best_ids, best_values = scores.best()
        candidates = scores.candidates() if finds else None
        undecided = call.run_candidates(best_ids, best_values, scores.vocab_size, candidates, histories, prompt_lens)
        if undecided.any():
            places = np.where(undecided, np.cumsum(undecided) - 1, _NO_TOKEN).astype(np.int32)
            logits = scores.rows(np.flatnonzero(undecided).astype(np.int32))
            call.run_rows(logits, places, histories, prompt_lens)

    def _call_of(self, slot: StepSlot) -> SampleCall:
        """Returns the kernel call that samples for this slot. The first call of this method for a slot prepares the
        kernel call.
        """
        call: SampleCall | None = slot.prepared.get(self)
        if call is None:
            inputs = {name: slot.arrays[name] for name in SAMPLE_INPUTS}
            results = (field.name for field in fields(SampleOutputs) if field.name != "last_token")
            outputs = SampleOutputs(**{name: getattr(slot, name) for name in results}, last_token=self.rows.last_token)
            limits = slot.layout.limits
            masks = slot.masks.reshape(limits.max_seqs, limits.mask_words) if limits.mask_words else None
            call = slot.prepared[self] = SampleCall(inputs, outputs, limits.max_seqs, masks)
        return call

    def _histories(
        self, slot: StepSlot, penalised: npt.NDArray[np.bool_], drafts: Int32Array | None = None
    ) -> list[Int32Array | None]:
        """Returns the history (prompt and output) of each sequence with penalties, and None for each other sequence.

        If the step verifies drafts, the result has an element for each input token: a draft, or the last known token of
        a sequence. The history of a draft includes the draft itself and the drafts before it. ``drafts`` has the number
        of these drafts for each input token (``_num_drafts_before``).
        """
        table = self.rows
        histories: list[Int32Array | None] = [None] * slot.num_seqs
        for index in np.flatnonzero(penalised):
            row, position = int(slot.rows[index]), int(slot.sample_position[index])
            length, prompt = int(table.history_len[row]), int(table.prompt_len[row])
            if length and drafts is not None:
                length += int(drafts[index])
            if length == 0 or length - prompt != position or length >= table.history.shape[1]:
                raise ProtocolError(
                    f"row {row} samples its output token {position} with penalties, but its history has {prompt} "
                    f"prompt tokens and {length - prompt} output tokens"
                )
            histories[index] = table.history[row, :length]
        return histories


@contextmanager
def sampling_in_group() -> Iterator[None]:
    """Raises an error inside the ``with`` block as SamplingFailedError, unless the device or the group has failed.

    The block may only contain work of this agent: no sum, gather or exchange in which other agents take part.
    """
    try:
        yield
    except (RuntimeError, GroupDownError):
        raise
    except Exception as error:
        raise SamplingFailedError(error) from error


def _num_drafts_before(slot: StepSlot) -> Int32Array:
    """Returns, for each input token of a step with drafts, the number of drafts of its sequence up to this token.

    The result is int32 [input tokens]. It is 0 for the last known token of a sequence, 1 for the sequence's first
    draft, 2 for its second draft, and so on.

    Raises ProtocolError if the step has another number of drafts than its slot states, or if a draft is not a token.
    """
    seqs = slot.num_seqs
    is_draft = np.zeros(seqs, np.bool_)
    is_draft[1:] = slot.rows[1:seqs] == slot.rows[: seqs - 1]
    places = np.arange(seqs, dtype=np.int32)
    before: Int32Array = places - np.maximum.accumulate(np.where(is_draft, 0, places))
    if int(is_draft.sum()) != slot.num_drafts or slot.num_tokens != seqs or (slot.do_sample[:seqs] == 0).any():
        raise ProtocolError(f"a step has {int(is_draft.sum())} drafts in {seqs} entries, and states {slot.num_drafts}")
    if (slot.token_ids[:seqs][is_draft] < 0).any():
        raise ProtocolError("a draft of a step is not a token id")
    return before


def _report_allowed(scores: StepLogits | DeviceScores, slot: StepSlot) -> None:
    """Overwrites the reported tokens and logits of each sequence that may report only tokens of its mask.

    The reported tokens become the allowed tokens with the largest logits, in descending order. On a tie, the smaller id
    comes first. If the mask allows fewer tokens than requested, fewer tokens are reported.
    """
    seqs, words = slot.num_seqs, slot.layout.limits.mask_words
    wanted = (slot.top_allowed[:seqs] != 0) & (slot.mask_number[:seqs] != 0) & (slot.sampled_ids[:seqs] >= 0)
    for index in np.flatnonzero(wanted):
        first = (int(slot.mask_number[index]) - 1) * words
        bits = np.unpackbits(slot.masks[first : first + words].view(np.uint8), bitorder="little")
        logits = (
            scores.values[index] if isinstance(scores, StepLogits) else scores.rows(np.array([index], np.int32))[0]
        )
        allowed = np.flatnonzero(bits[: logits.size])
        count = min(int(slot.num_top_logits[index]), allowed.size)
        best = allowed[np.argsort(-logits[allowed], kind="stable")[:count]]
        start = int(index) * MAX_TOP_LOGITS
        slot.top_ids[start : start + MAX_TOP_LOGITS] = _NO_TOKEN
        slot.top_ids[start : start + count] = best
        slot.top_logits[start : start + count] = logits[best]


def find_candidates(scores: DeviceScores, slot: StepSlot) -> bool:
    """Returns whether at least one sequence of the step needs candidates. If so, starts the search for candidates on
    the device.

    A sequence needs no candidates if it is greedy, has no penalties and no mask, and reports no log-probabilities. If
    agents share the vocabulary, all of them must call this function, because they find the candidates together.
    """
    seqs = slot.num_seqs
    temperatures, samples = slot.arrays["temperature"][:seqs], slot.do_sample[:seqs] != 0
    needs = (temperatures != 0) | (slot.num_top_logits[:seqs] >= 0) | _has_penalties(slot, seqs) | _has_mask(slot, seqs)
    if not (needs & samples).any():
        return False
    scores.find_candidates(np.where(samples & (temperatures > 0), temperatures, np.float32(1)))
    return True


def decided_by_best(slot: StepSlot) -> npt.NDArray[np.bool_]:
    """Returns, for each sequence, whether it samples the token with the largest logit: bool [sequences].

    The result is True for greedy sequences without penalties and without a mask.
    """
    seqs = slot.num_seqs
    is_greedy = (slot.do_sample[:seqs] != 0) & (slot.arrays["temperature"][:seqs] == 0)
    decided: npt.NDArray[np.bool_] = is_greedy & ~_has_penalties(slot, seqs) & ~_has_mask(slot, seqs)
    return decided


def decided_by_candidates(slot: StepSlot, num_candidates: int) -> npt.NDArray[np.bool_]:
    """Returns, for each sequence, whether its token is drawn among its best ``num_candidates`` tokens: bool [seqs].

    The result is True for sequences with a temperature and a ``top_k`` of at most ``num_candidates``, without penalties
    and without a mask. In a step with drafts, the result is False for all sequences.
    """
    seqs = slot.num_seqs
    top_k = slot.arrays["top_k"][:seqs]
    is_random = (slot.do_sample[:seqs] != 0) & (slot.arrays["temperature"][:seqs] > 0)
    has_candidates = (top_k >= 1) & (top_k <= num_candidates) & (slot.num_drafts == 0)
    decided: npt.NDArray[np.bool_] = is_random & has_candidates & ~_has_penalties(slot, seqs) & ~_has_mask(slot, seqs)
    return decided


def decided_by_all(slot: StepSlot) -> npt.NDArray[np.bool_]:
    """Returns, for each sequence, whether its token is drawn among all tokens of the vocabulary: bool [seqs].

    The result is True for sequences with a temperature and without ``top_k``, penalties and mask. ``top_p`` and
    ``min_p`` may limit the tokens. In a step with drafts, the result is False for all sequences.
    """
    seqs = slot.num_seqs
    is_random = (slot.do_sample[:seqs] != 0) & (slot.arrays["temperature"][:seqs] > 0)
    has_all = (slot.arrays["top_k"][:seqs] <= 0) & (slot.num_drafts == 0)
    decided: npt.NDArray[np.bool_] = is_random & has_all & ~_has_penalties(slot, seqs) & ~_has_mask(slot, seqs)
    return decided


def _has_mask(slot: StepSlot, seqs: int) -> npt.NDArray[np.bool_]:
    has_mask: npt.NDArray[np.bool_] = slot.mask_number[:seqs] != 0
    return has_mask


def _has_penalties(slot: StepSlot, seqs: int) -> npt.NDArray[np.bool_]:
    penalised = np.zeros(seqs, np.bool_)
    for each in SAMPLER_PARAMETERS:
        if each.needs_history:
            penalised |= slot.arrays[each.name][:seqs] != each.default
    return penalised
