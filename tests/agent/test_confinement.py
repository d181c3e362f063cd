"""Tests that a confined process can do only what serving needs.

On an older kernel, the confinement uses only the rules that this kernel knows.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.confinement import seccomp
from agent.confinement.confine import confine
from agent.confinement.grants import cpu_rules
from agent.confinement.landlock import ADD_RULE, CREATE_RULESET, RESTRICT_SELF, Right, Rule, landlock_abi, restrict
from llm_serving.errors import AgentStartError
from support.small_configs import REPOSITORY, TINY_LLAMA, small_config
from support.time_limits import time_limit

PROGRAM = REPOSITORY / "tests/support/confined_program.py"
needs_landlock = pytest.mark.skipif(landlock_abi() == 0, reason="this kernel has no Landlock")
PERMITTED = {
    "read the model",
    "import linked packages",
    "map a segment",
    "write to the cache",
    "rename in the cache",
    "write a profile",
    "write a temporary file",
    "make a UNIX socket",
}


def linked_packages(folder: Path) -> Path:
    """Makes packages whose files are links to files elsewhere. Returns the folder for the module path."""
    store, installed = folder / "store", folder / "venv/site-packages"
    for package in ("linked_package", "archive/package_of_links", "archive/namespace/package_of_links"):
        (store / package / "inner").mkdir(parents=True)
        (store / package / "__init__.py").touch()
        (store / package / "inner/__init__.py").touch()
    (store / "module.py").touch()
    installed.mkdir(parents=True)
    (installed / "linked_package").symlink_to(store / "linked_package")
    (installed / "linked_module.py").symlink_to(store / "module.py")
    for package in ("package_of_links", "namespace/package_of_links"):
        (installed / package / "inner").mkdir(parents=True)
        for file in ("__init__.py", "inner/__init__.py"):
            (installed / package / file).symlink_to(store / "archive" / package / file)
    return installed


def run_program(setting: str, tmp_path: Path) -> dict[str, object]:
    """Runs the confined program on a model folder whose weights are links to other files, as in Hugging Face's cache.
    """
    logs, model, blobs, code = (tmp_path / name for name in ("logs", "model", "blobs", "code"))
    for folder in (logs, model, blobs, code):
        folder.mkdir()
    (logs / "server.log").write_text("a prompt")
    if setting == "off":  # with confinement, the program makes these folders itself
        (logs / "profiles").mkdir()
        (logs / "cache").mkdir()
    for file in TINY_LLAMA.iterdir():
        shutil.copy(file, blobs / file.name)
        (model / file.name).symlink_to(blobs / file.name)
    segment = Path("/dev/shm", f"llm-serving-test-{os.getpid()}x{secrets.token_hex(4)}")
    segment.touch()
    installed = linked_packages(tmp_path)
    paths = os.pathsep.join(map(str, (code, installed, REPOSITORY, REPOSITORY / "tests")))
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            done = subprocess.run(
                [sys.executable, PROGRAM, setting, logs, model, str(listener.getsockname()[1]), segment],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": paths},
                stdout=subprocess.PIPE,
                check=True,
                timeout=time_limit(60),
            )
    finally:
        segment.unlink(missing_ok=True)
        Path(f"{segment}x").unlink(missing_ok=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


@needs_landlock
def test_a_confined_process_can_only_do_what_serving_needs(tmp_path):
    found = run_program("on", tmp_path)
    abi = landlock_abi()
    done = found["done"]
    can_signal = abi < 6
    refused = {name for name, outcome in done.items() if outcome != "done"}
    assert set(done) - refused == PERMITTED | ({"signal the server"} if can_signal else set())
    assert {done[name] for name in refused} == {"PermissionError"}
    assert found["confinement"].startswith(f"Landlock {abi} (files")
    assert found["confinement"].endswith("seccomp") == seccomp.can_filter()
    assert found["core"] == [0, 0]
    assert not found["numpy"], "NumPy starts threads, and threads from before the confinement are not confined"


def test_without_confinement_the_same_process_can_do_everything(tmp_path):
    found = run_program("off", tmp_path)
    assert {name for name, outcome in found["done"].items() if outcome != "done"} == set()
    assert found["confinement"] == "none (serving_config.confine_agents is off)"
    assert found["core"] == [0, 0]


def test_auto_leaves_mindformers_unconfined(tmp_path):
    config = small_config(tmp_path)
    model = replace(config.model_config, model_type="mindformers")
    text = confine(replace(config, model_config=model), FakeKernel(7))
    assert text == "none (serving_config.confine_agents is auto, and the model is of MindFormers)"


def test_a_link_without_a_target_stops_no_agent(tmp_path, monkeypatch):
    """Tests a loop of links, and a link that the system refuses to follow. Users' folders may contain both."""
    folders = [tmp_path / name for name in ("code", "model", "venv/site-packages", "venv/site-packages/package")]
    for folder in folders:
        if folder.name == "model":
            shutil.copytree(TINY_LLAMA, folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "loop").symlink_to("loop")
        (folder / "refused").symlink_to("n" * 300)
    code, model, installed, _ = folders
    monkeypatch.setattr(sys, "path", [str(code), str(installed)])
    config, kernel = small_config(tmp_path, [f"model_config.model_path={model}"]), FakeKernel(7)
    restrict(cpu_rules(config, {}), abi=7, isolates=True, call=kernel)
    assert {str(code), str(model), str(installed)} <= set(kernel.rules)


def test_links_of_packages_open_only_code(tmp_path, monkeypatch):
    """A link to data is not a package. A package with a link to a file does not open a folder of the same name."""
    installed, home, store = (tmp_path / name for name in ("venv/site-packages", "home/user", "store"))
    code = ("package/__init__.py", "namespace/inner/module.py", "some.libs/some.so.1", "some-1.dist-info/METADATA")
    data = ("data/notes.txt", "data/script.py", "tool/key", "tool/tables/table")
    for file in (*(store / each for each in (*code, *data)), home / "__init__.py", installed / "tool/__init__.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for name in ("package", "namespace", "some.libs", "some-1.dist-info", "data"):
        (installed / name).symlink_to(store / name)
    for name, target in (("home", home), ("parent", home.parent), ("root", Path("/"))):
        (installed / name).symlink_to(target)
        (installed / "tool" / name).symlink_to(target)
    (installed / "tool/key").symlink_to(store / "tool/key")
    monkeypatch.setattr(sys, "path", [str(installed)])
    monkeypatch.setenv("HOME", str(home))
    paths = {rule.path for rule in cpu_rules(small_config(tmp_path), {})}
    expected = {store / Path(each).parts[0] for each in code} | {store / "tool/key"}
    assert {path for path in paths if path.is_relative_to(store)} == expected
    assert paths.isdisjoint({home, *home.parents})


class FakeKernel:
    """A fake kernel that records the system calls of Landlock.

    ``abi`` is its version of Landlock, or 0 for a kernel without Landlock.
    """

    def __init__(self, abi: int) -> None:
        self.abi = abi
        self.attributes: tuple[int, ...] = ()
        self.rules: dict[str, Right] = {}
        self.is_restricted = False

    def __call__(self, number, *arguments):
        if number == CREATE_RULESET and arguments == (None, 0, 1):
            if not self.abi:
                raise OSError(errno.ENOSYS, "no such call")
            return self.abi
        if number == CREATE_RULESET:
            data, size, flags = arguments
            assert (size, flags) == (len(data), 0)
            self.attributes = struct.unpack(f"={size // 8}Q", data)
            return os.open("/dev/null", os.O_RDONLY)
        if number == ADD_RULE:
            _, kind, data, flags = arguments
            rights, descriptor = struct.unpack("=Qi", data)
            assert (kind, flags) == (1, 0)
            self.rules[os.readlink(f"/proc/self/fd/{descriptor}")] = Right(rights)
            return 0
        assert number == RESTRICT_SELF
        self.is_restricted = True
        return 0


@pytest.mark.parametrize(
    ("abi", "words", "newest"),
    [(1, 1, Right.MAKE_SYM), (2, 1, Right.REFER), (3, 1, Right.TRUNCATE), (4, 2, Right.TRUNCATE),
     (5, 2, Right.IOCTL_DEV), (6, 3, Right.IOCTL_DEV), (99, 3, Right.IOCTL_DEV)],
)  # fmt: skip
def test_each_kernel_gets_only_the_restrictions_that_it_knows(tmp_path, abi, words, newest):
    kernel, file = FakeKernel(abi), tmp_path / "file"
    file.touch()
    everything = Right((1 << 16) - 1)
    rules = [Rule(tmp_path, everything), Rule(file, everything), Rule(tmp_path / "missing", everything)]
    restrict(rules, abi=abi, isolates=True, call=kernel)
    known = (int(newest) << 1) - 1
    assert kernel.attributes == (known, 0b11, 0b11)[:words]
    of_a_file = Right.EXECUTE | Right.WRITE_FILE | Right.READ_FILE | Right.TRUNCATE | Right.IOCTL_DEV
    assert kernel.rules == {str(tmp_path): Right(known), str(file): of_a_file & known}
    assert kernel.is_restricted


def test_an_agent_on_an_ascend_keeps_programs_and_network():
    kernel = FakeKernel(7)
    restrict([], abi=7, isolates=False, call=kernel)
    assert kernel.attributes == (((1 << 16) - 1) & ~Right.EXECUTE, 0, 0)


def test_a_kernel_without_landlock_fails_only_a_start_that_demands_it(tmp_path):
    demands = small_config(tmp_path, ["serving_config.confine_agents=on"])
    with pytest.raises(AgentStartError, match="confine_agents is on, but the kernel has no Landlock"):
        confine(demands, FakeKernel(0))
    assert confine(small_config(tmp_path), FakeKernel(0)).startswith("none (the kernel has no Landlock")


INSTRUCTION = struct.Struct("=HBBI")


def verdict(program: bytes, arch: int, number: int, first_argument: int) -> int:
    """Runs a seccomp filter as the kernel does, and returns the filter's result for a system call."""
    lines = [INSTRUCTION.unpack_from(program, at) for at in range(0, len(program), INSTRUCTION.size)]
    data = struct.pack("=IIQ6Q", number, arch, 0, first_argument, 0, 0, 0, 0, 0)
    accumulator, at = 0, 0
    while True:
        code, yes, no, operand = lines[at]
        at += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, operand)
        else:
            holds = accumulator == operand if code == 0x15 else accumulator >= operand
            assert code in (0x15, 0x35)
            at += yes if holds else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_its_list_and_nothing_else(machine):
    arch, _, socket_number = seccomp._MACHINES[machine]
    program = seccomp._program(machine)
    column = list(seccomp._MACHINES).index(machine)
    refused = {numbers[column] for numbers in seccomp._REFUSED.values()}
    found = {number for number in range(1024) if verdict(program, arch, number, socket.AF_UNIX) != seccomp._ALLOW}
    assert found == refused
    assert verdict(program, arch, socket_number, socket.AF_INET) == seccomp._ERRNO | errno.EPERM
    assert verdict(program, arch, socket_number, socket.AF_INET6) == seccomp._ERRNO | errno.EPERM
    assert verdict(program, arch ^ 1, 0, 0) == seccomp._ERRNO | errno.EPERM, "another interface has other numbers"
    assert verdict(program, arch, 0x40000000, 0) == seccomp._ERRNO | errno.EPERM


def test_numbers_of_system_calls_are_those_of_the_c_library():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    generic = Path("/usr/include/asm-generic/unistd.h")
    if not header.is_file() or not generic.is_file():
        pytest.skip("the headers of the kernel are not installed")
    for column, text in enumerate((header.read_text(), generic.read_text())):
        words = [line.split() for line in text.splitlines() if line.startswith("#define __NR")]
        stated = {each[1].removeprefix("__NR_").removeprefix("__NR3264_"): each[2] for each in words if len(each) > 2}
        for name, numbers in seccomp._REFUSED.items():
            assert stated[name] == str(numbers[column]), name
        _, own, sockets = list(seccomp._MACHINES.values())[column]
        assert (stated["seccomp"], stated["socket"]) == (str(own), str(sockets))
