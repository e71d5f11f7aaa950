"""`miles-like launch`: scripts and manifests that start a run on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import Command, Group, RunDirOption, SetOption
from miles_like.commands.output import echo

if TYPE_CHECKING:
    from miles_like.launch.layout import Asked, Launch

launch = typer.Typer(
    cls=Group, no_args_is_help=True, help="Write a Slurm script, a Ray start script or KubeRay manifests for a run."
)
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="a run's configuration")]
NameOption = Annotated[
    str | None, typer.Option("--name", help="name of the job; default: that of the configuration's file")
]
OutOption = Annotated[Path | None, typer.Option("--out", help="file to write; default: standard output")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="replace the file of --out")]
PortOption = Annotated[int, typer.Option("--port", help="port of Ray's head")]
JoinOption = Annotated[int, typer.Option("--join-s", help="seconds that nodes have to join Ray's cluster")]
RayStartOption = Annotated[
    list[str], typer.Option("--ray-start", metavar="NAME=VALUE", help="further option of ray start, e.g. num-cpus=64")
]
EnvironmentOption = Annotated[
    Path | None,
    typer.Option("--environment", help="virtual environment on the nodes with miles-like and Ray, e.g. /opt/trainer"),
]
InterfaceOption = Annotated[
    str, typer.Option("--interface", help="network interface whose address Ray uses; default: that of the host name")
]
TempOption = Annotated[Path, typer.Option("--temp-dir", help="directory on each node's own disk for Ray's session")]


@launch.command("slurm", cls=Command)
def slurm(
    config: ConfigArgument,
    run_dir: RunDirOption,
    partition: Annotated[str | None, typer.Option("--partition", help="partition of the nodes")] = None,
    time: Annotated[str | None, typer.Option("--time", metavar="[DAYS-]HH:MM:SS", help="limit of each start")] = None,
    stop_before: Annotated[
        int | None,
        typer.Option(
            "--stop-before",
            metavar="SECONDS",
            help="time before the limit at which Slurm sends SIGTERM; default: checkpoint.grace_s + 70",
        ),
    ] = None,
    requeues: Annotated[int, typer.Option("--requeues", help="most starts after the first")] = 100,
    sbatch: Annotated[
        list[str], typer.Option("--sbatch", metavar="NAME=VALUE", help="further option of sbatch, e.g. account=NAME")
    ] = [],  # noqa: B006  typer does not change the default
    name: NameOption = None,
    environment: EnvironmentOption = None,
    interface: InterfaceOption = "",
    port: PortOption = 6379,
    join_s: JoinOption = 600,
    ray_start: RayStartOption = [],  # noqa: B006
    temp_dir: TempOption = Path("/tmp"),
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    submit: Annotated[bool, typer.Option("--submit", help="give the script to sbatch")] = False,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Write a batch script for Slurm, whose job is queued again and continues the run until its last step."""
    with one_sentence():
        from miles_like.launch.layout import Asked
        from miles_like.launch.output import check_output, write_output
        from miles_like.launch.slurm import SlurmOptions, render_slurm
        from miles_like.launch.slurm import submit as give_to_sbatch

        check_output(out, overwrite=overwrite)
        options = SlurmOptions(
            partition=partition,
            time=time,
            stop_before=stop_before,
            requeues=requeues,
            interface=interface,
            temp_dir=temp_dir,
            directives=sbatch,
        )
        asked = Asked(config, run_dir, overrides, name, port, join_s, ray_start, environment)
        text = render_slurm(_planned(asked), options, _origin("slurm", config), Path.cwd())
        if out is not None:
            write_output(out, text)
        if submit:
            echo(give_to_sbatch(text))
        elif out is None:
            echo(text.rstrip("\n"))
        else:
            echo(f"-> {out}\nNext: sbatch {out}")


@launch.command("ray", cls=Command)
def ray(
    config: ConfigArgument,
    run_dir: RunDirOption,
    name: NameOption = None,
    environment: EnvironmentOption = None,
    interface: InterfaceOption = "",
    port: PortOption = 6379,
    join_s: JoinOption = 600,
    ray_start: RayStartOption = [],  # noqa: B006
    temp_dir: TempOption = Path("/tmp"),
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Write a script that starts Ray on nodes without a scheduler, and the run on the first of them."""
    with one_sentence():
        from miles_like.launch.layout import Asked
        from miles_like.launch.output import check_output, write_output
        from miles_like.launch.ray_script import render_ray

        check_output(out, overwrite=overwrite)
        asked = Asked(config, run_dir, overrides, name, port, join_s, ray_start, environment)
        text = render_ray(_planned(asked), _origin("ray", config), interface=interface, temp_dir=temp_dir)
        if out is None:
            echo(text.rstrip("\n"))
        else:
            write_output(out, text)
            echo(f"-> {out}\nNext: bash {out} head on the first node, node on the others, train on the first")


@launch.command("kubernetes", cls=Command)
def kubernetes(
    config: ConfigArgument,
    run_dir: RunDirOption,
    image: Annotated[str | None, typer.Option("--image", help="image with miles-like and Ray")] = None,
    volumes: Annotated[
        list[str], typer.Option("--volume", metavar="CLAIM=/PATH", help="persistent volume claim and where it is")
    ] = [],  # noqa: B006  typer does not change the default
    in_image: Annotated[
        list[str],
        typer.Option("--in-image", metavar="/PATH", help="directory of the image with files of the configuration"),
    ] = [],  # noqa: B006  typer does not change the default
    namespace: Annotated[str | None, typer.Option("--namespace", help="namespace of Kubernetes")] = None,
    cpus: Annotated[str, typer.Option("--cpus", help="CPUs of a pod")] = "8",
    memory: Annotated[str, typer.Option("--memory", help="memory of a pod")] = "64Gi",
    shared_memory: Annotated[str, typer.Option("--shm", help="size of /dev/shm, part of the pod's memory")] = "16Gi",
    gpu_resource: Annotated[str, typer.Option("--gpu-resource", help="resource that GPUs are")] = "nvidia.com/gpu",
    retries: Annotated[int, typer.Option("--retries", help="further clusters after a failure")] = 3,
    secret: Annotated[
        str | None, typer.Option("--secret", help="secret with the configuration's secret variables; default: NAME-env")
    ] = None,
    name: NameOption = None,
    port: PortOption = 6379,
    join_s: JoinOption = 600,
    ray_start: RayStartOption = [],  # noqa: B006
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
) -> None:
    """Write manifests for KubeRay, whose RayJob continues the run after a failure."""
    with one_sentence():
        from importlib.metadata import version

        from miles_like.config.settings import as_toml, read_settings
        from miles_like.launch.kubernetes import KubernetesOptions, render_kubernetes
        from miles_like.launch.layout import Asked
        from miles_like.launch.output import check_output, write_output

        check_output(out, overwrite=overwrite)
        pods = KubernetesOptions(
            image, volumes, in_image, namespace, cpus, memory, shared_memory, gpu_resource, retries, secret
        )
        planned = _planned(Asked(config, run_dir, overrides, name, port, join_s, ray_start))
        settings = read_settings(config, overrides)
        text = render_kubernetes(
            planned,
            pods,
            _origin("kubernetes", config),
            settings={one.name: one.value for one in settings.every if one.value is not None},
            toml="\n".join([*as_toml(settings), ""]),
            ray=version("ray"),
        )
        if out is None:
            echo(text.rstrip("\n"))
        else:
            write_output(out, text)
            echo(f"-> {out}\nNext: kubectl apply -f {out}")


def _planned(asked: Asked) -> Launch:
    from miles_like.config.load import load_config
    from miles_like.launch.layout import plan_launch

    loaded = load_config(asked.config, list(asked.overrides))
    return plan_launch(asked, loaded.cluster, loaded.checkpoint, loaded.cluster.env | loaded.rollout.env)


def _origin(form: str, config: Path) -> str:
    from miles_like import __version__

    return f"Written by miles-like {__version__}: miles-like launch {form} {config}"
