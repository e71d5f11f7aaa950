"""Control requests of vLLM 0.32 in the terms that all engines share. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rollout.wire.control import ChecksumReply, ModelInfo, PauseMode, RankReply
from rollout.wire.replies import an_object, need
from rollout.wire.vllm_endpoints import CHECKER, MODELS, RESET_CACHE

REMEDIES: Mapping[int, str] = {  # by the status of a refusal
    403: "start the server with --enable-scale-out",
    404: "start the server with VLLM_SERVER_DEV_MODE=1 in its environment",
}
_OF_NOTHING = hashlib.sha256(b"").hexdigest()
_PAUSES = {
    PauseMode.ABORT: "?mode=abort&clear_cache=true",
    PauseMode.RETRACT: "?mode=keep&clear_cache=true",
    PauseMode.IN_PLACE: "?mode=keep&clear_cache=false",
}


def pause_query(mode: PauseMode) -> str:
    """The query of /pause: without a mode vLLM aborts what runs."""
    return _PAUSES[mode]


def check_reset(body: object) -> None:
    """Raises ValueError unless the prefix cache was dropped: vLLM answers 200 also where it was not, because running
    requests hold blocks of it."""
    if need(an_object(body, RESET_CACHE), "success", RESET_CACHE) is not True:
        raise ValueError(
            f"{RESET_CACHE}: the prefix cache was not dropped, because requests are running or frozen: later "
            "requests would reuse keys and values of older weights"
        )


def weight_hashes(body: object) -> ChecksumReply:
    """The reply to a checksum request. vLLM reports one table for all its ranks, on CPUs with the hash of no bytes for
    each linear that its kernels hold in a packed form; these entries are left out, because they are equal whatever the
    weights are. Raises ValueError for another form, and where nothing is left."""
    reported = an_object(need(an_object(body, CHECKER), "checksums", CHECKER), CHECKER)
    table = {str(name): digest for name, digest in reported.items() if digest != _OF_NOTHING}
    if not table or not all(isinstance(digest, str) for digest in table.values()):
        raise ValueError(
            f"{CHECKER}: {len(table)} of {len(reported)} checksums belong to weights: expected at least one, and "
            "all of them as text"
        )
    whole = hashlib.sha256(repr(sorted(table.items())).encode()).hexdigest()
    return ChecksumReply(ranks=(RankReply(checksums=table, per_gpu_checksum=whole),), per_engine_checksum=whole)


def served_model(body: object, weight_version: int) -> ModelInfo:
    """The reply to a request for the served models. Raises ValueError unless it is one."""
    models = need(an_object(body, MODELS), "data", MODELS)
    if not isinstance(models, list) or len(models) != 1:
        raise ValueError(f"{MODELS}: the reply has {len(models)} models, but a rollout server has one")
    model = an_object(models[0], MODELS)
    return ModelInfo(model_path=str(need(model, "root", MODELS)), weight_version=str(weight_version))
