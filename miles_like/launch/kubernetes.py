"""Manifests for KubeRay: a ConfigMap with the configuration and the command, and a RayJob that runs it.

Written for the RayJob of KubeRay's API ray.io/v1 (https://github.com/ray-project/kuberay, version 1.7.0). Its operator
starts one pod for each node, submits the command to Ray's dashboard on node 0, and after a failure starts another
cluster, in which the command continues the run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from miles_like.launch.layout import Launch

RETRIES = 3
MOUNT = "/etc/miles-like"
_PORTS = {"gcs": 0, "dashboard": 8265}  # 0: the launch's
# absolute paths of a configuration that are of the image or of the node, and not of a shared disk
_OF_THE_NODE = ("cluster.stage_dir", "rollout.sglang.python", "rollout.vllm.python")
_DNS = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTP]i?)?")


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """Options of `miles-like launch kubernetes`."""

    image: str | None = None
    volumes: Sequence[str] = ()
    """CLAIM=/path: persistent volume claims that every pod mounts."""
    in_image: Sequence[str] = ()
    """Directories of the image with files that the configuration names."""
    namespace: str | None = None
    cpus: str = "8"
    memory: str = "64Gi"
    shared_memory: str = "16Gi"
    """Size of /dev/shm."""
    gpu_resource: str = "nvidia.com/gpu"
    retries: int = RETRIES
    secret: str | None = None
    """Secret with the variables that the configuration takes from the environment; None: NAME-env."""


class _Readable(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Without references within a document, and files as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Readable.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def render_kubernetes(
    launch: Launch, options: KubernetesOptions, origin: str, *, settings: Mapping[str, Any], toml: str, ray: str
) -> str:
    """The manifests as YAML. settings: every key of the configuration and its value, whose paths are checked; toml: the
    configuration; ray: version of the image's Ray. Raises ValueError for options that the pods could not be made by."""
    volumes = _volumes(options)
    _check(launch, options)
    for key, path in (("--run-dir", str(launch.run_dir)), *_paths(settings)):
        places = [*volumes.values(), *([] if key == "--run-dir" else options.in_image)]
        if not any(PurePosixPath(path).is_relative_to(there) for there in places):
            raise ValueError(
                f"{key} {path} is not in the pods, which have {', '.join(places) or 'no volume'}: add the claim that "
                "has it, as --volume CLAIM=/path, or name the image's directory with --in-image"
            )
    documents = [_config_map(launch, options, toml), _ray_job(launch, options, volumes, settings, ray)]
    text: str = yaml.dump_all(documents, Dumper=_Readable, sort_keys=False, width=120)
    return f"# {origin}\n{text}"


def _check(launch: Launch, options: KubernetesOptions) -> None:
    if not options.image:
        raise ValueError("--image is missing: name the image with this project and Ray (docs/cluster/Containerfile)")
    for option, value in (("--cpus", options.cpus), ("--memory", options.memory), ("--shm", options.shared_memory)):
        if not _QUANTITY.fullmatch(value):
            raise ValueError(f"{option} {value} is no quantity of Kubernetes: write it as 8, 500m or 64Gi")
    for option, name in (("--namespace", options.namespace), ("--secret", options.secret)):
        if name is not None and not _DNS.fullmatch(name):
            raise ValueError(f"{option} {name!r} has to be of a-z, 0-9 and -, 63 characters at most: correct it")
    if options.retries < 0:
        raise ValueError(f"--retries {options.retries} is negative: pass 0 for a run that is never started again")
    if launch.environment is not None:
        raise ValueError(f"--environment {launch.environment} has no effect in pods: the image's PATH finds miles-like")


def _volumes(options: KubernetesOptions) -> dict[str, str]:
    """Claim -> where it is mounted."""
    found: dict[str, str] = {}
    for one in options.volumes:
        claim, _, path = one.partition("=")
        if not _DNS.fullmatch(claim) or not path.startswith("/") or path == "/":
            raise ValueError(f"--volume {one} is not of the form CLAIM=/path: name a claim and where pods mount it")
        if claim in found or path in found.values():
            raise ValueError(f"--volume {one} has the claim or the path of another --volume: pass each once")
        found[claim] = path
    return found


def _paths(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys with an absolute path, without those of the image or of the node."""
    for key, value in settings.items():
        texts = value if isinstance(value, list) else [value]
        for text in texts:
            if isinstance(text, str) and text.startswith("/") and key not in _OF_THE_NODE:
                yield key, text.partition(":")[0]  # file.py:function


def _metadata(launch: Launch, options: KubernetesOptions) -> dict[str, Any]:
    return {"name": launch.name, **({"namespace": options.namespace} if options.namespace else {})}


def _config_map(launch: Launch, options: KubernetesOptions, toml: str) -> dict[str, Any]:
    command = ["miles-like", "train", f"{MOUNT}/config.toml", "--run-dir", str(launch.run_dir)]
    lines = [
        "#!/bin/bash",
        f'python -m miles_like.nodes.joined "$RAY_ADDRESS" {launch.nodes} {launch.join_s} || exit 1',
        f"[ ! -d {shlex.quote(str(launch.run_dir))} ] || resume=--resume",
        f"exec {shlex.join(command)} ${{resume:-}}",  # Ray gives its jobs RAY_ADDRESS
    ]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(launch, options),
        "data": {"config.toml": toml, "train.sh": "\n".join([*lines, ""])},
    }


def _ray_job(
    launch: Launch, options: KubernetesOptions, volumes: Mapping[str, str], settings: Mapping[str, Any], ray: str
) -> dict[str, Any]:
    template = _pod(launch, options, volumes, settings)
    start = {"num-gpus": str(launch.gpus), **launch.ray_options}
    head = {
        "rayStartParams": start | {"port": str(launch.port), "dashboard-host": "0.0.0.0"},
        "template": _with_ports(template, launch.port),
    }
    others = {
        "groupName": "nodes",
        "replicas": launch.nodes - 1,
        "minReplicas": launch.nodes - 1,
        "maxReplicas": launch.nodes - 1,
        "rayStartParams": start,
        "template": template,
    }
    cluster = {
        "rayVersion": ray,
        "authOptions": {"mode": "token"},
        "headGroupSpec": head,
        **({"workerGroupSpecs": [others]} if launch.nodes > 1 else {}),
    }
    spec = {
        "entrypoint": f"bash {MOUNT}/train.sh",
        "submissionMode": "K8sJobMode",
        "backoffLimit": options.retries,
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": cluster,
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(launch, options), "spec": spec}


def _with_ports(template: Mapping[str, Any], port: int) -> dict[str, Any]:
    (container,) = template["spec"]["containers"]
    ports = [{"name": name, "containerPort": own or port} for name, own in _PORTS.items()]
    ports.append({"name": "client", "containerPort": 10001})
    return {"spec": {**template["spec"], "containers": [{**container, "ports": ports}]}}


def _pod(
    launch: Launch, options: KubernetesOptions, volumes: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Template of the pods, which are alike: a pod is a node of the run."""
    resources: dict[str, Any] = {"cpu": options.cpus, "memory": options.memory}
    if launch.gpus:
        resources[options.gpu_resource] = launch.gpus
    mounts = [{"name": "launch", "mountPath": MOUNT}, {"name": "shm", "mountPath": "/dev/shm"}]
    sources: list[dict[str, Any]] = [
        {"name": "launch", "configMap": {"name": launch.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}},
    ]
    for i, (claim, path) in enumerate(volumes.items()):
        mounts.append({"name": f"volume-{i}", "mountPath": path})
        sources.append({"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}})
    if (stage := settings.get("cluster.stage_dir")) is not None:
        mounts.append({"name": "stage", "mountPath": str(stage)})
        sources.append({"name": "stage", "emptyDir": {}})
    plain = {"RAY_worker_niceness": "0", "RAY_prestart_worker_first_driver": "0"}
    environment: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    of = options.secret or f"{launch.name}-env"
    environment += [{"name": name, "valueFrom": {"secretKeyRef": {"name": of, "key": name}}} for name in launch.secrets]
    container = {
        "name": "ray",
        "image": options.image,
        "env": environment,
        "resources": {"limits": dict(resources), "requests": dict(resources)},
        "volumeMounts": mounts,
    }
    return {"spec": {"containers": [container], "volumes": sources}}
