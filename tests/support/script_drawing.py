"""Draws random scripts for the scheduler: any legal limits, and requests that compete for blocks and batch rows."""

from __future__ import annotations

import random
from typing import Any

from support.fakes import END_TOKEN, VOCABULARY, expected_tokens, make_request
from support.scheduler_scripts import Operation, Script

BLOCK_SIZES = [1, 1, 2, 2, 3, 4, 4, 5, 8, 8, 16, 32, 64, 128]
POLICIES = ["prefill_first", "fcfs", "decode_first", "chunked", "slo"]
BATCHINGS = [*["continuous"] * 7, "dynamic", "static", "none"]

_FAMILIES = [[2 + (7 * place + 11 * family) % (VOCABULARY - 2) for place in range(400)] for family in range(3)]
"""Prompts with common beginnings, so that the prefix cache has hits."""


def draw_limits(rng: random.Random) -> dict[str, Any]:
    """Draws limits for the scheduler. In about half of the draws, running requests compete for blocks."""
    limits = _any_limits(rng)
    if rng.random() < 0.5:
        block_size, usable = rng.choice([1, 1, 2, 3, 4, 8]), rng.choice([39, 40, 40, 41, 44, 52])
        limits |= {
            "block_size": block_size,
            "num_blocks": 1 + -(-usable // block_size),
            "max_model_len": 40,
            "max_prompt_len": 40,
            "max_num_seqs": rng.choice([3, 5, 8]),
            "max_num_batched_tokens": rng.choice([6, 16, 40, 100]),
            "decode_batch_size": rng.choice([2, 8, 8]),
            "batching": "continuous",
            "page_attention": True,
            "prefix_cache": rng.random() < 0.5,
            "preemption": rng.choice(["recompute", "swap", "swap", "swap", "auto"]),
            "num_host_blocks": -(-rng.choice([20, 60, 200]) // block_size),
            "admission": rng.choice(["none", "none", "none", "aimd"]),
            "max_waiting_requests": 1000,
            "max_waiting_tokens": None,
        }
    return limits


def _any_limits(rng: random.Random) -> dict[str, Any]:
    """Draws limits from very tight to generous.

    The pool may be too small for the longest sequence, which is then refused. Usually the pool has a few more blocks
    than the longest sequence needs.
    """
    max_model_len = rng.choice([4, 17, 40, 40, 64, 64, 100])
    block_size = rng.choice(BLOCK_SIZES)
    longest = -(-(max_model_len - 1) // block_size)
    spare = rng.choice([-1, 0, 0, 1, 2, longest, longest, 7 * longest])
    page_attention = rng.random() < 0.85
    return {
        "num_blocks": 1 + max(1, longest + spare),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_prompt_len": max(1, max_model_len // rng.choice([1, 1, 1, 1, 2])),
        "max_num_seqs": rng.choice([1, 2, 3, 3, 5, 5, 8, 8]),
        "max_num_batched_tokens": rng.choice([1, 5, 16, 32, max_model_len, max_model_len, 200, 200]),
        "prefill_batch_size": rng.choice([1, 2, 4]),
        "decode_batch_size": rng.choice([1, 2, 6, 8]),
        "policy": rng.choice(POLICIES),
        "batching": rng.choice(BATCHINGS),
        "batch_size": rng.choice([None, 1, 3]),
        "page_attention": page_attention,
        "prefix_cache": page_attention and rng.random() < 0.7,
        "preemption": rng.choice(["recompute", "swap", "swap", "auto"]),
        "num_host_blocks": rng.choice([0, 1, longest, 4 * longest, 4 * longest]),
        "admission": rng.choice(["none", "none", "none", "router", "aimd"]),
        "max_total_tokens": rng.choice([None, None, 20, 200]),
        "predict_output_length": rng.random() < 0.5,
        "chunk_tokens": rng.choice([None, 1, 2, 7, 20]),
        "decode_steps_ahead": rng.randrange(4),
        "batch_waiting_time": rng.choice([0.0, 0.0, 0.01]),
        "decode_batch_waiting_time": rng.choice([0.0, 0.0, 0.01]),
        "max_waiting_requests": rng.choice([1, 1000, 1000, 1000, 1000]),
        "max_waiting_tokens": rng.choice([None, None, None, None, 50]),
        "fairness": rng.random() < 0.7,
        "ttft_objective": rng.choice([0.001, 0.02, 2.0]),
        "tbt_objective": rng.choice([0.0005, 0.002, 0.2]),
    }


class _Requests:
    """Draws the requests of one script. Some continue an earlier request's prompt and output, as in a chat."""

    def __init__(self, rng: random.Random, limits: dict[str, Any]) -> None:
        self._rng = rng
        self._limits = limits
        self._answers: list[list[int]] = []
        self._tenants = rng.choice([[""], ["a"], ["", "a"], ["a", "b", "c"]])
        self._salts = rng.choice([[""], [""], ["x", "y"]])
        self._priorities = rng.choice([[0], [0], [0, 1], [-1, 0, 2]])
        self._deadlines = rng.choice([0.0, 0.0, 0.2])
        pressed = limits["num_blocks"] * limits["block_size"] < 2 * limits["max_model_len"]
        self._longest_prompt = rng.choice([1.0, 0.4, 0.2, 0.1][pressed:])
        self._longest_answer = rng.choice([2, 15, 40, 100][pressed:])
        self.names: list[str] = []

    def next(self) -> Operation:
        rng, name = self._rng, f"r{len(self.names)}"
        self.names.append(name)
        request: dict[str, Any] = {"prompt": self._prompt(), "max_tokens": rng.randint(1, self._longest_answer)}
        optional: list[tuple[str, Any, float]] = [
            ("ignore_eos", False, 0.4),
            ("stop_token_ids", [END_TOKEN + rng.randrange(1, 6)], 0.2),
            ("presence_penalty", 0.5, 0.25),
            ("seed", len(self.names), 0.3),
            ("top_logits", 2, 0.1),
            ("deadline", rng.choice([0.0, 0.004, 0.03]), self._deadlines),
            ("ttft_objective", rng.choice([0.0005, 0.01, 5.0]), 0.2),
            ("tbt_objective", rng.choice([0.0003, 0.003, 1.0]), 0.2),
        ]
        request |= {key: value for key, value, chance in optional if rng.random() < chance}
        for key, choices in (("tenant", self._tenants), ("cache_salt", self._salts), ("priority", self._priorities)):
            value = rng.choice(choices)
            if value:
                request[key] = value
        self._remember(request)
        return "add", name, request

    def _prompt(self) -> list[int]:
        rng, longest = self._rng, self._limits["max_model_len"]
        kind = rng.random()
        if kind < 0.25 and self._answers:
            prompt = list(rng.choice(self._answers))
            return prompt[: rng.choice([len(prompt), rng.randint(1, len(prompt))])]
        length = self._length(longest)
        if kind < 0.7:
            prompt = _FAMILIES[rng.randrange(3)][:length]
            if rng.random() < 0.4:
                prompt = prompt[: rng.randint(1, length)] + [rng.randrange(2, VOCABULARY) for _ in range(length)]
            return prompt[: max(1, longest - 1)]
        return [rng.randrange(2, VOCABULARY) for _ in range(length)]

    def _length(self, longest: int) -> int:
        """Returns a prompt length, often exactly at a block border or one token away from it."""
        rng = self._rng
        if rng.random() < 0.4:
            length = self._limits["block_size"] * rng.randint(1, 3) + rng.choice([-1, 0, 1])
        else:
            length = rng.randint(1, max(1, int(longest * self._longest_prompt)))
        return min(max(1, length), longest if rng.random() < 0.02 else longest - 1)

    def _remember(self, request: dict[str, Any]) -> None:
        fields = {k: v for k, v in request.items() if k in ("ignore_eos", "presence_penalty", "seed", "stop_token_ids")}
        fields["stop_token_ids"] = frozenset(fields.get("stop_token_ids", ()))
        alone = make_request("alone", request["prompt"], request["max_tokens"], **fields)
        if len(request["prompt"]) < self._limits["max_model_len"]:
            text = request["prompt"] + expected_tokens(alone, self._limits["max_model_len"])
            self._answers.append(text[: self._limits["max_model_len"] - 1])


def draw_script(seed: int) -> Script:
    """Draws the script of a seed. Scripts differ in load, deadlines and losses of agents."""
    rng = random.Random(seed)
    limits = draw_limits(rng)
    requests = _Requests(rng, limits)
    weights = {
        "add": rng.choice([1.0, 2.0, 6.0]),
        "schedule": 2.0,
        "run": 2.0,
        "begin": rng.choice([0.0, 1.0]),
        "answer": rng.choice([1.0, 3.0]),
        "go_on": rng.choice([0.0, 2.0, 4.0]),
        "rounds": rng.choice([0.0, 1.0, 3.0]),
        "wait": rng.choice([0.2, 1.0]),
        "end": rng.choice([0.0, 0.3, 1.5]),
        "fail": rng.choice([0.0, 0.0, 0.2]),
        "skip": rng.choice([0.0, 0.0, 0.4]),
        "lose": rng.choice([0.0, 0.0, 0.2, 0.6]),
        "fail_all": 0.02,
        "drop": 0.1,
        "finish": rng.choice([0.0, 0.1]),
    }
    names = list(weights)
    chosen = rng.choices(names, [weights[name] for name in names], k=rng.choice([20, 60, 150]))
    return Script(limits, [_draw_operation(name, rng, requests) for name in chosen])


def draw_state_script(seed: int) -> Script:
    """Draws a script for a model with linear attention, whose prefix cache needs snapshots of states."""
    script, rng = draw_script(seed), random.Random(seed)
    states = {"num_state_snapshots": rng.choice([1, 2, 5, 30]), "preemption": "recompute", "num_host_blocks": 0}
    block_size = rng.choice([1, 2, 3, 4])
    num_blocks = 1 + -(-script.limits["num_blocks"] * script.limits["block_size"] // block_size)
    paged = {"page_attention": True, "prefix_cache": True, "block_size": block_size, "num_blocks": num_blocks}
    return Script(script.limits | states | paged, script.operations)


def _draw_operation(name: str, rng: random.Random, requests: _Requests) -> Operation:
    if name == "add" or (name == "end" and not requests.names):
        return requests.next()
    if name in ("run", "answer"):
        return name, rng.randint(1, 3)
    if name in ("go_on", "rounds"):
        return name, rng.choice([1, 3, 10])
    if name == "wait":
        return name, rng.choice([0.001] * 6 + [0.02] * 4 + [3.0, 40.0])
    if name == "end":
        return name, rng.choice(requests.names[-12:]), rng.choice(["abort", "stop"]), rng.random() < 0.5
    return (name,)
