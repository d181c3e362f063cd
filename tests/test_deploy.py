"""Tests that the files of deploy/ agree with the server and grant few permissions."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from llm_serving.config.loader import parse_override
from llm_serving.config.serving_section import DEFAULT_SERVER_PORT, ServingConfig
from llm_serving.engine.agent_questions import SLOW_PROBE_S
from llm_serving.server.operations.admin import PROBE_TIMEOUT_S
from llm_serving.version import __version__
from support.access_keys import secret_of, write_keys
from support.server_process import running_server
from support.small_configs import REPOSITORY
from support.time_limits import time_limit

DEPLOY = REPOSITORY / "deploy"
UNIT = (DEPLOY / "llm-serving.service").read_text()
IMAGES = {name: (DEPLOY / name).read_text() for name in ("Dockerfile", "Dockerfile.ascend")}
"""The container files by name: for a CPU, and for an Ascend."""
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["llm-serving"]
CHART = REPOSITORY / "helm" / "llm-serving"
POD = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


@pytest.mark.parametrize("name", ["llm-serving.service", *IMAGES, "compose.yaml", "kubernetes.yaml", "the chart"])
def test_every_setting_exists(name):
    path = CHART / "templates" / "statefulset.yaml" if name == "the chart" else DEPLOY / name
    text = re.sub(r"\{\{[^}]*\}\}", "1", path.read_text().replace('", "', " "))  # values of the chart stand for numbers
    # ``test_chart.py`` checks the value of ``parallel_config.pools``, which the template makes in several parts.
    overrides = re.findall(r'--set[ =]"?((?!parallel_config.pools)[a-z_]+\.[a-z_]+=[^\s",\\]+)', text)
    assert overrides
    for override in overrides:
        parse_override(override)


def test_there_is_more_time_to_stop_than_to_drain():
    drain = ServingConfig().drain_timeout_s
    [unit] = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    compose = int(COMPOSE["stop_grace_period"].removesuffix("s"))
    chart = yaml.safe_load((CHART / "values.yaml").read_text())["terminationGraceSeconds"]
    assert min(int(unit), compose, chart, POD["terminationGracePeriodSeconds"]) >= drain + 10


def test_a_probe_waits_longer_than_the_server_waits_for_slow_agents():
    check = runpy.run_path(str(DEPLOY / "health_check.py"))
    chart = (CHART / "templates" / "statefulset.yaml").read_text()
    [probe] = re.findall(r"readinessProbe:\n(?: {12}.*\n)*? {12}timeoutSeconds: (\d+)", chart)
    assert PROBE_TIMEOUT_S + SLOW_PROBE_S < check["READY_TIMEOUT_S"] < int(probe)
    assert int(probe) == CONTAINER["readinessProbe"]["timeoutSeconds"]


def test_the_readiness_probe_asks_whether_the_server_is_ready():
    """Without a key, the health check asks only whether the server is live. So the command must name the key's file."""
    command = CONTAINER["readinessProbe"]["exec"]["command"]
    chart = (CHART / "templates" / "statefulset.yaml").read_text()
    [lines] = re.findall(r"readinessProbe:\n +exec:\n +command:\n((?: +- .*\n)+)", chart)
    assert command == [line.strip().removeprefix("- ") for line in lines.splitlines()]
    assert command[-2:] == ["/run/llm-serving/server.sock", "/secrets/probe.key"]


def test_systemd_never_stops_restarting_the_server():
    """A healthy run does not reset systemd's count of restarts. So the longest pause also follows a rare failure."""
    section = UNIT.partition("[Unit]")[2].partition("[Service]")[0]
    assert "StartLimitIntervalSec=0" in section.splitlines()
    service = dict(re.findall(r"^(Restart\w*)=(.+)$", UNIT, re.MULTILINE))
    assert service["Restart"] == "on-failure"
    assert int(service["RestartSteps"]) > 0
    assert (service["RestartSec"], service["RestartMaxDelaySec"]) == ("1", "15")


def test_the_chart_has_the_version_and_a_configuration_of_the_server():
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (__version__, __version__)
    for key, value in values["settings"].items():
        parse_override(f"{key}={value}")
    assert list((REPOSITORY / "configs").rglob(values["config"]))


def test_settings_that_the_chart_makes_are_refused_as_values():
    schema = json.loads((CHART / "values.schema.json").read_text())
    refused = set(schema["properties"]["settings"]["propertyNames"]["not"]["enum"])
    made = set(re.findall(r"--set=([a-z_]+\.[a-z_]+)=", (CHART / "templates" / "statefulset.yaml").read_text()))
    # Users may set the first two settings in the chart's values, whose arguments follow and take precedence. The third
    # is refused only with ``agentPool``. The chart must refuse all others.
    free = {"telemetry_config.vllm_metric_names", "parallel_config.data_parallel", "parallel_config.pools"}
    assert made - free <= refused


def test_containers_have_no_root_no_privileges_and_a_read_only_system():
    users = set()
    for text in IMAGES.values():
        [user] = re.findall(r"^USER (\d+):\d+$", text, re.MULTILINE)
        assert text.rindex("\nUSER ") > text.rindex("\nRUN ")
        users.add(user)
    [user] = users
    assert int(user) > 0
    assert COMPOSE["read_only"]
    assert (COMPOSE["cap_drop"], COMPOSE["user"]) == (["ALL"], f"{user}:{user}")
    assert COMPOSE["security_opt"] == ["no-new-privileges:true"]
    rights = CONTAINER["securityContext"]
    assert rights["readOnlyRootFilesystem"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert POD["securityContext"]["runAsNonRoot"]
    assert POD["securityContext"]["runAsUser"] == int(user)


def test_the_port_is_the_default():
    assert COMPOSE["ports"] == [f"{DEFAULT_SERVER_PORT}:{DEFAULT_SERVER_PORT}"]
    assert CONTAINER["ports"] == [{"containerPort": DEFAULT_SERVER_PORT}]
    assert all(f"EXPOSE {DEFAULT_SERVER_PORT}\n" in text for text in IMAGES.values())


@pytest.mark.parametrize("image", IMAGES)
def test_what_the_image_copies_is_not_ignored(image):
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    lines = re.findall(r"^COPY ((?!--).*) \S+$", IMAGES[image], re.MULTILINE)
    copied = [word for line in lines for word in line.split()]
    assert len(copied) > 8
    for name in copied:
        assert f"!{name}" in ignored
        assert (REPOSITORY / name).exists()


def test_the_command_of_the_ascend_image_is_an_exec_form_whose_shell_passes_the_arguments(tmp_path):
    """Runs the image's shell command with a stand-in for the server, and with an environment file like CANN's."""
    text = IMAGES["Dockerfile.ascend"].replace("\\\n", "")
    command = json.loads(text[text.rindex("ENTRYPOINT ") + len("ENTRYPOINT ") :])
    (tmp_path / "set_env.sh").write_text("export FROM_CANN=yes\n")
    script = command[2].replace("/usr/local/Ascend/ascend-toolkit/set_env.sh", str(tmp_path / "set_env.sh"))
    script = re.sub(r"exec \S+ \S+", 'exec printf "%s\\\\n" "$FROM_CANN"', script)
    arguments = [command[0], command[1], script, *command[3:], "--config", "a b"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["yes", *command[4:], "--config", "a b"], done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit_and_rates_its_rights_as_few(tmp_path):
    unit = tmp_path / "llm-serving.service"
    unit.write_text(UNIT.replace("/opt/llm-serving/.venv/bin/python", "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    # Versions before 254 do not know the keys of the growing pause. They ignore them and print a line for each.
    ignored = re.compile(r"Unknown key (name )?'(RestartSteps|RestartMaxDelaySec)'")
    lines = [line for line in verified.stderr.splitlines() if "llm-serving" in line]
    assert [line for line in lines if not ignored.search(line)] == []
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=20", unit], capture_output=True, text=True
    )
    assert rated.returncode == 0, rated.stdout[-200:]


def test_the_health_check_sees_a_server_and_its_end(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of a UNIX socket has at most 107 characters
        _check_health(tmp_path, Path(folder, "server.sock"))


def _check_health(tmp_path: Path, path: Path) -> None:
    """Starts a server at the socket ``path``, and runs the health check with and without keys, and after its end."""
    check = [sys.executable, DEPLOY / "health_check.py", path]
    key, wrong = tmp_path / "probe.key", tmp_path / "wrong.key"
    key.write_text(f"{secret_of('probe')}\n")
    wrong.write_text("sk-wrong\n")
    keys = write_keys(tmp_path / "keys.txt", ["probe"])
    settings = [f"serving_config.unix_socket={path}", f"serving_config.api_keys_file={keys}"]
    with running_server(tmp_path, settings):
        assert subprocess.run(check, timeout=time_limit(20)).returncode == 0
        assert subprocess.run([*check, key], timeout=time_limit(20)).returncode == 0
        assert subprocess.run([*check, wrong], timeout=time_limit(20)).returncode == 1
    assert subprocess.run(check, timeout=time_limit(20)).returncode == 1
