"""MLflow (https://mlflow.org/docs/latest), by its client, without its flavours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from miles_like.config.sections.watched.trackers import TrackersConfig
from miles_like.report.trackers.client import given_up, run_name
from miles_like.report.trackers.run_files import TrackedRun, columns, flat
from miles_like.report.trackers.sent import FOLDER
from miles_like.variables import inherited

_BATCH = 500  # values in a request; the server takes 1000
_PARAMS = 100  # likewise of parameters
_VALUE = 500  # characters of a parameter, of the 6000 that a server takes


class MlflowTracker:
    """A run of an MLflow experiment. Users and passwords are those of MLFLOW_TRACKING_USERNAME and _PASSWORD."""

    def open(self, run: TrackedRun, settings: TrackersConfig, run_id: str) -> str:
        local = run.directory.resolve() / FOLDER / "mlflow"
        named = settings.mlflow_uri or inherited().get("MLFLOW_TRACKING_URI")
        here = settings.offline or not named
        if here:
            local.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(f"sqlite:///{local}/mlflow.db" if here else named)
        found = self._client.get_experiment_by_name(settings.project)
        where = f"{local.as_uri()}/artifacts" if here else None
        experiment = found.experiment_id if found else self._client.create_experiment(settings.project, where)
        try:
            self._id = str(self._client.get_run(run_id).info.run_id)
            self._client.update_run(self._id, status="RUNNING")
        except MlflowException as e:
            if e.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            started = int(run.began * 1000) or None
            made = self._client.create_run(experiment, start_time=started, run_name=run_name(run, settings))
            self._id = str(made.info.run_id)
            params = [Param(key, str(value)[:_VALUE]) for key, value in flat(run.config).items()]
            for i in range(0, len(params), _PARAMS):
                self._client.log_batch(self._id, params=params[i : i + _PARAMS])
        for key, value in flat(run.about).items():
            self._client.set_tag(self._id, "mlflow.source.git.commit" if key == "commit" else f"run.{key}", str(value))
        return self._id

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """A value of the same step and time replaces itself, so that a repeated request adds nothing."""
        values = [Metric(key, value, int(at * 1000), step) for key, value in metrics.items()]
        for i in range(0, len(values), _BATCH):
            self._client.log_batch(self._id, metrics=values[i : i + _BATCH])

    def rolled_back(self, step: int, to: int) -> None:
        self._client.set_tag(self._id, f"rolled_back.{step}", given_up(step, to))

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._client.log_table(self._id, columns(rows), f"samples/step_{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)
