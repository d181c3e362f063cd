"""Tests of the Helm chart, without Helm and without a cluster. ``make test-chart`` runs them.

Go's template engine renders the templates, as in Helm. Of Helm's own functions, the chart uses only ``fail``. Here, it
prints a line that these tests find. ``kubernetes-validate`` has the schemas of the Kubernetes API and refuses unknown
fields. ``cloudcoil`` has models of the kinds of KEDA and of the Prometheus operator, made from their schemas.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

CHART = Path(__file__).parents[2] / "helm" / "llm-serving"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = yaml.safe_load((CHART / "values.schema.json").read_text())
ABOUT = yaml.safe_load((CHART / "Chart.yaml").read_text())
KUBERNETES = "1.30"
MODELS = {"ServiceMonitor": prometheus_operator.ServiceMonitor, "ScaledObject": keda.ScaledObject}
"""Models of kinds of other projects. Kubernetes' schemas do not have these kinds."""
UNCHECKED_KINDS = {"InferencePool"}
"""Kinds without a schema. No package has one."""
FAILED = "FAILED: "
"""Start of the line that ``fail`` prints."""
RENDER = "import sys, go_template; go_template.render_template(sys.argv[1], sys.argv[2], '')"
EVERYTHING = {
    "image": {"tag": "2.0", "pullSecrets": ["registry"]},
    "settings": {
        "scheduler_config.policy": "chunked",
        "model_config.model_name": 'a "b"',
        "scheduler_config.prefix_cache": True,
    },
    "ascend": {"devices": 2},
    "cache": {"storageClass": "fast"},
    "nodeSelector": {"zone": "1"},
    "tolerations": [{"key": "npu", "operator": "Exists"}],
    "networkPolicy": {"enabled": True, "from": ["gateway"]},
    "monitor": {"enabled": True, "keySecret": "metrics-key"},
    "autoscaling": {"enabled": True},
    "inferencePool": {"enabled": True, "endpointPicker": "picker"},
}
POOL = {
    **{key: value for key, value in EVERYTHING.items() if key not in ("autoscaling", "inferencePool")},
    "agentPool": {"enabled": True, "maxReplicas": 3, "idleSeconds": 120},
}

POOLS = {
    **POOL,
    "agentPool": {
        **POOL["agentPool"],
        "pools": [
            {"name": "short", "replicas": 2, "minReplicas": 1, "maxPromptTokens": "2048"},
            {"name": "long", "replicas": 1},
        ],
    },
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the chart's values with ``changes``, merged as Helm merges them."""
    values = copy.deepcopy(VALUES)
    for key, change in changes.items():
        values[key] = {**values[key], **change} if isinstance(change, dict) else change
    return values


class FailedError(Exception):
    """Raised if a template calls ``fail``."""


def manifests(folder: Path, changes: dict[str, Any], release: str = "chat") -> list[dict[str, Any]]:
    """Renders the chart with changed values and returns its manifests. Checks the values against the schema first, as
    Helm does. Raises FailedError if a template calls ``fail``.
    """
    values = changed(changes)
    jsonschema.validate(values, SCHEMA)
    data = folder / "data.yaml"
    data.write_text(
        yaml.safe_dump(
            {
                "Values": values,
                "Release": {"Name": release, "Namespace": "models"},
                "Chart": {"Name": ABOUT["name"], "AppVersion": ABOUT["appVersion"]},
            }
        )
    )
    found = []
    for template in sorted((CHART / "templates").glob("*.yaml")):
        copied = folder / template.name
        copied.write_text(template.read_text().replace("{{- fail (", f'{{{{- printf "\\n{FAILED}%s\\n" ('))
        done = subprocess.run([sys.executable, "-c", RENDER, copied, data], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if failed := re.search(f"^{FAILED}(.*)", done.stdout, re.MULTILINE):
            raise FailedError(failed[1])
        assert "<no value>" not in done.stdout
        found += [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    return found


@pytest.fixture(
    scope="module",
    params=[{}, EVERYTHING, POOL, POOLS],
    ids=["defaults", "everything", "pool of agents", "pools by prompt length"],
)
def rendered(request, tmp_path_factory):
    return manifests(tmp_path_factory.mktemp("chart"), request.param)


def by_kind(rendered: list[dict[str, Any]], kind: str, name: str = "chat") -> dict[str, Any]:
    return next(one for one in rendered if one["kind"] == kind and one["metadata"]["name"] == name)


def check_against_model(manifest: dict[str, Any]) -> None:
    """Checks a manifest of another project's kind. The models drop unknown fields and convert values, so that an error
    changes the manifest.
    """
    read = MODELS[manifest["kind"]].model_validate(manifest)
    assert read.model_dump(by_alias=True, exclude_unset=True, mode="json") == manifest


def test_every_manifest_fits_the_schema_of_its_kind(rendered):
    for manifest in rendered:
        if manifest["kind"] in MODELS:
            check_against_model(manifest)
        elif manifest["kind"] not in UNCHECKED_KINDS:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("ScaledObject", {"minReplicas": 1}),
        ("ScaledObject", {"maxReplicaCount": "4"}),
        ("ScaledObject", {"triggers": [{"type": "prometheus", "metadata": {"threshold": 4}}]}),
        ("ServiceMonitor", {"endpoints": [{"port": 8835}]}),
    ],
)
def test_a_wrong_field_of_another_project_is_found(tmp_path, kind, change):
    manifest = by_kind(manifests(tmp_path, EVERYTHING), kind)
    check_against_model(manifest)
    manifest["spec"] |= change
    with pytest.raises((AssertionError, ValueError)):
        check_against_model(manifest)


def test_selectors_find_the_pods(rendered):
    for name, pods, headless in (("chat", "llm-serving", "chat-pods"), ("chat-agents", "llm-serving-agents", None)):
        labels = {"app.kubernetes.io/name": pods, "app.kubernetes.io/instance": "chat"}
        names = {name, headless, *(f"{name}-{pool}" for pool in ("short", "long"))}
        own = [one for one in rendered if one["metadata"]["name"] in names]
        for manifest in own:
            spec = manifest["spec"]
            if manifest["kind"] == "StatefulSet":
                assert spec["template"]["metadata"]["labels"] == spec["selector"]["matchLabels"]
                assert labels.items() <= spec["selector"]["matchLabels"].items()
                assert spec["serviceName"] == (headless or name)
            elif manifest["kind"] == "Service":
                assert spec["selector"] == labels
            elif "selector" in spec or "podSelector" in spec:
                assert spec.get("selector", spec.get("podSelector"))["matchLabels"] == labels
        services = [one for one in own if one["kind"] == "Service" and one["spec"].get("clusterIP") == "None"]
        assert len(services) == any(one["kind"] == "StatefulSet" for one in own)


def test_pods_have_few_rights_and_enough_time_to_drain(rendered):
    for pod in [one["spec"]["template"]["spec"] for one in rendered if one["kind"] == "StatefulSet"]:
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for container in containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert pod["terminationGracePeriodSeconds"] >= 40
        volumes = {volume["name"] for volume in pod["volumes"]} | {"cache"}
        assert {mount["name"] for each in containers for mount in each["volumeMounts"]} == volumes


def test_the_server_knows_when_kubernetes_kills_it(rendered):
    """The server gets the grace period of its pod as a setting. It refuses a drain time that is longer."""
    pods = [one["spec"]["template"]["spec"] for one in rendered if one["kind"] == "StatefulSet"]
    port = "--set=serving_config.server_port=8835"
    [(pod, server)] = [(pod, each) for pod in pods for each in pod["containers"] if port in each.get("args", ())]
    assert f"--set=serving_config.kill_after_s={pod['terminationGracePeriodSeconds']}" in server["args"]


def test_the_defaults_render_only_what_every_cluster_knows(tmp_path):
    kinds = sorted(one["kind"] for one in manifests(tmp_path, {}))
    assert kinds == ["PodDisruptionBudget", "Service", "Service", "StatefulSet"]


def test_values_reach_the_manifests(tmp_path):
    found = manifests(tmp_path, EVERYTHING)
    stateful = by_kind(found, "StatefulSet")
    pod = stateful["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "llm-serving:2.0"
    assert '--set=model_config.model_name=a "b"' in container["args"]
    assert "--set=scheduler_config.policy=chunked" in container["args"]
    assert "--set=scheduler_config.prefix_cache=true" in container["args"]
    assert "--set=telemetry_config.vllm_metric_names=true" in container["args"], "the endpoint picker reads these names"
    assert container["resources"]["limits"]["huawei.com/Ascend910"] == 2
    assert pod["nodeSelector"] == {"zone": "1"}
    assert pod["tolerations"] == [{"key": "npu", "operator": "Exists"}]
    assert "replicas" not in stateful["spec"], "KEDA sets the number of replicas"
    [trigger] = by_kind(found, "ScaledObject")["spec"]["triggers"]
    assert 'namespace="models", service="chat"' in trigger["metadata"]["query"]
    assert trigger["metadata"]["threshold"] == "4"
    [endpoint] = by_kind(found, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in by_kind(found, "Service")["spec"]["ports"]}
    assert by_kind(found, "InferencePool")["spec"]["endpointPickerRef"]["name"] == "picker"
    assert by_kind(found, "NetworkPolicy")["spec"]["egress"] == []


def test_a_pool_of_agents_goes_down_to_none_while_the_server_stays(tmp_path):
    found = manifests(tmp_path, POOL)
    server, agents = by_kind(found, "StatefulSet"), by_kind(found, "StatefulSet", "chat-agents")
    [container] = server["spec"]["template"]["spec"]["containers"]
    [host] = agents["spec"]["template"]["spec"]["containers"]
    assert server["spec"]["replicas"] == 1
    assert "replicas" not in agents["spec"], "KEDA sets the number of pods"
    assert container["resources"]["limits"] == {"memory": "1Gi"}, "the server needs no device"
    assert host["resources"]["limits"]["huawei.com/Ascend910"] == 2
    service = by_kind(found, "Service", "chat-agents")
    assert service["spec"]["clusterIP"] == "None"
    assert "--set=parallel_config.nodes=[dns:chat-agents:7450]" in container["args"]
    assert "--set=parallel_config.idle_s=120" in container["args"]
    assert "--listen=0.0.0.0:7450" in host["command"]
    scaled = by_kind(found, "ScaledObject", "chat-agents")["spec"]
    assert scaled["scaleTargetRef"] == {"kind": "StatefulSet", "name": "chat-agents"}
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"], scaled["cooldownPeriod"]) == (0, 3, 120)
    [trigger] = scaled["triggers"]
    assert "llm_serving_requests_(waiting|running)" in trigger["metadata"]["query"]
    assert trigger["metadata"]["activationThreshold"] == "0", "one waiting request starts a pod"
    [secrets] = [each for each in agents["spec"]["template"]["spec"]["volumes"] if each["name"] == "secrets"]
    assert [each["path"] for each in secrets["secret"]["items"]] == ["cluster.key"], "the agents get no API keys"
    outgoing = by_kind(found, "NetworkPolicy")["spec"]["egress"]
    assert [rule["ports"][0]["port"] for rule in outgoing] == [7450, 53]
    assert by_kind(found, "NetworkPolicy", "chat-agents")["spec"]["egress"] == []
    assert len(by_kind(found, "NetworkPolicy", "chat-agents")["spec"]["ingress"][0]["from"]) == 1
    roles = {**POOL, "settings": {"parallel_config.roles": "[prefill, decode, both]"}}
    policy = by_kind(manifests(tmp_path, roles), "NetworkPolicy", "chat-agents")["spec"]
    [outgoing] = policy["egress"]
    assert outgoing["ports"] == [{"port": 7450, "protocol": "TCP"}]
    assert outgoing["to"] == [policy["ingress"][0]["from"][1]], "pods with agents reach each other, and nothing else"


def test_pools_by_prompt_length_reach_the_server(tmp_path):
    [server] = by_kind(manifests(tmp_path, POOLS), "StatefulSet")["spec"]["template"]["spec"]["containers"]
    wanted = '[{name: "short", replicas: 2, max_prompt_tokens: 2048}, {name: "long", replicas: 1}]'
    assert f"--set=parallel_config.pools={wanted}" in server["args"]
    assert "--set=parallel_config.data_parallel=3" in server["args"]
    assert "--set=parallel_config.nodes=[dns:chat-agents:7450]" in server["args"], "the name of the pods of all pools"


def test_each_pool_by_prompt_length_has_its_own_pods_and_its_own_trigger(tmp_path):
    found = manifests(tmp_path, POOLS)
    sets = {one["metadata"]["name"] for one in found if one["kind"] == "StatefulSet"}
    assert sets == {"chat", "chat-agents-short", "chat-agents-long"}
    assert {one["metadata"]["name"] for one in found if one["kind"] == "ScaledObject"} == sets - {"chat"}
    for name, numbers in {"short": (1, 2), "long": (0, 1)}.items():
        agents = by_kind(found, "StatefulSet", f"chat-agents-{name}")["spec"]
        [host] = agents["template"]["spec"]["containers"]
        assert "replicas" not in agents, "KEDA sets the number of pods"
        assert [each for each in host["command"] if each.startswith("--pool")] == [f"--pool={name}"]
        assert agents["selector"]["matchLabels"]["llm-serving/pool"] == name, "no pod belongs to two StatefulSets"
        scaled = by_kind(found, "ScaledObject", f"chat-agents-{name}")["spec"]
        assert scaled["scaleTargetRef"] == {"kind": "StatefulSet", "name": f"chat-agents-{name}"}
        assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == numbers
        [trigger] = scaled["triggers"]
        labels = f'namespace="models", service="chat", pool="{name}"'
        assert trigger["metadata"]["query"] == f"sum(llm_serving_pool_requests{{{labels}}})"
        assert trigger["metadata"]["activationThreshold"] == "0", "one waiting request starts a pod"


def test_pods_of_pools_differ_only_in_their_pool(tmp_path):
    def pod(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
        spec: dict[str, Any] = by_kind(found, "StatefulSet", name)["spec"]["template"]["spec"]
        [host] = spec["containers"]
        host["command"] = [each for each in host["command"] if not each.startswith("--pool")]
        return spec

    found, without = manifests(tmp_path, POOLS), manifests(tmp_path, POOL)
    assert pod(found, "chat-agents-short") == pod(found, "chat-agents-long") == pod(without, "chat-agents")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replica": 2}, "replica"),
        ({"service": {"port": 70000}}, "port"),
        ({"resources": {"memory": "4 GB"}}, "memory"),
        ({"ascend": {"devices": 17}}, "devices"),
        ({"settings": {"policy": "chunked"}}, "settings"),
        ({"settings": {"serving_config.tls_key": "/other"}}, "settings"),
        ({"settings": {"model_config.seq_length": 4096}}, "settings"),
        ({"autoscaling": {"minReplicas": 0}}, "minReplicas"),
        ({"inferencePool": {"enabled": True}}, "endpointPicker"),
        ({"agentPool": {"minReplicas": -1}}, "minReplicas"),
        ({"agentPool": {"enabled": True, "maxReplicas": 0}}, "maxReplicas"),
        ({"agentPool": {"enabled": True}, "replicas": 2}, "replicas"),
        ({"agentPool": {"enabled": True}, "autoscaling": {"enabled": True}}, "autoscaling"),
        ({"settings": {"parallel_config.nodes": "[a:1]"}}, "settings"),
        ({"agentPool": {"pools": [{"name": "a b", "replicas": 1}]}}, "name"),
        ({"agentPool": {"pools": [{"name": "A_b", "replicas": 1}]}}, "name"),
        ({"agentPool": {"pools": [{"name": "a", "replicas": 1, "minReplicas": -1}]}}, "minReplicas"),
        ({"agentPool": {"pools": [{"name": "a", "replicas": 1}], "minReplicas": 1}}, "minReplicas"),
        ({"agentPool": {"pools": [{"name": "a", "replicas": 0}]}}, "replicas"),
        ({"agentPool": {"pools": [{"name": "a"}]}}, "replicas"),
        ({"agentPool": {"pools": [{"name": "a", "replicas": 1, "maxPromptTokens": 9}]}}, "maxPromptTokens"),
        ({"agentPool": {"pools": [{"name": "a", "replicas": 1, "maxPromptToken": "9"}]}}, "maxPromptToken"),
        ({"agentPool": {"enabled": True}, "settings": {"parallel_config.pools": "[]"}}, "settings"),
    ],
)
def test_wrong_values_are_refused_by_name(tmp_path, changes, named):
    with pytest.raises(jsonschema.ValidationError) as refused:
        manifests(tmp_path, changes)
    path = ".".join(str(part) for part in refused.value.absolute_path)
    assert named in f"{path} {refused.value.message}"


def with_pools(*pools: dict[str, Any]) -> dict[str, Any]:
    return {"agentPool": {"enabled": True, "pools": list(pools)}}


@pytest.mark.parametrize(("fewest", "most"), [(3, 2), (10, 9), (2.0, 1), (100, 99.0)])
def test_a_pool_cannot_keep_more_pods_than_it_may_have(tmp_path, fewest, most):
    """Helm has numbers of a file as floats, and numbers of ``--set`` as integers."""
    changes = with_pools({"name": "b", "replicas": 1}, {"name": "a", "replicas": most, "minReplicas": fewest})
    problem = f"agentPool.pools: a: minReplicas is {fewest:.0f}; it must be at most replicas, which is {most:.0f}"
    with pytest.raises(FailedError, match=f"^{problem}$"):
        manifests(tmp_path, changes)


@pytest.mark.parametrize(("fewest", "most"), [(2, 2), (2, 10), (9, 10.0), (99, 256), (0, 1)])
def test_a_pool_can_keep_all_its_pods(tmp_path, fewest, most):
    found = manifests(tmp_path, with_pools({"name": "a", "replicas": most, "minReplicas": fewest}))
    spec = by_kind(found, "ScaledObject", "chat-agents-a")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (fewest, most)


@pytest.mark.parametrize("pools", [({"name": "short", "replicas": 1}, {"name": "p" * 32, "replicas": 1}), ()])
def test_the_name_of_a_stateful_set_fits_the_label_of_its_pods(tmp_path, pools):
    """The label has the name, "-" and a hash of 10 characters. A label has at most 63 characters."""
    end = "-agents" + "".join(f"-{pool['name']}" for pool in pools[1:])
    release = "r" * (63 - 11 - len(end))
    assert by_kind(manifests(tmp_path, with_pools(*pools), release), "StatefulSet", release + end)
    with pytest.raises(FailedError, match=f"^the StatefulSet r{release}{end} has a name of 53 characters; at most 52"):
        manifests(tmp_path, with_pools(*pools), f"r{release}")


def test_every_value_is_used():
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    for name, value in VALUES.items():
        if isinstance(value, dict) and name not in {"settings", "nodeSelector"}:
            for key in value:
                assert f".Values.{name}.{key}" in text, f"{name}.{key}"
        else:
            assert f".Values.{name}" in text, name
