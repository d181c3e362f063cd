"""Runs one setup (types and formats) with ModelRunner in a separate process, and prints the results as JSON.

python tests/agent/runner_worker.py DTYPE OP_TABLE WEIGHT_FORMAT KV_FORMAT SCRATCH_FOLDER [MODEL ...]
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from block_sharing import run_block_sharing, run_move_refusals  # noqa: E402
from step_driver import Part, StepDriver, blocks_for  # noqa: E402

from agent import step_threads  # noqa: E402
from agent.scores import whole_logits  # noqa: E402
from agent.step_threads import StepThreads  # noqa: E402
from llm_serving.config.sections import PowerConfig  # noqa: E402
from llm_serving.errors import AgentError, ProtocolError  # noqa: E402
from llm_serving.ipc.shm import LAST_TOKEN  # noqa: E402
from performance.models.folders import write_model  # noqa: E402
from performance.models.variants import VARIANTS  # noqa: E402
from support.golden_files import LLAMAS, golden_of  # noqa: E402
from support.position_bits import FORCED_STEPS  # noqa: E402
from support.step_config import BLOCK_SIZE, make_config  # noqa: E402
from tools.make_golden import weights_digest  # noqa: E402


def run_golden(driver: StepDriver, golden: dict[str, Any]) -> dict[str, Any]:
    """Generates from all prompts in one batch, once from the model's own tokens and once from the oracle's tokens.

    ``best`` has the best ids and their logits in the second run, for each step of each prompt.
    """
    cases = golden["cases"]
    free = generate(driver, cases, forced=False)
    forced = generate(driver, cases, forced=True)
    best = [[(step[i].top_ids, step[i].top_logits) for step in forced] for i in range(len(cases))]
    return {
        "free": [[step[i].token for step in free] for i in range(len(cases))],
        "forced": [[step[i].token for step in forced] for i in range(len(cases))],
        "best": best,
    }


def generate(driver: StepDriver, cases: list[dict[str, Any]], *, forced: bool) -> list[list[Any]]:
    driver.runner.reset()
    prompts = [case["prompt"] for case in cases]
    blocks = [blocks_for(i, len(prompt) + len(cases[i]["tokens"])) for i, prompt in enumerate(prompts)]
    starts = np.cumsum([0, *map(len, blocks)])
    blocks = [list(range(1 + starts[i], 1 + starts[i + 1])) for i in range(len(prompts))]
    steps = [driver.prefill(*[Part(prompt, 0, blocks[i], row=i) for i, prompt in enumerate(prompts)])]
    for step in range(1, len(cases[0]["tokens"])):
        fed = [[case["tokens"][step - 1]] if forced else [LAST_TOKEN] for case in cases]
        parts = [
            Part(fed[i], len(prompts[i]) + step - 1, blocks[i], row=i, sample_position=step) for i in range(len(cases))
        ]
        steps.append(driver.decode(*parts))
    return steps


def run_invariance(driver: StepDriver, golden: dict[str, Any]) -> dict[str, list[str]]:
    """Computes one sequence in different batches and chunks. Returns the digests of its positions, by the name of the
    division.
    """
    case = golden["cases"][-1]
    prompt, forced = case["prompt"], case["tokens"][:FORCED_STEPS]
    return {
        "alone": _alone(driver, prompt, forced),
        "batched": _batched(driver, prompt, forced, golden["cases"][0]["tokens"]),
        "chunked": _chunked(driver, prompt, forced),
        "prefilled": _prefilled(driver, prompt, forced),
        "together": _together(driver, prompt, forced),
    }


def _alone(driver: StepDriver, prompt: list[int], forced: list[int]) -> list[str]:
    blocks = blocks_for(0)
    outputs = driver.prefill(Part(prompt, 0, blocks, row=0))
    for step, token in enumerate(forced):
        outputs += driver.decode(Part([token], len(prompt) + step, blocks, row=0))
    return [output.digest for output in outputs]


def _batched(driver: StepDriver, prompt: list[int], forced: list[int], other: list[int]) -> list[str]:
    """Runs the sequence in a batch with other sequences. Its blocks are in descending order, and its batch row is 7."""
    blocks, count = blocks_for(3)[::-1], len(other)
    neighbours = [Part(other[: 5 * i + 1], 0, blocks_for(i), row=i) for i in range(3)]
    outputs = [driver.prefill(*neighbours[:2], Part(prompt, 0, blocks, row=7), neighbours[2])[2]]
    for step, token in enumerate(forced):
        near = [
            Part([other[step]], len(part.tokens) + step, part.blocks, part.row, sampling={"temperature": 0.7})
            for part in neighbours
        ]
        own = Part([token], len(prompt) + step, blocks, row=7)
        outputs.append(driver.decode(near[0], own, near[1], near[2])[1])
    assert count > len(forced)
    return [output.digest for output in outputs]


def _chunked(driver: StepDriver, prompt: list[int], forced: list[int]) -> list[str]:
    """Runs the prompt in uneven chunks, then two or three known output tokens in each step.

    Returns the digest of the last position of each step that samples.
    """
    blocks, tokens = blocks_for(1), prompt + forced
    edges = [1, 8, 41, BLOCK_SIZE * 3, len(prompt), *range(len(prompt) + 2, len(tokens) + 1, 3)]
    start, digests = 0, []
    for end in edges:
        part = Part(tokens[start:end], start, blocks, row=1, sample=end >= len(prompt))
        output = driver.prefill(part)[0]
        if part.sample:
            digests.append(f"{end - len(prompt)} {output.digest}")
        elif output.token != -1:
            digests.append("a chunk that does not sample gave a token")
        start = end
    return digests


def _prefilled(driver: StepDriver, prompt: list[int], forced: list[int]) -> list[str]:
    """Runs the prompt and a part of the known output as one prompt, as the recompute after a preemption does."""
    digests = []
    for step in (0, 1, 7, len(forced)):
        output = driver.prefill(Part(prompt + forced[:step], 0, blocks_for(2), row=2))[0]
        digests.append(f"{step} {output.digest}")
    return digests


def _together(driver: StepDriver, prompt: list[int], forced: list[int]) -> list[str]:
    """Runs the prompt's last token as a decode, in one step with the whole prompt of another sequence."""
    blocks = blocks_for(4)
    driver.prefill(Part(prompt[:-1], 0, blocks, row=0, sample=False))
    own = Part(prompt[-1:], len(prompt) - 1, blocks, row=0)
    return [driver.prefill(Part(forced, 0, blocks_for(5), row=1), own)[1].digest]


def run_rows(driver: StepDriver) -> dict[str, Any]:
    """Returns the tokens that the runner samples with penalties, and the tokens that NumPy chooses from the same
    logits.

    The same sequence also continues twice in another batch row: once by recompute and once after a swap. These tokens
    are returned, too.
    """
    runner, captured = driver.runner, []
    original = runner._sampler.sample

    def capture(scores: Any, slot: Any) -> None:
        original(scores, slot)
        captured.append(whole_logits(scores, slot.num_seqs))

    runner._sampler.sample = capture  # type: ignore[method-assign]
    runner.reset()
    prompt = [5, 6, 7, 5, 9, 11]
    sampling = {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.9}
    tokens = penalised(driver, prompt, [], 12, sampling, row=3)
    logits = [each[0] for each in captured[1:]]  # the first logits are those of a chunk that does not sample
    resumed = penalised(driver, prompt, tokens[:5], 12, sampling, row=4)
    swapped = _penalised_after_swap(driver, prompt, tokens[:5], 12, sampling, old_row=3, row=6)
    plain = penalised(driver, prompt, [], 12, {}, row=3)
    runner._sampler.sample = original  # type: ignore[method-assign]
    return {
        "prompt": prompt,
        "tokens": tokens,
        "expected": expected_tokens(logits, prompt, sampling),
        "resumed": tokens[:5] + resumed,
        "swapped": tokens[:5] + swapped,
        "plain": plain,
        "plain_expected": expected_tokens([each[0] for each in captured[-12:]], prompt, {}),
    }


def penalised(
    driver: StepDriver, prompt: list[int], output: list[int], total: int, sampling: dict[str, float], row: int
) -> list[int]:
    """Continues a sequence with the known ``output`` until its output has ``total`` tokens. Returns the new tokens.

    Prompt and known output run as a prefill of two chunks. The second chunk also sends the tokens that the penalties
    count.
    """
    blocks, known = blocks_for(row), prompt + output
    driver.prefill(Part(known[:3], 0, blocks, row, sample=False))
    history = known if sampling else []
    last = Part(known[3:], 3, blocks, row, True, len(output), history, len(prompt) if sampling else 0, sampling)
    tokens = [driver.prefill(last)[0].token]
    while len(output) + len(tokens) < total:
        position = len(output) + len(tokens)
        part = Part([LAST_TOKEN], len(prompt) + position - 1, blocks, row, True, position, sampling=sampling)
        tokens.append(driver.decode(part)[0].token)
    return tokens


def _penalised_after_swap(
    driver: StepDriver,
    prompt: list[int],
    output: list[int],
    total: int,
    sampling: dict[str, float],
    old_row: int,
    row: int,
) -> list[int]:
    """Continues the sequence of ``old_row`` in the batch row ``row``, as after a swap. Returns the new tokens.

    The new batch row starts with a decode over the same blocks. This decode sends the tokens that the penalties count.
    """
    blocks, known = blocks_for(old_row), prompt + output
    first = Part([known[-1]], len(known) - 1, blocks, row, True, len(output), known, len(prompt), sampling)
    tokens = [driver.decode(first)[0].token]
    for position in range(len(output) + 1, total):
        part = Part([LAST_TOKEN], len(prompt) + position - 1, blocks, row, True, position, sampling=sampling)
        tokens.append(driver.decode(part)[0].token)
    return tokens


def expected_tokens(logits: list[Any], prompt: list[int], sampling: dict[str, float]) -> list[int]:
    """Returns the greedy choices after penalties, computed in NumPy.

    The repetition penalty counts prompt and output. The presence and frequency penalties count only the output.
    """
    output: list[int] = []
    for row in logits:
        row = row.astype(np.float32).copy()
        seen = np.unique(prompt + output)
        repetition = np.float32(sampling.get("repetition_penalty", 1.0))
        row[seen] = np.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
        for token in set(output):
            row[token] -= np.float32(sampling.get("frequency_penalty", 0.0)) * np.float32(output.count(token))
            row[token] -= np.float32(sampling.get("presence_penalty", 0.0))
        output.append(int(row.argmax()))
    return output


def run_sampling(driver: StepDriver) -> dict[str, Any]:
    """Runs prompts and decodes with different kinds of sampling parameters.

    Returns for each step the sampled tokens, the tokens that the sampler chooses from whole logits, and the number of
    bytes fetched from the device. The first steps are greedy. In the next steps, ``top_k`` and ``top_p`` limit the
    candidates. The last steps have random parameters.
    """
    runner, rng, steps = driver.runner, np.random.default_rng(5), []
    original, vocab = runner._sampler.sample, driver.config.shape.vocab_size

    def compare(scores: Any, slot: Any) -> None:
        seqs = slot.num_seqs
        original(scores, slot)
        fetched, tokens = scores.fetched_bytes, slot.sampled_ids[:seqs].tolist()
        runner._sampler._call_of(slot).run(whole_logits(scores, seqs))
        assert slot.sampled_ids[:seqs].min() >= 0, "every sequence samples"
        steps.append({"tokens": tokens, "of whole logits": slot.sampled_ids[:seqs].tolist(), "fetched": fetched})

    plain = {"num_top_logits": -1}
    kinds: list[Any] = [
        lambda: plain,
        lambda: plain | {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": int(rng.integers(2**40))},
        lambda: {
            "temperature": float(rng.choice([0, 0.3, 1, 2])), "top_k": int(rng.choice([0, 1, 40, 64, 200])),
            "top_p": float(rng.choice([0.5, 0.95, 1])), "min_p": float(rng.choice([0, 0, 0.1])),
            "seed": int(rng.integers(2**40)), "num_top_logits": int(rng.integers(-1, 33)),
        },
    ]  # fmt: skip
    runner._sampler.sample = compare  # type: ignore[method-assign]
    for settings in kinds:
        runner.reset()
        prompts = [rng.integers(3, vocab, 3 + row).tolist() for row in range(4)]
        parts = [Part(prompt, 0, blocks_for(row), row, sampling=settings()) for row, prompt in enumerate(prompts)]
        driver.prefill(*parts)
        for step in range(6):
            driver.decode(
                *(
                    Part(
                        [LAST_TOKEN],
                        len(part.tokens) + step,
                        part.blocks,
                        part.row,
                        True,
                        step + 1,
                        sampling=settings(),
                    )
                    for part in parts
                )
            )
    runner._sampler.sample = original  # type: ignore[method-assign]
    return {"steps": steps, "vocab": vocab}


def run_refusals(driver: StepDriver) -> dict[str, Any]:
    """Runs step slots with one invalid value each. Returns their errors.

    Also returns whether a valid step has the same bits before and after them.
    """
    driver.runner.reset()
    good = Part([5, 6, 7], 0, blocks_for(0), row=0)
    before = driver.prefill(good)[0].digest
    shape, limit = driver.config.shape, driver.config.max_model_len
    wrong = {
        "token_ids": lambda slot: slot.token_ids.__setitem__(1, shape.vocab_size),
        "positions": lambda slot: slot.positions.__setitem__(0, limit),
        "slot_mapping": lambda slot: slot.slot_mapping.__setitem__(2, 256 * BLOCK_SIZE),
        "block_tables": lambda slot: slot.block_tables.__setitem__(3, -1),
        "context_lens": lambda slot: slot.context_lens.__setitem__(0, limit + 1),
        "shorter context": lambda slot: slot.context_lens.__setitem__(0, 2),
        "query_lens": lambda slot: slot.query_lens.__setitem__(0, 2),
        "last position": lambda slot: slot.positions.__setitem__(2, 9),
        "rows": lambda slot: slot.rows.__setitem__(0, driver.config.max_num_seqs),
        "num_top_logits": lambda slot: slot.num_top_logits.__setitem__(0, 33),
        "penalty without history": lambda slot: slot.repetition_penalty.__setitem__(0, 1.5),
        "history token": _set_history([5, shape.vocab_size], 2),
        "history prompt": _set_history([5, 6], 3),
        "last token of a row without one": _ask_last_token,
    }
    errors: dict[str, str] = {}
    for name, break_it in wrong.items():
        break_it(driver.fill([good]))
        errors[name] = _step_error(driver, driver.slot)
    driver.fill([good])
    errors["decode of three tokens"] = _step_error(driver, driver.slot, is_decode=True)
    errors["failing operator"] = _fail_in_graph(driver, good)
    if driver.config.op_table == "fused":
        errors["graph that did not run"] = _run_without_graph(driver, good)
    return {"errors": errors, "unharmed": driver.prefill(good)[0].digest == before}


@contextmanager
def _believing_in_more_blocks(driver: StepDriver) -> Iterator[None]:
    """Makes the step reader accept block numbers that do not exist, until the ``with`` block ends."""
    honest = driver.runner._reader
    credulous = copy.copy(honest)
    credulous._num_blocks *= 2**20
    driver.runner._reader = credulous
    try:
        yield
    finally:
        driver.runner._reader = honest


def _fail_in_graph(driver: StepDriver, good: Part) -> str:
    """Runs a step with a slot that does not exist, so that an operator refuses its inputs. Returns the error."""
    slot = driver.fill([good])
    slot.slot_mapping[1] = 2**27
    with _believing_in_more_blocks(driver):
        return _step_error(driver, slot)


def _run_without_graph(driver: StepDriver, good: Part) -> str:
    """Runs a step whose graph computes nothing, so the output layer has not run. Returns the error."""
    driver.runner._graph.replays.run = lambda results, num_tokens: None
    return _step_error(driver, driver.fill([good]))


def run_replays(driver: StepDriver, golden: dict[str, Any]) -> dict[str, Any]:
    """Runs decodes of one and of three sequences, prompts and chunks, as replays and by the graph.

    The first steps of each kind run in both ways, which confirms the replay. An operator also refuses invalid inputs,
    once in a replay and once in a step that confirms the replay.
    """
    graph, prompts = driver.runner._graph, [case["prompt"] for case in golden["cases"][:3]]
    replays, tokens = graph.replays, golden["cases"][0]["tokens"][:FORCED_STEPS]
    found: dict[str, Any] = {"refused": [_refused_decode(driver, 2)]}
    found["replayed"] = decodes(driver, prompts, tokens)
    found["prompts replayed"] = prompts_and_chunks(driver)
    found["refused"] += [_refused_decode(driver, rows) for rows in (2, 3, 3)]
    found["replayed again"] = decodes(driver, prompts, tokens)
    found["prompts replayed again"] = prompts_and_chunks(driver)
    found |= native_replays(graph)
    graph.replays = {}
    found["by the graph"] = decodes(driver, prompts, tokens)
    found["prompts by the graph"] = prompts_and_chunks(driver)
    graph.replays = replays
    return found


def native_replays(graph: Any) -> dict[str, Any]:
    """Returns the kinds of steps whose replays are confirmed, and for each kind the problem that prevents replays and
    the names of its fusions.
    """
    confirmed = sorted(kind.value for kind, replays in graph.replays.items() if replays.is_confirmed)
    problems = [replays.problem for replays in graph.replays.values()]
    fusions = {kind: list(each.fusions) for kind, each in graph.operators().items()}
    return {"confirmed": confirmed, "problems": problems, "fusions": fusions}


def prompts_and_chunks(driver: StepDriver) -> list[str]:
    """Runs prefill steps and returns a digest of each result. The prompts are a short one and a long one.

    The short prompt is split into two chunks, at several positions. Each chunk runs alone or in a step with the whole
    short prompt as a second sequence. The long prompt runs in one step. It is so long that the agent does not run the
    step twice, as it does with short steps to confirm a replay.
    """
    prompt = [3 + 7 * index % (driver.config.shape.vocab_size - 3) for index in range(100)]
    digests, short = [], prompt[:24]
    for length in range(1, len(short), 4):
        driver.runner.reset()
        first, rest = Part(short[:length], 0, blocks_for(0), 0), Part(short[length:], length, blocks_for(0), 0)
        whole = Part(short, 0, blocks_for(1), 1)
        for parts in ((first,), (first, whole), (rest, whole)):
            digests += [output.digest for output in driver.prefill(*parts)]
    driver.runner.reset()
    return digests + [output.digest for output in driver.prefill(Part(prompt, 0, blocks_for(0), 0))]


def decodes(driver: StepDriver, prompts: list[list[int]], tokens: list[int]) -> list[str]:
    """Returns digests of the decodes of the first prompt alone and of three prompts in a batch.

    Each decode step gets the next of ``tokens`` as its input.
    """
    digests = []
    for rows in (1, 3):
        driver.runner.reset()
        parts = [Part(prompt, 0, blocks_for(row), row) for row, prompt in enumerate(prompts[:rows])]
        driver.prefill(*parts)
        for step, token in enumerate(tokens):
            following = [Part([token], len(part.tokens) + step, part.blocks, part.row) for part in parts]
            digests += [output.digest for output in driver.decode(*following)]
    return digests


def _refused_decode(driver: StepDriver, rows: int) -> str:
    """Runs a decode of ``rows`` sequences with a slot that does not exist. Returns the beginning of its error."""
    driver.runner.reset()
    slot = driver.fill([Part([5], 0, blocks_for(row), row) for row in range(rows)])
    slot.slot_mapping[0] = 2**27
    with _believing_in_more_blocks(driver):
        return _step_error(driver, slot, is_decode=True).split(" its inputs")[0]


def _set_history(tokens: list[int], prompt_len: int) -> Any:
    def break_it(slot: Any) -> None:
        slot.history[: len(tokens)] = tokens
        slot.history_lens[0], slot.history_prompt_lens[0] = len(tokens), prompt_len
        slot.write_header(1, num_tokens=3, num_seqs=1, table_width=slot.table_width, history_len=len(tokens))

    return break_it


def _ask_last_token(slot: Any) -> None:
    slot.token_ids[2], slot.rows[0] = LAST_TOKEN, 5


def _step_error(driver: StepDriver, slot: Any, *, is_decode: bool = False) -> str:
    try:
        driver.runner.run_step(slot, is_decode=is_decode)
    except (AgentError, ProtocolError) as error:
        return str(error)
    return "no error"


def run_quiet(driver: StepDriver) -> dict[str, Any]:
    """Runs a small step in the quiet mode. Returns the changes of the threads and the bytes that decide on them."""
    changes: list[bool] = []
    threads, runner = StepThreads(PowerConfig("quiet")), driver.runner
    threads.weight_bytes = runner._threads.weight_bytes
    runner._threads, usual = threads, runner._threads
    with mock.patch.object(step_threads, "set_alone", changes.append):
        driver.prefill(Part([5, 6, 7], 0, blocks_for(0), row=0))
    runner._threads = usual
    return {"changes": changes, "weight_bytes": threads.weight_bytes}


def main() -> None:
    dtype, op_table, weights, kv, folders, *models = sys.argv[1:]
    scratch = Path(folders)
    results: dict[str, Any] = {"models": {}}
    for name in models or sorted(path.stem for path in LLAMAS.glob("*.json")):
        golden = golden_of(name)
        folder = ROOT / "models" / name
        if name in VARIANTS:
            folder = scratch / name
            write_model(VARIANTS[name], folder)
        driver = StepDriver(make_config(folder, dtype, op_table, weights, kv))
        result = {"golden": run_golden(driver, golden), "invariance": run_invariance(driver, golden)}
        result["sharing"] = run_block_sharing(driver, golden)
        if op_table == "native":
            result["replays"] = run_replays(driver, golden)
            result["sampling"] = run_sampling(driver)
        result["digest"] = weights_digest(folder)
        results["models"][name] = result
        if name == "gqa_tied":
            results |= {"rows": run_rows(driver), "stages": list(driver.stages)}
            # Only one setup runs the invalid steps, because MindSpore waits 3 seconds after a failed graph.
            if (weights, kv) == ("auto", "auto"):
                results["refusals"] = run_refusals(driver)
            results["moves"] = run_move_refusals(driver)
            results["quiet"] = run_quiet(driver)
            results["summary"] = driver.runner.summary()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
