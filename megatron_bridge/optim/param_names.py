"""Layout-independent parameter names, and name patterns matched over all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_bridge.device.collective_errors import gather_objects
from megatron_bridge.optim.te_names import local_name

if TYPE_CHECKING:  # the exporter uses only the names and runs without megatron
    from megatron_bridge.device.parallel import ParallelContext

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EMBEDDING = "embedding.word_embeddings.weight"
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def layer_renamer(model: Any) -> Callable[[str], str]:
    """A function from names of modules and parameters in one unwrapped chunk, of either spec, to the local spec's names
    with the global layer number: a pipeline stage counts its layers from 0."""
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
    return lambda name: local_name(_LAYER.sub(lambda m: str(numbers[int(m[0])]), name))


def renamer(model: Any, parallel: ParallelContext) -> Callable[[str], str]:
    """`layer_renamer` with the global expert number too: an expert-parallel rank counts its experts from 0."""
    layers, experts = layer_renamer(model), (model.config.num_moe_experts or 0) // parallel.config.ep
    return lambda name: _EXPERT.sub(lambda m: str(parallel.ep_rank * experts + int(m[0])), layers(name))


def named_tensors(models: Sequence[Any], parallel: ParallelContext) -> Iterator[tuple[str, Tensor]]:
    """(global name, tensor) of every parameter and routing bias that this rank holds; `models` are unwrapped chunks.

    A head that is tied to the embedding has the embedding's name, also on a last stage, which holds a separate copy:
    the two must be trained alike.
    """
    for model in models:
        rename = renamer(model, parallel)
        for name, value in model.named_parameters():
            tied = name == "output_layer.weight" and model.share_embeddings_and_output_weights
            yield _EMBEDDING if tied else rename(name), value
        for name, value in model.named_buffers():
            if name.endswith(".expert_bias"):
                yield rename(name), value


def matching(models: Sequence[Any], parallel: ParallelContext, patterns: Sequence[str], *, key: str) -> list[Tensor]:
    """This rank's tensors whose global name matches a pattern. Collective.

    Raises ValueError, on every rank, for a pattern that matches nothing on any; `key` is the config key that holds it.
    """
    if not patterns:
        return []
    held = list(named_tensors(models, parallel))
    local = [any(fnmatchcase(name, pattern) for name, _ in held) for pattern in patterns]
    for pattern, found in zip(patterns, zip(*gather_objects(local), strict=True), strict=True):
        if not any(found):
            example = next((name for name, _ in held if name.endswith("weight")), "none here")
            raise ValueError(
                f"{key}: {pattern!r} matches no parameter of the model: patterns must match complete names such as "
                f"{example!r}"
            )
    return [tensor for name, tensor in held if any(fnmatchcase(name, pattern) for pattern in patterns)]
