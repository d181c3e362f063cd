"""Tests the checks of the doctor on simulated machines.

A simulated machine is a folder of files, an environment, and the outputs of commands.
"""

import json
import platform
import shutil
import socket
from importlib import metadata
from pathlib import Path

import pytest

from agent.kernels import kernel_isa
from llm_serving.ipc.exchange import exchange_bytes
from llm_serving.telemetry.npu_smi import DeviceProcess, parse_npu_smi
from support.small_configs import REPOSITORY, small_config
from tools.diagnosis import cann, deployment, npu, resources, software, versions
from tools.diagnosis.finding import Level
from tools.diagnosis.host import CommandResult, Host, run_command
from tools.kernel_build import INSTRUCTION_SETS

OK, WARNING, PROBLEM = Level.OK, Level.WARNING, Level.PROBLEM
GIB = 1024**3

NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3                 Version: 24.1.rc3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B1               | OK            | 94.6        49                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3373 / 65536         |
+===========================+===============+====================================================+
| 1     910B1               | OK            | 97.8        48                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3367 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| 1       0                 | 106           | VLLMWorker_TP            | 23189                   |
+===========================+===============+====================================================+
"""
"""The layout of https://github.com/vllm-project/vllm-ascend/issues/152 and (the processes) /8679."""

A3_ROWS = """\
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | Warning       | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
"""
"""An NPU with two chips: https://github.com/vllm-project/vllm-ascend/issues/2534."""

VERSION_CFG = "# version: 1.0\nruntime_running_version=[7.6.0.1.220:{0}]\ntoolkit_running_version=[7.6.0.1.220:{0}]\n"
SOURCED = {
    "ASCEND_HOME_PATH": "/usr/local/Ascend/cann",
    "ASCEND_OPP_PATH": "/usr/local/Ascend/cann/opp",
    "LD_LIBRARY_PATH": "/usr/local/Ascend/cann/lib64",
    "PYTHONPATH": "/usr/local/Ascend/cann/opp/built-in/op_impl/ai_core/tbe",
}


class Commands:
    """Replaces running commands. Returns prepared results for known programs, and finds no other program."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def __call__(self, command, environment, stdin, timeout_s):
        self.asked.append((list(command), dict(environment), stdin))
        return self.answers.get(Path(command[0]).name.replace("-", "_"), CommandResult(None, failure="not found"))


def machine(root, files=None, environment=None, commands=None, **facts):
    for name, text in (files or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root, environment or {}, commands or Commands(), **facts)


def brief(findings):
    return [(finding.level, finding.text) for finding in findings]


ASCEND_FILES = {
    "/dev/davinci0": "",
    "/dev/davinci1": "",
    "/dev/davinci_manager": "",
    "/dev/devmm_svm": "",
    "/dev/hisi_hdc": "",
    "/usr/local/Ascend/driver/version.info": "Version=25.5.0\nascendhal_version=7.35.19\n",
}


def test_npus_with_driver_health_and_memory(tmp_path):
    host = machine(tmp_path, ASCEND_FILES, commands=Commands(npu_smi=CommandResult(0, NPU_SMI)))
    state, findings = npu.look_at_npus(host, wanted=True)
    assert brief(findings) == [
        (OK, "2 device files: /dev/davinci0 to 1"),
        (OK, "25.5.0"),
        (OK, "2 x 910B1, 64 GiB each"),
    ]
    assert [(chip.number, chip.used_mib, chip.total_mib) for chip in state.chips] == [
        (0, 3373, 65536),
        (1, 3367, 65536),
    ]
    assert state.processes == (DeviceProcess(1, 0, 106, "VLLMWorker_TP", 23189),)


def test_devices_of_the_config_can_be_free_in_use_or_missing(tmp_path):
    host = machine(tmp_path, ASCEND_FILES, commands=Commands(npu_smi=CommandResult(0, NPU_SMI)))
    state, _ = npu.look_at_npus(host, wanted=True)
    assert brief(npu.check_devices(state, host, 0, 3, 100 * GIB)) == [
        (PROBLEM, "the config uses device 2; this process sees 2"),
        (PROBLEM, "device 0: 60.7 of 64.0 GiB free; the plan needs 100.0 GiB"),
        (PROBLEM, "device 1: 60.7 of 64.0 GiB free; used by VLLMWorker_TP (106); the plan needs 100.0 GiB"),
    ]
    assert brief(npu.check_devices(state, host, 0, 2, 50 * GIB)) == [
        (OK, "device 0: 60.7 of 64.0 GiB free"),
        (WARNING, "device 1: 60.7 of 64.0 GiB free; used by VLLMWorker_TP (106)"),
    ]


def test_a_device_with_less_than_half_of_its_memory_free_is_a_problem(tmp_path):
    text = NPU_SMI.replace("3373 / 65536", "40000 / 65536")
    host = machine(tmp_path, ASCEND_FILES, commands=Commands(npu_smi=CommandResult(0, text)))
    state, _ = npu.look_at_npus(host, wanted=True)
    (finding,) = npu.check_devices(state, host, 0, 1, GIB)
    assert (finding.level, finding.text) == (PROBLEM, "device 0: 24.9 of 64.0 GiB free")
    assert finding.advice == "end the other processes, or use another serving_config.start_device_id"


def test_only_visible_devices_are_counted(tmp_path):
    host = machine(
        tmp_path, ASCEND_FILES, {"ASCEND_RT_VISIBLE_DEVICES": "1"}, Commands(npu_smi=CommandResult(0, NPU_SMI))
    )
    state, _ = npu.look_at_npus(host, wanted=True)
    assert brief(npu.check_devices(state, host, 0, 2, None)) == [
        (PROBLEM, "the config uses device 1; this process sees 1"),
        (WARNING, "device 1: 60.7 of 64.0 GiB free; used by VLLMWorker_TP (106)"),
    ]


def test_two_chips_of_an_npu_are_two_devices_and_health_is_reported(tmp_path):
    chips, processes = parse_npu_smi(A3_ROWS)
    assert [(chip.number, chip.npu, chip.chip, chip.health) for chip in chips] == [
        (0, 0, 0, "OK"),
        (1, 0, 1, "Warning"),
    ]
    assert processes == ()
    host = machine(tmp_path, ASCEND_FILES, commands=Commands(npu_smi=CommandResult(0, A3_ROWS)))
    _, findings = npu.look_at_npus(host, wanted=True)
    assert brief(findings)[-1] == (WARNING, "device 1 (Ascend910): health Warning")


@pytest.mark.parametrize(
    ("answer", "level", "text"),
    [
        (CommandResult(None, failure="not found"), WARNING, "npu-smi: not found"),
        (
            CommandResult(1, "dcmi model initialized failed, because the device is used. ret is -8020\n"),
            PROBLEM,
            "npu-smi: dcmi model initialized failed, because the device is used. ret is -8020",
        ),
        (CommandResult(None, failure="no response within 30 s"), WARNING, "npu-smi: no response within 30 s"),
        (CommandResult(0, "something else\n"), WARNING, "npu-smi info lists no device"),
    ],
)
def test_npu_smi_that_fails_is_a_finding(tmp_path, answer, level, text):
    host = machine(tmp_path, ASCEND_FILES, commands=Commands(npu_smi=answer))
    _, findings = npu.look_at_npus(host, wanted=True)
    assert brief(findings)[-1] == (level, text)


def test_a_container_with_half_of_the_device_files_and_no_driver(tmp_path):
    host = machine(tmp_path, {"/dev/davinci7": "", "/dev/davinci_manager": ""})
    _, findings = npu.look_at_npus(host, wanted=True)
    assert brief(findings)[:3] == [
        (OK, "1 device files: /dev/davinci7"),
        (PROBLEM, "missing: /dev/devmm_svm, /dev/hisi_hdc"),
        (WARNING, "unknown version: /usr/local/Ascend/driver/version.info cannot be read"),
    ]
    assert findings[1].advice == "pass them into the container: --device /dev/devmm_svm --device /dev/hisi_hdc"


def test_a_driver_in_another_folder_is_found(tmp_path):
    files = {
        "/etc/ascend_install.info": "UserName=HwHiAiUser\nDriver_Install_Path_Param=/opt/Ascend\n",
        "/opt/Ascend/driver/version.info": "Version=24.1.rc3\n",
    }
    assert npu.driver_version(machine(tmp_path, files)) == "24.1.rc3"


@pytest.mark.parametrize(("wanted", "level"), [(True, PROBLEM), (False, OK)])
def test_no_npu(tmp_path, wanted, level):
    _, (finding,) = npu.look_at_npus(machine(tmp_path), wanted)
    assert finding.level is level


def test_a_card_without_its_driver_is_reported(tmp_path):
    card = "/sys/bus/pci/devices/0000:c1:00.0"
    host = machine(tmp_path, {f"{card}/vendor": "0x19e5\n", f"{card}/class": "0x120000\n"})
    _, (finding,) = npu.look_at_npus(host, wanted=True)
    assert (finding.level, finding.text) == (
        PROBLEM,
        "1 Huawei accelerators on the PCI bus, but no /dev/davinci*: no driver is installed",
    )


def cann_files(version, home="/usr/local/Ascend/cann"):
    return {
        f"{home}/version.cfg": VERSION_CFG.format(version),
        f"{home}/set_env.sh": "",
        f"{home}/opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b/x.json": "",
    }


def test_cann_with_its_environment(tmp_path):
    host = machine(tmp_path, cann_files("9.0.0"), SOURCED)
    found, findings = cann.check_cann(host, wanted=True)
    assert brief(findings) == [(OK, "9.0.0 in /usr/local/Ascend/cann")]
    assert found == cann.Cann("/usr/local/Ascend/cann", "9.0.0", True)


def test_cann_whose_set_env_was_not_sourced(tmp_path):
    home = "/usr/local/Ascend/ascend-toolkit/latest"
    files = {f"{home}/version.cfg": VERSION_CFG.format("8.3.RC1"), "/usr/local/Ascend/ascend-toolkit/set_env.sh": ""}
    _, (finding,) = cann.check_cann(machine(tmp_path, files), wanted=True)
    assert (finding.level, finding.text) == (PROBLEM, f"8.3.RC1 in {home}, but its environment is not set")
    assert finding.advice == "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def test_cann_with_an_incomplete_environment_and_no_operators(tmp_path):
    environment = {"ASCEND_HOME_PATH": "/usr/local/Ascend/cann", "LD_LIBRARY_PATH": "/usr/local/Ascend/cann/lib64"}
    files = {"/usr/local/Ascend/cann/compiler/version.info": "Version=8.5.0.1.200\n"}
    _, findings = cann.check_cann(machine(tmp_path, files, environment), wanted=True)
    assert brief(findings) == [
        (OK, "8.5.0.1.200 in /usr/local/Ascend/cann"),
        (PROBLEM, "the environment is incomplete: PYTHONPATH, ASCEND_OPP_PATH without CANN's folders"),
        (WARNING, "no operator binaries in /usr/local/Ascend/cann/opp/built-in/op_impl/ai_core/tbe/kernel"),
    ]


def test_an_environment_that_names_a_missing_folder(tmp_path):
    _, (finding,) = cann.check_cann(machine(tmp_path, environment=SOURCED), wanted=True)
    assert (finding.level, finding.text) == (PROBLEM, "ASCEND_HOME_PATH=/usr/local/Ascend/cann: no such folder")


@pytest.mark.parametrize(
    ("mindspore", "version", "driver", "expected"),
    [
        ("2.9.0", "9.0.0", "26.0.RC1", [OK, OK]),
        ("2.9.0", "8.3.RC1", "25.3.rc1", [OK, OK]),
        ("2.9.0", "8.0.0", "24.1.0", [PROBLEM, OK]),
        ("2.9.0", "9.1.0", "25.0.RC1", [WARNING, PROBLEM]),
        ("2.9.0", "8.5.0", "24.1.rc3", [OK, PROBLEM]),
        ("2.9.0", "9.0.0", "27.0.0", [OK, WARNING]),
        ("3.0.0", "9.5.0", "27.0.0", [WARNING, WARNING]),
        (None, "9.0.0", None, []),
        ("2.9.0", None, "26.0.0", []),
    ],
)
def test_versions_are_compared_with_the_published_tables(mindspore, version, driver, expected):
    installed = cann.Cann("/cann", version, True)
    findings = list(cann.check_pairing(installed, driver, mindspore))
    assert [finding.level for finding in findings] == expected
    assert all(finding.source or "https://" in finding.text for finding in findings)


def test_the_table_matches_the_installed_mindspore():
    file = metadata.distribution("mindspore").locate_file("mindspore/run_check/_check_version.py")
    key = versions.parse_version(metadata.version("mindspore"))
    listed = ", ".join(f'"{major}.{minor}"' for major, minor in versions.CANN_OF_MINDSPORE[key])
    assert f"self.version = [{listed}]" in Path(file).read_text()
    assert versions.recommended("2.9.0") == versions.Pairing("2.9.0", "9.0.0", "26.0.RC1")


def meminfo(gib):
    return {"/proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:    {int(gib * 1024 * 1024)} kB\n"}


def test_memory_is_compared_with_the_plan(tmp_path):
    config = small_config(tmp_path)
    roomy, tight, little = (machine(tmp_path / str(gib), meminfo(gib)) for gib in (8, 0.9, 0.5))
    levels = [resources.check_memory(host, config)[1][0].level for host in (roomy, tight, little)]
    assert levels == [OK, WARNING, PROBLEM]
    assert resources.check_memory(machine(tmp_path / "none"), config)[1][0].level is WARNING


def test_the_memory_limit_of_a_container_counts(tmp_path):
    group = {
        "/proc/self/cgroup": "0::/\n",
        "/sys/fs/cgroup/memory.max": "1048576\n",
        "/sys/fs/cgroup/memory.current": "0\n",
    }
    (finding,) = resources.check_memory(machine(tmp_path, meminfo(8) | group), small_config(tmp_path))[1]
    assert finding.level is PROBLEM
    assert finding.text.endswith("of 1.0 MiB (memory limit of the control group)")


def test_small_shared_memory_and_segments_of_killed_servers(tmp_path):
    host = machine(tmp_path, {"/dev/shm/llm-serving-0123": "12345678"}, free_bytes=lambda path: 1024)
    assert brief(resources.check_shared_memory(host, 2048, 1)) == [
        (PROBLEM, "step slots of 1 agent need 2.0 KiB; 1.0 KiB are free"),
        (WARNING, "1 segments of killed servers, 8 B"),
    ]
    (finding,) = resources.check_shared_memory(machine(tmp_path / "none"), 1, 1)
    assert (finding.level, finding.text) == (PROBLEM, "does not exist or is not writable")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None),
        (
            {
                "/proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
                "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        ({}, None),
    ],
)
def test_the_quota_of_cores_of_a_container(tmp_path, files, quota):
    assert resources.cpu_quota(machine(tmp_path, files)) == quota


def test_more_threads_than_the_quota_is_a_warning(tmp_path):
    files = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "200000 100000\n"}
    host = machine(tmp_path, files, usable_cores=lambda: 8)
    (finding,) = resources.check_cores(host, small_config(tmp_path))
    expected = "8 of 8 usable, the control group grants 2.0 of them; the kernels would use 8 threads"
    assert (finding.level, finding.text) == (WARNING, expected)
    (finding,) = resources.check_cores(host, small_config(tmp_path, ["model_config.cpu_threads=2"]))
    assert finding.level is OK


def test_agents_share_cores_and_memory(tmp_path):
    """Two replicas of two agents are checked on a machine with eight usable cores and on one with two.

    On two cores, the doctor advises to use fewer agents.
    """
    parallel = ["parallel_config.tensor_parallel=2", "parallel_config.data_parallel=2"]
    config = small_config(tmp_path, parallel)
    (finding,) = deployment.check_agents(config)
    assert (finding.level, finding.text) == (OK, "4: 2 replicas of 1 stages of 2 agents")
    assert list(deployment.check_agents(small_config(tmp_path))) == []
    alone, two = deployment.shared_bytes(small_config(tmp_path)), deployment.shared_bytes(config)
    exchange = exchange_bytes(config.shape, config.slot_limits(), config.parallel_config)
    assert two == 2 * (alone + exchange)
    host = machine(tmp_path, {"/proc/cpuinfo": "processor\t: 0\n" * 8}, usable_cores=lambda: 8)
    (finding,) = resources.check_cores(host, config)
    assert (finding.level, finding.text) == (OK, "8 of 8 usable"), "two threads each"
    (finding,) = resources.check_cores(host, small_config(tmp_path, [*parallel, "model_config.cpu_threads=3"]))
    assert finding.text == "8 of 8 usable; the kernels would use 12 threads"
    assert finding.advice.startswith("set model_config.cpu_threads=2:")
    few = machine(tmp_path, {}, usable_cores=lambda: 2)
    (finding,) = resources.check_cores(few, config)
    assert (finding.level, finding.advice.split(" (")[0]) == (WARNING, "use fewer agents")


def test_huge_pages_and_open_files(tmp_path):
    config = small_config(tmp_path)
    host = machine(
        tmp_path,
        {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
        open_files_limit=lambda: 1024,
    )
    assert [finding.level for finding in resources.check_huge_pages(host, config)] == [WARNING]
    (finding,) = resources.check_open_files(host, config)
    assert (finding.level, finding.advice) == (WARNING, "ulimit -n 1160 in the shell that starts the server")


def test_a_missing_crashing_or_hanging_mindspore_is_a_finding(tmp_path):
    def look(answer):
        version, findings = software.check_mindspore(machine(tmp_path, commands=Commands(**{PYTHON: answer})), "2.9.0")
        return version, findings[0].level, findings[0].text, findings[0].advice

    python = "ModuleNotFoundError: No module named 'mindspore'"
    assert look(CommandResult(1, "", f"Traceback\n{python}\n"))[:3] == (None, PROBLEM, f"cannot be imported: {python}")
    version, level, text, advice = look(CommandResult(-4))
    assert (version, level, text) == (None, PROBLEM, "cannot be imported: signal 4")
    assert advice.startswith("build the kernels on this machine")
    assert look(CommandResult(None, failure="no response within 180 s"))[1] is PROBLEM
    assert look(CommandResult(0, "[WARNING] something\n2.9.0\n"))[:3] == ("2.9.0", OK, "2.9.0")
    assert look(CommandResult(0, "2.8.0\n"))[:3] == ("2.8.0", WARNING, "2.8.0 instead of 2.9.0")
    missing = "ImportError: libascendcl.so: cannot open shared object file: No such file or directory"
    assert look(CommandResult(1, "", missing))[3].startswith("source CANN's set_env.sh")


PYTHON = Path(software.sys.executable).name.replace("-", "_")


def test_kernels_that_are_not_built_or_crash_are_findings(tmp_path):
    def look(answer):
        (finding,) = software.check_kernels(machine(tmp_path, commands=Commands(**{PYTHON: answer})))
        return finding.level, finding.text, finding.advice

    words = "agent.kernels.library.KernelsNotBuiltError: /x/libllm_kernels.so is not built; run `make setup`"
    assert look(CommandResult(1, "", words)) == (PROBLEM, words, "make setup, or python setup.py build_ext --inplace")
    level, text, advice = look(CommandResult(-11))
    assert (level, text) == (PROBLEM, "signal 11")
    assert advice == "make clean setup on this machine; LLM_KERNELS_ISA=portable until then"


def test_the_real_kernels_list_their_instruction_sets():
    first, *others = software.check_kernels(Host())
    assert first.level is OK
    assert f"; compiled and usable: {kernel_isa()}" in first.text
    assert [finding.level for finding in others if finding.level is PROBLEM] == []


@pytest.mark.parametrize(("architecture", "wanted"), [("aarch64", [OK, WARNING]), ("x86_64", [OK])])
def test_kernels_on_arm_are_untried_on_a_processor(tmp_path, monkeypatch, architecture, wanted):
    library = tmp_path / "libllm_kernels.so"
    library.touch()
    monkeypatch.setattr(platform, "machine", lambda: architecture)
    answer = CommandResult(0, f'["neon_dot", 4, "{library}", ["neon_dot", "portable"]]')
    found = list(software.check_kernels(machine(tmp_path, commands=Commands(**{PYTHON: answer}))))
    assert [finding.level for finding in found] == wanted
    assert all("emulator" in finding.text for finding in found[1:])


X86_FLAGS = "fma f16c avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8"


def test_every_compiled_instruction_set_is_known_by_its_flags():
    assert {name for name, _ in software._ISA_FLAGS} == set(INSTRUCTION_SETS)


@pytest.mark.parametrize(
    ("compiled", "words"),
    [
        (["avx512_bf16"], "built without it"),
        (["avx512_amx", "avx512_bf16"], "does not let this process use it"),
    ],
)
def test_a_processor_whose_tiles_are_not_used_is_reported(tmp_path, monkeypatch, compiled, words):
    """``avx512_amx`` is the best set of the processor, but the library offers only ``avx512_bf16``."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    library = tmp_path / "libllm_kernels.so"
    library.touch()
    answer = CommandResult(
        0, json.dumps(["avx512_bf16", 4, str(library), compiled]), "this processor offers: avx512_bf16"
    )
    host = machine(tmp_path, {"/proc/cpuinfo": f"flags\t\t: {X86_FLAGS}\n"}, commands=Commands(**{PYTHON: answer}))
    (unused,) = [finding for finding in software.check_kernels(host) if finding.level is WARNING]
    assert "avx512_amx" in unused.text
    assert words in unused.text


def test_the_pinned_versions_are_the_projects_dependencies():
    pins = software.pinned_packages((REPOSITORY / "pyproject.toml").read_text())
    assert (pins["mindspore"], pins["numpy"]) == ("2.9.0", "1.26.4")
    assert [finding.level for finding in software.check_packages({"numpy": pins["numpy"]})] == [OK]
    assert brief(software.check_packages({"numpy": "1.0", "no-such-package": "1"})) == [
        (PROBLEM, "missing: no-such-package"),
        (WARNING, f"numpy {pins['numpy']} instead of 1.0"),
    ]


def test_a_config_for_an_ascend_is_checked_without_one(tmp_path):
    host = machine(tmp_path)
    overrides = ["model_config.device_target=Ascend", "model_config.model_dtype=float16"]
    found = deployment.look_at_config(host, "llama_tiny_cpu.yaml", overrides)
    assert found.wants_ascend
    assert found.config is not None
    assert found.config.device == "Ascend"
    assert [finding.level for finding in found.findings] == [PROBLEM]
    wrong = deployment.look_at_config(host, "llama_tiny_cpu.yaml", ["pa_config.num_blocks=0"])
    assert (wrong.config, wrong.wants_ascend) == (None, False)


def test_auto_selects_an_ascend_if_there_is_one(tmp_path):
    home = tmp_path / "cann"
    home.mkdir()
    host = machine(tmp_path, {"/dev/davinci0": ""}, {"ASCEND_HOME_PATH": str(home)})
    found = deployment.look_at_config(host, "llama_tiny_cpu.yaml", ["model_config.model_dtype=float16"])
    assert found.wants_ascend
    assert [finding.level for finding in found.findings] == [OK]


def test_a_port_in_use_is_reported(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = small_config(tmp_path, [f"serving_config.agent_ports=[{port}]"])
        assert brief(deployment.check_ports(config)) == [
            (PROBLEM, f"serving_config.agent_ports: 127.0.0.1:{port}: Address already in use")
        ]
    assert brief(deployment.check_ports(config)) == [(OK, f"free: {port}")]


def test_git_lfs_pointers_and_a_tokenizer_of_another_model_are_problems(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(REPOSITORY / "models" / "tiny_llama", folder)
    config = small_config(tmp_path, [f"model_config.model_path={folder}"])
    assert [finding.level for finding in deployment.check_model(config)] == [OK]
    assert [finding.level for finding in deployment.check_tokenizer(config)] == [OK]
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert brief(deployment.check_model(config)) == [(PROBLEM, f"{folder}: model.safetensors has 43 bytes")]
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": 1024}))
    smaller = small_config(
        tmp_path,
        [f"model_config.model_path={folder}", "model_config.load_format=dummy", "model_config.vocab_size=null"],
    )
    (finding,) = deployment.check_tokenizer(smaller)
    assert (finding.level, finding.text.endswith("2048 tokens; the model has 1024")) == (PROBLEM, True)


def test_commands_never_raise(tmp_path):
    assert run_command(["/no/such/program"], {}, "", 1.0).failure == "not found"
    assert run_command(["sleep", "5"], {"PATH": "/bin:/usr/bin"}, "", 0.1).failure == "no response within 0.1 s"
    done = run_command(["cat"], {"PATH": "/bin:/usr/bin"}, "hello", 10.0)
    assert (done.code, done.stdout, done.succeeded) == (0, "hello", True)
    host = machine(tmp_path)
    assert (host.read("/no/file"), host.names("/no", "*"), host.is_folder("/no")) == (None, [], False)
