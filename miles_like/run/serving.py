"""The Hugging Face directory that `miles-like serve` serves: the given one, or the export of a run's checkpoint."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles_like.checkpoint.run_state import STATE_FILE, latest_folder, step_folder
from miles_like.hf.checkpoint import read_config
from miles_like.pipeline.cache import cache_of
from miles_like.pipeline.convert import ConvertWork
from miles_like.run.export import config_of, export_run, verified_checkpoint
from miles_like.storage.completion import file_sha256, files_under, input_key, why_incomplete, write_marker

CONTEXT = 8192  # tokens: the most that a server reserves unless asked


@dataclass(frozen=True, slots=True)
class Servable:
    """name: of the model, for clients."""

    directory: Path
    name: str


def servable(
    path: Path,
    work: ConvertWork,
    *,
    step: int | None = None,
    format: str = "bf16",
    hf_config: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Servable:
    """The model at `path`: a Hugging Face directory; a run directory, for its last checkpoint or that of `step`; or one
    checkpoint of a run, `checkpoints/step_N` or the `trainer` in it.

    A checkpoint is exported to the run's cache the first time, in `format`; later calls find it there. `report` is
    given a line about it. Raises ValueError for any other path, for a step of what is no run, and as `export_run`.
    """
    run_dir, named = _run_of(path)
    if run_dir is None:
        if step is not None or hf_config is not None or format != "bf16":
            raise ValueError(
                f"{path} is a Hugging Face directory: --step, --format and --hf-config apply to runs only: remove them"
            )
        return Servable(path, path.resolve().name)
    if named is not None and step not in (None, named):
        raise ValueError(
            f"--step {step}: {path} is the checkpoint of step {named}: pass its run directory {run_dir} instead"
        )
    return _exported(run_dir, work, step if named is None else named, format, hf_config, report)


def context_length(directory: Path, asked: int | None) -> int:
    """Tokens of the longest sample: `asked`, else as many as the model has positions, at most `CONTEXT`.
    Raises ValueError for more than the model has."""
    positions = read_config(directory).get("max_position_embeddings")
    if not isinstance(positions, int):
        return asked or CONTEXT
    if asked is not None and asked > positions:
        raise ValueError(
            f"--context-length {asked}: the model in {directory} has only {positions} positions: pass at most "
            f"{positions}"
        )
    return asked or min(positions, CONTEXT)


def _run_of(path: Path) -> tuple[Path | None, int | None]:
    """The run directory that `path` is or lies in, and the step of the checkpoint that it is; (None, None) for a
    Hugging Face directory."""
    if (path / "config.toml").is_file():
        return path, None
    if (path / "config.json").is_file():
        return None, None
    folder = path.resolve()
    folder = folder.parent if folder.name == "trainer" else folder
    run_dir, step = folder.parent.parent, folder.name.removeprefix("step_")
    if step.isdecimal() and (folder / STATE_FILE).is_file() and (run_dir / "config.toml").is_file():
        return run_dir, int(step)
    raise ValueError(
        f"{path} contains nothing to serve: pass a Hugging Face directory (with a config.json), a run directory "
        "(with a config.toml) or a checkpoint of a run (RUN_DIR/checkpoints/step_N)"
    )


def _exported(
    run_dir: Path,
    work: ConvertWork,
    step: int | None,
    format: str,
    hf_config: Path | None,
    report: Callable[[str], None],
) -> Servable:
    config = config_of(run_dir)
    checkpoints = run_dir / "checkpoints"
    folder = latest_folder(checkpoints) if step is None else step_folder(checkpoints, step)
    if folder is None or not (folder / STATE_FILE).is_file():
        folder = verified_checkpoint(checkpoints, step)  # raises
    inputs = {
        "run_state": file_sha256(folder / STATE_FILE),  # which has the sums of all its files
        "format": format,
        "lora_alpha": config.lora.alpha if config.lora.rank else None,
        "hf_config": None if hf_config is None else str(hf_config.resolve()),
    }
    key = input_key("serve", inputs)
    directory = cache_of(config, run_dir) / f"serve-{key}"
    data = directory / "data"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another server of the same checkpoint waits for its export
        if why_incomplete(directory, key) is None:
            report(f"using the existing export: {data}")
        else:
            shutil.rmtree(
                data, ignore_errors=True
            )  # beside it are the finished parts of an export that was interrupted
            line = export_run(run_dir, data, work, step=step, format=format, hf_config=hf_config)
            write_marker(directory, stage="serve", key=key, root=data, files=files_under(data))
            report(f"exported: {line}")
    return Servable(data, run_dir.resolve().name)
