"""Paths of the HTTP endpoints of SGLang 0.5.23 that this project uses."""

from __future__ import annotations

GENERATE = "/generate"
HEALTH = "/health"
MODEL_INFO = "/model_info"
SERVER_INFO = "/server_info"
FLUSH_CACHE = "/flush_cache"
ABORT = "/abort_request"
PAUSE = "/pause_generation"
CONTINUE = "/continue_generation"
BEGIN_UPDATE = "/begin_weight_update"
END_UPDATE = "/end_weight_update"
UPDATE_FROM_TENSOR = "/update_weights_from_tensor"
UPDATE_FROM_DISK = "/update_weights_from_disk"
UPDATE_VERSION = "/update_weight_version"
CHECKSUM = "/weights_checker"
