"""Paths of the HTTP endpoints of vLLM 0.32 that this project uses.

`/inference/v1/generate` needs the option `--enable-scale-out`, the paths after it the environment variable
VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

HEALTH = "/health"
VERSION = "/version"
MODELS = "/v1/models"
GENERATE = "/inference/v1/generate"
ABORT = "/abort_requests"
PAUSE = "/pause"
RESUME = "/resume"
RPC = "/collective_rpc"
RESET_CACHE = "/reset_prefix_cache"
UPDATE_VERSION = "/update_weight_version"
WEIGHT_INFO = "/weight_info"
CHECKER = "/weight_checker"
