"""Tests the simulated times of steps.

The tests cover counts of tokens, the roofline, presets of devices, and the order of the agent's queue.
"""

import math

import pytest

from llm_serving.config import load_config
from llm_serving.scheduler.output import BlockMove, MoveKind, ScheduledStep, StepKind
from performance.simulation.agent import VirtualAgent, agent_order
from performance.simulation.device import DeviceRates, RooflineDevice
from performance.simulation.presets import ASCEND_910B, CUBE_FLOPS
from performance.simulation.setup import simulated_config
from performance.simulation.work import ModelWork, StepWork, work_of

RATES = DeviceRates(
    name="test",
    operations_per_s={"float16": 1000.0},
    attention_share=0.5,
    memory_bytes_per_s=100.0,
    attention_bytes_per_s=50.0,
    host_bytes_per_s=10.0,
    copy_bytes_per_s=20.0,
    step_overhead_s=1.0,
    sample_row_s=0.25,
    kernel_launch_s=0.5,
    kernels_per_layer=3,
    kernels_per_step=2,
    move_overhead_s=0.125,
    block_overhead_s=0.5,
)
MODEL = ModelWork(
    num_layers=2,
    weight_unit="float16",
    float_unit="float16",
    layer_bytes=400.0,
    layer_operations=500.0,
    head_bytes=100.0,
    head_operations=1000.0,
    kv_token_bytes=50.0,
    pair_operations=250.0,
    activation_bytes=10.0,
    logit_bytes=40.0,
    block_bytes=60.0,
)
DEVICE = RooflineDevice(RATES, MODEL)


def decode(*starts: int) -> ScheduledStep:
    count = len(starts)
    return ScheduledStep(
        0, StepKind.DECODE, rows=list(range(count)), token_ids=[1] * count, query_lens=[1] * count,
        starts=list(starts), do_sample=[True] * count,
    )  # fmt: skip


def prefill(*chunks: tuple[int, int, bool]) -> ScheduledStep:
    return ScheduledStep(
        0, StepKind.PREFILL, rows=list(range(len(chunks))), token_ids=[1] * sum(length for _, length, _ in chunks),
        query_lens=[length for _, length, _ in chunks], starts=[start for start, _, _ in chunks],
        do_sample=[samples for _, _, samples in chunks],
    )  # fmt: skip


def test_the_counts_of_a_step() -> None:
    assert work_of(decode(4, 9)) == StepWork(StepKind.DECODE, 2, 2, 2, context=15, pairs=15)
    # A pair is a query and a key that it sees. Positions 0 to 2 see 1 + 2 + 3 keys, and positions 10 to 13 see 11 + 12
    # + 13 + 14.
    assert work_of(prefill((0, 3, True), (10, 4, False))) == StepWork(StepKind.PREFILL, 7, 2, 1, context=17, pairs=56)
    assert work_of(prefill((0, 1, True))).pairs == 1


def test_a_small_decode_step_is_bound_by_reading_and_a_large_one_by_computing() -> None:
    # One row: 1 s for the step, 4 s for weights, 1 s for the output layer, 5 s for 5 keys. Activations and logits take
    # 0.5 s, and the row 0.25 s. Launching 8 kernels takes 4 s, which is less.
    assert DEVICE.seconds(decode(4)) == pytest.approx(1.0 + 4.0 + 1.0 + 5.0 + 0.5 + 0.25)
    # Ten rows in the linear layers: the products take 5 s and reading the weights takes 4 s. The longer time counts. In
    # the output layer, the products take 10 s and reading takes 1 s, so 10 s count.
    assert DEVICE.seconds(decode(*[0] * 10)) == pytest.approx(1.0 + 5.0 + 10.0 + 10.0 + 5.0 + 2.5)


def test_a_prompt_computes_pairs_and_only_its_last_chunk_the_output_layer() -> None:
    whole = DEVICE.seconds(prefill((0, 10, True)))
    assert whole == pytest.approx(1.0 + 5.0 + 1.0 + 55 * 250.0 / 500.0 + 1.0 + 0.4 + 0.25)
    assert DEVICE.seconds(prefill((0, 10, False))) == pytest.approx(whole - 1.0 - 0.4 - 0.25)


def test_a_step_takes_at_least_as_long_as_its_kernel_launches() -> None:
    slow_host = RooflineDevice(DeviceRates(**(_values(RATES) | {"kernel_launch_s": 10.0})), MODEL)
    assert slow_host.seconds(decode(4)) == 1.0 + 8 * 10.0


def test_reading_and_computing_can_overlap_partially() -> None:
    # Seconds for products and for reads: 2.5 and 4 in linear layers, 5 and 1 in the output layer, 2.5 and 5 in
    # attention.
    rest = 1.0 + 5 * 0.1 + 5 * 0.4 + 5 * 0.25
    for overlap, seconds in (
        (math.inf, 4.0 + 5.0 + 5.0),
        (2.0, math.hypot(2.5, 4.0) + math.hypot(5.0, 1.0) + math.hypot(2.5, 5.0)),
        (1.0, 6.5 + 6.0 + 7.5),
    ):
        device = RooflineDevice(DeviceRates(**(_values(RATES) | {"overlap": overlap})), MODEL)
        assert device.seconds(decode(*[0] * 5)) == pytest.approx(rest + seconds)


def test_block_moves_take_their_bytes_over_the_transfer_rate() -> None:
    step = ScheduledStep(0, StepKind.MOVE, moves=[BlockMove(MoveKind.SWAP_OUT, 1, 2), BlockMove(MoveKind.COPY, 3, 4)])
    assert DEVICE.seconds(step) == 0.125 + (0.5 + 6.0) + (0.5 + 3.0)
    with_rows = decode(4)
    with_rows.moves = [BlockMove(MoveKind.SWAP_IN, 1, 2)]
    assert DEVICE.seconds(with_rows) == DEVICE.seconds(decode(4)) + 6.5


def test_the_work_of_llama_2_7b_matches_its_size() -> None:
    config = simulated_config("llama_7b_kbk_pa_dyn.yaml", [], "ascend-910b")
    model, shape = ModelWork.of(config), config.shape
    assert model.layer_bytes + model.head_bytes == 2 * shape.num_linear_parameters
    assert model.layer_operations + model.head_operations == 2 * shape.num_linear_parameters
    assert (model.kv_token_bytes, model.block_bytes) == (512 * 1024, 8 * 1024 * 1024)
    assert model.pair_operations == 4 * 32 * 4096


def test_the_ascend_reads_7b_in_ten_milliseconds() -> None:
    config = simulated_config("llama_7b_kbk_pa_dyn.yaml", [], "ascend-910b")
    device = RooflineDevice(ASCEND_910B, ModelWork.of(config))
    assert pytest.approx(353.9e12, rel=1e-3) == CUBE_FLOPS
    weights_s = 2 * config.shape.num_linear_parameters / ASCEND_910B.memory_bytes_per_s
    one = device.seconds(decode(100))
    assert weights_s == pytest.approx(10.3e-3, rel=0.02)
    assert weights_s + ASCEND_910B.step_overhead_s < one < weights_s + ASCEND_910B.step_overhead_s + 0.5e-3


def test_a_config_is_loaded_as_on_the_simulated_device() -> None:
    assert simulated_config("llama_7b_kbk_pa_dyn.yaml", [], "ascend-910b").device == "Ascend"
    tiny = simulated_config("llama_tiny_cpu.yaml", [], "cpu")
    assert tiny == load_config("llama_tiny_cpu.yaml", ascend=False)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("prefill_first", ["move", "prefill", "mixed", "decode"]),
        ("decode_first", ["move", "decode", "prefill", "mixed"]),
        ("fcfs", ["move", "prefill", "decode", "mixed"]),
        ("slo", ["move", "prefill", "decode", "mixed"]),
    ],
)
def test_the_agents_queue_runs_in_the_order_of_the_policy(policy: str, order: list[str]) -> None:
    class OneSecond:
        name = "one second"

        def seconds(self, step: ScheduledStep) -> float:
            return 1.0

    agent = VirtualAgent(OneSecond(), policy, lambda step: [])
    for seq, kind in enumerate((StepKind.PREFILL, StepKind.DECODE, StepKind.MIXED, StepKind.MOVE)):
        agent.submit(ScheduledStep(seq, kind), ready=0.0)
    kinds = ["prefill", "decode", "mixed", "move"]
    assert [kinds[result.seq] for _, result in agent.run_until(10.0)] == order


def test_a_running_step_is_not_overtaken() -> None:
    class OneSecond:
        name = "one second"

        def seconds(self, step: ScheduledStep) -> float:
            return 1.0

    agent = VirtualAgent(OneSecond(), "prefill_first", lambda step: [])
    agent.submit(ScheduledStep(0, StepKind.DECODE), ready=0.0)
    assert agent.next_result() == 1.0
    assert agent.run_until(0.5) == []
    agent.submit(ScheduledStep(1, StepKind.DECODE), ready=0.6)
    agent.submit(ScheduledStep(2, StepKind.PREFILL), ready=0.7)
    assert [(time, result.seq) for time, result in agent.run_until(9.0)] == [(1.0, 0), (2.0, 2), (3.0, 1)]
    assert agent.next_result() is None
    agent.submit(ScheduledStep(3, StepKind.PREFILL), ready=5.0)
    assert agent.next_result() == 6.0
    assert agent_order("chunked")["move"] == 0


def _values(rates: DeviceRates) -> dict[str, object]:
    return {name: getattr(rates, name) for name in rates.__dataclass_fields__}
