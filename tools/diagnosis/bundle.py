"""Collects what a developer needs to understand a failure, without secrets and prompts, in one archive."""

from __future__ import annotations

import importlib.metadata
import io
import ipaddress
import json
import os
import platform
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from llm_serving.version import __version__
from tools.diagnosis.examination import examine
from tools.diagnosis.finding import Finding
from tools.diagnosis.host import Host
from tools.diagnosis.redaction import redact_environment, redact_log, redact_text, redact_value

if TYPE_CHECKING:
    from llm_serving.config import Config

MAX_FILE_BYTES = 8 << 20
"""Maximum size of a log in the bundle. The end of a longer log is kept."""
MAX_TOTAL_BYTES = 64 << 20
"""Maximum size of all files of a bundle together, before compression."""
MAX_FILES = 200
"""Maximum number of files of a bundle."""
_ENVIRONMENT = (
    "ASCEND", "ATB_", "CANN", "GLOG", "HCCL", "LD_LIBRARY_PATH", "LLMK", "LLM_SERVING", "MINDFORMERS", "MS_", "NPU",
    "OMP", "PATH", "PYTHONPATH", "RANK", "RUN_MODE", "VIRTUAL_ENV",
)  # fmt: skip
"""Prefixes of the names of environment variables that the bundle contains. All other variables are left out."""
_COMMANDS = (("npu-smi", "info"), ("npu-smi", "info", "-t", "topo"), ("lscpu",), ("numactl", "--hardware"), ("free",))
_SYSTEM_FILES = (
    "/proc/meminfo", "/proc/version", "/etc/os-release", "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info", "/sys/kernel/mm/transparent_hugepage/enabled",
)  # fmt: skip
_LOGS = ("*.log", "*.log.*")
_ASCEND_LOGS = "ascend/log"
_SERVER_PAGES = ("server_info", "metrics")
"""Pages of a running server that the bundle contains. They have no prompts and no outputs."""


def write_bundle(
    out: Path,
    host: Host,
    config_name: str,
    overrides: Sequence[str],
    logs: Path | None,
    attached: Sequence[Path] = (),
) -> list[str]:
    """Writes the archive ``out`` (tar.gz), readable by this user only. Returns the names of its files.

    ``logs`` is the folder of the server's logs; None means the folder in the config. ``attached`` are further text
    files, such as outputs of commands. Raises FileExistsError if ``out`` exists, and OSError if it cannot be written or
    an attached file cannot be read.
    """
    texts = _attached(attached)
    findings = examine(host, config_name, overrides)
    descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    names: list[str] = []
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            total = 0
            for name, content in chain(texts, _files(host, config_name, overrides, logs, findings)):
                data = content.replace(str(Path.home()), "~").encode(errors="replace")
                total += len(data)
                if total > MAX_TOTAL_BYTES or len(names) == MAX_FILES:
                    break
                _add(archive, name, data)
                names.append(name)
            _add(archive, "contents.json", json.dumps({"version": __version__, "files": names}, indent=1).encode())
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    return [*names, "contents.json"]


def _files(
    host: Host, config_name: str, overrides: Sequence[str], logs: Path | None, findings: Sequence[Finding]
) -> Iterator[tuple[str, str]]:
    """Yields name and text of each file, the most important first, because the size of the bundle is limited."""
    rows = [{**asdict(finding), "level": finding.level.name.lower()} for finding in findings]
    yield "findings.json", _json(redact_value(rows))
    yield "environment.json", _json(redact_environment(host.environment, _ENVIRONMENT))
    yield "packages.json", _json(_packages())
    yield "machine.json", _json({"platform": platform.platform(), "python": platform.python_version()})
    yield from _config(config_name, overrides)
    for command in _COMMANDS:
        result = host.run(list(command))
        text = result.stdout + result.stderr if result.code is not None else result.last_words
        yield f"commands/{'_'.join(command)}.txt", redact_text(text)
    for path in _SYSTEM_FILES:
        text = host.read(path)
        if text is not None:
            yield f"system/{Path(path).name}", redact_text(text)
    yield from _server_pages(host, config_name, overrides)
    folder = logs or _log_folder(config_name, overrides)
    if folder is not None:
        yield from _logs(folder, "logs")
    home = host.environment.get("ASCEND_PROCESS_LOG_PATH") or str(Path.home() / _ASCEND_LOGS)
    yield from _logs(host.path(home), "ascend")


def _attached(files: Sequence[Path]) -> list[tuple[str, str]]:
    """Returns name and text of each attached file. Files of the same name get numbers."""
    return [(f"attached/{number}_{file.name}", redact_log(_end_of(file))) for number, file in enumerate(files, 1)]


def _server_pages(host: Host, name: str, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields pages of the server of this config, if it runs on this machine."""
    from llm_serving.errors import LLMServingError

    try:
        serving = _without_drafts(name, overrides).serving_config
    except LLMServingError:
        return
    address = "localhost" if _is_any_address(serving.server_ip) else serving.server_ip
    place = f"[{address}]" if ":" in address else address
    scheme = "http" if serving.tls_cert is None else "https"
    for page in _SERVER_PAGES if serving.server_port else ():
        answer = host.read_url(f"{scheme}://{place}:{serving.server_port}/{page}")
        if answer is not None:
            yield f"server/{page}.txt", _without_secrets(answer)


def _is_any_address(text: str) -> bool:
    """Returns True for 0.0.0.0 and ::. A server can listen on these addresses, but a client cannot connect to them."""
    return text != "localhost" and ipaddress.ip_address(text).is_unspecified


def _without_secrets(text: str) -> str:
    try:
        return _json(redact_value(json.loads(text)))
    except ValueError:
        return redact_text(text)


def _config(name: str, overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the config file, the overrides and the complete loaded config, or the reason why it cannot be loaded."""
    from llm_serving.config.lookup import find_config_file
    from llm_serving.errors import LLMServingError

    try:
        yield "config/stated.yaml", redact_text(find_config_file(name).read_text(encoding="utf-8", errors="replace"))
        yield "config/overrides.txt", redact_text("\n".join(overrides))
        config = _loaded(name, overrides)
        yield "config/resolved.json", _json(redact_value(json.loads(config.to_json())))
        if config.model_config.model_cfg_path is not None:
            text = Path(config.model_config.model_cfg_path).read_text(encoding="utf-8", errors="replace")
            yield "config/mindformers.yaml", redact_text(text)
    except (LLMServingError, OSError) as error:
        yield "config/error.txt", redact_text(str(error))


def _loaded(name: str, overrides: Sequence[str]) -> Config:
    from llm_serving.config import load_config
    from llm_serving.hub.fetching import cached_draft

    return load_config(name, overrides, fetch=cached_draft)


def _without_drafts(name: str, overrides: Sequence[str]) -> Config:
    """Returns the config, without its draft model if this is not in a cache. The server's download may have failed."""
    from llm_serving.errors import HubError

    try:
        return _loaded(name, overrides)
    except HubError:
        return _loaded(name, [*overrides, "speculative_config.method=off", "speculative_config.model=null"])


def _log_folder(name: str, overrides: Sequence[str]) -> Path | None:
    from llm_serving.errors import LLMServingError

    try:
        return Path(_without_drafts(name, overrides).log_config.path).parent
    except LLMServingError:
        return Path("output")


def _logs(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yields the last lines of each log in a folder, the newest log first."""
    found = [file for pattern in _LOGS for file in folder.rglob(pattern) if file.is_file() and not file.is_symlink()]
    for file in sorted(found, key=lambda each: -each.stat().st_mtime)[:MAX_FILES]:
        try:
            yield f"{name}/{file.relative_to(folder)}", redact_log(_end_of(file))
        except OSError as error:
            yield f"{name}/{file.relative_to(folder)}", f"cannot be read: {error.strerror}\n"


def _end_of(file: Path) -> str:
    """Returns the last whole lines of a file, at most ``MAX_FILE_BYTES``."""
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - MAX_FILE_BYTES))
        text = opened.read(MAX_FILE_BYTES)
    if size > MAX_FILE_BYTES:
        text = text[text.find(b"\n") + 1 :]
    return text.decode(errors="replace")


def _packages() -> dict[str, str]:
    found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return dict(sorted((name, version) for name, version in found.items() if name))


def _json(value: object) -> str:
    return json.dumps(value, indent=1, default=str) + "\n"


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(data))
