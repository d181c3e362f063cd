"""Tests of the Helm chart, without Helm and without a cluster. ``make test-chart`` runs them.

Go's template engine renders the templates, as in Helm. The chart uses only functions of that engine, so Helm's own
functions are not needed. ``kubernetes-validate`` has the schemas of the Kubernetes API and refuses unknown fields.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

CHART = Path(__file__).parents[2] / "helm" / "llm-serving"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = yaml.safe_load((CHART / "values.schema.json").read_text())
ABOUT = yaml.safe_load((CHART / "Chart.yaml").read_text())
KUBERNETES = "1.30"
OWN_KINDS = {"ServiceMonitor", "ScaledObject", "InferencePool"}
"""Kinds of other projects. Kubernetes' schemas do not have them."""
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


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the chart's values with ``changes``, merged as Helm merges them."""
    values = copy.deepcopy(VALUES)
    for key, change in changes.items():
        values[key] = {**values[key], **change} if isinstance(change, dict) else change
    return values


def manifests(folder: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests that the chart renders to. Checks the values against the schema first, as Helm does."""
    values = changed(changes)
    jsonschema.validate(values, SCHEMA)
    data = folder / "data.yaml"
    data.write_text(
        yaml.safe_dump(
            {
                "Values": values,
                "Release": {"Name": "chat", "Namespace": "models"},
                "Chart": {"Name": ABOUT["name"], "AppVersion": ABOUT["appVersion"]},
            }
        )
    )
    found = []
    for template in sorted((CHART / "templates").glob("*.yaml")):
        done = subprocess.run([sys.executable, "-c", RENDER, template, data], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "<no value>" not in done.stdout
        found += [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    return found


@pytest.fixture(scope="module", params=[{}, EVERYTHING], ids=["defaults", "everything"])
def rendered(request, tmp_path_factory):
    return manifests(tmp_path_factory.mktemp("chart"), request.param)


def by_kind(rendered: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(one for one in rendered if one["kind"] == kind)


def test_kubernetes_accepts_every_manifest(rendered):
    for manifest in rendered:
        if manifest["kind"] not in OWN_KINDS:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_selectors_find_the_pods(rendered):
    labels = by_kind(rendered, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/name": "llm-serving", "app.kubernetes.io/instance": "chat"}
    for manifest in rendered:
        spec = manifest["spec"]
        if manifest["kind"] == "Service":
            assert spec["selector"] == labels
        elif "selector" in spec or "podSelector" in spec:
            assert spec.get("selector", spec.get("podSelector"))["matchLabels"] == labels
    headless = next(one for one in rendered if one["kind"] == "Service" and one["spec"].get("clusterIP") == "None")
    assert by_kind(rendered, "StatefulSet")["spec"]["serviceName"] == headless["metadata"]["name"]


def test_pods_have_few_rights_and_enough_time_to_drain(rendered):
    pod = by_kind(rendered, "StatefulSet")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["terminationGracePeriodSeconds"] >= 40
    volumes = {volume["name"] for volume in pod["volumes"]} | {"cache"}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


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
    ],
)
def test_wrong_values_are_refused_by_name(tmp_path, changes, named):
    with pytest.raises(jsonschema.ValidationError) as refused:
        manifests(tmp_path, changes)
    path = ".".join(str(part) for part in refused.value.absolute_path)
    assert named in f"{path} {refused.value.message}"


def test_every_value_is_used():
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    for name, value in VALUES.items():
        if isinstance(value, dict) and name not in {"settings", "nodeSelector"}:
            for key in value:
                assert f".Values.{name}.{key}" in text, f"{name}.{key}"
        else:
            assert f".Values.{name}" in text, name
