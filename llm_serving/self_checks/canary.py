"""Runs the canary, a fixed prompt: at the start, at regular intervals and after restarts. Its output tokens must be the
same each time, and the same as those of earlier servers with the same model and program.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from typing import NamedTuple

from llm_serving.config.parallel_section import PREFILL
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.open_request import PieceStream
from llm_serving.errors import LLMServingError
from llm_serving.request import FinishReason, SchedulingParams
from llm_serving.routing.pools import PoolStatus
from llm_serving.sampling_params import SamplingParams
from llm_serving.scheduler.output import NOT_FINITE_ERROR
from llm_serving.self_checks.canary_file import CanaryFile, keeps_tokens
from llm_serving.telemetry.log import EventLog
from llm_serving.telemetry.metrics import Metrics

PROMPT_TOKENS = 16
"""Number of tokens of the canary's prompt."""
OUTPUT_TOKENS = 8
"""Number of tokens that the canary generates."""
_STRIDE = 7919
"""Difference between successive token ids of the prompt.

It is prime, so that the ids are spread over the vocabulary.
"""
_LOWEST_PRIORITY = 2**31 - 1
"""Priority of the canary: all other requests come first."""
MAX_RUN_S = 300.0
"""Maximum seconds of a run. A run that takes longer is aborted and counted as skipped, because the server is too busy.
"""


class _Run(NamedTuple):
    """A run of the prompt that has ended."""

    replica: int
    tokens: tuple[int, ...] | None
    """The output tokens. None if the logits were not finite."""


class Canary:
    """Runs the prompt on every replica and compares its tokens with the stored ones, or with those of the first run.

    If the tokens differ, the agents of the replica are restarted. The stored tokens may be wrong, too. So if the new
    agents repeat other tokens than the stored ones, ``canary_differs`` is logged, and the agents stay. The runs are not
    logged as requests.
    """

    def __init__(self, engine: AsyncEngine, log: EventLog, metrics: Metrics, interval_s: float) -> None:
        self._engine = engine
        self._log = log
        self._metrics = metrics
        self._interval_s = interval_s
        vocabulary = engine.config.shape.vocab_size
        self._prompt = [(1 + _STRIDE * index) % vocabulary for index in range(PROMPT_TOKENS)]
        self._expected: tuple[int, ...] | None = None
        self._file: CanaryFile | None = None
        self._must_write = False
        """True if the first tokens of this server must be stored, because no file has any."""
        self._is_confirmed = False
        """True after a run of this server got the expected tokens, or set them."""
        self._others: dict[int, tuple[tuple[int, ...] | None, object]] = {}
        """For each replica that got other tokens than the expected ones: these tokens, and how often its agents had
        been restarted after the run.
        """
        self._passed: set[int] = set()
        """The replicas whose last run got the expected tokens."""

    async def run(self) -> None:
        """Runs the prompt now, and then after each interval or when the engine asks for it. Never returns.

        If the server releases its nodes while it is idle, the prompt runs only after each start of agents. With regular
        runs, the server would never be idle.
        """
        wanted = self._engine.canary_wanted
        while True:
            if self._engine.standby is None or wanted.is_set():
                await self.check()
            wanted.clear()
            try:
                await asyncio.wait_for(wanted.wait(), self._interval_s)
            except asyncio.TimeoutError:
                continue

    async def check(self) -> None:
        """Runs the prompt as many times as there are replicas, all at the same time. With pools by prompt length, each
        run names the pool of its replica.

        The router distributes these requests. It may give several to one replica, for example if the others are not
        ready. Stores the tokens if no file has any and all replicas got the same tokens.
        """
        restarts = self._restarts()
        found = await asyncio.gather(*(self._run_once(pool) for pool in self._pools_to_check()))
        runs = dict.fromkeys(run for run in found if run is not None)  # a replica with several equal runs counts once
        if not runs:
            return
        await self._read_file()
        self._judge(runs, restarts)
        if self._must_write and self._passed >= self._replicas_to_check():
            await self._store()

    async def _store(self) -> None:
        """Stores the expected tokens for later servers."""
        assert self._file is not None
        assert self._expected is not None
        self._must_write = False
        try:
            await asyncio.to_thread(self._file.write, self._expected)
        except OSError as error:
            self._note_unusable_file(error)

    def _pools_to_check(self) -> list[str]:
        """Returns the pool of replicas for each run of the prompt. The names are empty without pools by prompt length.

        Leaves out replicas that are not ready. A run that names a pool without nodes would start its nodes.
        """
        pools = self._engine.status().pools
        if not pools:
            return [""] * self._engine.config.parallel_config.data_parallel
        return [pool.name for pool in pools if _takes_prompt(pool) for _ in range(pool.ready)]

    def _replicas_to_check(self) -> set[int]:
        """Returns the replicas that must pass before tokens are stored.

        Replicas with the role ``prefill`` are left out, because the prompt is usually too short for them.
        """
        parallel, pools = self._engine.config.parallel_config, self._engine.status().pools
        roles = enumerate(parallel.replica_roles)
        able = {number for pool in pools if _takes_prompt(pool) for number in pool.replicas}
        return {number for number, role in roles if role != PREFILL and (number in able or not pools)}

    def _restarts(self) -> dict[object, object]:
        """Returns the number of restarts of each replica's agents."""
        return {agent["replica"]: agent["restarts"] for agent in self._engine.status().agents}

    async def _run_once(self, pool: str) -> _Run | None:
        """Runs the prompt once. Returns None if the server could not run it."""
        try:
            return await asyncio.wait_for(self._generate(pool), MAX_RUN_S)
        except (LLMServingError, asyncio.TimeoutError):
            self._metrics.self_check("canary", "skipped")
            return None

    def _judge(self, runs: Iterable[_Run], restarts: dict[object, object]) -> None:
        """Compares the tokens of all runs of a check with the expected tokens.

        Begins with the runs that pass: if one passes, the stored tokens are right, and no other tokens are accepted.
        ``restarts`` are the numbers of restarts before the runs.
        """
        for replica, tokens in sorted(runs, key=lambda run: (run.tokens is None, run.tokens != self._expected)):
            if tokens is None and self._expected is None:
                self._log.warning(
                    "the canary has no finite logits in its first run, so it cannot be compared",
                    event="canary_unusable",
                )
                self._metrics.self_check("canary", "skipped")
            elif self._expected is None or tokens == self._expected:
                self._expected, self._is_confirmed = tokens, True
                self._passed.add(replica)
                self._metrics.self_check("canary", "passed")
            elif not self._is_confirmed and self._have_new_agents_repeated(replica, tokens, restarts):
                self._accept_repeated(tokens)
            else:
                self._others[replica] = tokens, self._restarts().get(replica)
                self._passed.discard(replica)
                self._engine.distrust(replica, self._difference(tokens))

    def _have_new_agents_repeated(
        self, replica: int, tokens: tuple[int, ...] | None, restarts: dict[object, object]
    ) -> bool:
        """Returns True if an earlier check got the same tokens from a replica, and its agents were restarted between
        the two runs.
        """
        earlier = self._others.get(replica)
        return earlier is not None and earlier[0] == tokens and earlier[1] != restarts.get(replica)

    async def _read_file(self) -> None:
        """Reads the stored tokens once, when the agents have reported the digest of their kernels."""
        if self._file is not None or not keeps_tokens(self._engine.config):
            return
        summaries = [agent.get("summary") for agent in self._engine.status().agents]
        found = {str(summary["arithmetic"]) for summary in summaries if isinstance(summary, dict)}
        if len(found) != 1:  # no agent is ready now
            return
        self._file = CanaryFile(self._engine.config, found.pop(), self._prompt, OUTPUT_TOKENS)
        try:
            stored = await asyncio.to_thread(self._file.read)
        except OSError as error:
            self._note_unusable_file(error)
            return
        if not self._is_confirmed:
            self._expected, self._must_write = stored, stored is None

    def _accept_repeated(self, tokens: tuple[int, ...] | None) -> None:
        """Reports tokens that differ from the stored ones before and after a restart. Later runs must repeat them.

        More restarts would not help. The file does not change, so that the next server reports the difference again.
        """
        assert self._file is not None
        self._log.error(
            f"{self._difference(tokens)}; new agents repeated this. If these tokens are right, delete the file. "
            "Otherwise, replace the machine",
            event="canary_differs",
        )
        self._metrics.self_check("canary", "failed")
        self._expected, self._is_confirmed = tokens, tokens is not None

    def _difference(self, tokens: tuple[int, ...] | None) -> str:
        found = "logits that are not finite" if tokens is None else f"the tokens {list(tokens)}"
        if self._is_confirmed or self._file is None:
            return f"the canary got {found}; its first run got {list(self._expected or ())}"
        return f"the canary got {found}; an earlier server has stored {list(self._expected or ())} in {self._file.path}"

    def _note_unusable_file(self, error: OSError) -> None:
        self._log.warning(f"the tokens of the canary cannot be kept on disk: {error}", event="canary_not_stored")

    async def _generate(self, pool: str) -> _Run:
        """Runs the prompt once in a pool of replicas. Raises LLMServingError if the run was refused or failed."""
        name = f"canary-{uuid.uuid4().hex}"
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        # The salt prevents hits in the prefix cache, so that the prompt is computed.
        scheduling = SchedulingParams(priority=_LOWEST_PRIORITY, cache_salt=name.encode(), pool=pool)
        stream = PieceStream()
        tokens: list[int] = []
        opened = self._engine.open(
            name, self._prompt, sampling, stream, scheduling=scheduling, streamed=False, quiet=True
        )
        try:
            while True:
                piece = await stream.next()
                tokens += piece.token_ids
                if piece.finish_reason is FinishReason.LENGTH:
                    return _Run(opened.request.replica or 0, tuple(tokens))
                if piece.error == NOT_FINITE_ERROR:
                    return _Run(opened.request.replica or 0, None)
                if piece.finished:
                    raise LLMServingError(piece.error or "the canary was aborted")
        finally:
            opened.close()


def _takes_prompt(pool: PoolStatus) -> bool:
    """Returns True if the prompt is not too long for a pool."""
    return (pool.max_prompt_tokens or PROMPT_TOKENS) >= PROMPT_TOKENS
