"""The launcher: starts all parts of the server in order, shows the progress, and stops them in reverse order.

    config, memory plan ─▶ ports ─▶ agent processes ─▶ tokenizer ─▶ engine thread ─▶ HTTP server ─▶ "ready http://..."

The HTTP server responds with 503 until the agents are ready. After SIGINT or SIGTERM, new requests get a 503, and
running requests may complete within ``serving_config.drain_timeout_s`` seconds. Remaining streams then end with an
error event, and the engine and the agents end. A second signal ends the process immediately. SIGUSR1 opens the log
files again. SIGHUP reads the key file and the certificate again, if they have changed.

If the engine or the HTTP server ends without a signal, the process ends with exit code 1. Its supervisor (systemd,
Kubernetes) then starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from llm_serving.access.listening import Sockets, open_sockets
from llm_serving.cli import EXIT_USAGE, Launch, launch_from_command_line
from llm_serving.config import Config
from llm_serving.config.source import unused_lines, unused_summary
from llm_serving.engine.assembly import make_engine, make_executors, wait_ready
from llm_serving.errors import ConfigError, EngineFailedError, LLMServingError
from llm_serving.ipc.segment import remove_leftovers
from llm_serving.planning.machine import process_seconds
from llm_serving.registry.freeing import limit_free_memory
from llm_serving.telemetry.progress import ProgressDisplay
from llm_serving.version import __version__

if TYPE_CHECKING:
    from llm_serving.access.control import AccessControl
    from llm_serving.access.tls import ServerTls
    from llm_serving.engine.schedulers import ObserveCache
    from llm_serving.executor.agent_executor import AgentExecutor
    from llm_serving.registry.registry import ModelRegistry
    from llm_serving.server.app import ServerApp
    from llm_serving.server.batches.store import BatchStore
    from llm_serving.server.state import ServerState
    from llm_serving.telemetry.log import EventLog
    from llm_serving.telemetry.log_file import Rotation
    from llm_serving.telemetry.metrics import Metrics
    from llm_serving.tracing.export import Tracing

EXIT_FAILED = 1
"""Exit code of a server that failed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server and returns the exit code.

    The code is 2 for wrong usage or a wrong config, and 1 if the start or a part of the server failed.
    """
    launch = launch_from_command_line(argv)
    import uvloop  # imported late, so that a wrong command line is reported without delay

    try:
        return uvloop.run(_Launcher(launch).run())
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except LLMServingError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED


class _Launcher:
    """One run of the server, from its start to its stop."""

    def __init__(self, launch: Launch) -> None:
        self._config: Config = launch.config
        self._plan = launch.plan
        self._models = launch.models
        self._display = ProgressDisplay(num_agents=launch.config.parallel_config.world_size)
        self._stop = asyncio.Event()
        self._seconds: dict[str, float] = {}
        """For each part of the start, the seconds from the start of this process until the part was complete."""
        self._access: AccessControl | None = None
        self._tls: ServerTls | None = None

    async def run(self) -> int:
        self._handle_signals()
        _raise_file_limit()
        limit_free_memory()
        self._display.watch()
        self._display.note(f"llm-serving {__version__}: {self._config.model_name} on {self._config.device}")
        for note in (*self._config.notes, *unused_summary(self._config.unused)):
            self._display.note(f"note: {note}")
        self._display.note(self._plan.table())
        with ExitStack() as owned:
            return await self._serve(owned)

    async def _serve(self, owned: ExitStack) -> int:
        """Starts all parts in order, serves until a signal or a failure, and stops. Returns the exit code."""
        config = self._config
        sockets = open_sockets(config.serving_config, owned)
        self._check_packages()
        # The agents start first, because they load the model while this process imports its modules.
        agents = owned.enter_context(ExitStack())
        executors, leftovers = self._start_agents(agents)
        from llm_serving.engine.tokenizer_backends import load_tokenizer
        from llm_serving.registry.starting import with_fingerprint
        from llm_serving.server.app import create_app
        from llm_serving.server.models.lookup import open_models

        tokenizer = load_tokenizer(config)
        log = self._open_log(leftovers, owned)
        metrics = self._make_metrics(owned)
        self._open_access(log, metrics, owned)
        tracing, batches = self._open_tracing(metrics, owned), self._open_batches(log, owned)
        observe = self._open_events(metrics, log, owned)
        _freeze_objects()
        engine = make_engine(with_fingerprint(config), tokenizer, executors, log, metrics, observe=observe)
        engine.start()
        app = create_app(engine, log, metrics, config, self._access, tracing, batches)
        models = open_models(app.state, self._models, config.models_config, agents)
        del engine, executors, tokenizer  # now only the registry holds these objects, so a reload can free them
        stop_http = asyncio.Event()
        http = self._start_http(app, sockets, stop_http)
        try:
            started = await wait_ready(models.main.engine, lambda: self._stop.is_set() or http.done())
            if started:
                self._begin_service(models, log, metrics, sockets, owned)
                if app.state.shadow is not None:
                    app.state.shadow.start()
                await self._wait_stop(models, http)
            log.event("server_stop")
            stop_http.set()
            await asyncio.wait((http,))
            if (failure := self._failure(models, http)) is not None:
                raise failure
            return 0 if started else EXIT_FAILED
        except LLMServingError as error:
            log.error(str(error), event="server_failed")
            raise
        finally:
            stop_http.set()
            await asyncio.wait((http,))
            if app.state.shadow is not None:
                await app.state.shadow.stop()
            await models.close()

    def _check_packages(self) -> None:
        """Raises ConfigError if the config asks for traces or events of the prefix cache, and a package for them is
        missing. Called before the agents start.
        """
        if self._config.kv_events_config.enabled:
            from llm_serving.kvevents.setup import check_package

            check_package()
        if self._config.telemetry_config.traces_endpoint is not None:
            from llm_serving.tracing.export import check_packages

            check_packages()

    def _start_agents(self, owned: ExitStack) -> tuple[list[AgentExecutor], list[str]]:
        """Starts the agents. Returns their executors, and the names of the shared memory segments that dead servers had
        left and that this method has removed.
        """
        executors = make_executors(self._config, self._display.update, owned)
        leftovers = remove_leftovers()
        for executor in executors:
            executor.start()
        self._seconds["agents_started"] = process_seconds()
        return executors, leftovers

    def _open_log(self, leftovers: list[str], owned: ExitStack) -> EventLog:
        """Opens the event log and writes its first events. SIGUSR1 opens the files of all logs again."""
        from llm_serving.telemetry.log import EventLog
        from llm_serving.telemetry.log_file import reopen_all

        settings = self._config.log_config
        log = owned.enter_context(EventLog(settings.path, settings.level, rotation=self._rotation()))
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, reopen_all)
        if leftovers:
            log.event("leftovers_removed", names=leftovers)
        log.event("server_start", version=__version__, pid=os.getpid(), config=asdict(self._config))
        for line in unused_lines(self._config.unused):
            log.event("settings_unused", message=line)
        return log

    def _rotation(self) -> Rotation:
        """Returns the configured maximum size and maximum number of log files."""
        from llm_serving.telemetry.log_file import Rotation

        return Rotation.of_mib(self._config.log_config.max_mib, self._config.log_config.keep_files)

    def _make_metrics(self, owned: ExitStack) -> Metrics:
        """Creates the metrics. On Ascends with the tool ``npu-smi``, they include the state of the NPUs."""
        from llm_serving.telemetry.metrics import Metrics
        from llm_serving.telemetry.npu_metrics import NpuCollector

        config = self._config
        has_vllm_names = config.telemetry_config.vllm_metric_names
        metrics = Metrics(vllm_model=config.model_name if has_vllm_names else None)
        if config.device == "Ascend" and shutil.which("npu-smi"):
            first = config.serving_config.start_device_id or config.context.device_id
            npus = NpuCollector(first, config.parallel_config.world_size)
            metrics.registry.register(npus)
            npus.start()
            owned.callback(npus.close)
        return metrics

    def _open_access(self, log: EventLog, metrics: Metrics, owned: ExitStack) -> None:
        """Reads the certificate and the API keys, and opens the audit log. Raises ConfigError if a file is wrong."""
        from llm_serving.access.key_store import ENVIRONMENT_VARIABLE
        from llm_serving.access.setup import open_access
        from llm_serving.access.tls import open_tls

        settings, keys = self._config.serving_config, os.environ.get(ENVIRONMENT_VARIABLE, "")
        self._tls = open_tls(settings, log)
        self._access = open_access(settings, keys, log, metrics.access_refused, self._rotation())
        if self._access is not None and self._access.audit is not None:
            owned.callback(self._access.audit.close)

    def _open_tracing(self, metrics: Metrics, owned: ExitStack) -> Tracing | None:
        """Returns the exporter of spans, or None if the config asks for no traces."""
        settings = self._config.telemetry_config
        if settings.traces_endpoint is None:
            return None
        from llm_serving.tracing.export import Tracing

        endpoint, ratio = settings.traces_endpoint, settings.trace_sample_ratio
        tracing = Tracing(endpoint, ratio, self._config.model_name, __version__, metrics.trace_spans)
        owned.callback(tracing.close)
        return tracing

    def _open_events(self, metrics: Metrics, log: EventLog, owned: ExitStack) -> ObserveCache | None:
        """Opens the sockets for events of the prefix cache. Returns the function that creates a replica's observer, or
        None without events.
        """
        if not self._config.kv_events_config.enabled:
            return None
        from llm_serving.kvevents.publisher import EventPublisher

        events = EventPublisher(self._config.kv_events_config, metrics.kv_events_dropped)
        owned.callback(events.close)
        log.event("kv_events_open", endpoints=events.endpoints)
        return events.observer

    def _open_batches(self, log: EventLog, owned: ExitStack) -> BatchStore | None:
        """Opens the folder of files and batches. Returns None if the config names no folder."""
        if self._config.batch_config.folder is None:
            return None
        from llm_serving.server.batches.store import BatchStore

        batches = BatchStore(self._config.batch_config, partial(log.warning, event="batch_record_ignored"))
        owned.callback(batches.close)
        return batches

    def _start_http(self, app: ServerApp, sockets: Sockets, stop: asyncio.Event) -> asyncio.Task[None]:
        """Serves ``app`` on all sockets until ``stop`` is set. If the config has an administration port, only this port
        serves the administration endpoints.
        """
        from llm_serving.server.app import split_administration
        from llm_serving.server.run import Listener, serve

        others = []
        if sockets.admin is not None:
            app, administration = split_administration(app)
            others.append(Listener(sockets.admin, administration, tls=self._tls is not None))
        if sockets.unix is not None:
            others.append(Listener(sockets.unix, app))
        self._seconds["server_started"] = process_seconds()
        drain_s = self._config.serving_config.drain_timeout_s
        return asyncio.create_task(serve(app, sockets.http, stop, drain_s=drain_s, tls=self._tls, others=others))

    def _begin_service(
        self, models: ModelRegistry[ServerState], log: EventLog, metrics: Metrics, sockets: Sockets, owned: ExitStack
    ) -> None:
        """Starts the tasks that need ready agents, for example self-checks. Then reports that the server is ready."""
        models.begin()
        self._report_energy(metrics, log, owned)
        self._say_ready(sockets, log)

    def _report_energy(self, metrics: Metrics, log: EventLog, owned: ExitStack) -> None:
        """Adds energy and processor time to the metrics, and logs them repeatedly if the config asks for it."""
        from llm_serving.energy.meter import EnergyMeter

        meter = EnergyMeter(metrics.output_tokens)
        metrics.registry.register(meter)
        interval_s = self._config.power.report_interval_s
        if interval_s:
            owned.callback(asyncio.create_task(meter.report(log, interval_s)).cancel)

    async def _wait_stop(self, models: ModelRegistry[ServerState], http: asyncio.Task[None]) -> None:
        """Waits for a signal, or until the main model's engine or the HTTP server ends."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._stop, models.ended)]
        await asyncio.wait((http, *waits), return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _failure(self, models: ModelRegistry[ServerState], http: asyncio.Task[None]) -> LLMServingError | None:
        """Returns an error if the engine or the HTTP server ended without a stop signal, otherwise None. ``http`` must
        have ended.
        """
        if models.ended.is_set():
            return EngineFailedError(f"the server stopped: {models.end_reason}")
        if http.exception() is not None or not self._stop.is_set():
            return EngineFailedError(f"the HTTP server stopped: {http.exception()!r}")
        return None

    def _say_ready(self, sockets: Sockets, log: EventLog) -> None:
        scheme = "http" if self._tls is None else "https"
        url = _url(scheme, sockets.http)
        admin_url = None if sockets.admin is None else _url(scheme, sockets.admin)
        seconds = process_seconds()
        self._display.note(f"ready in {seconds:.1f} s; log: {self._config.log_config.path}; Ctrl-C stops")
        if admin_url is not None:
            self._display.note(f"administration on {admin_url}")
        if sockets.unix is not None:
            self._display.note(f"also on the UNIX socket {self._config.serving_config.unix_socket}")
        self._display.close()
        self._seconds["start"] = seconds
        parts: dict[str, Any] = {f"{part}_seconds": round(each, 3) for part, each in self._seconds.items()}
        log.event("server_ready", url=url, admin_url=admin_url, **parts)
        sys.stdout.write(f"ready {url}\n")
        sys.stdout.flush()

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_hangup(self) -> None:
        if self._access is not None:
            self._access.reload()
        if self._tls is not None:
            self._tls.refresh()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            os._exit(128 + signal.SIGINT)  # a second signal ends this process immediately; then the agents end, too
        from llm_serving.telemetry.log import report_on_stderr

        self._stop.set()
        self._display.close()
        seconds = self._config.serving_config.drain_timeout_s
        report_on_stderr(f"stopping: running requests have {seconds:g} s; a second signal ends them now")


def _raise_file_limit() -> None:
    """Raises the limit of open files to the maximum that the system permits. Each connection needs one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _url(scheme: str, listener: socket.socket) -> str:
    return "{}://{}:{}".format(scheme, *listener.getsockname()[:2])


def _freeze_objects() -> None:
    """Excludes all present objects (mostly modules, functions and classes) from garbage collection.

    They live as long as the server. A full collection that traverses them would delay all requests by 50 to 150 ms.
    Call this function before the first engine is made: an engine's objects form reference cycles, which garbage
    collection must free after a reload.
    """
    gc.collect()
    gc.freeze()
