"""Decides which drafts to offer to a replica's scheduler, so that the steps give more tokens per second.

The text does not depend on these decisions, because a step verifies each draft. The scheduler gets the drafts as an
input, and a flight recording contains the number of drafts.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import thread_time

from llm_serving.constraints.forced import ForcedTokens
from llm_serving.request import ForkableConstraint, Request
from llm_serving.scheduler.output import RequestUpdate, ScheduledStep, StepKind, StepResult
from llm_serving.speculation.budget import BuildBudget
from llm_serving.speculation.constrained import Draft, DraftBuilder
from llm_serving.speculation.costs import MODEL, OF_GRAMMAR, REPEATED, SEEN, Chances, OwnChance, StepCosts
from llm_serving.speculation.draft_lengths import DraftLengths
from llm_serving.speculation.gains import Gains
from llm_serving.speculation.look_ahead import Mask, is_allowed
from llm_serving.speculation.model_track import ModelTrack, StepUse
from llm_serving.speculation.places import Places
from llm_serving.speculation.suffix_index import MAX_MATCH, SuffixIndex

MIN_GAIN = 1.05
"""Drafts are offered if they give at least this multiple of the tokens per second of steps without drafts."""
PLAIN_STEP_INTERVAL = 64
"""After this number of steps with drafts, a step without drafts runs, to measure the time of a plain step again."""
MAX_SALTS = 64
"""Maximum number of cache salts whose places are remembered."""

_NO_DRAFT = Draft()


@dataclass(slots=True)
class _Track:
    """The current draft of one request, and the data from which its next drafts are made."""

    request: Request
    index: SuffixIndex
    """Finds earlier occurrences of the request's last tokens. The tokens that followed them become the draft."""
    shared: Places
    """For each place of a grammar, the token that was sampled there last. All requests with the same cache salt share
    this object. ``Places`` explains what a place is.
    """
    places: Places = field(default_factory=Places)
    """Like ``shared``, but only for the tokens of this request."""
    chance: OwnChance = field(default_factory=OwnChance)
    """The fraction of right drafts among those that ``index`` found."""
    num_known: int = 0
    """Number of the request's output tokens that ``index`` contains."""
    draft: Draft = _NO_DRAFT
    """The guesses of the next tokens. They are compared with the sampled tokens even if they are not offered to the
    scheduler.
    """
    builder: DraftBuilder | None = None
    """Extends ``draft`` if the request has a constraint. None after the drafts were offered."""
    budget: BuildBudget = field(default_factory=BuildBudget)
    """Limits the time for building drafts under the request's constraint."""
    model: ModelTrack = field(default_factory=ModelTrack)
    """The drafts of the draft model for this request."""
    follows_text: bool = False
    """True if the last draft that was offered came from earlier tokens. The next draft is expected to do so, too."""

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end the request."""
        sampling = self.request.sampling
        return sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else self.request.end_token_ids)

    @property
    def num_guessed(self) -> int:
        """Number of tokens in the draft. If the request has a constraint, the last token may lack its mask."""
        return len(self.draft.token_ids)

    def note_place(self, place: int | None, token_id: int) -> None:
        """Records the token that was sampled at a place of the grammar. ``place`` is None where the text is free."""
        if place is not None:
            self.places.note(place, token_id)
            self.shared.note(place, token_id)

    def guess_at(self, place: int | None) -> list[tuple[int, int]]:
        """Returns a guess for a place of the grammar: the token that was sampled there last, and ``REPEATED`` or
        ``SEEN``.

        Looks in the text of this request first, then in the text of other requests. Returns an empty list if the place
        is new or the text is free.
        """
        known = None if place is None else self.places.guess(place) or self.shared.guess(place)
        return [] if known is None else [(known.token_id, REPEATED if known.is_repeated else SEEN)]


class Speculator:
    """Makes the drafts of one replica's requests. The engine thread calls all methods."""

    def __init__(
        self,
        max_drafts: int,
        max_entries: int,
        prepare_masks: Callable[[Request, list[Mask]], None],
        *,
        always: bool = False,
        has_model: bool = False,
        clock: Callable[[], float] = thread_time,
    ) -> None:
        """``max_drafts`` is the maximum number of drafts of a request. ``max_entries`` is the maximum number of input
        tokens of a decode step: its sequences plus their drafts.

        ``prepare_masks`` is called for a request with a constraint. It gets the mask of allowed tokens after each
        draft. With ``always``, all drafts are offered, whether they are expected to gain time or not. With
        ``has_model``, the agents have a draft model. ``clock`` measures the time for building drafts, in seconds.
        """
        self._max_drafts = max_drafts
        self._max_entries = max_entries
        self._prepare_masks = prepare_masks
        self._always = always
        self._clock = clock
        self._costs = StepCosts()
        self._chances = Chances()
        self._lengths = (
            DraftLengths(self._costs, max_drafts, max_entries, MIN_GAIN, always=always) if has_model else None
        )
        self._gains: dict[int, Gains] = {}
        """A ``Gains`` object for each number of sequences. This cache is cleared when the estimates of step times
        change.
        """
        self._tracks: dict[Request, _Track] = {}
        self._offers: dict[str, list[int]] = {}
        self._places: dict[bytes, Places] = {}
        """The ``Places`` object of each cache salt. The salt that was used last is at the end."""
        self._num_drafted = 0

    def take_offers(self) -> list[tuple[str, list[int]]]:
        """Returns the offers since the last call: pairs of a request id and its drafts."""
        offers, self._offers = list(self._offers.items()), {}
        return offers

    def wanted(self, step: ScheduledStep) -> int:
        """Returns the number of drafts that the draft model should make for each sequence after ``step``, which is sent
        next.
        """
        lengths, common = self._lengths, self._chances.of(MODEL)
        if lengths is None or step.kind is StepKind.MOVE:
            return 0
        if step.kind is not StepKind.DECODE:
            return lengths.after_prompts(max(1, len(self._tracks)), common, step.num_tokens)
        tracks = [track for each in dict.fromkeys(step.requests) if (track := self._tracks.get(each)) is not None]
        users = [track.model for track in tracks if not (track.follows_text or track.model.is_behind)]
        chance = sum(user.chance.mixed_with(common) for user in users) / len(users) if users else common
        num_missed = sum(
            track.request.num_tokens - track.model.num_computed for track in tracks if not track.model.is_behind
        )
        return lengths.after_decode(step.num_seqs - step.num_drafts, len(users), chance, num_missed)

    def holds(self, step: ScheduledStep) -> bool:
        """Returns True if no step should be sent before the result of ``step``, because the draft model makes drafts
        which the next step verifies.
        """
        return self._lengths is not None and self._lengths.holds(step)

    def clear(self) -> None:
        """Forgets all offers and all requests, because the agents were lost."""
        self._offers.clear()
        self._tracks.clear()

    def completed(
        self, step: ScheduledStep, result: StepResult, updates: Iterable[RequestUpdate], seconds: float
    ) -> None:
        """Learns from the result of a step, and chooses new drafts. ``seconds`` is the time from sending the step to
        its result.

        Must be called after the constraints of the requests have advanced by the tokens of the result.
        """
        token_s = 0.0
        if step.kind is StepKind.DECODE and result.error is None:
            device_s = (result.graph_us + result.sample_us - result.draft_us) / 1e6
            if self._costs.note(step.num_seqs, device_s, seconds - (result.queue_us + result.draft_us) / 1e6):
                self._gains.clear()
            num_sequences = step.num_seqs - step.num_drafts
            token_s = (self._costs.seconds(num_sequences) or device_s) / num_sequences
            self._num_drafted = self._num_drafted + 1 if step.num_drafts else 0
        last = {update.request: update.index for update in updates if update.token_id is not None}
        if self._lengths is not None and result.error is None:
            self._lengths.note(step, result, self._use_of(step, last))
        tracks = [track for request in last if (track := self._advance(request, token_s)) is not None]
        if self._lengths is not None:
            for track in tracks:
                drafts = None if result.drafts is None else result.drafts[last[track.request]]
                track.model.take(drafts, track.request.num_tokens)
        if tracks and self._may_gain(len(tracks)):
            for track in tracks:
                self._start_draft(track)
            self._offer(tracks)
            for track in tracks:
                track.builder = None  # frees the copy of the constraint

    def _use_of(self, step: ScheduledStep, requests: Iterable[Request]) -> StepUse:
        """Returns how a step used the draft model. ``requests`` got tokens that their tracks do not have yet."""
        use = StepUse()
        entries = Counter(step.requests) if step.num_drafts else Counter[Request]()
        for request in requests:
            track = self._tracks.get(request)
            model = ModelTrack() if track is None else track.model
            if not model.is_behind:
                use.num_missed += request.num_tokens - model.num_computed
            if track is None or entries[request] < 2:
                continue
            is_models = [match == MODEL for match in track.draft.matches[: entries[request] - 1]]
            if any(is_models):
                num_right = len(request.output_token_ids) - track.num_known - 1
                use.num_gained += sum(is_models[:num_right]) - model.displaced
                use.num_verified += sum(is_models)
        return use

    def _advance(self, request: Request, token_s: float) -> _Track | None:
        """Updates the track of a request with its new tokens, and returns the track. Returns None if the request needs
        no drafts.

        After a decode step, ``token_s`` is the time of a step without drafts, divided by its number of sequences. After
        another step, it is 0.
        """
        self._offers.pop(request.request_id, None)
        track = self._tracks.get(request)
        if isinstance(request.constraint, ForcedTokens):
            return None  # the request scores a prompt; ``forced_offers`` has its drafts
        if request.is_finished:
            if track is not None:
                self._compare(track, request.output_token_ids[track.num_known :])
                del self._tracks[request]
            return None
        if track is None:
            if len(self._tracks) > 2 * self._max_entries:
                self._tracks = {known: one for known, one in self._tracks.items() if not known.is_finished}
            shared = self._shared_places(request.cache_salt)
            track = self._tracks[request] = _Track(request, SuffixIndex(request.prompt_token_ids), shared)
        new = request.output_token_ids[track.num_known :]
        if token_s and track.num_known:
            track.budget.earn(token_s, len(new) - 1)
        self._compare(track, new)
        track.index.extend(new)
        track.num_known += len(new)
        return track

    def _shared_places(self, salt: bytes) -> Places:
        """Returns the places of grammars (``Places``) that all requests with this cache salt share.

        Requests with different salts share nothing, because response times would reveal the tokens of other requests.
        """
        known = self._places.pop(salt, None)
        places = self._places[salt] = Places() if known is None else known
        if len(self._places) > MAX_SALTS:
            del self._places[next(iter(self._places))]
        return places

    def _compare(self, track: _Track, token_ids: list[int]) -> None:
        """Compares drafts with the tokens that were sampled, up to the first difference."""
        draft, track.draft = track.draft, _NO_DRAFT
        if MODEL not in draft.matches[:1]:
            for guess, token_id in zip(track.model.token_ids, token_ids, strict=False):
                self._note_chance(track, MODEL, guess == token_id)
                if guess != token_id:
                    break
        for number, token_id in enumerate(token_ids):
            if number < len(draft.places):
                track.note_place(draft.places[number], token_id)
            if number == len(draft.token_ids):
                break
            match, is_right = draft.matches[number], draft.token_ids[number] == token_id
            self._note_chance(track, match, is_right)
            if not is_right:
                break

    def _note_chance(self, track: _Track, match: int, is_right: bool) -> None:
        self._chances.note(match, is_right)
        if match == MODEL:
            track.model.chance.note(is_right)
        elif match not in OF_GRAMMAR:
            track.chance.note(is_right)

    def _start_draft(self, track: _Track) -> None:
        """Makes the draft of a request. If the request has a constraint, the draft has only one token at first."""
        constraint, end_token_ids = track.request.constraint, track.end_token_ids
        if constraint is None:
            draft = self._free_draft(track)
            ends = (number for number, token_id in enumerate(draft.token_ids) if token_id in end_token_ids)
            track.draft = draft.first(next(ends, len(draft.token_ids)))
        elif isinstance(constraint, ForkableConstraint) and (track.budget.is_open or self._always):
            began = self._clock()
            if (fork := constraint.fork()) is not None:
                guess = partial(self._guess, track)
                track.builder = DraftBuilder(fork, self._max_drafts, end_token_ids, guess)
                track.draft = track.builder.draft
            track.budget.spend(self._clock() - began)

    def _may_add(self, track: _Track) -> bool:
        """Returns True if the scheduler can be offered one more draft token of a request.

        If the request has a constraint, also computes the mask after this token and guesses another token.
        """
        if track.builder is None:
            return True
        began = self._clock()
        can_offer = track.builder.extend()
        track.budget.spend(self._clock() - began)
        return can_offer

    def _free_draft(self, track: _Track) -> Draft:
        """Returns the draft of a request without a constraint: that of the draft model, or one from an earlier match in
        its tokens.

        If both exist, chooses the draft with the most expected right tokens. With ``always``, uses only the draft
        model, if there is one.
        """
        model, lengths, drafts = track.model, self._lengths, list[Draft]()
        if (lengths is None or not self._always) and (found := track.index.propose(self._max_drafts)) is not None:
            drafts.append(Draft(found.token_ids, [found.length] * len(found.token_ids)))
        model.displaced = 0.0
        if lengths is not None and model.token_ids and not lengths.is_trial:
            made = Draft(model.token_ids, [MODEL] * len(model.token_ids))
            displaced = max(map(self._expected, drafts), default=0.0)
            if self._expected(made) >= displaced:
                model.displaced, drafts = displaced, [made]
        return drafts[0] if drafts else _NO_DRAFT

    def _expected(self, draft: Draft) -> float:
        """Returns the expected number of right drafts in ``draft``, computed from the match lengths of its tokens."""
        expected, survival = 0.0, 1.0
        for match in draft.matches:
            survival *= self._chances.of(match)
            expected += survival
        return expected

    def _guess(self, track: _Track, drafted: list[int], mask: Mask, place: int | None) -> tuple[int, int] | None:
        """Returns the most probable next token where the constraint of a request allows several, or None.

        The token comes from the draft model, from the place in the grammar, or from an earlier match in the request's
        tokens. The result also has the element of ``Draft.matches`` for the token. ``drafted`` is the draft so far.
        With ``always``, the token of the draft model is preferred. During a trial of the draft model, its tokens are
        not used.
        """
        count, lengths, made = len(drafted), self._lengths, track.model.token_ids
        guesses = list[tuple[int, int]]()
        if lengths is not None and not lengths.is_trial and count < len(made) and made[:count] == drafted:
            guesses = [(made[count], MODEL)]
            if self._always and is_allowed(mask, made[count]):
                return guesses[0]
        guesses += track.guess_at(place)
        if (found := track.index.propose(1, drafted)) is not None:
            guesses.append((found.token_ids[0], found.length))
        allowed = [guess for guess in guesses if is_allowed(mask, guess[0])]
        return max(allowed, key=lambda guess: self._chances.of(guess[1]), default=None)

    def _may_gain(self, num_sequences: int) -> bool:
        """Returns False if the gain would be too small even if every draft were right. Then no draft need be made."""
        if num_sequences >= self._max_entries or self._always:
            return num_sequences < self._max_entries
        return self._gains_of(num_sequences).largest >= MIN_GAIN

    def _gains_of(self, num_sequences: int) -> Gains:
        known = self._gains.get(num_sequences)
        if known is None:
            max_drafts = min(self._max_entries - num_sequences, self._max_drafts * num_sequences)
            known = self._gains[num_sequences] = Gains(self._costs, num_sequences, max_drafts)
        return known

    def _offer(self, tracks: list[_Track]) -> None:
        """Offers the drafts with the largest expected gain, if the gain is large enough."""
        if self._num_drafted >= PLAIN_STEP_INTERVAL - 1:
            self._num_drafted = 0
            return
        sizes = self._sizes(tracks)
        for track, size in zip(tracks, sizes, strict=True):
            draft = track.draft.first(size)
            track.follows_text = bool(draft.token_ids) and draft.matches[0] <= MAX_MATCH
            if draft.token_ids:
                if track.request.constraint is not None:
                    self._prepare_masks(track.request, draft.masks)
                self._offers[track.request.request_id] = draft.token_ids

    def _sizes(self, tracks: list[_Track]) -> list[int]:
        """Returns the number of drafts to offer for each request.

        Adds the drafts one by one, the most probable first. Keeps the number with the most expected tokens per second.
        Stops as soon as further drafts cannot raise this number, so that no mask is computed for them.
        """
        sizes = [0] * len(tracks)
        if self._always:
            for number, track in enumerate(tracks):
                while sizes[number] < track.num_guessed and self._may_add(track):
                    sizes[number] += 1
            return sizes
        gains = self._gains_of(len(tracks))
        best, best_gain, tokens, order = 0, MIN_GAIN, float(len(tracks)), list[int]()
        heap = [(-self._chance(track, 0), number) for number, track in enumerate(tracks) if track.draft.matches]
        heapq.heapify(heap)
        while heap and gains.may_rise(len(order), -heap[0][0], best_gain):
            survival, number = heapq.heappop(heap)
            track = tracks[number]
            if not self._may_add(track):
                continue
            order.append(number)
            tokens -= survival
            if (gain := gains.of(len(order), tokens)) > best_gain:
                best, best_gain = len(order), gain
            sizes[number] += 1
            if sizes[number] < track.num_guessed:
                heapq.heappush(heap, (survival * self._chance(track, sizes[number]), number))
        chosen = order[:best]
        return [chosen.count(number) for number in range(len(tracks))]

    def _chance(self, track: _Track, place: int) -> float:
        """Returns the chance that a draft is right if all drafts before it are right."""
        match = track.draft.matches[place]
        common = self._chances.of(match)
        if match in OF_GRAMMAR:
            return common
        return (track.model.chance if match == MODEL else track.chance).mixed_with(common)
