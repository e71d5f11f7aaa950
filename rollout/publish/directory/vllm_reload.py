"""Let stock vLLM servers load a directory of published weights.

vLLM 0.32 answers each of these requests with HTTP 200 whether or not the servers compute with the new weights: hashes
are of the tensors that it fuses. The text that every server scores after a publication decides
(miles_like/alignment/known_answer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollout.publish.publication import RankChecksums
from rollout.publish.publisher import compare_replies
from rollout.publish.servers import ServerSet, Stage
from rollout.vllm.control import check_reset, pause_query, weight_hashes
from rollout.wire import vllm_endpoints as endpoints
from rollout.wire.control import PauseMode


def reload_weights(
    servers: ServerSet, path: Path, version: int, *, mode: PauseMode, verify: bool, reached: Callable[[Stage], None]
) -> RankChecksums:
    """Pause the servers, let them load `path` as `version`, and continue; returns their hashes, which with `verify` are
    compared with each other. The prefix cache, whose keys and values are of the old weights, is dropped: a reload keeps
    it. reached: called with each stage. Raises RolloutError."""
    servers.ask(endpoints.PAUSE + pause_query(mode), {})
    reached(Stage.BEGUN)
    servers.ask(endpoints.RPC, {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
    reached(Stage.CHANGED)
    servers.read(endpoints.RESET_CACHE, {}, check_reset)
    servers.ask(endpoints.UPDATE_VERSION, {"new_version": str(version)})
    checksums: RankChecksums = ()
    if verify:
        checksums = compare_replies(
            servers, servers.read(endpoints.CHECKER, {"action": "checksum"}, weight_hashes), None
        )
    servers.ask(endpoints.RESUME, {})
    return checksums
