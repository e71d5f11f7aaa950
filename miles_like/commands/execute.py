"""`python -m miles_like.commands.execute CONFIG --rank R` executes one rank of a run's trainer on fake tensors and
prints what it holds; with `--all DIRECTORY --json FILE`, a rank of each kind of stage of every configuration with
GPUs, and of the layouts in `--layouts FILE`.

Results are kept in a cache by everything that determines them. Each rank is executed in a separate process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bridge.config import TrainerConfig
from megatron_bridge.fake.execute_rank import execute
from megatron_bridge.fake.records import Cache, ExecutedRank, key_of, read_records, record, table, write_records
from megatron_bridge.fake.stages import distinct_stages, first_rank, micro_batches_in_flight
from megatron_bridge.fake.substitutes.facts import RankRun, packed
from megatron_bridge.plan.precision import served_spec
from miles_like.config.load import load_config
from miles_like.config.ranks import critic_config, reference_config, trainer_config
from miles_like.pipeline.first_layers import shortened
from quant.hf_config import quantized_config

ROLES = ("trainer", "critic", "reference")
_CACHE = Path("build/executed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 after an error of the user, printed in one line."""
    options = _parser().parse_args(arguments)
    try:
        if options.all is not None:
            _execute_all(options)
            return 0
        found = _one(options)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    if options.json is not None:
        write_records(options.json, [found])
    print(table(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m miles_like.commands.execute", description=__doc__)
    parser.add_argument("config", type=Path, nargs="?", help="TOML file of a run")
    parser.add_argument("--rank", type=int, default=0, help="rank of the trainer that is executed")
    parser.add_argument("--role", choices=ROLES, default="trainer")
    parser.add_argument(
        "--micro-batches", type=int, help="micro-batches of the step; default: as many as peak memory needs"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="device of the fake tensors")
    parser.add_argument(
        "--imbalance", type=float, default=1.0, help="tokens of this rank's experts, relative to the mean"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="overrides of configuration keys"
    )
    parser.add_argument("--json", type=Path, help="JSON file for the record")
    parser.add_argument("--cache", type=Path, default=_CACHE, help="directory that caches results")
    parser.add_argument(
        "--all",
        type=Path,
        metavar="DIRECTORY",
        help="execute one rank of each kind, for all configurations in this directory",
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="with --all: only these configurations")
    parser.add_argument("--layouts", type=Path, help="with --all: JSON list of {config, overrides, stage, imbalance}")
    parser.add_argument("--jobs", type=int, default=1, help="with --all: number of ranks that are executed at once")
    return parser


def _one(options: argparse.Namespace) -> ExecutedRank:
    if options.config is None:
        raise ValueError("no configuration: pass the TOML file of a run, or --all DIRECTORY")
    with tempfile.TemporaryDirectory() as where:
        ranks = Ranks(options.config, Path(where), options.set, role=options.role)
        run = ranks.run(options.rank, options.micro_batches, device=options.device, imbalance=options.imbalance)
        key, cache = ranks.key(run), Cache(options.cache)
        found = cache.get(key)
        if found is None:
            counts = execute(run)
            found = record(run, counts, name=options.config.stem, overrides=options.set, role=options.role, key=key)
            cache.put(found)
        return found


class Ranks:
    """The ranks of one role of a run. where: a directory for the config.json that they read.

    Raises ValueError for a configuration that cannot be read, a run without GPUs, and a run without ranks of that role.
    """

    def __init__(self, path: Path, where: Path, overrides: Sequence[str] = (), *, role: str = "trainer") -> None:
        self.path, self.role = path, role
        self._run = load_config(path, overrides)
        self.hf = _served_config(self._run)
        (where / "config.json").write_text(json.dumps(self.hf), encoding="utf-8")
        trainer = trainer_config(self._run, where)
        found: Mapping[str, TrainerConfig | None] = {
            "trainer": trainer,
            "critic": critic_config(self._run, trainer),
            "reference": reference_config(self._run, trainer),
        }
        config = found[role]
        if config is None:
            raise ValueError(f"{path}: the run has no {role} ranks")
        self.config = config

    @property
    def has_gpus(self) -> bool:
        return self._run.cluster.gpus_per_node > 0

    def run(
        self, rank: int, micro_batches: int | None = None, *, device: str = "cuda", imbalance: float = 1.0
    ) -> RankRun:
        """imbalance: without effect where each rank has all experts. Raises ValueError for a rank outside of the
        world."""
        parallel = self.config.parallel
        if not 0 <= rank < parallel.world_size:
            raise ValueError(
                f"rank {rank} is not in a layout of {parallel.world_size} ranks: choose 0 to {parallel.world_size - 1}"
            )
        stage = rank // first_rank(parallel, 1)
        longest = self._run.data.max_prompt_tokens + self._run.rollout.max_new_tokens
        return RankRun(
            config=self.config,
            rank=rank,
            pack=packed(self._run.max_pack_tokens, longest),
            micro_batches=micro_batches or micro_batches_in_flight(parallel, stage),
            device="cuda" if device == "cuda" else "cpu",
            imbalance=imbalance if parallel.ep > 1 else 1.0,
            colocated=self._run.cluster.colocate is not False,
        )

    def key(self, run: RankRun) -> str:
        return key_of(run, self.hf, self.role)


def _served_config(run: Any) -> dict[str, Any]:
    """config.json of the checkpoint that servers load. Raises ValueError for a model that must be fetched first."""
    given = run.model.config if run.model.make is None else run.model.make.config
    if given is None:
        raise ValueError(
            f"model.path = {run.model.path!r} without model.config: set model.config to the path of its config.json"
        )
    hf: dict[str, Any] = json.loads(Path(given).read_text(encoding="utf-8"))
    if run.model.first_layers is not None:
        hf = shortened(hf, run.model.first_layers)
    return quantized_config(hf, served_spec(run.precision, hf))


@dataclass(frozen=True, slots=True)
class _Job:
    """One rank to execute: the first of `stage`."""

    path: Path
    overrides: tuple[str, ...]
    stage: int
    imbalance: float = 1.0


def _execute_all(options: argparse.Namespace) -> None:
    """Records go to the file as they are ready; those of `--only` replace its records of the same configurations.
    Raises ValueError at the end if ranks could not be executed."""
    if options.json is None:
        raise ValueError("--all needs --json FILE for the records")
    cache, out = Cache(options.cache), options.json
    paths = [p for p in sorted(options.all.glob("*.toml")) if not options.only or p.stem in options.only]
    chosen = {p.stem for p in paths}
    kept = [r for r in read_records(out) if r["config"] not in chosen] if options.only and out.exists() else []
    jobs = [*(job for job in _layouts(options) if job.path.stem in chosen), *_shipped(paths)]
    failed = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(_recorded, job, cache) for job in jobs]):
            if (error := done.exception()) is not None:
                failed.append(str(error))
                print(f"error: {error}", file=sys.stderr, flush=True)
                continue
            kept.append(done.result())
            print(table(kept[-1]), flush=True)
            write_records(out, kept)
    if failed:
        raise ValueError(f"{len(failed)} of {len(jobs)} ranks could not be executed; the first: {failed[0]}")


def _shipped(paths: Sequence[Path]) -> Iterator[_Job]:
    """A rank of each kind of stage."""
    for path in paths:
        with tempfile.TemporaryDirectory() as where:
            ranks = Ranks(path, Path(where))
            if ranks.has_gpus:
                yield from (_Job(path, (), stage.number) for stage in distinct_stages(ranks.config, ranks.hf))


def _layouts(options: argparse.Namespace) -> Iterator[_Job]:
    for given in json.loads(options.layouts.read_text(encoding="utf-8")) if options.layouts else ():
        path = options.all / f"{given['config']}.toml"
        yield _Job(path, tuple(given["overrides"]), given["stage"], given.get("imbalance", 1.0))


def _recorded(job: _Job, cache: Cache) -> ExecutedRank:
    with tempfile.TemporaryDirectory() as where:
        ranks = Ranks(job.path, Path(where), job.overrides)
        rank = first_rank(ranks.config.parallel, job.stage)
        found = cache.get(ranks.key(ranks.run(rank, imbalance=job.imbalance)))
        made = found or _in_a_process(job, rank, Path(where) / "record.json", cache)
        # the cache knows a rank by what it executes: two configurations may have the same
        return ExecutedRank(**{**made, "config": job.path.stem, "overrides": list(job.overrides)})


def _in_a_process(job: _Job, rank: int, out: Path, cache: Cache) -> ExecutedRank:
    """Raises ValueError with the process's last line if it fails."""
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, str(job.path), "--rank", str(rank)]
    command += ["--imbalance", str(job.imbalance)]
    command += [word for override in job.overrides for word in ("--set", override)]
    done = subprocess.run(
        [*command, "--json", str(out), "--cache", str(cache.directory)], capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"{job.path} {' '.join(job.overrides)}, rank {rank}: {last}")
    return read_records(out)[0]


if __name__ == "__main__":
    sys.exit(main())
