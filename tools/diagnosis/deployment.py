"""Checks the config: validity, model, tokenizer, ports and log."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_serving.access.listening import bound_socket
from llm_serving.config import Config, load_config
from llm_serving.config.hardware import has_ascend
from llm_serving.engine.tokenizer_backends import load_tokenizer
from llm_serving.errors import HubError, LLMServingError
from llm_serving.hub.fetching import cached_draft
from llm_serving.ipc.exchange import exchange_bytes
from llm_serving.ipc.shm import NUM_SLOTS, SlotLayout
from llm_serving.planning.auto_blocks import fit_sizes
from llm_serving.planning.machine import Machine
from llm_serving.planning.rank_memory import format_bytes
from tools.diagnosis.finding import Finding, ok, problem, warning
from tools.diagnosis.host import Host

_WEIGHTS = ("*.safetensors", "*.gguf")


@dataclass(frozen=True, slots=True)
class Deployment:
    """The config that the doctor examines, and the findings from loading it."""

    config: Config | None
    """The loaded config, or None if it is wrong."""
    wants_ascend: bool
    findings: tuple[Finding, ...]


def look_at_config(host: Host, name: str, overrides: Sequence[str]) -> Deployment:
    """Loads the config as the server would. A config for an Ascend can also be loaded on a machine without an Ascend.
    """
    ascend = has_ascend(host.environment, host.path("/dev"))
    try:
        config = fit_sizes(load_config(name, overrides, ascend=ascend, fetch=cached_draft), Machine.detect())
    except LLMServingError as error:
        return _refused(name, overrides, ascend, error)
    findings = [ok("config", f"{config.file}: {config.model_name} on {config.device}, {config.op_table} operators")]
    findings += [warning("config", note, "check whether this is intended") for note in config.notes]
    return Deployment(config, config.device == "Ascend", tuple(findings))


def _refused(name: str, overrides: Sequence[str], ascend: bool, error: LLMServingError) -> Deployment:
    reason = str(error)
    advice = "correct the name, or let a server download the model" if isinstance(error, HubError) else "correct it"
    finding = problem("config", reason, f"{advice}; docs/configuration.md lists all keys")
    if ascend:
        return Deployment(None, False, (finding,))
    try:
        config = load_config(name, overrides, ascend=True, fetch=cached_draft)
    except LLMServingError:
        return Deployment(None, False, (finding,))
    advice = "see NPU, driver and CANN below, or set model_config.device_target: CPU"
    return Deployment(config, True, (problem("config", reason, advice),))


def num_agents(config: Config) -> int:
    """Returns the number of agents of all replicas."""
    return config.parallel_config.world_size


def shared_bytes(config: Config) -> int:
    """Returns the bytes of shared memory of all agents: step slots, and the memory through which the agents of a group
    exchange data.
    """
    limits, parallel = config.slot_limits(), config.parallel_config
    slots = SlotLayout.of(limits).slot_bytes * NUM_SLOTS
    return (slots + exchange_bytes(config.shape, limits, parallel)) * parallel.data_parallel


def check_agents(config: Config) -> Iterator[Finding]:
    """Reports the numbers of replicas, pipeline stages and agents. With a single agent, there is no finding."""
    parallel = config.parallel_config
    if parallel.world_size == 1:
        return
    text = (
        f"{parallel.world_size}: {parallel.data_parallel} replicas of {parallel.pipeline_parallel} stages of "
        f"{parallel.tensor_parallel} agents"
    )
    yield ok("agents", text)


def check_model(config: Config) -> Iterator[Finding]:
    """Checks that the weight files can be read and are not empty. Random weights need no folder."""
    path = config.model_config.model_path
    if config.model_config.load_format == "dummy" or path is None:
        yield ok("model", f"random weights of {config.shape.architecture}'s sizes")
        return
    place = Path(path)
    files = [place] if place.is_file() else sorted(file for pattern in _WEIGHTS for file in place.glob(pattern))
    unreadable = [file.name for file in files if not os.access(file, os.R_OK)]
    empty = [file for file in files if file.stat().st_size < 1024 and not unreadable]
    size = format_bytes(sum(file.stat().st_size for file in files))
    if unreadable:
        yield problem("model", f"{path}: {unreadable[0]} is not readable", f"chmod or chown it for user {os.getuid()}")
    elif empty:
        text = f"{path}: {empty[0].name} has {empty[0].stat().st_size} bytes"
        yield problem("model", text, "the file is a Git LFS pointer or truncated: git lfs pull, or download it again")
    else:
        yield ok("model", f"{path}: {len(files)} {'file' if len(files) == 1 else 'files'} of weights, {size}")


def check_tokenizer(config: Config) -> Iterator[Finding]:
    """Loads the tokenizer and compares its vocabulary with the model's."""
    try:
        tokenizer = load_tokenizer(config)
    except (LLMServingError, OSError) as error:
        yield problem("tokenizer", str(error), "download the tokenizer again, or set tokenizer.vocab_file")
        return
    text = f"{config.tokenizer_file}: {tokenizer.vocab_size} tokens"
    if tokenizer.vocab_size > config.shape.vocab_size:
        advice = "it belongs to another model: prompts could have tokens that the model does not know"
        yield problem("tokenizer", f"{text}; the model has {config.shape.vocab_size}", advice)
    elif tokenizer.chat_template.is_missing:
        yield warning(
            "tokenizer", f"{text}, no chat template", "/v1/chat/completions is not available; /v1/completions works"
        )
    else:
        yield ok("tokenizer", text)


def check_ports(config: Config) -> Iterator[Finding]:
    """Checks whether the config's ports are free."""
    settings = config.serving_config
    wanted = [("server_port", settings.server_ip, settings.server_port)]
    wanted += [("agent_ports", settings.agent_ip, port) for port in settings.agent_ports]
    taken = [(key, ip, port, reason) for key, ip, port in wanted if port and (reason := _cannot_bind(ip, port))]
    for key, ip, port, reason in taken:
        advice = f"ss -ltnp 'sport = :{port}' shows the process; or --set serving_config.{key}=... (0: any free port)"
        yield problem("ports", f"serving_config.{key}: {ip}:{port}: {reason}", advice)
    if not taken:
        named = ", ".join(str(port) for _, _, port in wanted if port)
        yield ok("ports", f"free: {named}" if named else "any free port")


def _cannot_bind(ip: str, port: int) -> str:
    """Returns why a socket cannot be bound to the address, or an empty text. The socket never listens."""
    try:
        bound_socket(ip, port).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_log(config: Config) -> Iterator[Finding]:
    """Checks that the log file is writable. If there is no log file, checks the nearest existing folder above it."""
    path = Path(config.log_config.path).absolute()
    folder = next(parent for parent in path.parents if parent.exists())
    place = path if path.exists() else folder
    if os.access(place, os.W_OK):
        yield ok("log", str(path))
    else:
        yield problem("log", f"{place} is not writable", "set log_config.path to a file that this user can write")
