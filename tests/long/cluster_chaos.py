"""Loses nodes, agents and links under load, and compares every answer with the undisturbed text.

    python tests/long/cluster_chaos.py --nodes 3 [--faults 16] [--seed 1] [--ray] [--roles [--mooncake]] [--tiers]
        [--drafts suffix|draft]
    python tests/long/cluster_chaos.py --nodes 4 --nodes-per-replica 2 [--tiers] [--drafts suffix|draft]

A server has one replica of the tiny model on each node. All processes are on this machine and are connected by TLS. The
faults: agents and nodes are killed and stopped, links are cut or carry nothing, nodes are drained, removed and added.
With ``--ray``, Ray places the nodes, and its raylets are killed and stopped, too. With ``--roles``, the first replica
has the role ``prefill`` and the others have ``decode``, so the blocks of most prompts travel between nodes. With
``--mooncake``, Mooncake moves their contents, and its process on a node is killed, too. With ``--tiers``, the replicas
have KV tiers in host memory and in a folder. At the end, the agents of all replicas are killed, and the blocks of
a prompt must come from the folder. With ``--nodes-per-replica``, each replica has agents on several nodes. With
``--drafts``, steps verify drafts, and the texts must also be those of a server without drafts and nodes.

Prints a line for each fault with the seconds until the server noticed it, and until all replicas were ready again. The
last line is JSON. Exits with 1 after an error in an answer, a wrong text, or a loss that was noticed after more than
3 s. Also exits with 1 if no blocks have moved, if no draft was right, or if a process or shared memory is left. The
same seed repeats the order of the faults.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from support.chaos_drafts import add_drafts_option, draft_figures, texts_without_drafts  # noqa: E402
from support.chaos_load import COMPLETIONS, ChaosLoad, Texts  # noqa: E402
from support.cluster_rigs import OwnNodes, RayRig  # noqa: E402
from support.draft_models import method_settings  # noqa: E402
from support.long_program import run_program  # noqa: E402
from support.server_process import ServerProcess, running_server, shm_entries  # noqa: E402

DETECTION_S = 3.0
RECOVERY_S = 240.0
WARM_UP_S = 2.0
NUM_LONG_PROMPTS = 10
STORY = "Once upon a time there was a fox. " * 12
MIN_BLOCKS = 7
"""Minimum number of whole blocks of a long prompt."""
WRITE_S = 5.0
"""Seconds after which other prompts are sent, if the folder did not get the blocks of the last ones."""
WITHOUT_LOSS = ("drained", "raylet stopped", "mooncake killed")
"""Faults after which no agent is lost."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=3, help="number of nodes (default: 3)")
    parser.add_argument("--nodes-per-replica", type=int, default=1, help="nodes of each replica (default: 1)")
    parser.add_argument("--faults", type=int, default=16, help="number of faults (default: 16)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ray", action="store_true", help="let Ray place the nodes")
    parser.add_argument("--roles", action="store_true", help="separate prefill and decode")
    parser.add_argument("--mooncake", action="store_true", help="with --roles: Mooncake moves the blocks")
    parser.add_argument("--tiers", action="store_true", help="KV tiers in host memory and in a folder")
    add_drafts_option(parser)
    arguments = parser.parse_args()
    if arguments.mooncake and (arguments.ray or not arguments.roles):
        parser.error("--mooncake needs --roles, and nodes without --ray")
    if arguments.nodes_per_replica < 1:
        parser.error(f"--nodes-per-replica {arguments.nodes_per_replica} is below 1")
    if arguments.nodes % arguments.nodes_per_replica:
        parser.error(f"--nodes {arguments.nodes} is no multiple of --nodes-per-replica {arguments.nodes_per_replica}")
    with tempfile.TemporaryDirectory(prefix="cluster_chaos_") as name:
        folder, reference = Path(name), None
        if arguments.drafts is not None:
            reference = texts_without_drafts(folder / "reference", group_settings(arguments.nodes_per_replica))
        rig = (RayRig if arguments.ray else OwnNodes)(folder, arguments.nodes)
        try:
            settings = [*rig.settings, *settings_of(arguments, folder)]
            with running_server(folder / "server", settings, forks=False) as server:
                rig.server = server
                figures = run(server, rig, arguments, reference)
        finally:
            rig.stop()
    figures["left"] = sorted(name for pid in figures.pop("pids") for name in shm_entries(pid))
    figures["pass"] = figures["pass"] and not figures["left"]
    print(json.dumps(figures), flush=True)
    return 0 if figures["pass"] else 1


def settings_of(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Returns the settings of the server. With roles, prompts of at least 4 tokens are handed over."""
    span, num_replicas = arguments.nodes_per_replica, arguments.nodes // arguments.nodes_per_replica
    settings = [
        *(f"parallel_config.data_parallel={num_replicas}", *group_settings(span)),
        *("serving_config.agent_restart_limit=1000", f"parallel_config.nodes_per_replica={span}"),
    ]
    if arguments.drafts is not None:
        settings += method_settings(folder, arguments.drafts)
    if arguments.roles:
        roles = ["prefill", *["decode"] * (num_replicas - 1)]
        settings += [f"parallel_config.roles=[{', '.join(roles)}]", "parallel_config.prefill_threshold=4"]
    if arguments.mooncake:
        settings += ["parallel_config.hand_over_transport=mooncake", "parallel_config.mooncake_unprotected=true"]
    if arguments.tiers:
        settings += ["kv_tier_config.host_blocks=64", "kv_tier_config.loads=always"]
        settings += [f"kv_tier_config.ssd_folder={folder / 'tiers'}"]
    return settings


def group_settings(num_agents: int) -> list[str]:
    """Returns the settings of a replica that change its texts, or the speed of its agents."""
    return [f"parallel_config.tensor_parallel={num_agents}", "model_config.cpu_threads=1"]


def run(
    server: ServerProcess, rig: OwnNodes | RayRig, arguments: argparse.Namespace, reference: list[Texts] | None
) -> dict[str, Any]:
    """Injects the faults under load. Returns the figures of the run.

    ``reference`` are the texts without drafts, or None if they need not be compared.
    """
    rng, late, pids = random.Random(arguments.seed), [], set()
    possible = [*rig.kinds, *(["mooncake killed"] if arguments.mooncake else [])]
    rounds = -(-arguments.faults // len(possible))
    kinds = [kind for _ in range(rounds) for kind in rng.sample(possible, len(possible))]
    wait_until(lambda: all_ready(server))
    num_clients = 2 * arguments.nodes // arguments.nodes_per_replica
    load = ChaosLoad(server.url, arguments.seed, num_clients, reference)
    with load:
        for kind in kinds[: arguments.faults]:
            time.sleep(WARM_UP_S)
            noticed_s = inject(server, rig, kind, rng)
            pids |= {node["pid"] for node in server.get("/v1/cluster")["nodes"] if "pid" in node}
            if noticed_s is not None and noticed_s > DETECTION_S:
                late.append(kind)
            # A request that loses its agent twice ends with an error, by design. So all requests end before the next
            # fault.
            assert load.pause(RECOVERY_S), "a client waits for its response without end"
            load.resume()
    num_read, num_wrong = read_the_folder(server, rig) if arguments.tiers else (0, 0)
    errors = [answer.error for answer in load.answers if answer.error]
    wrong = sum(not load.is_equal(answer) for answer in load.answers) + num_wrong
    for error in errors[:20]:
        print(f"  error: {error}")
    info = server.wait_until_idle()
    drafts = draft_figures(server) if arguments.drafts is not None else {}
    hand_overs, hits = info.get("hand_overs", {}), tier_hits(info) if arguments.tiers else {}
    has_moved = (not arguments.roles or hand_overs["completed"] > 0) and (not arguments.tiers or num_read > 0)
    has_leaked = bool(hand_overs) and hand_overs["pool_free_blocks"] != hand_overs["pool_blocks"]
    is_good = not errors and not wrong and not late and load.num_hung == 0 and has_moved and not has_leaked
    is_good = is_good and (not drafts or drafts["accepted_drafts"] > 0)
    return {
        "nodes": arguments.nodes, "seed": arguments.seed, "faults": arguments.faults, "ray": arguments.ray,
        "answers": len(load.answers), "errors": len(errors), "wrong": wrong, "late": late, "hung": load.num_hung,
        "hand_overs": hand_overs, "tier_hits": hits, **drafts, "pids": pids, "pass": is_good,
    }  # fmt: skip


def read_the_folder(server: ServerProcess, rig: OwnNodes | RayRig) -> tuple[int, int]:
    """Sends long prompts, kills the agents of all replicas, and sends the prompts again. Returns the number of blocks
    that came from the folder, and the number of wrong texts.

    The faults alone need not cause a read. While one replica lives, the router may send each long prompt to it, because
    its prefix cache has the blocks.
    """
    prompts, texts = [f"{number} foxes. {STORY}" for number in range(NUM_LONG_PROMPTS)], []
    for prompt in prompts:  # host blocks that wait for their write may be reused, so each prompt is written on its own
        num_written = written_blocks(server)
        texts.append(text_of(server, prompt))
        wait_until(lambda least=num_written + MIN_BLOCKS: written_blocks(server) >= least)
    info, num_lost = server.wait_until_idle(), len(server.events("agent_lost"))
    used = {node["replica"]: node for node in server.get("/v1/cluster")["nodes"] if node["state"] == "used"}
    for node in used.values():  # the loss of one node of a replica ends all agents of the replica
        rig.inject("agent killed", node)
    wait_until(lambda: len(server.events("agent_lost")) >= num_lost + len(used))
    wait_until(lambda: all_ready(server))
    wait_for_pools(server, stored_blocks(info))
    num_wrong = sum(text_of(server, prompt) != text for prompt, text in zip(prompts, texts, strict=True))
    num_read = tier_hits(server.wait_until_idle())["ssd"] - tier_hits(info)["ssd"]
    print(f"all agents killed: {num_read} blocks came from the folder", flush=True)
    return num_read, num_wrong


def wait_for_pools(server: ServerProcess, before: list[int]) -> None:
    """Waits until the replicas that have stored blocks ``before`` can read blocks of the folder.

    A node that starts agents first compares its weights with the server's. Until then, it stores blocks, but the server
    neither writes them to the folder nor reads blocks for the node. So other prompts are sent to all replicas, until
    the folder has their blocks.
    """
    numbers = itertools.count()

    def all_write() -> bool:
        num_written = written_blocks(server)
        with ThreadPoolExecutor(len(before)) as clients:  # requests at the same time go to different replicas
            new = [f"{next(numbers)} hares. {STORY}" for _ in before]
            list(clients.map(lambda prompt: text_of(server, prompt), new))
        deadline = time.monotonic() + WRITE_S  # a node that still compares its weights never writes these blocks
        while written_blocks(server) < num_written + MIN_BLOCKS * len(new):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        now = stored_blocks(server.wait_until_idle())
        return all(later > earlier for later, earlier in zip(now, before, strict=True) if earlier)

    wait_until(all_write)


def stored_blocks(info: dict[str, Any]) -> list[int]:
    """Returns for each replica the number of blocks that it has copied to host memory. ``info`` is as in ``tier_hits``.
    """
    return [each["kv_tiers"]["stored"] for each in info["replicas"]]


def text_of(server: ServerProcess, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    text: str = server.post(COMPLETIONS, body)["choices"][0]["text"]
    return text


def written_blocks(server: ServerProcess) -> int:
    """Returns the number of blocks in the folder. All replicas have the same folder."""
    blocks: int = server.get("/server_info")["engine"]["replicas"][0]["kv_tiers"]["disk"]["blocks"]
    return blocks


def tier_hits(info: dict[str, Any]) -> dict[str, int]:
    """Returns the blocks that all replicas have got from each KV tier. ``info`` is the engine's part of /server_info.
    """
    return {name: sum(each["kv_tiers"]["hits"][name] for each in info["replicas"]) for name in ("host", "ssd")}


def inject(server: ServerProcess, rig: OwnNodes | RayRig, kind: str, rng: random.Random) -> float | None:
    """Injects one fault and waits until all replicas are ready. Returns the seconds until it was noticed."""
    wait_until(lambda: all(each["running"] for each in server.get("/v1/cluster")["replicas"]))
    used = [node for node in server.get("/v1/cluster")["nodes"] if node["state"] == "used"]
    num_lost, node, noticed_s = len(server.events("agent_lost")), rng.choice(used), None
    restore = rig.inject(kind, node)
    began = time.monotonic()  # the search for the process may take long on a busy machine
    if kind in WITHOUT_LOSS:
        time.sleep(WARM_UP_S)
    else:
        wait_until(lambda: len(server.events("agent_lost")) > num_lost)
        noticed_s = time.monotonic() - began
    restore()
    wait_until(lambda: all_ready(server))
    noticed = "no loss" if noticed_s is None else f"noticed after {noticed_s:.2f} s"
    print(f"{kind:<15} {node['name']}: {noticed}, ready after {time.monotonic() - began:.2f} s", flush=True)
    return noticed_s


def all_ready(server: ServerProcess) -> bool:
    return all(each["state"] == "ready" for each in server.get("/v1/cluster")["replicas"])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {RECOVERY_S} s"
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(run_program(main))
