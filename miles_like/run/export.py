"""The model of a run as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from miles_like.checkpoint.run_state import kept_steps, load, load_latest, step_folder
from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.pipeline.cache import fetched_model
from miles_like.pipeline.convert import Conversion, ConvertWork, to_hf


def export_run(
    run_dir: Path, out: Path, work: ConvertWork, *, step: int | None, format: str, hf_config: Path | None
) -> Conversion:
    """Write the trained model of `step`, by default the last checkpoint's, to `out`.

    Tokenizer and config.json are those of the model that the run began with: of the run's fetch stage, or in
    `hf_config`. Adapters are merged with the run's alpha. Every file of the checkpoint is verified first. Raises
    ValueError for a directory without a run, a step without a checkpoint, a damaged file, and where the fetched model
    was deleted.
    """
    config = config_of(run_dir)
    folder = verified_checkpoint(run_dir / "checkpoints", step)
    return to_hf(
        folder / "trainer",
        out,
        work,
        format=format,
        hf_config=fetched_model(config, run_dir) if hf_config is None else hf_config,
        lora_alpha=config.lora.alpha if config.lora.rank else None,
    )


def config_of(run_dir: Path) -> RunConfig:
    """Raises ValueError for a directory without a run."""
    path = run_dir / "config.toml"
    if not path.is_file():
        raise ValueError(f"{run_dir} contains no run ({path} does not exist): use the --run-dir of a run")
    return load_config(path)


def verified_checkpoint(checkpoints: Path, step: int | None) -> Path:
    """The folder of the checkpoint of `step`, None: the last one's, after all its files are verified. Raises ValueError
    for a step without a checkpoint and a damaged file."""
    if step is None:
        found = load_latest(checkpoints)
        if found is None:
            raise ValueError(f"{checkpoints} has no checkpoint: the run has not saved one (checkpoint.every)")
        return found[0]
    if step not in (kept := kept_steps(checkpoints)):
        there = f"kept are the checkpoints of steps {', '.join(map(str, kept))}" if kept else f"{checkpoints} has none"
        raise ValueError(f"--step {step}: the checkpoint of that step was not kept: {there}")
    load(step_folder(checkpoints, step))
    return step_folder(checkpoints, step)
