"""Lists the files that an agent may access, and whether it may read, write or create each of them."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from agent.confinement.landlock import Right, Rule
from agent.folders import log_folder, scratch_folder, weight_cache_folder
from llm_serving.config import Config
from llm_serving.ipc.segment import SHM_DIRECTORY

READ = Right.READ_FILE | Right.READ_DIR
MAP = Right.READ_FILE | Right.WRITE_FILE
"""Rights for shared memory and devices. Existing files can be read and written, but files cannot be made or removed."""
# MAKE_SOCK is for MindSpore's profiler, which makes a UNIX socket for its own processes.
_MAKE = Right.MAKE_DIR | Right.MAKE_REG | Right.MAKE_SOCK
WRITE = READ | MAP | _MAKE | Right.REMOVE_DIR | Right.REMOVE_FILE | Right.REFER | Right.TRUNCATE

_SYSTEM = ("/usr", "/lib", "/lib64", "/proc", "/sys")
_SYSTEM_FILES = (
    *("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group"),
    *("/etc/ssl/openssl.cnf", "/etc/selinux/config", "/dev/urandom", "/dev/random", "/dev/zero"),
)
"""Files that libraries read. The agent may not read all of /etc, because /etc may have keys that the server's user can
read.
"""
_INSTALLED = ("site-packages", "dist-packages")
"""Names of the folders that installers of packages fill."""
_CODE = (".py", ".pyc", ".so", ".pth")
_PACKAGE_METADATA = (".dist-info", ".egg-info")
_MAX_NAMESPACES = 3
"""Maximum number of nested folders, such as ``a/b/c``, in which the search for packages follows namespace packages."""
MAX_LINKS = 10_000
"""Maximum number of folders and links in a model folder that ``_link_targets`` examines."""


def cpu_rules(config: Config, environment: Mapping[str, str] = os.environ) -> list[Rule]:
    """Returns the rules for the files of an agent on a CPU. Creates the folders that the agent writes to."""
    model = config.model_config
    python_paths = list(_python_paths(environment))
    readable = [*_SYSTEM, *_SYSTEM_FILES, *python_paths]
    readable += filter(None, environment.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    draft_path = None if config.draft is None else config.draft.path
    readable += [path for path in (model.model_path, model.model_cfg_path, draft_path) if path is not None]
    rules = [Rule(Path(path), READ) for path in readable]
    linked = [target for path in python_paths for target in _package_targets(Path(path))]
    linked += [target for path in (model.model_path, draft_path) if path for target in _link_targets(Path(path))]
    kept_out = _home_and_parents()
    rules += [Rule(target, READ) for target in linked if target not in kept_out]
    rules += [Rule(Path("/dev/null"), MAP), Rule(Path(SHM_DIRECTORY), MAP)]
    return rules + [Rule(folder, WRITE) for folder in _writable_folders(config, environment)]


def ascend_rules(config: Config, environment: Mapping[str, str] = os.environ) -> list[Rule]:
    """Returns the rules for an agent on an Ascend. The agent may read everything.

    The agent may write where CANN and MindSpore write. These places are the devices, the working directory (for
    ``kernel_meta``), the folders of CANN's logs and caches, and /tmp.
    """
    home = Path.home()
    named = ("ASCEND_PROCESS_LOG_PATH", "ASCEND_WORK_PATH", "ASCEND_CACHE_PATH", "MS_COMPILER_CACHE_PATH")
    writable = [*_writable_folders(config, environment), Path.cwd(), Path(scratch_folder().parent)]
    writable += [home / "ascend", home / "atc_data", Path(SHM_DIRECTORY), Path("/var/log/npu")]
    writable += [Path(environment[name]) for name in named if environment.get(name)]
    devices = Rule(Path("/dev"), MAP | Right.IOCTL_DEV)
    return [Rule(Path("/"), READ), devices, *(Rule(folder, WRITE) for folder in writable)]


def _python_paths(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields the folders from which Python imports modules.

    Python adds the working directory to ``sys.path`` by itself. The result contains the working directory only if
    ``PYTHONPATH`` names it.
    """
    stated = environment.get("PYTHONPATH", "").split(os.pathsep)
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    yield from (path for path in sys.path if path and (path != os.getcwd() or path in stated))


def _package_targets(folder: Path) -> Iterator[Path]:
    """Yields the targets of those symbolic links in ``folder`` that lead to Python code. ``folder`` is a folder of
    Python's module path.

    The rules must name the target of a link, because Landlock ignores the link itself. An installer may also make a
    package as a folder of links to the files of its cache, as ``uv`` does with ``link-mode = "symlink"``. Links that do
    not lead to code are skipped, because the user may have made them. Links to namespace packages are followed only if
    an installer fills ``folder``.
    """
    is_installed = folder.name in _INSTALLED
    for entry in _entries(folder):
        if entry.is_symlink():
            target = _real(entry.path)
            is_metadata = is_installed and target.suffix in _PACKAGE_METADATA
            if is_metadata or _is_code(target, _MAX_NAMESPACES if is_installed else 0):
                yield target
        elif is_installed and entry.is_dir():
            yield from _linked_files(Path(entry.path))


def _is_code(path: Path, namespaces: int) -> bool:
    """Returns whether a path is a module, a library, a package or a namespace package.

    A folder counts as a namespace package if it contains code, at most ``namespaces`` levels deep, and no files of
    other kinds.
    """
    if path.suffix in _CODE or ".so." in path.name or _is_package(path):
        return True
    entries = _entries(path) if namespaces else []
    files = [Path(entry.path) for entry in entries if os.path.isfile(entry.path)]
    if not all(_is_code(file, 0) for file in files):
        return False
    return any(_is_code(Path(entry.path), namespaces - 1) for entry in entries)


def _is_package(folder: Path) -> bool:
    return os.path.isfile(folder / "__init__.py")


def _linked_files(folder: Path, depth: int = 1) -> Iterator[Path]:
    """Yields the targets of the symbolic links in the folder of a package. Also searches the packages in a namespace
    package.

    If a link leads to a file in another package folder with the same name as ``folder``, yields that folder instead of
    the file. That folder has all files of the package.
    """
    entries = _entries(folder)
    links = [_real(entry.path) for entry in entries if entry.is_symlink()]
    wholes = {link.parent for link in links if link.parent.name == folder.name and _is_package(link.parent)}
    yield from wholes
    yield from (link for link in links if link.parent not in wholes)
    if depth < _MAX_NAMESPACES and not _is_package(folder):
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _linked_files(Path(entry.path), depth + 1)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # a folder of the module path need not exist
        return []


def _link_targets(folder: Path) -> list[Path]:
    """Returns the targets of the symbolic links in a model folder. In the cache of Hugging Face, every file is a link.
    """
    targets: list[Path] = []
    for number, (parent, folders, files) in enumerate(os.walk(folder)):
        if number + len(targets) > MAX_LINKS:
            break
        links = [Path(parent, name) for name in (*folders, *files)]
        targets += [_real(link) for link in links if os.path.islink(link)]
    return targets


def _home_and_parents() -> set[Path]:
    """Returns the user's home and its parent folders. These folders hold the user's private files, so a link that leads
    to one of them gives the agent no access.
    """
    home = _real(os.path.expanduser("~"))
    return {home, *home.parents}


def _real(link: str | Path) -> Path:
    """Returns the target of a symbolic link. Never fails, even if links form a loop or a folder belongs to another
    user.

    In these cases, ``Path.resolve``, ``Path.exists`` and ``DirEntry.is_file`` raise an error, and then no agent would
    start.
    """
    return Path(os.path.realpath(link))


def _writable_folders(config: Config, environment: Mapping[str, str]) -> list[Path]:
    logs = log_folder(config)
    folders = [logs / "profiles", scratch_folder()]
    if config.model_config.weight_cache_gib > 0:
        folders.append(weight_cache_folder(config, environment))
    if config.model_config.model_type == "mindformers":
        folders.append(logs / "mindformers")
    if config.context.save_graphs:
        folders.append(Path(config.context.save_graphs_path).absolute())
    return list(_made(folders))


def _made(folders: Iterable[Path]) -> Iterator[Path]:
    """Creates the folders, private to this process's user, and yields them. Leaves out folders of other users."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The scratch folder is in /tmp, where another user can make a link of the same name. lstat() does not
            # follow links.
            state = folder.lstat() if folder == scratch_folder() else folder.stat()
        except OSError:
            continue  # the agent works without this folder, or reports the problem when it writes
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
            yield folder
