"""The builds of Mooncake that work, and the environment variables that choose a protocol."""

from __future__ import annotations

import importlib.metadata
import os
import re

# Copies of constants of ``config``. The engine's process does not import ``config``, which would double its start time.
TCP, RDMA, ASCEND = "tcp", "rdma", "ascend"
PACKAGES = {
    TCP: "mooncake-transfer-engine-non-cuda",
    RDMA: "mooncake-transfer-engine-non-cuda",
    ASCEND: "mooncake-transfer-engine-npu",
}
"""The package of PyPI with the build of Mooncake for each protocol."""
FIRST_VERSION, END_VERSION = (0, 3, 13), (0, 4, 0)
"""The versions of Mooncake that work: from ``FIRST_VERSION`` on, and below ``END_VERSION``.

Before 0.3.12, everyone who reached a port of Mooncake could read and write all memory of the process.
"""
LIBRARIES = "libibverbs1, libnl-3-200 and libnl-route-3-200"
"""Packages of Debian with the system libraries that Mooncake needs with every protocol."""
TIMEOUT_S = 6
"""Seconds after which Mooncake gives up a transfer. Mooncake adds a second for each GiB."""
_FORCED = {TCP: "MC_FORCE_TCP", RDMA: "MC_FORCE_HCA"}
"""The environment variable that makes Mooncake use a protocol, for TCP and RDMA.

Without the variable, Mooncake chooses one of these two protocols itself.
"""


def problem_with(protocol: str) -> str | None:
    """Returns the reason why this machine cannot use Mooncake, or None if the right build is installed."""
    package = PACKAGES[protocol]
    key = f"parallel_config.mooncake_protocol: {protocol}"
    remedy = f"run pip install '{package}==0.3.13.post1', or use parallel_config.hand_over_transport: tcp"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{key} needs the Python package {package}, which is not installed on this machine; {remedy}"
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None or not FIRST_VERSION <= tuple(map(int, found.groups())) < END_VERSION:
        first, end = (".".join(map(str, one)) for one in (FIRST_VERSION, END_VERSION))
        return f"{key} needs {package} from {first} on and below {end}; this machine has {version}; {remedy}"
    return None


def environment(protocol: str, host: str) -> dict[str, str]:
    """Returns the environment variables for the process with Mooncake's engine. Other nodes reach it at ``host``.

    The variables choose the protocol. The protocol argument of ``TransferEngine.initialize`` does not choose it:
    without the variables, Mooncake uses RDMA if the machine has an RDMA device, and TCP otherwise. All other variables
    of the node are passed on.
    """
    others = {name: value for name, value in os.environ.items() if name not in _FORCED.values()}
    forced = {_FORCED[protocol]: "1"} if protocol in _FORCED else {}
    if ":" in host:  # an IPv6 address
        forced["MC_USE_IPV6"] = "1"
    return {"MC_LOG_LEVEL": "WARNING", **others, "MC_TRANSFER_TIMEOUT": str(TIMEOUT_S), **forced}
