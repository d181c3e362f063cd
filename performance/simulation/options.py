"""Defines the command line of the simulator."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from performance.load.arrivals import request_count
from performance.load.options import (
    LoadOptions,
    add_arrival_options,
    add_objective_options,
    add_workload_options,
    workload_options,
)
from performance.program import UsageError, parse_values
from performance.simulation.cluster import ClusterModel, Loss
from performance.simulation.presets import PRESETS
from performance.simulation.runs import NOWHERE

__all__ = ["SimulationOptions", "Variant", "parse_options"]

DESCRIPTION = """\
Simulate a load test: the real scheduler on a virtual clock, against a model of the device. Prints what the load test
prints, for each policy and each setting of a sweep, and finds the rate a deployment keeps its objectives at."""

EPILOG = """\
examples:
  %(prog)s --config llama_7b_kbk_pa_dyn.yaml --device ascend-910b -X 10 -T 150 --policy prefill_first,fcfs
  %(prog)s --config llama_160m_cpu.yaml --device cpu --recording output/flight.bin -X 5 -T 60 --json FILE
  %(prog)s --config C --device ascend-910b --find-rate --slo-ttft-ms 2000 --slo-tbt-ms 50
  %(prog)s --config C --device ascend-910b --sweep pa_config.num_blocks=512,1024,2048 --sweep rate=5,10
  %(prog)s --config C --device ascend-910b --beginnings 64x1000 --set scheduler_config.prefix_cache=true \\
      --set parallel_config.data_parallel=4 --sweep parallel_config.routing=prefix,least_loaded,round_robin
  %(prog)s --config C --recording F --validate LOADTEST.json       how far off is the simulation?

Settings are those of the server, and device.RATE and host.TIME (fields of DeviceRates and HostModel). A sweep also
takes rate. A trace has one JSON object per line with arrival_s, prompt_tokens (or prompt: token ids) and output_tokens.
It may have max_tokens, priority, tenant, ttft_objective_ms, tbt_objective_ms. A flight recording is a trace, too."""

RATE = "rate"
LOAD_NAMES = ("rate", "duration", "arrivals", "seed", "slo_ttft_ms", "slo_tpot_ms", "slo_tbt_ms")
SAME_NAMES = ("config", "device", "recording", "fit", "save_fit", "trace", "validate", "find_rate")
"""Fields of ``SimulationOptions`` that are command-line options of the same name."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One simulated variant: a policy, and one value for each setting that ``--sweep`` varies."""

    name: str
    settings: tuple[str, ...]
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """The parsed options of the command line."""

    config: str
    device: str
    settings: tuple[str, ...]
    policies: tuple[str, ...]
    sweeps: tuple[tuple[str, tuple[str, ...]], ...]
    load: LoadOptions
    recording: Path | None
    fit: Path | None
    save_fit: Path | None
    trace: Path | None
    validate: Path | None
    find_rate: bool
    cluster: ClusterModel | None
    """The nodes of the replicas. None: all agents are on the server's machine."""
    json_path: Path | None
    plot_dir: Path | None

    def variants(self) -> list[Variant]:
        """Returns every combination of policies and swept values, in the given order."""
        bases = [(policy, [f"scheduler_config.policy={policy}"]) for policy in self.policies] or [("", [])]
        found = []
        for values in product(*(values for _, values in self.sweeps)):
            pairs = [(key, value) for (key, _), value in zip(self.sweeps, values, strict=True)]
            for policy, settings in bases:
                names = ([policy] if policy else []) + [f"{key.rpartition('.')[2]}={value}" for key, value in pairs]
                swept = tuple(f"{key}={value}" for key, value in pairs if key != RATE)
                rates = [_rate(value) for key, value in pairs if key == RATE]
                name = " ".join(names) or "as configured"
                found.append(Variant(name, (*self.settings, *settings, *swept), rates[0] if rates else None))
        return found


def parse_options(arguments: Sequence[str] | None = None) -> SimulationOptions:
    """Parses the command line. Exits with 2 on a wrong option; raises UsageError on a wrong combination."""
    parsed = build_parser().parse_args(arguments)
    if parsed.trace is None and parsed.validate is None and request_count(parsed.rate, parsed.duration) < 1:
        raise UsageError(f"-X {parsed.rate:g} for -T {parsed.duration:g} seconds makes no request: raise one of them")
    if parsed.recording is not None and parsed.device != "cpu":
        raise UsageError(f"--recording fits a device to measured steps; --device {parsed.device} has its own rates")
    if parsed.beginnings[0] and parsed.trace is not None:
        raise UsageError("--beginnings applies to generated prompts; a trace has its own prompts")
    if parsed.find_rate and parsed.trace is not None:
        raise UsageError("--find-rate changes the rate of generated arrivals; a trace has its own arrival times")
    load = LoadOptions(
        endpoint=NOWHERE,
        **{name: getattr(parsed, name) for name in LOAD_NAMES},
        **workload_options(parsed),
    )
    return SimulationOptions(
        settings=tuple(parsed.settings),
        policies=tuple(parsed.policy.split(",")) if parsed.policy else (),
        sweeps=tuple(parsed.sweep),
        load=load,
        cluster=_cluster(parsed),
        json_path=parsed.json,
        plot_dir=parsed.plots,
        **{name: getattr(parsed, name) for name in SAME_NAMES},
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("deployment")
    what.add_argument("--config", required=True, help="the server's config")
    what.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings", help="see below")
    what.add_argument("--device", choices=sorted(PRESETS), default="cpu", help="default %(default)s")
    what.add_argument("--recording", type=Path, metavar="F", help="fit the device to the steps of a flight recording")
    what.add_argument("--fit", type=Path, metavar="FILE", help="use a stored fit (--save-fit)")
    what.add_argument("--save-fit", type=Path, metavar="FILE", help="write the fit to this file")
    what.add_argument("--policy", metavar="P[,P...]", help="scheduling policies to compare (default: the config's)")
    what.add_argument(
        "--sweep", action="append", default=[], type=parse_values, metavar="KEY=V1,V2", help="values to compare"
    )
    add_arrival_options(parser)
    add_workload_options(parser)
    parser.set_defaults(token_ids=True, vocab_size=32_000, prompt_len=(32, 64), output_len=(64, 504), ignore_eos=True)
    parser.add_argument("--text-prompts", dest="token_ids", action="store_false", help="words instead of token ids")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="requests and their times, see below")
    _add_cluster_options(parser)
    result = parser.add_argument_group("result")
    result.add_argument("--find-rate", action="store_true", help="find the highest rate with p99 in the objectives")
    result.add_argument("--validate", type=Path, metavar="LOADTEST.json", help="compare with the JSON of a load test")
    result.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    result.add_argument("--plots", type=Path, metavar="FOLDER", help="write a picture of each run to this folder")
    add_objective_options(result)
    return parser


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    nodes = parser.add_argument_group("several machines")
    nodes.add_argument("--nodes", type=int, metavar="N", help="machines with the replicas (default: one machine)")
    nodes.add_argument("--replicas", type=int, metavar="N", help="replicas on all nodes (default: data_parallel)")
    nodes.add_argument("--link-ms", type=float, default=0.1, help="latency of a link (default %(default)s)")
    nodes.add_argument("--link-gbit", type=float, default=10.0, help="bandwidth of a node's link (default %(default)s)")
    nodes.add_argument(
        "--lose", action="append", default=[], type=_loss, metavar="NODE@S", help="this node stops at this time"
    )
    nodes.add_argument("--restart-s", type=float, default=10.0, help="time until its agents run again (default 10)")
    nodes.add_argument(
        "--measure-engine",
        action="store_true",
        help="the engine thread takes the processor time of the real router and scheduler",
    )


def _loss(text: str) -> Loss:
    node, _, moment = text.partition("@")
    try:
        return Loss(int(node), float(moment))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE@SECONDS, as in 3@2.5") from None


def _cluster(parsed: argparse.Namespace) -> ClusterModel | None:
    if parsed.nodes is None:
        if parsed.lose or parsed.replicas is not None or parsed.measure_engine:
            raise UsageError("--replicas, --lose and --measure-engine need --nodes")
        return None
    if not 1 <= parsed.nodes <= 100_000 or parsed.link_gbit <= 0 or parsed.link_ms < 0 or parsed.restart_s < 0:
        raise UsageError("--nodes must be from 1 to 100000, --link-gbit above 0, --link-ms and --restart-s at least 0")
    if wrong := [loss for loss in parsed.lose if not 0 <= loss.node < parsed.nodes or loss.at_s < 0]:
        raise UsageError(f"--lose {wrong[0].node}@{wrong[0].at_s:g}: the nodes are 0 to {parsed.nodes - 1}")
    return ClusterModel(
        num_nodes=parsed.nodes,
        num_replicas=parsed.replicas or 0,
        latency_s=parsed.link_ms / 1000,
        bytes_per_s=parsed.link_gbit * 125e6,
        losses=tuple(parsed.lose),
        restart_s=parsed.restart_s,
        measures=parsed.measure_engine,
    )


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if rate <= 0.0:
        raise UsageError(f"--sweep rate: {text!r} is not a number above 0")
    return rate
