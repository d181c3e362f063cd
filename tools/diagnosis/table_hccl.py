"""Collective communication: HCCL (``EI``), and HCCP (``EJ``), the network process under it."""

from __future__ import annotations

from tools.diagnosis import sources
from tools.diagnosis.entry import Entry

_ONE_RANK_FIRST = "look at the rank that failed first, or that reports nothing at all: the others only waited for it"

ENTRIES = (
    Entry(
        "EI0001",
        "HCCL: an environment variable is wrong",
        "an HCCL_* variable has a value outside its range; the message names it and the range",
        ("correct or unset the variable that the message names", "set it alike for every rank"),
        sources.HCCL_ENVIRONMENT,
    ),
    Entry(
        "EI0002",
        "HCCL: waiting for another rank timed out while an operator ran (notify wait)",
        "a rank died, hangs, is far slower, or runs other collectives in another order; or packets are lost. "
        "The limit is HCCL_EXEC_TIMEOUT (1800 s by default)",
        (
            _ONE_RANK_FIRST,
            "if every rank reports it, check that all ran the same collectives on the same shapes",
            "grep -rn 'error cqe' in the plogs: if there is one, check the link with hccn_tool",
        ),
        sources.HCCL_NOTIFY_WAIT,
        follows=True,
        pattern=r"wait execution of the Notify register times out|timeout occurs when the Notify register|"
        r"hccl fftsplus task timeout",
    ),
    Entry(
        "EI0003",
        "HCCL: a collective was called with a wrong argument",
        "the message names operator, parameter, value and what was expected",
        ("check count, type and group of the collective the message names",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EI0004",
        "HCCL: the rank table cannot be used",
        "RANK_TABLE_FILE cannot be parsed, or does not agree with the devices and addresses of this machine",
        ("make the rank table anew for this machine, or unset RANK_TABLE_FILE and start with msrun",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EI0005",
        "HCCL: the ranks called the same collective with different arguments",
        "the ranks do not run the same graph: another config, version, or shape on one of them",
        ("compare parameter, local and remote value in the message", "start every rank with the same config"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EI0006",
        "HCCL: the connection to another rank was not made in time",
        "some rank did not come to the same point within HCCL_CONNECT_TIMEOUT (120 s by default, 600 s under "
        "MindSpore): it failed earlier, is still loading or compiling, or the network between the devices is down",
        (
            _ONE_RANK_FIRST,
            "if all report it and the first and last are further apart than the limit, raise HCCL_CONNECT_TIMEOUT "
            "(120 to 7200) alike for every rank",
            "otherwise check the device network: hccn_tool -i N -ip -g; -link -g; -tls -g must be alike on both ends",
        ),
        sources.hiascend_error("0246", "zh/CANNCommunityEdition/850"),
        follows=True,
        pattern=r"Getting socket times out|wait socket establish timeout",
    ),
    Entry(
        "EI0007",
        "HCCL: no memory or notify register was left",
        "device memory or another resource of the device is exhausted",
        ("stop other processes on the device (npu-smi info)", "lower pa_config.num_blocks or max_device_memory"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EI0008",
        "HCCL: the ranks have different CANN or HCCL versions",
        "versions are compared when ranks connect, and must be equal",
        ("grep -r CannVersion in the plogs (info level)", "install the same CANN on every machine"),
        sources.HCCL_CANN_VERSIONS,
    ),
    Entry(
        "EI0009",
        "HCCL: the link of a device could not be set up",
        "the device's network port is down or has no address, or the other end has failed",
        (
            "check the ranks that do not report it",
            "for every device: hccn_tool -i N -ip -g; hccn_tool -i N -link -g; hccn_tool -i N -lldp -g",
        ),
        sources.hiascend_error("0249", "zh/CANNCommunityEdition/850alpha002"),
    ),
    Entry(
        "EI0010",
        "HCCL: direct communication between two devices of the machine failed",
        "the devices cannot reach each other over the board's links",
        ("check the health of both with npu-smi info", "try HCCL_INTRA_ROCE_ENABLE=1"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EI0011",
        "HCCL: no device memory was left for communication",
        "HCCL takes its buffers (HCCL_BUFFSIZE) beside the model; weights and KV cache left too little",
        (
            "lower pa_config.num_blocks or context.max_device_memory by 1 to 2 GB",
            "stop other processes on the device (npu-smi info)",
        ),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EI0012",
        "HCCL: a copy between devices failed (SDMA)",
        "the other rank's process ended, its memory was freed, or the link failed during the copy",
        (_ONE_RANK_FIRST, "check the link of both devices"),
        sources.ERROR_CODE_JSON,
        follows=True,
    ),
    Entry(
        "EI0013",
        "HCCL: the network reported a failed transfer (error CQE)",
        "the network between two devices broke, or the other rank's process ended first; the message names both ends",
        (_ONE_RANK_FIRST, "check the ports of both ends that the message names"),
        sources.ERROR_CODE_JSON,
        follows=True,
    ),
    Entry(
        "EI0014",
        "HCCL: the rank table does not agree with the machine",
        "an address or device of the rank table is not that of the machine",
        ("make the rank table anew, or unset RANK_TABLE_FILE and start with msrun",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EI0015",
        "HCCL: the ranks of a group did not find each other",
        "a rank did not start, the host network does not reach the first one, or HCCL_SOCKET_IFNAME is wrong",
        (
            "check that every rank has started",
            "set HCCL_SOCKET_IFNAME to the interface all machines share",
            "raise HCCL_CONNECT_TIMEOUT if one is merely slow",
        ),
        sources.ERROR_CODE_JSON,
        follows=True,
    ),
    Entry(
        "EI0019",
        "HCCL: its port on the host is taken",
        "another process, or an earlier run that has not ended, listens on HCCL's ports (60000 and up)",
        (
            "end the earlier run (npu-smi info shows its processes)",
            "or set HCCL_IF_BASE_PORT apart for each job, and reserve it: sysctl net.ipv4.ip_local_reserved_ports",
        ),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EI0020",
        "HCCL: its port on the device is taken",
        "two processes share a device",
        ("one process a device; or set HCCL_NPU_SOCKET_PORT_RANGE",),
        sources.ERROR_CODE_JSON,
        pattern=r"specific port\[\d+\] fail. Please check the port status",
    ),
    Entry(
        "EI9999",
        "HCCL: inner error",
        "HCCL met an error that has no code of its own; the lines under it tell which",
        (_ONE_RANK_FIRST, "collect the plogs of every rank before asking for support"),
        sources.HCCL_LOCATING,
        follows=True,
    ),
    Entry(
        "EJ0001",
        "HCCP: the network process of the device could not start",
        "mostly an earlier run still holds the device",
        ("end every process on the device (npu-smi info), wait 10 s, start again",),
        sources.hiascend_error("0251", "zh/CANNCommunityEdition/850"),
    ),
    Entry(
        "EJ0002",
        "HCCP: the device's network port is down",
        "no cable, no optical module, or the switch's port is off",
        ("hccn_tool -i N -link -g; hccn_tool -i N -optical -g", "on one machine alone: HCCL_INTRA_ROCE_ENABLE=0"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EJ0003",
        "HCCP: address and port are taken",
        "another process, or an earlier run that has not ended, uses HCCL's port",
        ("end the earlier run (npu-smi info shows its processes)", "or set HCCL_IF_BASE_PORT apart for each job"),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "EJ0004",
        "HCCP: an address is wrong",
        "the device's address in the rank table is not the one it has",
        ("compare with hccn_tool -i N -ip -g",),
        sources.ERROR_CODE_JSON,
    ),
    Entry(
        "heartbeat_lost",
        "HCCL: a rank's heartbeat stopped",
        "its process has ended, or the network to it is cut; the message names server and device",
        ("look at the log of that rank: it failed first",),
        sources.MINDSPORE_CANN_CASES,
        follows=True,
        pattern=r"Heartbeat Lost Occurred|\[Stuck Occurred\]",
    ),
)
