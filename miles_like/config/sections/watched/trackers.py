"""Services that show the metrics of runs to a team. Torch-free."""

from __future__ import annotations

from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from miles_like.section import Section

Tracker: TypeAlias = Literal["wandb", "mlflow", "trackio"]


class TrackersConfig(Section):
    """Trackers that get the run's metrics, configuration and samples, beside its own files (docs/trackers.md)."""

    use: tuple[Tracker, ...] = ()  # each needs its package: pip install 'miles-like[wandb]'
    project: str = Field("miles-like", min_length=1)  # project, or MLflow's experiment, that the run is shown in
    name: str | None = None  # name of the run there; None: that of the run directory
    offline: bool = False  # write to `trackers/` of the run directory, and send nothing
    # MLflow's tracking server or store; None: the environment variable MLFLOW_TRACKING_URI, or a store in `trackers/`
    mlflow_uri: str | None = None
    trackio_space: str | None = None  # Hugging Face space, OWNER/NAME, that shows Trackio's runs; None: this machine
    samples_every: int = Field(10, ge=0)  # steps between two tables of samples; 0: none
    samples: int = Field(16, ge=1)  # rows of a table
    exit_s: float = Field(30.0, ge=0)  # time limit for trackers to finish at the end of the run

    @model_validator(mode="after")
    def uri_has_no_password(self) -> TrackersConfig:
        """The configuration is written to the run directory."""
        if self.mlflow_uri is not None and "@" in urlsplit(self.mlflow_uri).netloc:
            raise ValueError(
                "trackers.mlflow_uri has a user or password, which would be written to the run directory: remove them, "
                "and export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return self

    @model_validator(mode="after")
    def keys_have_an_effect(self) -> TrackersConfig:
        for key, value, tracker in (
            ("mlflow_uri", self.mlflow_uri, "mlflow"),
            ("trackio_space", self.trackio_space, "trackio"),
        ):
            if value is None:
                continue
            if tracker not in self.use:
                raise ValueError(
                    f"trackers.{key} has no effect without {tracker!r} in trackers.use: add it, or remove the key"
                )
            if self.offline:
                raise ValueError(f"trackers.{key} has no effect with trackers.offline = true: remove one of them")
        if len(set(self.use)) < len(self.use):
            raise ValueError(f"trackers.use = {list(self.use)} has a tracker twice: name each once")
        return self
