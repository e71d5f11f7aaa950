"""The residual stream at every layer of a stock server, by the forward hooks with which it was started.

Stock SGLang 0.5.23 answers requests with hidden states of the last layer only (`return_hidden_states`). Of all layers
it gives them to hooks (`--forward-hooks`), here one on each norm: they write files, which this process must see. Its
`DUMPER_SERVER_PORT`, which needs no hook, listens on every address of the machine and unpickles what it receives.

States are numbered as in rollout/wire/layer_states.py. Letters: S tokens, L layers, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

HOOKS = Path(__file__).parent / "hooks"  # on the module path of a server that is started with them
_FACTORY = "miles_like_layer_states:hook"
_ON = "on"


def forward_hooks(directory: Path, layers: int) -> str:
    """The value of `--forward-hooks` for a model of L layers."""
    norms = [
        f"model.layers.{i}.{norm}" for i in range(layers) for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    return json.dumps(
        [
            {
                "name": f"state {state}",
                "target_modules": [norm],
                "hook_factory": _FACTORY,
                "config": {"directory": str(directory), "name": str(state)},
            }
            for state, norm in enumerate([*norms, "model.norm"])
        ]
    )


class StockStates:
    """The states that a server writes. url: for messages."""

    def __init__(self, url: str, directory: Path, count: int) -> None:
        self._url, self._directory, self._count = url, directory, count

    @classmethod
    def of(cls, url: str, info: Mapping[str, Any]) -> StockStates:
        """info: the reply to /server_info. Raises ValueError for a server that was started without the hooks, or whose
        directory is not seen here."""
        hooks = [h for h in info.get("forward_hooks") or () if h.get("hook_factory") == _FACTORY]
        if not hooks:
            raise ValueError(
                f"server {url} is stock SGLang, which returns hidden states of its last layer only, because it "
                "was started without --forward-hooks: let `miles-like verify --layers` start the servers, or "
                "remove --layers"
            )
        directory = Path(hooks[0]["config"]["directory"])
        if not directory.is_dir():
            raise ValueError(
                f"server {url} writes the states of its layers into {directory}, which is not on this machine: "
                "choose a --run-dir on a disk that all nodes share, or remove --layers"
            )
        return cls(url, directory, len(hooks))

    @contextmanager
    def written(self) -> Iterator[None]:
        """Context in which the server writes states."""
        self._remove()
        on = self._directory / _ON
        on.touch()
        try:
            yield
        finally:
            on.unlink(missing_ok=True)

    def read(self, tokens: int) -> Tensor:
        """[S, 2L+1, H] fp32: the states of the one text of S tokens that was sent within `written`. Removes the files.
        Raises ValueError where states are missing, or where other tokens have written states too."""
        try:
            found = [self._stream(str(state), tokens) for state in range(self._count)]
        finally:
            self._remove()
        return torch.stack(found, 1)

    def _stream(self, name: str, tokens: int) -> Tensor:
        """[S, H], as the first of the ranks that have it wrote it, in one or several passes."""
        of_rank: dict[int, list[Path]] = {}
        for path in sorted(self._directory.glob(f"*.{name}.safetensors")):
            of_rank.setdefault(int(path.name.split(".")[1]), []).append(path)
        try:
            passes: Sequence[Tensor] = [load_file(path)["state"] for path in of_rank[min(of_rank)]] if of_rank else ()
        except (OSError, KeyError, SafetensorError) as e:
            raise ValueError(
                f"server {self._url}: a file of state {name} in {self._directory} is damaged: {e}"
            ) from None
        if sum(map(len, passes)) != tokens:
            raise ValueError(
                f"server {self._url} wrote {sum(map(len, passes))} rows of state {name} for a text of {tokens} "
                "tokens: it ran other requests at the same time, or a CUDA graph that skips hooks (disable its "
                "prefill graphs)"
            )
        return torch.cat(list(passes))

    def _remove(self) -> None:
        for path in self._directory.glob("*.safetensors"):
            path.unlink(missing_ok=True)
