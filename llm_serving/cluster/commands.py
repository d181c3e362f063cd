"""``llm-serving cluster``: runs nodes, starts a server on them, and changes the nodes of a running server."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llm_serving.cluster.key import ClusterKey, make_key
from llm_serving.config.parallel_section import NODES, RAY
from llm_serving.errors import ConfigError, LLMServingError

EXIT_FAILED, EXIT_USAGE = 1, 2
"""Exit codes: the command failed; the command line was wrong."""
DEFAULT_URL = "http://127.0.0.1:8835"
API_KEY_VARIABLE = "LLM_SERVING_API_KEY"
TIMEOUT_S = 30.0
"""Maximum seconds to wait for an answer of the server."""
MAX_ANSWER_BYTES = 4 * 1024 * 1024
"""Maximum size of an answer of the server."""
_EXAMPLES = """\
examples:
  %(prog)s key cluster.key                        makes a cluster key; copy it to every machine
  %(prog)s host --key-file cluster.key --listen 10.0.0.5:7450
                                                  starts a node; do this on every machine with agents.
                                                  With --pool NAME, it only serves this pool by prompt length
  %(prog)s up --key-file cluster.key --node 10.0.0.5:7450 --node 10.0.0.6:7450 --model FOLDER
                                                  starts the server, with one replica on each node
  %(prog)s status                                 shows the nodes of a running server
  %(prog)s add 10.0.0.7:7450                      adds a node
  %(prog)s drain 10.0.0.5:7450                    gives a node no more requests
"""


class ClusterCommandError(LLMServingError):
    """The server cannot be reached or refuses the command."""


def main(argv: Sequence[str]) -> int:
    """Runs one of the commands of ``llm-serving cluster``. Returns the exit code: 0, 2 for wrong usage, or 1 if the
    server cannot be reached or refuses.
    """
    arguments = list(argv)
    if arguments[:1] == ["host"]:
        from llm_serving.agent_host.main import main as run_host

        return run_host(arguments[1:])
    parser = build_parser()
    if arguments[:1] == ["up"]:
        known, rest = parser.parse_known_args(arguments)
        return _up(known, rest)
    known = parser.parse_args(arguments)
    try:
        if known.command == "key":
            make_key(Path(known.file))
            sys.stdout.write(f"wrote {known.file}; copy it to every machine, with mode 600\n")
            return 0
        return _ask_server(known)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except ClusterCommandError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    """Returns the argument parser of ``llm-serving cluster``."""
    parser = argparse.ArgumentParser(
        prog="llm-serving cluster",
        description="Serve a model with agents on several machines.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    key = commands.add_parser("key", help="make a cluster key", allow_abbrev=False)
    key.add_argument("file", help="the new file; it must not exist")
    commands.add_parser("host", help="run a node; `host --help` shows its options", add_help=False)
    up = commands.add_parser(
        "up", help="start a server; further options are those of `llm-serving serve`", allow_abbrev=False
    )
    up.add_argument("--key-file", required=True, metavar="FILE", help="the cluster key")
    up.add_argument("--node", action="append", default=[], metavar="HOST:PORT", help="a node; may be repeated")
    up.add_argument("--ray", nargs="?", const="auto", metavar="ADDRESS", help="let Ray choose the machines")
    up.add_argument(
        "--replicas", type=int, metavar="N", help="highest number of replicas (default: as many as the nodes make)"
    )
    up.add_argument(
        "--nodes-per-replica", type=int, default=1, metavar="N", help="nodes that share one copy of the model "
        "(default: %(default)s)"
    )  # fmt: skip
    status = commands.add_parser("status", help="show the nodes of a running server", allow_abbrev=False)
    status.add_argument("--json", action="store_true", help="print JSON")
    add = commands.add_parser("add", help="add a node, or use a drained one again", allow_abbrev=False)
    add.add_argument("address", metavar="HOST:PORT")
    drain = commands.add_parser("drain", help="give a node no more requests", allow_abbrev=False)
    drain.add_argument("node", metavar="NODE", help="its name in `status`")
    drain.add_argument("--timeout", type=float, metavar="S", help="then running requests move to other nodes")
    remove = commands.add_parser("remove", help="forget a node", allow_abbrev=False)
    remove.add_argument("node", metavar="NODE", help="its name in `status`")
    for each in (status, add, drain, remove):
        each.add_argument("--url", default=DEFAULT_URL, help="address of the server (default: %(default)s)")
        each.add_argument(
            "--api-key",
            default=os.environ.get(API_KEY_VARIABLE),
            help=f"a key with the right admin (default: the environment variable {API_KEY_VARIABLE})",
        )
    return parser


def _up(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Starts a server whose settings follow from the options of ``up``. ``rest`` are options of ``llm-serving serve``.
    """
    uses_ray = arguments.ray is not None
    if uses_ray == bool(arguments.node):
        problem = "use either --node or --ray" if uses_ray else "name the nodes with --node, or use --ray"
        sys.stderr.write(f"error: {problem}\n")
        return EXIT_USAGE
    try:
        _check_nodes(arguments.key_file, arguments.node)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    replicas = arguments.replicas
    if replicas is None:
        replicas = max(1, len(arguments.node) // max(1, arguments.nodes_per_replica))
    settings: dict[str, object] = {
        "executor": RAY if uses_ray else NODES,
        "data_parallel": replicas,
        "nodes_per_replica": arguments.nodes_per_replica,
        "cluster_key_file": str(Path(arguments.key_file).absolute()),
    }
    settings |= {"ray_address": arguments.ray} if uses_ray else {"nodes": arguments.node}
    options = [f"parallel_config.{key}={json.dumps(value)}" for key, value in settings.items()]
    from llm_serving.launcher import main as serve  # only now, because a server imports many modules

    return serve([part for option in options for part in ("--set", option)] + rest)


def _check_nodes(key_file: str, nodes: Sequence[str]) -> None:
    """Raises ConfigError if the cluster key cannot be used or an address is wrong. The server checks both, too, but
    prints its memory plan first.
    """
    from llm_serving.cluster.dialling import read_address
    from llm_serving.cluster.named_nodes import PREFIX

    ClusterKey(key_file)
    for node in nodes:
        read_address(node.removeprefix(PREFIX))


def _ask_server(arguments: argparse.Namespace) -> int:
    """Sends a command to the server, and prints the state of the nodes that the server returns."""
    path, body = "/v1/cluster", None
    if arguments.command == "add":
        path, body = "/v1/cluster/add", {"address": arguments.address}
    elif arguments.command in ("drain", "remove"):
        path, body = f"/v1/cluster/{arguments.command}", {"node": arguments.node}
        if getattr(arguments, "timeout", None) is not None:
            body["timeout_s"] = arguments.timeout
    found = _send(arguments.url, path, body, arguments.api_key)
    if getattr(arguments, "json", False):
        sys.stdout.write(f"{json.dumps(found)}\n")
        return 0
    nodes = found["nodes"] if body is None else [found]
    for node in nodes:
        replica = "" if node.get("replica") is None else f"replica {node['replica']}"
        pool = f"pool {node['pool']} " if node.get("pool") else ""
        shown = f"{node['name']:<24} {node['state']:<11} {replica:<11} {pool}{node['reason']}"
        sys.stdout.write(shown.rstrip() + "\n")
    return 0


def _send(url: str, path: str, body: dict[str, Any] | None, api_key: str | None) -> dict[str, Any]:
    """Sends a request to the server, GET without a body and POST with one. Returns the JSON of the response. Raises
    ClusterCommandError if the server cannot be reached or refuses.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ClusterCommandError(f"--url {url}: expected http://HOST:PORT or https://HOST:PORT")
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        connection = (
            http.client.HTTPSConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
        )
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, parts.path.rstrip("/").removesuffix("/v1") + path, data, headers)
        response = connection.getresponse()
        answer = json.loads(response.read(MAX_ANSWER_BYTES))
        connection.close()
    except (OSError, ssl.SSLError, http.client.HTTPException, ValueError) as error:
        raise ClusterCommandError(f"no server of this project responds at {url}: {error}") from error
    if response.status != 200:
        problem = answer.get("error", {}) if isinstance(answer, dict) else {}
        raise ClusterCommandError(f"the server refused: {problem.get('message', response.status)}")
    found: dict[str, Any] = answer
    return found
