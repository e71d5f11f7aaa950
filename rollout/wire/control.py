"""Requests and replies of SGLang 0.5.23's control endpoints as typed values, and encodings of weights. No I/O.

Defaults are SGLang's. Only the embedded engine reads `load_format` SAFETENSORS, which contains no pickle.
"""

from __future__ import annotations

import binascii
import io
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self

import pybase64
import safetensors
import safetensors.torch
import torch
from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator
from safetensors import SafetensorError
from torch import Tensor

from miles_like.types import NamedTensor
from rollout.wire.bodies import (
    MAX_PATH,
    MAX_RID,
    MAX_TENSORS,
    MAX_VERSION,
    Body,
    DtypeName,
    MemoryTag,
    Name,
    Shape,
    Version,
    read,
)
from rollout.wire.endpoints import (
    ABORT,
    BEGIN_UPDATE,
    CHECKSUM,
    DESTROY_GROUP,
    END_UPDATE,
    INIT_GROUP,
    PAUSE,
    RELEASE_MEMORY,
    RESUME_MEMORY,
    UPDATE_FROM_DISK,
    UPDATE_FROM_DISTRIBUTED,
    UPDATE_FROM_TENSOR,
    UPDATE_VERSION,
)
from rollout.wire.pickles import START, STOP, Global, called, pushed
from rollout.wire.replies import Json, Reply, Text

SAFETENSORS = "safetensors"


class PauseMode(StrEnum):
    """What /pause_generation does with running requests."""

    ABORT = "abort"  # they end with the tokens sampled so far
    RETRACT = "retract"  # they return to the queue; their keys and values are recomputed after the pause
    IN_PLACE = "in_place"  # they are frozen with their keys and values; the cache cannot be flushed meanwhile


MAX_GROUP = 1 << 16  # ranks
GroupName = Annotated[str, Field(min_length=1, max_length=128)]
Flag = Annotated[bool, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "null"}]})]


class Request(Body):
    """A request to ENDPOINT, which client and server hold as this type."""

    ENDPOINT: ClassVar[str]

    def to_json(self) -> Json:
        return self.model_dump()

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Raises ValueError naming the endpoint, the field, its value and the bound."""
        return read(cls, body, cls.ENDPOINT)


class PauseRequest(Request):
    ENDPOINT = PAUSE
    mode: Annotated[PauseMode, Field(strict=False)] = PauseMode.ABORT  # strict would refuse the mode's text

    def to_json(self) -> Json:
        return self.model_dump(mode="json")


class ControlRequest(Request):
    """A request in which null stands for the default of a field that has one."""

    @field_validator("*", mode="before")
    @classmethod
    def _default_for_null(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[str(info.field_name)]
        return field.default if value is None and not field.is_required() else value


class AbortRequest(ControlRequest):
    """An unknown rid is no error."""

    ENDPOINT = ABORT
    rid: Annotated[str, Field(max_length=MAX_RID)] | None = ""
    abort_all: Flag = False


class BeginUpdate(ControlRequest):
    """weight_version: version of the new weights; an extension of this project, which stock servers ignore. In the
    embedded engine the same or a newer version replaces an update that was begun and not ended."""

    ENDPOINT = BEGIN_UPDATE
    selector: Literal["all", "target", "draft"] | None = "all"
    weight_version: Version | None = None

    def to_json(self) -> Json:
        return self.model_dump(exclude_none=True)


class EndUpdate(ControlRequest):
    """weight_version: the version given to BeginUpdate, if any; an extension of this project."""

    ENDPOINT = END_UPDATE
    weight_version: Version | None = None

    def to_json(self) -> Json:
        return self.model_dump(exclude_none=True)


class UpdateFromTensor(ControlRequest):
    """Part of the new weights, inline or by a handle; valid only between BeginUpdate and EndUpdate."""

    ENDPOINT = UPDATE_FROM_TENSOR
    # base64, one per tensor-parallel rank; the embedded engine: exactly one, for SEGMENT (`flat`) JSON
    serialized_named_tensors: Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1024)]
    load_format: Annotated[str, Field(max_length=MAX_VERSION)] | None = None
    flush_cache: Flag = True  # rejected by a server paused IN_PLACE
    abort_all_requests: Flag = False
    weight_version: Version | None = None


class InitGroup(ControlRequest):
    """The ranks of a server join a process group, at ranks from `rank_offset` on. It answers when all members have
    joined. The group's store listens at the address, at which rank 0 sends."""

    ENDPOINT = INIT_GROUP
    master_address: Annotated[str, Field(min_length=1, max_length=255)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=1, le=MAX_GROUP)]
    world_size: Annotated[int, Field(ge=2, le=MAX_GROUP)]
    group_name: GroupName = "weight_update_group"
    backend: Literal["nccl", "gloo"] = "nccl"


class DestroyGroup(ControlRequest):
    """The ranks of a server leave a group. Without such a group the outcome is no success."""

    ENDPOINT = DESTROY_GROUP
    group_name: GroupName = "weight_update_group"


class UpdateFromDistributed(ControlRequest):
    """Part of the new weights, which rank 0 of the group broadcasts meanwhile; valid only between BeginUpdate and
    EndUpdate. load_format FLATTENED (`flat`): in one broadcast of bytes."""

    ENDPOINT = UPDATE_FROM_DISTRIBUTED
    names: Annotated[list[Name], Field(fail_fast=True, min_length=1, max_length=MAX_TENSORS)]
    dtypes: Annotated[list[DtypeName], Field(fail_fast=True, min_length=1, max_length=MAX_TENSORS)]
    shapes: Annotated[list[Shape], Field(fail_fast=True, min_length=1, max_length=MAX_TENSORS)]
    group_name: GroupName = "weight_update_group"
    load_format: Annotated[str, Field(max_length=MAX_VERSION)] | None = None
    flush_cache: Flag = True
    abort_all_requests: Flag = False
    weight_version: Version | None = None


class UpdateFromDisk(ControlRequest):
    """All new weights from a Hugging Face directory that the server can read; needs no BeginUpdate and EndUpdate.

    The embedded engine also reads a directory of differences (`deltas.py`) with load_format DELTA. prepare: an
    extension of this project for such a directory: the server reads and checks it while it goes on serving the old
    weights, which the same request without `prepare` replaces.
    """

    ENDPOINT = UPDATE_FROM_DISK
    model_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH)]
    load_format: Annotated[str, Field(max_length=MAX_VERSION)] | None = None
    prepare: Flag = False
    flush_cache: Flag = True
    abort_all_requests: Flag = False
    weight_version: Version | None = None
    keep_pause: Flag = False

    def to_json(self) -> Json:
        unknown_to_stock = () if self.prepare else ("prepare",)
        return self.model_dump(exclude={*unknown_to_stock, *(() if self.load_format else ("load_format",))})


class UpdateVersion(ControlRequest):
    ENDPOINT = UPDATE_VERSION
    new_version: Version
    abort_all_requests: Flag = True


class ChecksumRequest(ControlRequest):
    ENDPOINT = CHECKSUM
    action: Annotated[str, Field(max_length=64)] | None = "checksum"


class MemoryRequest(ControlRequest):
    """Parts of the memory; without tags, or with an empty list, all parts. A stock server does not check the names."""

    # strict would refuse a tag's text
    tags: Annotated[list[Annotated[MemoryTag, Field(strict=False)]], Field(max_length=16)] | None = None

    def to_json(self) -> Json:
        return self.model_dump(mode="json")

    @property
    def named(self) -> tuple[MemoryTag, ...]:
        """The parts, each once, in the order of MemoryTag."""
        return tuple(tag for tag in MemoryTag if not self.tags or tag in self.tags)


class ReleaseMemory(MemoryRequest):
    """Frees parts of the memory of an idle server. A stock server ends with an AssertionError if it is busy."""

    ENDPOINT = RELEASE_MEMORY


class ResumeMemory(MemoryRequest):
    """Allocates released parts again: an empty KV cache, and weights of undefined content. A stock server ends with a
    KeyError if a part was not released."""

    ENDPOINT = RESUME_MEMORY


class Outcome(Reply):
    """Reply to requests that change weights or their group, with HTTP 200 or 400."""

    success: bool
    message: Text = ""


class ModelInfo(Reply):
    """The keys of /model_info that are used. `weight_version` is current; /server_info has that of the launch."""

    model_path: str
    weight_version: str
    architectures: Annotated[tuple[str, ...], BeforeValidator(lambda names: names or ())] = ()  # from its config.json
    tokenizer_path: str | None = None
    is_generation: bool = True


class RankReply(Reply):
    """Hashes of one rank of a server."""

    checksums: dict[str, str]  # parameter name -> hash; SGLang's have 16 hex digits
    per_gpu_checksum: str  # SHA-256 hex
    parallelism_info: Any = Field(default_factory=list)


class ChecksumReply(Reply):
    """Hashes of a server's weights. A stock server hashes its fused, sharded tensors."""

    success: bool = True
    message: Text = ""
    ranks: tuple[RankReply, ...]
    per_engine_checksum: str  # SHA-256 hex

    @property
    def per_rank(self) -> tuple[Mapping[str, str], ...]:
        """For each rank: parameter name -> hash."""
        return tuple(rank.checksums for rank in self.ranks)

    @property
    def tensors(self) -> Mapping[str, str]:
        """Parameter name -> hash. With several ranks, which may hold different shards, names include the rank."""
        if len(self.ranks) == 1:
            return self.ranks[0].checksums
        return {f"{name} (rank {i})": digest for i, rank in enumerate(self.per_rank) for name, digest in rank.items()}


def encode_safetensors(tensors: Iterable[NamedTensor]) -> str:
    """Base64 of a safetensors file. Raises ValueError for a duplicate name."""
    named: dict[str, Any] = {}
    for name, tensor in tensors:
        if name in named:
            raise ValueError(f"tensor {name!r} occurs twice in one request")
        named[name] = tensor.detach().cpu().contiguous()
    # safetensors.torch.save first searches for shared memory, which takes longer than the rest; there is none here
    flat = {
        name: safetensors.TensorSpec(
            dtype=str(t.dtype).removeprefix("torch."), shape=list(t.shape), data_ptr=t.data_ptr(), data_len=t.nbytes
        )
        for name, t in named.items()
    }
    return pybase64.b64encode_as_string(safetensors.serialize(flat))


def decode_safetensors(payload: str) -> list[NamedTensor]:
    """The inverse of `encode_safetensors`, in the order of names. Raises ValueError for a damaged payload, and for a
    dtype that torch does not have."""
    try:
        named = safetensors.torch.load(pybase64.b64decode(payload, validate=True))
    except (binascii.Error, UnicodeError) as e:
        raise ValueError(f"weights are not base64: {e}") from None
    except SafetensorError as e:
        raise ValueError(f"weights are not safetensors bytes: {e}") from None
    except KeyError as e:
        raise ValueError(f"weights have dtype {e.args[0]}, which this server does not support") from None
    except (RuntimeError, TypeError, OverflowError) as e:
        raise ValueError(f"weights cannot be read: {str(e).splitlines()[0]}") from None
    return [NamedTensor(name, named[name]) for name in sorted(named)]


def encode_sglang_pickle(tensors: Iterable[NamedTensor], tp_size: int) -> tuple[str, ...]:
    """SGLang's encoding: base64 of a pickled [(name, tensor)], the same for each of `tp_size` ranks.

    It is sent only to servers that this run started, and never read here. Tensors are inline and on the CPU; SGLang's
    loader shards them. The pickle is written opcode by opcode with the globals on SGLang's allow-list: the output of
    pickle.dumps for an FP8 tensor cannot be read back (an AttributeError that ends the server).
    """
    out = [START, b"]("]  # empty list, mark
    for name, tensor in tensors:
        t = tensor.detach().cpu().contiguous()
        storage = called(Global("torch.storage", "_load_from_bytes"), _stored_bytes(t))
        hooks = called(Global("collections", "OrderedDict"))
        whole = called(
            Global("torch._utils", "_rebuild_tensor_v3"), storage, 0, tuple(t.shape), t.stride(), False, hooks, t.dtype
        )
        out += [pushed(name), whole, b"\x86"]  # a pair
    out += [b"e", STOP]  # append all since the mark
    return (pybase64.b64encode_as_string(b"".join(out)),) * tp_size


def _stored_bytes(t: Tensor) -> bytes:
    """torch.save of the tensor's bytes as a uint8 storage; `_rebuild_tensor_v3` gets the dtype separately."""
    raw = t.reshape(-1).view(torch.uint8).clone()  # a view would bring its whole storage
    storage = torch.storage.TypedStorage(wrap_storage=raw.untyped_storage(), dtype=torch.uint8, _internal=True)
    out = io.BytesIO()
    torch.save(storage, out, _use_new_zipfile_serialization=False)
    return out.getvalue()
