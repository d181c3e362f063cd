"""Runs the steps of an agent: loads the model, compiles its graphs, then runs graph and sampler for each step.

Only the device thread may use a ``ModelRunner``.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from agent.cache_pages import LaterPages
from agent.drafting.making import make_drafter
from agent.group.exchange import Exchange
from agent.group.last_tokens import SharedLastTokens
from agent.group.model_part import ModelPart
from agent.hand_over import HandedBlocks, is_hand_over
from agent.kernels import OperatorRefusedError
from agent.logits_processors import load_processors
from agent.lora.store import AdapterStore
from agent.mask_gate import LogitBias, MaskGate
from agent.model_loading import LoadedModel
from agent.model_start import ModelStart
from agent.model_summary import describe_fusions, describe_model, describe_steps_ahead
from agent.pooling.pooler import Pooler
from agent.profiling import Profiling
from agent.row_check import RowCheck
from agent.run_ahead.last_tokens import GroupTokens, LastTokens, OwnTokens
from agent.run_ahead.steps import StepsAhead
from agent.sampler import Sampler, find_candidates, sampling_in_group
from agent.scores import DeviceScores, StepLogits, cost_of_step
from agent.step_cost import StepCost
from agent.step_entry import StepEntry
from agent.step_graph.step_blocks import StepBlocks
from agent.step_inputs import Int32Array, StepInputs, StepReader
from agent.step_threads import StepThreads
from agent.warm_up import captured_steps, largest_steps, make_moves, make_step
from llm_serving.config import Config
from llm_serving.errors import AgentError, AgentStartError, GroupBrokenError, GroupDownError, ProtocolError
from llm_serving.ipc.exchange import ExchangeMemory
from llm_serving.ipc.hand_over_memory import HandOverMemory
from llm_serving.ipc.host_pool import HostPoolMemory
from llm_serving.ipc.shm import StepSlot
from llm_serving.ipc.tile_memory import TileMemory
from llm_serving.planning.machine import process_seconds

if TYPE_CHECKING:
    from agent.step_graph.interface import StepGraph

StartReport = Callable[[str, int, int], None]
"""Reports the progress of the start: the name of the stage, the number of completed units and the total number of
units.
"""


class ModelRunner:
    """Runs the steps of an agent. Owns its weights, its KV cache and the state of its batch rows.

    Call ``load``, ``compile`` and ``warm_up`` once, in this order. Then call ``run_step`` or ``run_moves`` for each
    step. The constructor or ``load`` imports mindspore, unless an earlier start has stored the launches of all graphs
    (``agent.stored_program``).
    """

    def __init__(
        self,
        config: Config,
        report: StartReport,
        rank: int = 0,
        exchange: ExchangeMemory | None = None,
        *,
        keeps_files: bool = False,
    ) -> None:
        """``rank`` is the agent's number among all agents. ``exchange`` is the memory that the agents of a group share.

        ``exchange`` is None if the group has one agent. With ``keeps_files``, the agent reads converted weights and the
        launches of the graph from files, or writes them for the next start. Raises AgentStartError if ``exchange`` does
        not fit the config.
        """
        self._part = ModelPart.of(config, rank)
        if (exchange is None) != self._part.is_alone:
            raise AgentStartError(
                f"an agent of a group of {config.parallel_config.group_size} was started "
                f"{'without' if exchange is None else 'with'} an exchange"
            )
        self._start = ModelStart(config, rank, keeps_files=keeps_files)
        self._pooler = Pooler.of_agent(config, self._part)
        self._config = config = self._part.narrow(config)
        self._report = report
        self.wait_for_masks: Callable[[int], Mapping[int, LogitBias]] = MaskGate().wait
        """Takes the number of a step. Waits until the step's slot has the token masks of its sequences. Returns the
        logit biases of the step by batch row.
        """
        self._sampler, self._threads = self._made_sampler(config), StepThreads(config.power)
        self._reader = StepReader(
            config, config.max_num_seqs, self._sampler.rows.last_token if exchange is None else None
        )
        self._readers = [self._reader]
        """The step readers. If the device runs ahead, a second one copies a step before the previous one is sampled."""
        timeout_s = config.serving_config.step_timeout_s
        self._exchange = None if exchange is None else Exchange(exchange, self._part, timeout_s)
        tokens = None if self._exchange is None else SharedLastTokens(self._exchange, self._part, self._sampler.rows)
        self._last_tokens = tokens
        self._entry = StepEntry(config, self._part, self._exchange, self._last_tokens)
        self._model: LoadedModel | None = None
        self._graph: StepGraph | None = None
        self._adapters: AdapterStore | None = None
        self._drafter = make_drafter(config, rank, self._start)
        self.ahead: StepsAhead | None = None
        """Launches steps ahead, if the device supports this. None otherwise, and before ``load``."""
        self.tiles: TileMemory | None = None
        """The tiles of images in shared memory. None if the model reads no images. Set it before ``load``."""
        self.host_pool: HostPoolMemory | None = None
        """The host blocks in shared memory. None if the agent allocates them itself. Set it before ``load``."""
        self.hand_over_pool: HandOverMemory | None = None
        """The hand-over pool in shared memory. None if the replicas have no roles. Set it before ``load``."""
        self._handed: HandedBlocks | None = None
        self.later_pages = LaterPages()
        """Allocates the memory pages of the KV cache that the start has not allocated."""
        self._seconds = {"import": process_seconds()}
        self.profiling = Profiling(config.device, rank, self._set_replaying)

    def _made_sampler(self, config: Config) -> Sampler:
        """Returns the sampler of this agent's batch rows. ``config`` has the sizes of the agent's part of the model."""
        vocab_size = config.shape.vocab_size
        processors = load_processors(config.model_config.logits_processors or (), vocab_size)
        return Sampler(
            config.max_step_seqs, config.max_model_len, vocab_size, lambda seq: self.wait_for_masks(seq), processors
        )

    def load(self) -> None:
        """Builds the model, loads its weights and allocates its KV cache. Raises CheckpointError or AgentStartError."""
        start = time.perf_counter()
        self._model = self._start.load(
            self._config, self._part, lambda done, of: self._report("load", done, of), self.host_pool
        )
        self._threads.weight_bytes = self._model.weight_bytes
        if self._drafter is not None:
            self._drafter.load(lambda done, of: self._report("load the draft model", done, of), self._model)
        elif self._config.draft is None and not self._entry.load(self._model, self.tiles):
            self.ahead = self._made_steps_ahead(self._model)
        if self.hand_over_pool is not None:
            own = [] if self._drafter is None else self._drafter.handed_arrays
            self._handed = HandedBlocks(self.hand_over_pool, [*self._model.kv_cache.block_arrays, *own])
        self._seconds["load"] = time.perf_counter() - start

    def _made_steps_ahead(self, model: LoadedModel) -> StepsAhead | None:
        if not model.ops.traits.runs_ahead or not self._part.may_run_ahead:
            return None
        assert model.ops.states is None, "a second launch of a step would update recurrent states twice"
        reader = StepReader(self._config, self._config.max_num_seqs)
        self._readers.append(reader)
        return StepsAhead(self, reader, self._made_last_tokens())

    def _made_last_tokens(self) -> LastTokens:
        if self._last_tokens is None:
            return OwnTokens(self._sampler)
        return GroupTokens(self._sampler, self._last_tokens, self._part)

    def compile(self) -> None:
        """Compiles the graphs. If an earlier start has stored the graph's launches, restores these launches instead."""
        start = time.perf_counter()
        self._report("compile", 0, 1)
        assert self._model is not None, "load() must come before compile()"
        self._graph = self._start.stored_graph(self._model, self._reader.buffers, self._made_graph)
        if self._graph is None:
            self._graph = self._made_graph()
        self._report("compile", 1, 1)
        self._seconds["compile"] = time.perf_counter() - start

    def warm_up(self) -> None:
        """Runs the largest steps that the config allows, which proves that they fit into the memory. Then clears the
        state of all batch rows.

        If the launches of the graph come from a file, an earlier start has run the largest steps. Then only a few test
        steps check these launches (``agent.stored_program``). All agents of a group warm up together. Raises
        GroupDownError if another agent does not begin its warm-up in time.
        """
        start = time.perf_counter()
        if self._exchange is not None:
            self._report("wait for the group", 0, 1)
            self._exchange.meet(self._config.serving_config.agent_start_timeout_s)
        assert self._model is not None, "load() must come before warm_up()"
        if not (self._start.is_stored and self._is_proved(self._model)):
            self._run_largest_steps()
        if self._drafter is not None:
            self._drafter.warm_up()
        self._entry.warm_up()
        self.run_moves(make_moves(self._config))
        self.reset()
        caches = [self._model.kv_cache.pages, *([] if self._drafter is None else [self._drafter.pages])]
        self.later_pages = LaterPages.of(caches)
        gc.collect()
        gc.freeze()  # excludes objects made during the start from garbage collection, because they stay until the end
        self._seconds["warm_up"] = time.perf_counter() - start

    def _is_proved(self, model: LoadedModel) -> bool:
        """Returns True if the stored launches give the bits that MindSpore's graph gave in an earlier start.

        Otherwise compiles the graph, which replaces the launches.
        """
        self._report("warm up", 0, 1)
        is_proved = self._start.is_proved(model, partial(self.run_step, is_decode=False))
        if not is_proved:
            self._graph = self._made_graph()
        self._report("warm up", 1, 1)
        return is_proved

    def _run_largest_steps(self) -> None:
        steps = [(kind == "decode", lens) for kind, lens in largest_steps(self._config).items()]
        steps += [(True, lens) for lens in captured_steps(self._config)]
        for done, (is_decode, lens) in enumerate(steps):
            self._report("warm up", done, len(steps))
            self.run_step(make_step(self._config, *lens), is_decode=is_decode)
        self._report("warm up", len(steps), len(steps))
        assert self._model is not None
        self._start.keep(self._model, self._reader.buffers, self.step_graph(), partial(self.run_step, is_decode=False))

    def summary(self) -> dict[str, str | int | float]:
        """Returns a description of the loaded model for the log and the status page."""
        assert self._model is not None, "load() must come before summary()"
        summary = describe_model(self._config, self._part, self._model)
        if self._drafter is not None:
            summary |= self._drafter.summary()
        summary |= describe_steps_ahead(self._part, self._model, is_on=self.ahead is not None)
        summary["start"] = "stored program" if self._start.is_stored else "compiled"
        summary |= describe_fusions(self._config, self._model.ops, self._graph)
        return summary | {f"{stage}_seconds": round(seconds, 3) for stage, seconds in self._seconds.items()}

    def run_step(self, slot: StepSlot, *, is_decode: bool) -> StepCost:
        """Runs one step: copies blocks, runs the graph, samples, and writes the results into ``slot``.

        If ``is_decode``, the step has exactly one token for each sequence. Any other step may have prompts, chunks and
        single tokens. If the slot does not have a valid step, raises ProtocolError before anything is copied or
        computed. AgentError means that an operator failed, and that the next step may run. GroupBrokenError means that
        the agent must end.
        """
        if self.ahead is not None:
            self.ahead.settle()
        start = time.perf_counter_ns()
        inputs, moves = self._reader.read(slot, is_decode=is_decode), self._reader.read_moves(slot)
        with self._threads.of_step(inputs.token_ids.size):
            self._sampler.rows.start_rows(slot)
            if self._last_tokens is not None:
                self._last_tokens.check(inputs.token_ids, inputs.rows, inputs.query_lens)
            if moves.size:
                self.move_blocks(moves)
            if self._last_tokens is not None:
                return self._run_in_group(slot, inputs, start)
            assert self._graph is not None, "compile() must come before any step"
            if self._pooler is not None:
                return self._run_pooled(slot, inputs, self._pooler, start)
            try:
                scores = self._graph.run(inputs, self._entry.of_step(inputs, slot))
                computed = time.perf_counter_ns()
                self._sample(scores, slot)
            except RuntimeError as error:
                raise self.after_failure(error) from error
            check = self._made_check(slot) if slot.checked_row and is_decode else None
            if check is not None:
                check.keep(scores)
            cost = self._with_drafts(cost_of_step(start, computed, scores), slot, inputs)
            if check is not None:
                self._run_check(check)
            return cost

    def _with_drafts(self, cost: StepCost, slot: StepSlot, inputs: StepInputs) -> StepCost:
        """Makes drafts after a step that was sampled. Returns ``cost`` with the time of the draft model.

        Does nothing in an agent without a draft model.
        """
        if self._drafter is None:
            return cost
        assert self._graph is not None
        draft_us = self._drafter.after_step(slot, inputs, self._graph.tapped(inputs.token_ids.size))
        return cost._replace(sample_us=cost.sample_us + draft_us, draft_us=draft_us)

    def _run_pooled(self, slot: StepSlot, inputs: StepInputs, pooler: Pooler, start: int) -> StepCost:
        """Runs a step of a model that pools. Its results are pooled hidden states instead of sampled tokens."""
        assert self._graph is not None, "compile() must come before any step"
        try:
            stream = self._graph.run_stage(inputs, inputs.token_ids)
        except RuntimeError as error:
            raise self.after_failure(error) from error
        computed = time.perf_counter_ns()
        pooler.take(stream, inputs, slot)
        return cost_of_step(start, computed, None)

    def run_moves(self, slot: StepSlot) -> StepCost:
        """Runs a step that only copies blocks. Raises the same errors as ``run_step``."""
        if self.ahead is not None:
            self.ahead.settle()
        start = time.perf_counter_ns()
        if slot.num_tokens:
            raise ProtocolError(f"a step of moves has {slot.num_tokens} tokens; it must have none")
        if self._handed is not None and is_hand_over(slot):
            self._run_hand_overs(self._handed, slot)
        else:
            self.move_blocks(self._reader.read_moves(slot))
        return StepCost((time.perf_counter_ns() - start) // 1000)

    def _run_hand_overs(self, handed: HandedBlocks, slot: StepSlot) -> None:
        if self._drafter is not None:
            self._drafter.settle()
        arrived = handed.run(slot)
        if self._drafter is not None:
            self._drafter.take_handed(arrived)

    def reset(self) -> None:
        """Clears the tokens and the states of all batch rows. The KV cache needs no reset, because the server knows
        which blocks are valid.
        """
        if self._model is not None and self._model.ops.states is not None:
            self._model.ops.states.reset()
        self._sampler.rows.reset()
        if self._drafter is not None:
            self._drafter.reset()
        if self._pooler is not None:
            self._pooler.reset()
        if self._last_tokens is not None:
            self._last_tokens.reset()

    def _set_replaying(self, replaying: bool) -> None:
        assert self._graph is not None, "compile() must come before a profile"
        self._graph.set_replaying(replaying)

    def load_adapter(self, slot: int, name: str, num_bytes: int) -> None:
        """Copies the LoRA adapter in the shared memory ``name`` into an adapter slot. No step may be running.

        Raises the errors of ``AdapterStore.load``.
        """
        assert self._model is not None, "load() must come before load_adapter()"
        if self._adapters is None:
            self._adapters = self._made_adapter_store(self._model)
        self._adapters.load(slot, name, num_bytes)

    def _made_adapter_store(self, model: LoadedModel) -> AdapterStore:
        assert model.adapters is not None, "the server sends adapters only if there are adapter slots"
        loaded = [reader.buffers.loaded for reader in self._readers]
        equal_vocabularies = not model.ops.traits.packs_weights
        dtype = self._config.model_config.model_dtype
        return AdapterStore(self._part, dtype, model.adapters, loaded, equal_vocabularies=equal_vocabularies)

    def step_graph(self) -> StepGraph:
        """Returns the graph that runs all steps. The caller must not store it, because after a failure another object
        replaces it."""
        assert self._graph is not None, "compile() must come before any step"
        return self._graph

    def move_blocks(self, moves: Int32Array) -> None:
        """Runs block moves. No graph may be running. If the device fails, raises the error of ``after_failure``."""
        assert self._model is not None, "load() must come before any step"
        try:
            self._model.moves.run(moves)
            if self._drafter is not None:
                self._drafter.move_blocks(moves)
        except RuntimeError as error:
            raise self.after_failure(error, "the block moves") from error

    def after_failure(self, error: RuntimeError, failed: str = "the graph") -> AgentError:
        """Recovers from a failed graph or from other work of the device, named by ``failed``. Returns the error for
        the step. No graph may be running.

        MindSpore does not run a failed graph again, so this method compiles the graphs again. But if MindSpore captures
        launches, it would replay the launches of the failed graph. Then this method returns a GroupBrokenError, which
        means that the agent must end. An agent of a group always ends: the other agents wait for its part of the step.
        """
        text = f"{failed} failed: {_first_line(error)}"
        if self._exchange is not None:
            if self._exchange.is_down:
                return GroupDownError("another agent of this group ended or did not arrive in time")
            self._exchange.give_up()
            return GroupBrokenError(text)
        if isinstance(error, OperatorRefusedError):
            return AgentError(text)
        if self._config.captured_batch_sizes:
            return GroupBrokenError(text)
        self._report("compile", 0, 1)  # so that the server does not regard this long step as hanging
        try:
            self._graph = self._made_graph()
        except RuntimeError:
            return GroupBrokenError(text)
        return AgentError(text)

    def _run_in_group(self, slot: StepSlot, inputs: StepInputs, start: int) -> StepCost:
        """Runs a step that all agents of the group have accepted. From now on, no agent may skip the step.

        The other agents wait for this agent's activations. Therefore, if the graph fails, this agent and its group end.
        """
        last_tokens, graph = self._last_tokens, self._graph
        assert last_tokens is not None
        assert graph is not None, "compile() must come before any step"
        try:
            stream = graph.run_stage(inputs, self._entry.of_step(inputs, slot)) if self._part.pools else None
            scores = self._compute_in_group(inputs, slot) if stream is None else None
            computed, failure = time.perf_counter_ns(), None
            is_decode = inputs.token_ids.size == inputs.query_lens.size
            check = self._made_check(slot) if slot.checked_row and is_decode else None
            try:
                if stream is not None and self._pooler is not None:
                    with sampling_in_group():
                        self._pooler.take(stream, inputs, slot)
                elif scores is not None:
                    self._sample(scores, slot)
                    if check is not None and self._part.returns_results:
                        check.keep(scores)
                cost = self._with_drafts(cost_of_step(start, computed, scores), slot, inputs)
            except (RuntimeError, GroupDownError):
                raise
            except Exception as error:
                failure = error  # raised after the row check, which the other agents run in any case
            finally:
                last_tokens.step_done(slot)
            if check is not None:
                self._run_check(check)
            if failure is not None:
                raise failure
        except RuntimeError as error:
            raise self.after_failure(error) from error
        return cost

    def _sample(self, scores: StepLogits | DeviceScores, slot: StepSlot) -> None:
        """Samples a step. In an agent that does not sample, computes only this agent's part of the candidates.

        All agents that share the vocabulary start the search for candidates, even if ``Sampler.sample`` then fails.
        Always waits until the device has finished, because the next step overwrites memory that the device may still
        read. ``Sampler.sample`` waits only for the results that it fetches. Raises the errors of ``Sampler.sample``.
        An agent of a group raises SamplingFailedError instead, unless the device or the group has failed.
        """
        try:
            if self._part.is_split and isinstance(scores, DeviceScores):
                find_candidates(scores, slot)
            if self._part.returns_results:
                with nullcontext() if self._exchange is None else sampling_in_group():
                    self._sampler.sample(scores, slot)
        finally:
            if isinstance(scores, DeviceScores):
                scores.wait()

    def _compute_in_group(self, inputs: StepInputs, slot: StepSlot | None) -> StepLogits | DeviceScores | None:
        """Runs this agent's part of the graph. Returns the scores (logits) in the last stage. In any other stage, sends
        the residual stream to the next stage and returns None.

        ``slot`` has the tiles of images. It is None if the row check computes a decode step again, which has no tiles.
        """
        assert self._exchange is not None
        assert self._graph is not None
        entry = self._entry.of_step(inputs, slot)
        if self._part.shard.is_last_stage:
            return self._graph.run(inputs, entry)
        self._exchange.send(self._graph.run_stage(inputs, entry))
        return None

    def _made_check(self, slot: StepSlot) -> RowCheck:
        return RowCheck(slot, whole=not self._part.is_split)

    def _run_check(self, check: RowCheck) -> None:
        """Runs the row check of a decode step: computes one of its sequences again, alone, and compares the logits.

        The second computation writes the sequence's keys and values to the same KV positions. All agents of a group
        take part in the second computation, and the agent that samples compares the logits. Raises RowCheckError unless
        the logits have the same bits.
        """
        inputs = self._reader.keep_only(check.index)
        if self._exchange is not None:
            again = self._compute_in_group(inputs, None)
        else:
            assert self._graph is not None
            again = self._graph.run(inputs, self._entry.of_step(inputs, None))
        if isinstance(again, DeviceScores):
            again.wait()  # agents that do not compare fetch nothing, so they must wait here
        if again is not None:
            check.compare(again)

    def _made_graph(self) -> StepGraph:
        """Compiles a new graph with MindSpore and returns it."""
        assert self._model is not None, "load() must come before compile()"
        self._model = self._start.with_network(self._config, self._part, self._model)
        from agent.step_graph.making import make_step_graph  # imports mindspore

        config, model = self._config, self._model
        graph = make_step_graph(
            model.network,
            model.ops,
            self._reader.buffers,
            config.slot_limits(),
            config.max_prefill_seqs,
            config.shape.vocab_size,
            config.captured_batch_sizes,
            fuses=config.fuses_operators,
            step_blocks=StepBlocks.of_config(config) if model.ops.gathers_blocks else None,
        )
        graph.compile()
        return graph


def _first_line(error: RuntimeError) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
