"""Runs all checks of a machine against a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tools.diagnosis import cann, npu, software
from tools.diagnosis.finding import Finding, problem
from tools.diagnosis.host import Host

if TYPE_CHECKING:
    from llm_serving.config import Config


Result = TypeVar("Result")


def examine(host: Host, config_name: str, overrides: Sequence[str]) -> list[Finding]:
    """Runs all checks and returns their findings in the order of the report. An exception in a check becomes a finding.
    """
    pins = software.pinned_packages((software.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    others = {name: pin for name, pin in pins.items() if name != "mindspore"}
    findings = [*_guarded(software.check_python), *_guarded(lambda: software.check_packages(others))]
    mindspore, found = _attempt(lambda: software.check_mindspore(host, pins["mindspore"]), None)
    findings += [*found, *_guarded(lambda: software.check_kernels(host))]
    (config, wants_ascend), config_findings = _attempt(lambda: _look(host, config_name, overrides), (None, False))
    state, found = _attempt(lambda: npu.look_at_npus(host, wants_ascend), npu.NpuState((), None))
    findings += found
    installed, found = _attempt(lambda: cann.check_cann(host, wants_ascend), None)
    findings += [*found, *_guarded(lambda: cann.check_pairing(installed, state.driver, mindspore)), *config_findings]
    if config is not None:
        findings += _for_config(host, config, state, mindspore is not None)
    return findings


def _look(host: Host, name: str, overrides: Sequence[str]) -> tuple[tuple[Config | None, bool], list[Finding]]:
    try:
        from tools.diagnosis.deployment import look_at_config
    except ImportError as error:
        return (None, False), [problem("config", f"cannot be checked: {error}", "make setup")]
    deployment = look_at_config(host, name, overrides)
    return (deployment.config, deployment.wants_ascend), list(deployment.findings)


def _for_config(host: Host, config: Config, state: npu.NpuState, has_mindspore: bool) -> list[Finding]:
    """Runs the checks of memory, model, ports and devices, which need a valid config."""
    from tools.diagnosis import deployment, resources

    plan, findings = _attempt(lambda: resources.check_memory(host, config), None)
    agents = deployment.num_agents(config)
    checks: list[Callable[[], Iterable[Finding]]] = [
        lambda: deployment.check_agents(config),
        lambda: resources.check_shared_memory(host, deployment.shared_bytes(config), agents),
        lambda: resources.check_cores(host, config),
        lambda: resources.check_huge_pages(host, config),
        lambda: resources.check_open_files(host, config),
        lambda: deployment.check_model(config),
        lambda: deployment.check_tokenizer(config),
        lambda: deployment.check_ports(config),
        lambda: deployment.check_log(config),
    ]
    if config.device == "Ascend" and state.device_files:
        needed = plan.total_bytes if plan is not None else None
        first = config.serving_config.start_device_id
        checks.insert(0, lambda: npu.check_devices(state, host, first, agents, needed))
    if has_mindspore and (config.device == "CPU" or state.device_files):
        described = f"{config.op_table} on {config.device}"
        checks.append(lambda: software.check_operators(host, config.to_json(), described))
    for check in checks:
        findings += _guarded(check)
    return findings


def _guarded(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Returns the findings of a check.

    If the check raises an exception, returns a finding about the exception, so that the other checks still run.
    """
    try:
        return list(check())
    except Exception as error:
        return [_broken(error)]


def _attempt(look: Callable[[], tuple[Result, list[Finding]]], otherwise: Result) -> tuple[Result, list[Finding]]:
    """Returns the result and the findings of a check.

    If the check raises an exception, returns ``otherwise`` as its result, and a finding about the exception.
    """
    try:
        return look()
    except Exception as error:
        return otherwise, [_broken(error)]


def _broken(error: Exception) -> Finding:
    return problem("doctor", f"a check failed: {type(error).__name__}: {error}", "report it; other checks continued")
