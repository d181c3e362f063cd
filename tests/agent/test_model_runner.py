"""Tests a whole ModelRunner: golden tokens, equal bits in any batch, and the state of batch rows.

Each setup (type and op table) runs in its own process.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_serving.sampling_params import MAX_TOP_LOGITS
from performance.models.folders import write_model
from performance.models.variants import VARIANTS
from support.forked_programs import run_forked
from support.golden_files import golden_of
from support.json_program import printed_json
from support.llama_in_numpy import NumpyLlama
from support.oracle_ties import check_forced
from support.position_bits import check_position_bits, check_sharing_bits
from support.small_configs import REPOSITORY
from support.sweeps import with_sweeps

WORKER = Path(__file__).with_name("runner_worker.py")
MODELS = ("gqa_tied", "llama3_rope", "mha", "tiny_llama")
SETUPS = (
    ("float32", "fused", "auto", "auto"),
    ("float16", "fused", "auto", "auto"),
    ("bfloat16", "fused", "auto", "auto"),
    ("float16", "native", "auto", "auto"),
    ("bfloat16", "native", "auto", "auto"),
)
FLOAT32 = SETUPS[0]
HALF_SETUPS = SETUPS[1:]
QUANTISED_SETUPS = (
    ("bfloat16", "fused", "int8", "auto"),
    ("bfloat16", "fused", "int4", "int8"),
    ("float16", "fused", "int8_weight_only", "int8"),
    ("float32", "fused", "int8", "int8"),
    ("bfloat16", "fused", "int8", "int8"),
    ("bfloat16", "native", "int8", "auto"),
    ("float16", "native", "int8_weight_only", "auto"),
    ("bfloat16", "native", "int4", "auto"),
    ("bfloat16", "native", "int4", "int8"),
    ("bfloat16", "native", "int8", "int8"),
    ("float16", "native", "int8_weight_only", "int8"),
)
"""Setups with a weight format and a KV cache format."""
INT8_CACHE_PARTNERS = {
    ("bfloat16", "native", "int8", "int8"): ("bfloat16", "fused", "int8", "int8"),
    ("float16", "native", "int8_weight_only", "int8"): ("float16", "fused", "int8_weight_only", "int8"),
}
FUSED_PARTNERS = {
    ("bfloat16", "native", "int8", "auto"): ("bfloat16", "fused", "int8", "auto"),
    ("float16", "native", "int8_weight_only", "auto"): ("float16", "fused", "int8_weight_only", "auto"),
}
"""Maps a native setup to the fused setup with the same products. Both round differently between the operators."""
WEIGHT_ONLY = ("float16", "native", "int8_weight_only", "auto")
ROUNDED_SETUPS = (
    *HALF_SETUPS,
    *FUSED_PARTNERS,
    *FUSED_PARTNERS.values(),
)
GATED_PRODUCTS = {
    "auto": "MatMul+Swiglu",
    "int8": "AddRmsNorm+DynamicQuantExt+QuantBatchMatmul+Swiglu",
    "int8_weight_only": "WeightQuantBatchMatmul+Swiglu",
    "int4": "WeightQuantBatchMatmul+Swiglu",
}
"""The fusion of the product of gate and up with SwiGLU, by weight format. Native replays fuse operators by default."""
MOST_ERROR = 1.1
"""Maximum error of int8 activations, as a multiple of NumPy's rounding error. Measured on x86: 0.98 to 1.07."""
MOST_FUSED_ERROR = 1.0
"""Maximum error of float activations, as a multiple of NumPy's rounding error. Fused operators round less often.
Measured: 0.89 to 0.97."""
ALL_SETUPS = (*SETUPS, *QUANTISED_SETUPS)
ONE_MODEL = {
    ("bfloat16", "native", "auto", "auto"): "gqa_tied",
    ("bfloat16", "fused", "int8", "auto"): "gqa_tied",
    ("bfloat16", "native", "int8", "auto"): "gqa_tied",
    ("bfloat16", "native", "int4", "int8"): "tiny_llama",
}
"""Setups of which ``make test`` runs one model."""
HALF_MODELS = {"float16": ("gqa_tied", "llama3_rope"), "bfloat16": ("gqa_tied", "mha", "tiny_llama")}
"""The models that ``make test`` runs in each half type with fused operators. Together these are all models."""
NATIVE_SETUPS = tuple(setup for setup in ALL_SETUPS if setup[1] == "native")
MOST_TIES = 0.06
"""Maximum fraction of a model's tokens that may differ. More would be an error, not ties."""
LOGIT_TOLERANCE = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15}
"""Two logits count as a tie up to this difference, in units of the standard deviation of the oracle's logits."""

Setup = tuple[str, str, str, str]
"""Type, op table, format of the weights, format of the KV cache."""
Results = dict[str, Any]


def is_swept(setup: Setup, model: str = "gqa_tied") -> bool:
    """Returns whether only ``make test-sweeps`` runs a case, because the cases of ``make test`` cover it.

    With native operators, bfloat16 also covers float16, and int4 also covers int8 with float activations. All models
    run in float32, and one to three in each other setup. The trained model covers native int4 with an int8 cache, and a
    model with random weights covers native floats and native int8 with int8 activations.
    """
    if setup in (("float16", "native", "auto", "auto"), WEIGHT_ONLY, FUSED_PARTNERS[WEIGHT_ONLY]):
        return True
    if setup in INT8_CACHE_PARTNERS or setup in INT8_CACHE_PARTNERS.values():
        return True
    if setup == ("bfloat16", "native", "int4", "auto"):
        return True
    if setup[1] == "fused" and setup in HALF_SETUPS:
        return model not in HALF_MODELS[setup[0]]
    if setup in ONE_MODEL:
        return model != ONE_MODEL[setup]
    return (setup in QUANTISED_SETUPS or setup[1] == "native") and model in ("llama3_rope", "mha")


def of_models(setups: Iterable[Setup]) -> list[Any]:
    """Returns each pair of setup and model."""
    return with_sweeps([(setup, model) for setup in setups for model in MODELS], is_swept)


def of_setups(setups: Iterable[Setup]) -> list[Any]:
    return with_sweeps([(setup,) for setup in setups], is_swept)


Run = Callable[[Setup, str], Results]
SmallRun = Callable[[Setup], Results]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that gives the printed results of a setup. One process runs all models of ``make test``."""

    @cache
    def printed(setup: Setup, models: tuple[str, ...]) -> Results:
        scratch = tmp_path_factory.mktemp("-".join(setup))
        done = run_forked(WORKER, *setup, str(scratch / "models"), *models, folder=scratch, timeout=240)
        answer: Results = printed_json(done)
        littered = sorted(path.name for path in scratch.iterdir() if path.name != "models")
        assert littered == [], f"a run created {littered} in the working directory"
        return answer

    def of_model(setup: Setup, model: str) -> Results:
        swept = is_swept(setup, model)
        return printed(setup, tuple(each for each in MODELS if is_swept(setup, each) == swept))

    return of_model


@pytest.fixture(scope="session")
def results(run: Run) -> Run:
    """Returns a function that gives the results of a model in a setup."""

    def of_model(setup: Setup, model: str) -> Results:
        found: Results = run(setup, model)["models"][model]
        return found

    return of_model


@pytest.fixture(scope="session")
def small_results(run: Run) -> SmallRun:
    """Returns a function that gives all results of a setup with the smallest model."""
    return lambda setup: run(setup, "gqa_tied")


@pytest.fixture(scope="session")
def numpy_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function that writes the folder of a model on first use and returns its path."""

    @cache
    def folder_of(model: str) -> Path:
        if model not in VARIANTS:
            return REPOSITORY / "models" / model
        folder = tmp_path_factory.mktemp("numpy") / model
        write_model(VARIANTS[model], folder)
        return folder

    return folder_of


@pytest.mark.parametrize("model", MODELS)
def test_golden_files_belong_to_these_weights(results: Run, model: str) -> None:
    digest = results(FLOAT32, model)["digest"]
    assert digest == golden_of(model)["weights_sha256"], f"run tools/make_golden.py {model} (see its text)"


@pytest.mark.parametrize("model", MODELS)
def test_float32_gives_the_oracles_tokens_exactly(results: Run, model: str) -> None:
    golden = results(FLOAT32, model)["golden"]
    expected = [case["tokens"] for case in golden_of(model)["cases"]]
    assert golden["free"] == expected
    assert golden["forced"] == expected


@pytest.mark.parametrize(("setup", "model"), of_models(HALF_SETUPS))
def test_half_types_differ_from_the_oracle_only_at_ties(results: Run, setup: Setup, model: str) -> None:
    forced = results(setup, model)["golden"]["forced"]
    check_forced(golden_of(model)["cases"], forced, setup[0], MOST_TIES, f"{model} {'-'.join(setup)}")


@pytest.mark.parametrize(("setup", "model"), of_models(SETUPS))
def test_logits_equal_those_of_the_oracle(results: Run, setup: Setup, model: str) -> None:
    best = results(setup, model)["golden"]["best"]
    for case, steps in zip(golden_of(model)["cases"], best, strict=True):
        for step, text in case["logits"].items():
            top_ids, top_logits = steps[int(step)]
            row = np.frombuffer(base64.b64decode(text), "<f4")
            assert len(set(top_ids)) == MAX_TOP_LOGITS
            error = np.abs(row[top_ids] - np.array(top_logits, np.float32)).max()
            assert error < LOGIT_TOLERANCE[setup[0]] * case["logit_std"]


@pytest.mark.parametrize(("setup", "model"), of_models(FUSED_PARTNERS | INT8_CACHE_PARTNERS))
def test_quantised_native_differs_from_fused_only_at_ties(results: Run, setup: Setup, model: str) -> None:
    """Native and fused operators get the oracle's tokens as input. They choose different tokens only at a tie.

    At a tie, both tokens have nearly the oracle's best logit. The number of ties depends more on the model than on its
    operators. With random weights, int8 has many near ties. A slightly different rounding doubles or halves their
    number. The next test bounds the size of the errors.
    """
    partners = FUSED_PARTNERS | INT8_CACHE_PARTNERS
    native, fused = (results(each, model)["golden"]["forced"] for each in (setup, partners[setup]))
    gaps = []
    for case, ours, theirs in zip(golden_of(model)["cases"], native, fused, strict=True):
        for step, pair in enumerate(zip(ours, theirs, strict=True)):
            if pair[0] != pair[1]:
                best, logits = case["top_ids"][step], case["top_logits"][step]
                assert set(pair) <= set(best), f"token {step}: {pair} of {best}"
                gaps.append(abs(logits[best.index(pair[0])] - logits[best.index(pair[1])]) / case["logit_std"])
    print(f"{model} {'-'.join(setup)}: {len(gaps)} ties, widest {max(gaps, default=0):.2f} deviations")
    assert max(gaps, default=0) < 0.3


@pytest.mark.parametrize(("setup", "model"), of_models(ROUNDED_SETUPS))
def test_errors_do_not_exceed_rounding_between_operators(
    results: Run, numpy_folder: Callable[[str], Path], setup: Setup, model: str
) -> None:
    """Compares the errors of the best logits of every step (root mean square, relative to exact arithmetic).

    The error of the operators must not exceed the error of NumPy. NumPy is exact within an operator and rounds to the
    type between operators.
    """
    dtype, op_table, weights, _ = setup
    golden = results(setup, model)["golden"]
    is_native = op_table == "native"
    numpy_model = NumpyLlama(
        numpy_folder(model),
        "float" if weights == "auto" else weights,
        dtype,
        scale_dtype=dtype if is_native and weights == "int8_weight_only" else "float32",
        float_tied=is_native,
    )
    errors, allowed = [], []
    for case, tokens, steps in zip(golden_of(model)["cases"], golden["forced"], golden["best"], strict=True):
        assert tokens == [top_ids[0] for top_ids, _ in steps]
        known, first = case["prompt"] + case["tokens"][:-1], len(case["prompt"]) - 1
        exact = numpy_model.logits(known)[first:] / case["logit_std"]
        between = numpy_model.logits(known, dtype, dtype if is_native else "float32")[first:] / case["logit_std"]
        ids, logits = (np.array(column) for column in zip(*steps, strict=True))
        errors.append(logits / case["logit_std"] - np.take_along_axis(exact, ids, axis=1))
        ids = np.argsort(-between, axis=1)[:, :MAX_TOP_LOGITS]
        allowed.append(np.take_along_axis(between, ids, axis=1) - np.take_along_axis(exact, ids, axis=1))
    error, bound = (float(np.sqrt(np.mean(np.square(each)))) for each in (errors, allowed))
    print(f"{model} {'-'.join(setup)}: {error:.5f} deviations, {error / bound:.3f} times NumPy's")
    assert error <= bound * (MOST_FUSED_ERROR if op_table == "fused" and weights != "int8" else MOST_ERROR)


@pytest.mark.parametrize("model", MODELS)
def test_numpy_without_rounding_equals_the_oracle(numpy_folder: Callable[[str], Path], model: str) -> None:
    numpy_model = NumpyLlama(numpy_folder(model), "float", "float32")
    for case in golden_of(model)["cases"]:
        logits = numpy_model.logits(case["prompt"] + case["tokens"][:-1])[len(case["prompt"]) - 1 :]
        for step, text in case["logits"].items():
            row = np.frombuffer(base64.b64decode(text), "<f4")
            assert np.abs(row - logits[int(step)]).max() < LOGIT_TOLERANCE["float32"] * case["logit_std"]


def test_native_int4_predicts_the_tokens_of_the_trained_model(results: Run) -> None:
    """Native int4 is closer to the oracle than fused int4, because only fused int4 quantises activations."""

    def wrong(*setup: str) -> int:
        forced = results(setup, "tiny_llama")["golden"]["forced"]
        wanted = [token for case in golden_of("tiny_llama")["cases"] for token in case["tokens"]]
        given = [token for tokens in forced for token in tokens]
        return sum(a != b for a, b in zip(wanted, given, strict=True))

    native = wrong("bfloat16", "native", "int4", "int8")
    assert native <= 0.05 * 256
    assert native <= wrong("bfloat16", "fused", "int4", "int8")


@pytest.mark.parametrize(("setup", "model"), of_models(ALL_SETUPS))
def test_a_position_gives_the_same_bits_however_it_is_computed(results: Run, setup: Setup, model: str) -> None:
    check_position_bits(results(setup, model)["invariance"])


@pytest.mark.parametrize(("setup", "model"), of_models(NATIVE_SETUPS))
def test_replayed_steps_have_the_bits_of_the_graph(results: Run, setup: Setup, model: str) -> None:
    replays = results(setup, model)["replays"]
    assert replays["problems"] == ["", "", ""]
    assert replays["confirmed"] == ["chunked", "decode", "prefill"]
    for kind in replays["confirmed"]:
        assert GATED_PRODUCTS[setup[2]] in replays["fusions"][kind]
    assert len(set(replays["by the graph"])) == 60, "a sequence decodes alone as in a batch"
    assert replays["replayed"] == replays["replayed again"] == replays["by the graph"]
    by_the_graph = replays["prompts by the graph"]
    assert len(set(by_the_graph)) == 6 + 1 + 1, "the last token of a prompt must not depend on chunks"
    assert replays["prompts replayed"] == replays["prompts replayed again"] == by_the_graph
    assert replays["refused"] == ["the graph failed: ReshapeAndCache refused"] * 4


@pytest.mark.parametrize(("setup", "model"), of_models(NATIVE_SETUPS))
def test_sampling_on_the_device_gives_the_tokens_of_whole_logits(results: Run, setup: Setup, model: str) -> None:
    """Sampling with random parameters gives the same tokens from the device's candidates as from whole logits.

    The number of bytes fetched from the device does not grow with the vocabulary, except for whole logits.
    """
    sampling = results(setup, model)["sampling"]
    steps = sampling["steps"]
    assert [step["tokens"] for step in steps] == [step["of whole logits"] for step in steps]
    greedy, filtered, other = steps[:7], steps[7:14], steps[14:]
    sequence, row = 4 + 2, 2 * sampling["vocab"]
    assert {step["fetched"] for step in greedy} == {4 * sequence}
    candidates = 64 * (4 + 8) + 2 * 4
    assert {step["fetched"] for step in filtered} <= {4 * (sequence + candidates) + rows * row for rows in range(3)}
    assert max(step["fetched"] for step in other) > 4 * (sequence + candidates), "some sequences need whole logits"
    assert 128 * (sequence + candidates) <= 128 * 1024, "a step of 128 sequences, with any vocabulary"


@pytest.mark.parametrize(("setup", "model"), of_models(ALL_SETUPS))
def test_shared_copied_and_swapped_blocks_and_mixed_steps_change_no_bit(results: Run, setup: Setup, model: str) -> None:
    check_sharing_bits(results(setup, model)["sharing"])


@pytest.mark.parametrize("setup", of_setups(ALL_SETUPS))
def test_penalties_use_prompt_and_output(small_results: SmallRun, setup: Setup) -> None:
    rows = small_results(setup)["rows"]
    assert rows["tokens"] == rows["expected"]
    assert rows["plain"] == rows["plain_expected"]
    assert rows["tokens"] != rows["plain"]


@pytest.mark.parametrize("setup", of_setups(ALL_SETUPS))
def test_a_recomputed_sequence_continues_with_the_same_bits(small_results: SmallRun, setup: Setup) -> None:
    """A preempted sequence is recomputed in another batch row.

    The recomputed prompt includes the earlier output. The first step sends the tokens that the penalties count again.
    """
    rows = small_results(setup)["rows"]
    assert rows["resumed"] == rows["tokens"]


@pytest.mark.parametrize("setup", of_setups(ALL_SETUPS))
def test_a_row_may_start_with_a_decode_that_brings_its_history(small_results: SmallRun, setup: Setup) -> None:
    """After a swap, the cache has the tokens of the sequence, but its batch row is new.

    The first decode in this row sends the history: the tokens that the penalties count.
    """
    rows = small_results(setup)["rows"]
    assert rows["swapped"] == rows["tokens"]


REFUSALS = {
    "token_ids": "a step's token_ids holds 1536; it must be at least -1 and below 1536",
    "positions": "a step's positions holds 256; it must be at least 0 and below 256",
    "slot_mapping": "a step's slot_mapping holds 4096; it must be at least -1 and below 4096",
    "block_tables": "a step's block_tables holds -1; it must be at least 0 and below 256",
    "context_lens": "a step's context_lens holds 257; it must be at least 1 and below 257",
    "shorter context": "a sequence's context is shorter than its tokens in this step",
    "query_lens": "query_lens sum to 2, the step has 3 tokens",
    "last position": "a sequence's last position is not the last position of its context",
    "rows": "a step's rows holds 8; it must be at least 0 and below 8",
    "num_top_logits": "a step's num_top_logits holds 33; it must be at least -1 and below 33",
    "penalty without history": "row 0 samples its output token 0 with penalties, but its history has 0 prompt "
    "tokens and 0 output tokens",
    "history token": "a step's history holds 1536; it must be at least 0 and below 1536",
    "history prompt": "a step's history_lens and history_prompt_lens do not fit its history",
    "last token of a row without one": "a step asks for the last token of row 5, which has not sampled one",
    "decode of three tokens": "a decode step has 3 tokens for 1 sequences; it must have one each",
}


@pytest.mark.parametrize("wrong", REFUSALS)
def test_an_invalid_slot_is_refused(small_results: SmallRun, wrong: str) -> None:
    assert small_results(FLOAT32)["refusals"]["errors"][wrong] == REFUSALS[wrong]


@pytest.mark.parametrize("setup", of_setups(SETUPS))
def test_a_refused_slot_leaves_the_runner_unharmed(small_results: SmallRun, setup: Setup) -> None:
    refusals = small_results(setup)["refusals"]
    assert refusals["unharmed"]
    fused_alone = {"graph that did not run"} if setup[1] == "fused" else set()
    assert refusals["errors"].keys() == {*REFUSALS, "failing operator", *fused_alone}
    assert "no error" not in refusals["errors"].values()
    if fused_alone:
        assert "the graph failed: the output layer is at step" in refusals["errors"]["graph that did not run"]
    failure = refusals["errors"]["failing operator"]
    assert failure.startswith(
        "the graph failed: ReshapeAndCache refused" if setup[1] == "native" else "the graph failed: "
    )


MOVE_REFUSALS = {
    "kind": "move kinds holds 3; it must be at least 0 and below 3",
    "negative kind": "move kinds holds -1; it must be at least 0 and below 3",
    "copy from beyond": "move sources in the cache holds 256; it must be at least 1 and below 256",
    "copy to beyond": "move destinations in the cache holds 256; it must be at least 1 and below 256",
    "copy of the padding block": "move sources in the cache holds 0; it must be at least 1 and below 256",
    "copy to the padding block": "move destinations in the cache holds 0; it must be at least 1 and below 256",
    "out to beyond": "move destinations on the host holds 12; it must be at least 0 and below 12",
    "out from beyond": "move sources in the cache holds 256; it must be at least 1 and below 256",
    "in from beyond": "move sources on the host holds 12; it must be at least 0 and below 12",
    "in from before": "move sources on the host holds -1; it must be at least 0 and below 12",
    "in to beyond": "move destinations in the cache holds 256; it must be at least 1 and below 256",
}


@pytest.mark.parametrize("setup", [FLOAT32, ("bfloat16", "native", "auto", "auto")], ids="-".join)
def test_an_invalid_move_is_refused_and_nothing_is_moved(small_results: SmallRun, setup: Setup) -> None:
    moves = small_results(setup)["moves"]
    empty = "a prefill or decode step has no tokens; only a step of moves may have none"
    assert moves["errors"] == {
        **{name: f"a step's {text}" for name, text in MOVE_REFUSALS.items()},
        "tokens": "a step of moves has 3 tokens; it must have none",
        "no tokens in a prefill": empty,
        "no tokens in a decode": empty,
    }
    assert moves["unharmed"]


@pytest.mark.parametrize("setup", [FLOAT32, ("bfloat16", "native", "auto", "auto")], ids="-".join)
def test_progress_and_summary(small_results: SmallRun, setup: Setup) -> None:
    dtype, op_table = setup[:2]
    run = small_results(setup)
    # The fused operators pack a second copy of an output weight that is tied to the embedding.
    parameters = 21 if op_table == "fused" else 20
    load = [["load", done, parameters] for done in range(parameters + 1)]
    steps = 2 if op_table == "fused" else 3  # the fused op table has one graph for whole prompts and for chunks
    rest = [["compile", 0, 1], ["compile", 1, 1], *[["warm up", done, steps] for done in range(steps + 1)]]
    assert run["stages"] == load + rest
    summary, element = run["summary"], 4 if dtype == "float32" else 2
    assert (summary["device"], summary["op_table"], summary["dtype"]) == ("CPU", op_table, dtype)
    packed = 1536 * 192 * element + 13 * 64 if op_table == "fused" else 0  # each packed weight has a header of 64 bytes
    assert summary["weight_bytes"] == 1_475_904 * element + packed
    assert summary["kv_cache_bytes"] == 3 * 2 * 256 * 16 * 2 * 32 * element
    assert summary["host_kv_cache_bytes"] == 3 * 2 * 12 * 16 * 2 * 32 * element
    assert summary["huge_page_bytes"] >= 0
    assert summary.keys() >= {"kernel_isa", "cpu_threads", "load_seconds", "compile_seconds", "warm_up_seconds"}


def test_one_thread_computes_a_small_step_and_all_threads_what_follows(small_results: SmallRun) -> None:
    run = small_results(FLOAT32)
    assert run["quiet"] == {"changes": [True, False], "weight_bytes": run["summary"]["weight_bytes"]}
