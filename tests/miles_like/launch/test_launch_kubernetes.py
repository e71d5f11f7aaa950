"""KubeRay's API server accepts the manifests: they are held to the schema of its RayJob (tests/data/kuberay).

As `kubectl apply --validate=strict` does, a field that the schema has not is refused too. Not covered: the operator,
and the schema's rules in the Common Expression Language.
"""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from miles_like.config.load import load_config
from miles_like.config.settings import as_toml, read_settings
from miles_like.launch.kubernetes import KubernetesOptions, render_kubernetes
from tests.support.launched import V3, planned
from tests.support.refusals import refuses

SCHEMA = Path(__file__).parents[2] / "data" / "kuberay" / "rayjob_v1.json.gz"
GIVEN: dict[str, Any] = {
    "image": "registry/miles-like:1",
    "volumes": ["runs=/shared"],
    "in_image": [str(V3.parent.absolute())],
}


def manifests(*overrides: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the RayJob."""
    settings = read_settings(V3, overrides)
    text = render_kubernetes(
        planned(*overrides, ray_options=["labels=rack=r1"]),
        KubernetesOptions(**(GIVEN | options)),
        "of a test",
        settings={one.name: one.value for one in settings.every if one.value is not None},
        toml="\n".join(as_toml(settings)),
        ray="2.60.0",
    )
    first, second = yaml.safe_load_all(text)
    return first, second


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    read = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    closed: dict[str, Any] = strict(read)
    return closed


def strict(schema: Any) -> Any:
    """The schema with no other fields in an object than those that it has; `metadata` is every object's own."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: strict(value) for key, value in schema.items()}
    if isinstance(out.get("properties"), dict) and out.get("type") == "object":
        out.setdefault("additionalProperties", False)
    return out


def wrong(manifest: Any, schema: Any) -> list[str]:
    found = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    return [f"{'.'.join(map(str, e.path))}: {e.message}"[:200] for e in found]


@pytest.mark.parametrize(
    "overrides",
    [
        ("cluster.env={HF_TOKEN=''}",),
        ("cluster.nodes=1", "cluster.gpus_per_node=0", "cluster.colocate=true", "parallel.pp=1", "parallel.ep=1"),
    ],
)
def test_the_api_server_accepts_the_manifest(overrides: tuple[str, ...], schema: dict[str, Any]) -> None:
    config_map, job = manifests(*overrides, namespace="team", secret="tokens")
    assert wrong(job, schema) == []
    assert (config_map["apiVersion"], config_map["kind"]) == ("v1", "ConfigMap")
    assert job["metadata"] == config_map["metadata"] == {"name": "deepseek-v3-fp8", "namespace": "team"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.backoffLimits", 3),
        ("spec.backoffLimit", "3"),
        ("spec.rayClusterSpec.authOptions.mode", "tokens"),
        ("spec.rayClusterSpec.headGroupSpec.rayStartParams.num-gpus", 8),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.volumeMount", []),
        ("spec.rayClusterSpec.headGroupSpec.template.spec.containers.0.resources.limits.memory", "64 GB"),
    ],
)
def test_the_schema_finds_a_mistake(path: str, value: Any, schema: dict[str, Any]) -> None:
    _, job = manifests()
    *parents, last = path.split(".")
    inner: Any = job
    for name in parents:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    inner[last] = value
    assert wrong(job, schema)


def test_pods_are_the_nodes_of_the_configuration() -> None:
    config_map, job = manifests("rollout.env={HF_TOKEN=''}")
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    head = cluster["headGroupSpec"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 15
    for group in (head, workers):
        assert group["rayStartParams"] | {"num-gpus": "8", "labels": "rack=r1"} == group["rayStartParams"]
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        secret = {"secretKeyRef": {"name": "deepseek-v3-fp8-env", "key": "HF_TOKEN"}}
        assert {"name": "HF_TOKEN", "valueFrom": secret} in container["env"]
        mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        sources = {one["name"] for one in group["template"]["spec"]["volumes"]}
        assert set(mounted) == sources and {"/dev/shm", "/shared", "/etc/miles-like"} <= set(mounted.values())
    words = shlex.split(job["spec"]["entrypoint"])
    assert words == ["bash", "/etc/miles-like/train.sh"] and "--resume" in config_map["data"]["train.sh"]


def test_the_pods_configuration_is_that_of_the_launch(tmp_path: Path) -> None:
    config_map, _ = manifests("train.steps=7")
    (tmp_path / "config.toml").write_text(config_map["data"]["config.toml"])
    assert load_config(tmp_path / "config.toml") == load_config(V3, ["train.steps=7"])


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"image": None}, ("--image",)),
        ({"volumes": []}, ("--run-dir", "/shared/run", "--volume")),
        ({"in_image": []}, ("model.config", "/shared", "--in-image")),
        ({"in_image": ["/"], "volumes": []}, ("--run-dir", "/shared/run", "--volume")),
        ({"volumes": ["runs"]}, ("--volume", "runs", "CLAIM=/path")),
        ({"volumes": ["a=/shared", "a=/b"]}, ("--volume", "a=/b")),
        ({"memory": "64 GB"}, ("--memory", "64 GB", "64Gi")),
        ({"namespace": "My Team"}, ("--namespace", "'My Team'", 63)),
        ({"retries": -1}, ("--retries", -1)),
    ],
)
def test_what_no_pod_could_be_made_by_is_refused(options: dict[str, Any], facts: tuple[object, ...]) -> None:
    with refuses(ValueError, *facts):
        manifests(**options)
