"""Every known error in one place: by code, by words of a log line, and what is known of codes without a row."""

from __future__ import annotations

import re

from tools.diagnosis import sources, table_acl, table_device, table_hccl, table_own, table_software
from tools.diagnosis.entry import Entry, Family

ENTRIES: tuple[Entry, ...] = (
    *table_hccl.ENTRIES,
    *table_device.ENTRIES,
    *table_acl.ENTRIES,
    *table_software.ENTRIES,
    *table_own.ENTRIES,
)

_READ_MESSAGE = ("the message behind the code names the value and the reason", "the lines below it name the call")
_SUPPORT = ("look for an earlier error", "collect the plogs (~/ascend/log) before asking for support")


def _errors_of(prefix: str, whose: str, cause: str, advice: tuple[str, ...] = _READ_MESSAGE) -> Family:
    return Family(prefix, f"an error of {whose}", cause, advice, sources.CODE_SCHEME)


FAMILIES: tuple[Family, ...] = (
    _errors_of("E1", "the graph engine (GE)", "a graph or one of its options cannot be used"),
    _errors_of("E2", "graph fusion (FE)", "an operator of a graph could not be fused or compiled"),
    _errors_of("E3", "the AI CPU", "a kernel of the AI CPU, or the device's processes, failed", _SUPPORT),
    _errors_of("E4", "the operator compiler (TEFusion)", "an operator could not be compiled; often the environment"),
    _errors_of("E5", "an operator's checks", "shape, type or format of an operator is not supported"),
    _errors_of("E6", "an operator's checks", "shape, type or format of an operator is not supported"),
    _errors_of("E7", "an operator's checks", "shape, type or format of an operator is not supported"),
    _errors_of("E8", "an operator's checks", "shape, type or format of an operator is not supported"),
    _errors_of("E9", "the operator compiler (TBE)", "an operator could not be compiled"),
    _errors_of("EA", "the operator compiler (TBE)", "an operator could not be compiled"),
    _errors_of("EB", "the operator compiler (TBE)", "an operator could not be compiled"),
    _errors_of("EC", "auto tuning", "a remote device was not reached"),
    _errors_of("EE", "the runtime", "a call of the runtime failed"),
    _errors_of("EF", "graph distribution", "an option of a distributed graph is wrong"),
    _errors_of("EH", "ACL", "a call of ACL failed"),
    _errors_of("EI", "collective communication (HCCL)", "ranks did not connect, or a collective failed"),
    _errors_of("EJ", "the network process of a device (HCCP)", "the device's network could not be used"),
    _errors_of("EK", "profiling", "profiling could not start or write"),
    _errors_of("EL", "the driver", "the driver refused a call"),
    _errors_of("EM", "the queue scheduler", "a process of the device failed", _SUPPORT),
    _errors_of("EO", "model compression (AMCT)", "its config or model is wrong"),
    _errors_of("EP", "dumping", "the dump config is wrong"),
    _errors_of("EZ", "an operator", "an operator is not supported, or failed on the device"),
    Family(
        "107", "the runtime was called wrongly", "wrong argument, device or order of calls", _SUPPORT, sources.ACL_ERROR
    ),
    Family("207", "a resource is short or not supported", "memory, streams, events", _SUPPORT, sources.ACL_ERROR),
    Family("507", "an inner error of runtime or device", "software or hardware failed", _SUPPORT, sources.ACL_ERROR),
    Family("161", "an operator was called wrongly (aclnn)", "wrong parameter", _SUPPORT, sources.ACLNN_CODES),
    Family("361", "the runtime failed under an operator (aclnn)", "device or memory", _SUPPORT, sources.ACLNN_CODES),
    Family("561", "an inner error of an operator (aclnn)", "shape, tiling or package", _SUPPORT, sources.ACLNN_CODES),
    Family("100", "ACL was called wrongly", "wrong argument or order of calls", _SUPPORT, sources.ACL_ERROR),
    Family("145", "the graph engine was called wrongly", "wrong argument or model", _SUPPORT, sources.ACL_ERROR),
    Family("200", "a resource is short or not supported", "memory, or a feature", _SUPPORT, sources.ACL_ERROR),
    Family("245", "a resource of the graph engine is short", "memory", _SUPPORT, sources.ACL_ERROR),
    Family("500", "an inner error", "graph engine, runtime or driver failed", _SUPPORT, sources.ACL_ERROR),
    Family("545", "an inner error of the graph engine", "a graph could not be run", _SUPPORT, sources.ACL_ERROR),
)

_CODE = re.compile(r"E[0-9A-Z][0-9]{4}|[1235][0-9]{5}")
_BY_CODE = {entry.code.lower(): entry for entry in ENTRIES}
_IN_WORDS = tuple(entry for entry in ENTRIES if entry.pattern)
_ALIASES = {
    "kernelsnotbuilterror": "KernelsNotBuilt",
    "memoryplanerror": "memory_refused",
    "configerror": "config_wrong",
    "checkpointerror": "checkpoint_wrong",
    "protocolerror": "slot_torn",
    "agentstarterror": "agent_start_failed",
    "agentlosterror": "agent_lost",
    "queuefullerror": "queue_full",
}


def find(code: str) -> Entry | None:
    """The row of a code or name; a code without a row gets what is known of its family; None for anything else."""
    word = code.strip().lower()
    entry = _BY_CODE.get(_ALIASES.get(word, word).lower())
    return entry if entry is not None else _of_family(code.strip().upper())


def find_in_words(line: str) -> Entry | None:
    """The first row whose words the line has."""
    return next((entry for entry in _IN_WORDS if entry.matches(line)), None)


def _of_family(code: str) -> Entry | None:
    if _CODE.fullmatch(code) is None:
        return None
    family = next((each for each in FAMILIES if code.startswith(each.prefix)), None)
    if family is None:
        return None
    inner = code.startswith("E") and code[2] == "9"
    title = f"{family.title}{' without a code of its own' if inner else ''}"
    return Entry(code, title, family.cause, family.advice, family.source, follows=inner)
