"""Stock servers on CPU and the jobs whose models they serve."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rollout.server_key import ServerKey
from rollout.sglang.layer_states import HOOKS, forward_hooks
from rollout.sglang.ports import BLOCK, free_blocks, free_port
from rollout.sglang.servers import ServerEnvironment, ServerHandle, start

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
INTERPRETER = ROOT / "tests" / "sglang_cpu" / "interpreter"
PROGRAMS = ROOT / "tests" / "sglang_cpu" / "programs"
CONFIGS = {"deepseek": "tiny_bf16.toml", "qwen": "tiny_qwen.toml"}
MODELS = {"deepseek": "model.json", "qwen": "qwen_moe.json"}
START_S = 600.0
_FIRST = free_blocks(3)
# of the servers of a run: another worker's runs, which join another Ray on this machine, have others
PORTS = (f"rollout.port={_FIRST}", f"rollout.sglang.dist_init_port={_FIRST + BLOCK}")
SETTINGS = (
    *PORTS,
    *("model.make.max_steps=0", "model.make.format=bf16", "precision.format=bf16", "precision.qat=false"),
    *("parallel.dp=1", "parallel.ep=1", "rollout.engine=sglang", "rollout.max_new_tokens=24"),
    "rollout.request_timeout_s=600",
)


def given(settings: Sequence[str]) -> list[str]:
    """The words of a command line that change settings of its configuration."""
    return [word for setting in settings for word in ("--set", setting)]


def every_layer_routed(shape: str, home: Path) -> Path:
    """The shape's config.json, without Qwen's dense layer, which SGLang 0.5.23 does not know."""
    model = json.loads((ROOT / "configs" / "tiny" / MODELS[shape]).read_text())
    path = home / "model.json"
    path.write_text(json.dumps(model | {"mlp_only_layers": []} if "mlp_only_layers" in model else model))
    return path


def serve(
    model: Path,
    log: Path,
    *flags: str,
    key: ServerKey | None = None,
    key_file: Path | None = None,
    states: Path | None = None,
    tp: int = 1,
) -> ServerHandle:
    """A stock server of the checkpoint `model`, which begins to start; as a context manager it ends. states: the
    directory into which it writes the states of its layers."""
    port = free_port()
    command = [str(PYTHON), str(ROOT / "tests" / "sglang_cpu" / "serve.py"), "--model-path", str(model)]
    command += ["--port", str(port), *flags]
    if tp > 1:
        command += ["--tp-size", str(tp)]
    if states is not None:
        states.mkdir(exist_ok=True)
        layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
        command += ["--forward-hooks", forward_hooks(states, layers)]
    environment = ServerEnvironment(modules=None if states is None else HOOKS)
    url = f"http://127.0.0.1:{port}"
    return start(command, url=url, log=log, key=key, key_file=key_file, environment=environment)
