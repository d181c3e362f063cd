"""Tests the metrics under the names of vLLM: which names exist, and that their values equal the server's metrics."""

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llm_serving.lora.registry import Adapter, AdapterRegistry
from llm_serving.request import FinishReason, RequestOutput, RequestTimings
from llm_serving.telemetry.adapter_metrics import AdapterCollector
from llm_serving.telemetry.metrics import Metrics
from llm_serving.telemetry.vllm_names import LORA_INFO, VLLM_NAMES
from support.fake_engine import make_status

LABELS = {"model_name": "llama", "engine": "0"}
TIMINGS = RequestTimings(queue=0.1, prefill=0.2, decode=0.25, e2e=0.9, ttft=0.3, tpot=0.2)


def samples(metrics):
    """Returns the value of each sample of the exposition. The key is the name and the labels."""
    families = text_string_to_metric_families(metrics.exposition().decode())
    every = [sample for family in families for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in every}


@pytest.fixture
def metrics():
    metrics = Metrics(process=False, vllm_model="llama")
    metrics.bind(make_status)
    metrics.first_token(0.3)
    metrics.request_end(RequestOutput("r", "", (), (), 10, 4, FinishReason.STOP), FinishReason.STOP, TIMINGS)
    metrics.preemptions(3, 1)
    return metrics


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("vllm:num_requests_running", "llm_serving_requests_running"),
        ("vllm:num_requests_waiting", "llm_serving_requests_waiting"),
        ("vllm:kv_cache_usage_perc", "llm_serving_kv_usage_ratio"),
        ("vllm:gpu_cache_usage_perc", "llm_serving_kv_usage_ratio"),
        ("vllm:time_to_first_token_seconds_sum", "llm_serving_time_to_first_token_seconds_sum"),
        ("vllm:inter_token_latency_seconds_count", "llm_serving_time_per_output_token_seconds_count"),
        ("vllm:time_per_output_token_seconds_sum", "llm_serving_time_per_output_token_seconds_sum"),
        ("vllm:e2e_request_latency_seconds_sum", "llm_serving_request_seconds_sum"),
        ("vllm:prompt_tokens_total", "llm_serving_prompt_tokens_total"),
        ("vllm:generation_tokens_total", "llm_serving_generated_tokens_total"),
    ],
)
def test_a_copy_has_the_value_of_its_source(metrics, name, source):
    found = samples(metrics)
    assert found[name, frozenset(LABELS.items())] == found[source, frozenset()]


def test_every_name_of_the_table_is_exposed(metrics):
    families = {name for name, _ in samples(metrics)}
    for row in VLLM_NAMES:
        assert families & {row.name, f"{row.name}_count"}, row.name


def test_a_histogram_keeps_its_buckets(metrics):
    found = samples(metrics)
    for bound, count in (("0.5", 0), ("1.0", 1), ("+Inf", 1)):
        labels = frozenset({**LABELS, "le": bound}.items())
        assert found["vllm:e2e_request_latency_seconds_bucket", labels] == count


def test_a_label_is_renamed_or_its_samples_are_added(metrics):
    found = samples(metrics)
    assert found["vllm:request_success_total", frozenset({**LABELS, "finished_reason": "stop"}.items())] == 1
    assert found["vllm:request_success_total", frozenset({**LABELS, "finished_reason": "error"}.items())] == 0
    assert found["vllm:num_preemptions_total", frozenset(LABELS.items())] == 3


def test_loaded_adapters_are_labels(metrics):
    """The endpoint picker of the Gateway API Inference Extension reads these labels."""
    names = {name for name, _ in samples(metrics)}
    assert "vllm:lora_requests_info" not in names
    adapters = AdapterRegistry(max_adapters=4)
    for name in ("sql", "mail"):
        adapters.add(Adapter(name, "/adapters", b"", adapters.take_slot()))
    sql = adapters.find("sql")
    assert sql is not None
    adapters.acquire(sql)
    metrics.registry.register(AdapterCollector(lambda: adapters))
    before = time.time()
    found = samples(metrics)
    assert found["llm_serving_adapter_slots", frozenset()] == 4
    requests = [found["llm_serving_adapter_requests", frozenset({("adapter", name)})] for name in ("mail", "sql")]
    assert requests == [0, 1]
    [(labels, value)] = [(dict(labels), value) for (name, labels), value in found.items() if name == LORA_INFO.name]
    assert labels == {"max_lora": "4", "running_lora_adapters": "mail,sql", "waiting_lora_adapters": ""}
    assert before <= value <= time.time()


def test_without_the_setting_there_are_no_copies():
    assert b"vllm:" not in Metrics(process=False).exposition()


def test_before_the_engine_has_a_status_its_gauges_are_missing():
    names = {name for name, _ in samples(Metrics(process=False, vllm_model="llama"))}
    assert "vllm:num_requests_running" not in names
    assert "vllm:prompt_tokens_total" in names
