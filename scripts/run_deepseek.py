"""Fetch, dequantize, convert, stage and train a DeepSeek-V3 model: one command from a checkpoint to a trained one.

python scripts/run_deepseek.py                                             # the tiny model, everything on two CPU cores
python scripts/run_deepseek.py --config configs/deepseek_v3_fp8.toml --run-dir runs/v3 --dry-run
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.commands.options import (
    CacheOption,
    DryRunOption,
    ForceOption,
    FreshOption,
    FromStepOption,
    FuseOption,
    ProfileOption,
    RayOption,
    ResumeOption,
    RunDirOption,
    SetOption,
    ShowConfigOption,
    SuperviseOption,
)
from miles_like.commands.train import train
from miles_like.pipeline.stage_names import STAGES

ROOT = Path(__file__).resolve().parents[1]


def main(
    config: Annotated[Path, typer.Option(help="TOML file")] = ROOT / "configs" / "tiny.toml",
    run_dir: RunDirOption = Path("runs/demo"),
    stages: Annotated[str, typer.Option(help="comma-separated subset")] = ",".join(STAGES),
    overrides: SetOption = [],  # noqa: B006  typer does not change the default
    resume: ResumeOption = False,
    from_step: FromStepOption = None,
    fresh: FreshOption = False,
    fuse: FuseOption = False,
    dry_run: DryRunOption = False,
    show_config: ShowConfigOption = False,
    ray_address: RayOption = None,
    cache_dir: CacheOption = None,
    force: ForceOption = False,
    supervise: SuperviseOption = False,
    profile: ProfileOption = None,
) -> None:
    """Run the five stages of one configuration."""
    train(
        config,
        run_dir,
        stages=stages,
        overrides=overrides,
        fuse=fuse,
        resume=resume,
        from_step=from_step,
        fresh=fresh,
        dry_run=dry_run,
        show_config=show_config,
        ray_address=ray_address,
        cache_dir=cache_dir,
        force=force,
        supervise=supervise,
        profile=profile,
    )


if __name__ == "__main__":
    typer.run(main)
