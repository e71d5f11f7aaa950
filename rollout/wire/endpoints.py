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
UPDATE_FROM_DISTRIBUTED = "/update_weights_from_distributed"
UPDATE_FROM_DISK = "/update_weights_from_disk"
INIT_GROUP = "/init_weights_update_group"
DESTROY_GROUP = "/destroy_weights_update_group"
UPDATE_VERSION = "/update_weight_version"
CHECKSUM = "/weights_checker"
RELEASE_MEMORY = "/release_memory_occupation"
RESUME_MEMORY = "/resume_memory_occupation"

# header of this project: the epoch of the run whose process sends the request; other servers ignore it
EPOCH = "x-miles-like-epoch"

# OpenAI's API
OPENAI = "/v1/"
OPENAI_MODELS = "/v1/models"
OPENAI_COMPLETIONS = "/v1/completions"
OPENAI_CHAT = "/v1/chat/completions"

# of this project's embedded engine alone: weights that trainer ranks send each of its ranks
WEIGHTS_LAYOUT = "/weights_layout"
PLAN_SLICES = "/plan_weight_slices"
JOIN_SLICES = "/init_weight_slices_group"
UPDATE_FROM_SLICES = "/update_weights_from_slices"
SLICE_HASHES = "/weight_slice_hashes"
