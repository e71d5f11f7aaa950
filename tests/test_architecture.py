"""The shape of the house, executable: floors, walls, no cycles, and the house rules a reader counts on.

Imports inside functions count too. Not covered: what a module reaches through values handed to it.
"""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("quant", "routing_replay", "rollout", "megatron_bridge", "miles_like", "scripts")
FLOORS = {  # longest prefix wins
    "quant": 0,
    "routing_replay": 0,
    "rollout.config": 1,
    "rollout.data_config": 1,
    "megatron_bridge.config": 1,
    "miles_like.supervised_config": 2,
    "miles_like.types": 2,
    "miles_like.algorithm_config": 2,
    "miles_like.alignment": 2,
    "miles_like.config": 2,
    "miles_like.distillation_config": 2,
    "miles_like.eval_config": 2,
    "miles_like.hf_checkpoint": 2,
    "miles_like.loop_config": 2,
    "miles_like.make_config": 2,
    "miles_like.metric_direction": 2,
    "miles_like.rank_configs": 2,
    "miles_like.child_limits": 1,
    "miles_like.regular_files": 1,
    "miles_like.reward_config": 2,
    "miles_like.server_url": 2,
    "miles_like.protocols": 3,
    "miles_like.by_import_path": 3,
    "miles_like.config_io": 3,
    "miles_like.rewards.threads": 3,
    "miles_like.user_errors": 3,
    "rollout": 4,
    "megatron_bridge": 4,
    "miles_like": 4,
    "miles_like.controller": 5,
    "miles_like.distillation": 5,
    "miles_like.evaluation": 5,
    "miles_like.loop_state": 5,
    "miles_like.pipeline": 5,
    "miles_like.placement": 5,
    "miles_like.served": 5,
    "miles_like.supervised_data": 5,
    "miles_like.workers": 5,
    "miles_like.ray_waits": 5,
    "miles_like.node_work": 5,
    "miles_like.assemble": 6,
    "miles_like.make_checkpoint": 6,
    "miles_like.factories": 6,
    "miles_like.engine_fit": 6,
    "miles_like.eval_alone": 6,
    "miles_like.run_checks": 6,
    "miles_like.preflight": 6,
    "miles_like.preflight_machine": 6,
    "miles_like.run_parts": 6,
    "miles_like.run_teachers": 6,
    "miles_like.train_stage": 6,
    "miles_like.trial_calls": 6,
    "miles_like.trainer_parts": 6,
    "miles_like.supervised_stage": 6,
    "miles_like.verify_live": 6,
    "miles_like.verify_stage": 6,
    "miles_like.cli": 7,
    "scripts": 8,
}
LIBRARIES_OF_FLOOR_0 = {"torch", "numpy"}
TORCH_FREE = (
    "rollout.config",
    "rollout.data_config",
    "megatron_bridge.config",
    "miles_like.algorithm_config",
    "miles_like.alignment",
    "miles_like.config",
    "miles_like.eval_config",
    "miles_like.config_io",
    "miles_like.distillation_config",
    "miles_like.loop_config",
    "miles_like.make_config",
    "miles_like.metric_direction",
    "miles_like.rank_configs",
    "miles_like.reward_config",
    "miles_like.server_url",
    "miles_like.supervised_config",
    "quant.spec",
    "quant.hf_config",
)


def floor(module: str) -> int:
    return FLOORS[max((p for p in FLOORS if f"{module}.".startswith(f"{p}.")), key=len)]


def all_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names if _is_module(node.module, a.name))}
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def _is_module(package: str, name: str) -> bool:
    base = ROOT / Path(*package.split("."))
    return (base / f"{name}.py").exists() or (base / name / "__init__.py").exists()


FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
OURS = {
    module: {name for name in all_imports(path) if name in FILES and name != module} for module, path in FILES.items()
}


@pytest.mark.parametrize("module", FILES)
def test_imports_point_down(module: str) -> None:
    """A module imports lower floors or its own package's own floor: nothing it stands on can lean on it."""
    for target in OURS[module]:
        same_room = floor(target) == floor(module) and target.split(".")[0] == module.split(".")[0]
        assert floor(target) < floor(module) or same_room, (
            f"{module} (floor {floor(module)}) imports {target} (floor {floor(target)}): move it down or pass it in"
        )


@pytest.mark.parametrize("module", FILES)
def test_the_wall_between_trainer_and_rollout(module: str) -> None:
    """Each side can be replaced without the other knowing; only the roof names both."""
    imported = [name for name in OURS[module] if not name.endswith(".config")]  # sections are data
    sides = {name.split(".")[0] for name in (*imported, module)} & {"rollout", "megatron_bridge"}
    assert len(sides) < 2 or floor(module) >= 6, module


def test_no_import_cycles() -> None:
    """CycleError names the cycle."""
    order = list(graphlib.TopologicalSorter(OURS).static_order())
    assert len(order) == len(FILES)


@pytest.mark.parametrize("module", [m for m in FILES if floor(m) == 0])
def test_the_ground_floor_stands_on_torch_and_numpy_alone(module: str) -> None:
    """quant and routing_replay must run inside any process, trainer, server or converter."""
    import sys

    foreign = {n.split(".")[0] for n in all_imports(FILES[module])} - {"quant", "routing_replay"}
    foreign -= set(sys.stdlib_module_names) | {"__future__"}
    assert foreign <= LIBRARIES_OF_FLOOR_0, (module, foreign)


@pytest.mark.parametrize("module", [m for m in TORCH_FREE if m in FILES])
def test_configuration_needs_no_torch(module: str) -> None:
    """A cluster's configuration can be checked on a laptop in a moment."""
    todo, seen = [module], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        assert "torch" not in {n.split(".")[0] for n in all_imports(FILES[name])}, (
            f"{module} reaches torch through {name}"
        )
        todo += OURS[name]


def test_only_the_roof_sees_the_whole_configuration() -> None:
    """A part that takes RunConfig depends on everything; it should take its own section."""
    stages = {"run_parts", "run_teachers", "supervised_stage", "train_stage", "trainer_parts"}
    allowed = {"config", "config_io", "rank_configs", "assemble", "make_checkpoint", "pipeline", "cli"} | stages
    allowed |= {"preflight", "preflight_machine"}
    for module, path in FILES.items():
        names = {n.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name)}
        assert "RunConfig" not in names or (module.startswith("miles_like.") and path.stem in allowed), module


@pytest.mark.parametrize("module", FILES)
def test_files_and_functions_stay_small(module: str) -> None:
    """What does not fit a head is not one thing."""
    text = FILES[module].read_text()
    assert len(text.splitlines()) <= 500, f"{module} has {len(text.splitlines())} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= 60, f"{module}.{node.name} has {lines} lines"


@pytest.mark.parametrize("module", FILES)
def test_house_rules(module: str) -> None:
    """Names that say something; environment variables and Ray only where they belong; no broad except."""
    assert not {"utils", "util", "common", "helpers", "misc"} & set(module.split(".")), module
    tree = ast.parse(FILES[module].read_text())
    # server_key: a key reaches a server by its environment alone, for every user can read a command line
    if module not in ("megatron_bridge.device", "miles_like.workers", "miles_like.cli", "rollout.server_key"):
        environ = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
        assert not environ, f"{module} reads the environment"
    roots = {n.split(".")[0] for n in all_imports(FILES[module])}
    assert "ray" not in roots or module in ("miles_like.workers", "miles_like.ray_waits", "miles_like.node_work"), (
        f"{module} imports ray"
    )
    parallel_state = [n for n in all_imports(FILES[module]) if n.endswith("parallel_state")]
    assert not parallel_state or module == "megatron_bridge.parallel", f"{module} calls parallel_state"
    bare = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type is None]
    assert not bare, f"{module}: bare except at {bare}"
