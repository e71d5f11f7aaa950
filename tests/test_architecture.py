"""The structure of the source tree: which folder imports which, what lower packages may import, sizes, house rules.

Imports inside functions count. Not covered: what a module reaches through values passed to it.
"""

import ast
import functools
import graphlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import nodes_of

ROOT = Path(__file__).parents[1]
PACKAGES = ("quant", "routing_replay", "rollout", "megatron_bridge", "miles_like", "scripts")
MODULES_IN_A_FOLDER = 14
TESTED_ELSEWHERE = ("scripts",)  # folders without a folder of tests: tests/e2e runs the scripts

# A folder -> the folders that its modules import, from the ground up. A module that lies in the root of a package has a
# separate row. A name stands for its subfolders too: "quant" is quant.spec, quant.formats and the others.
CONTRACTS = (
    "miles_like.types miles_like.records miles_like.protocols miles_like.rank_protocols miles_like.plugins"
    " miles_like.hf miles_like.limits miles_like.sandbox miles_like.section miles_like.spans miles_like.variables"
)
RULES = {
    "quant.exact": "",
    "quant.spec": "",
    "quant.formats.scale_rules": "",
    "quant.kernels": "quant.spec quant.formats.scale_rules",
    "quant.formats": "quant.spec quant.formats.scale_rules quant.kernels",
    "quant.ignore": "quant.spec",
    "quant.hf_config": "quant.spec quant.ignore",
    "quant.registry": "quant.spec quant.formats",
    "quant.qat": "quant.spec quant.formats quant.registry",
    "quant.stream": "quant.spec quant.formats quant.registry",
    "routing_replay": "",
    # what lower packages may import of miles_like
    "miles_like.limits": "",
    "miles_like.section": "",
    "miles_like.spans": "",
    "miles_like.variables": "",
    "miles_like.types": "routing_replay",
    "miles_like.records": "routing_replay miles_like.types",
    "miles_like.protocols": "miles_like.types miles_like.records",
    "miles_like.rank_protocols": "routing_replay miles_like.types",
    "miles_like.plugins": "miles_like.limits",
    "miles_like.hf": "quant.hf_config miles_like.limits miles_like.types",
    # rollout
    "rollout.tool_config": "miles_like.section miles_like.variables",
    "rollout.config": "miles_like.section miles_like.variables rollout.tool_config",
    "rollout.server_url": "",
    # programs of a model, for rewards above and environments below
    "miles_like.sandbox": "miles_like.limits miles_like.section miles_like.variables rollout.server_url",
    "rollout.concurrency": "",
    "rollout.seeds": "",
    "rollout.wire": "miles_like.types",
    "rollout.wire.reshard": "rollout.wire",
    "rollout.server_key": "rollout.wire",
    "rollout.vllm_command": "rollout.config",
    "rollout.guard": "rollout.server_key miles_like.limits miles_like.variables",
    "rollout.prompts": "miles_like.section miles_like.types",
    # messages as token ids; the engine's /v1 and the episodes of a run share it
    "rollout.chat": "miles_like.types",
    # OpenAI's API: the engine's /v1 and the recorder have the same bodies
    "rollout.openai": "miles_like.types rollout.wire",
    "rollout.tools": "miles_like.limits miles_like.plugins miles_like.types miles_like.variables rollout.chat"
    " rollout.tool_config",
    "rollout.sglang": f"{CONTRACTS} quant routing_replay rollout.config rollout.concurrency rollout.seeds"
    " rollout.guard rollout.server_key rollout.server_url rollout.vllm_command rollout.wire",
    "rollout.sglang.hooks": "",
    "rollout.vllm": f"{CONTRACTS} routing_replay rollout.concurrency rollout.seeds rollout.sglang rollout.wire",
    "rollout.publish.kernels": "",
    "rollout.publish": f"{CONTRACTS} quant rollout.config rollout.publish.kernels rollout.server_key"
    " rollout.server_url rollout.sglang rollout.wire",
    "rollout.publish.directory": f"{CONTRACTS} miles_like.hf quant rollout.publish rollout.sglang rollout.vllm"
    " rollout.wire",
    "rollout.publish.reshard": f"{CONTRACTS} quant rollout.server_key rollout.sglang rollout.wire rollout.publish",
    "rollout.publish.sources": f"{CONTRACTS} quant.registry rollout.publish rollout.sglang",
    # an endpoint that agents ask, and what they were answered
    "rollout.recorder": f"{CONTRACTS} rollout.chat rollout.openai rollout.seeds rollout.tool_config",
    "rollout.episodes": f"{CONTRACTS} rollout.config rollout.concurrency rollout.prompts rollout.seeds rollout.chat"
    " rollout.recorder rollout.tools",
    # an environment may be named by any configuration, and names no other room
    "rollout.environments": CONTRACTS,
    "rollout.embedded.families": "",
    "rollout.embedded.device": "rollout.embedded.families",
    "rollout.embedded.cache": "rollout.embedded.device rollout.embedded.families",
    "rollout.embedded.kernels": "quant.kernels.choice",
    "rollout.embedded.model": "miles_like.hf quant rollout.embedded.cache rollout.embedded.device"
    " rollout.embedded.families rollout.embedded.kernels rollout.wire",
    "rollout.embedded.updates": "miles_like.types rollout.wire",
    "rollout.embedded.engine": "miles_like.types rollout.embedded.cache rollout.embedded.device"
    " rollout.embedded.kernels rollout.embedded.model rollout.wire",
    "rollout.embedded.ranks": "miles_like.hf quant rollout.embedded.cache rollout.embedded.model"
    " rollout.embedded.updates rollout.wire",
    "rollout.embedded.openai": "miles_like.hf miles_like.limits miles_like.types rollout.chat rollout.embedded.engine"
    " rollout.openai rollout.wire",
    "rollout.embedded.server": f"{CONTRACTS} quant.hf_config rollout.config rollout.openai rollout.server_key"
    " rollout.wire rollout.embedded",
    # megatron_bridge
    "megatron_bridge.config": "quant.spec miles_like.section",
    "megatron_bridge.families": "",
    "megatron_bridge.plan": "quant megatron_bridge.config megatron_bridge.families",
    "megatron_bridge.convert.directory": "megatron_bridge.config megatron_bridge.families miles_like.limits",
    "megatron_bridge.convert": f"{CONTRACTS} quant megatron_bridge.families megatron_bridge.convert.directory",
    "megatron_bridge.device": "megatron_bridge.config megatron_bridge.plan",
    "megatron_bridge.optim": "megatron_bridge.device megatron_bridge.plan",
    "megatron_bridge.model.kernels": "quant.kernels",
    "megatron_bridge.model": "quant.exact routing_replay miles_like.types megatron_bridge.config"
    " megatron_bridge.families megatron_bridge.plan megatron_bridge.convert megatron_bridge.device"
    " megatron_bridge.optim megatron_bridge.model.kernels",
    "megatron_bridge.step": f"{CONTRACTS} quant routing_replay megatron_bridge.config megatron_bridge.families"
    " megatron_bridge.device megatron_bridge.optim megatron_bridge.model",
    "megatron_bridge.weights": f"{CONTRACTS} megatron_bridge.config megatron_bridge.families megatron_bridge.convert"
    " megatron_bridge.device megatron_bridge.optim megatron_bridge.model megatron_bridge.step",
    "megatron_bridge.trainer": f"{CONTRACTS} quant.exact routing_replay megatron_bridge",
    "megatron_bridge.fake.substitutes": "routing_replay miles_like.types megatron_bridge.config megatron_bridge.plan"
    " megatron_bridge.device megatron_bridge.model",
    "megatron_bridge.fake": f"{CONTRACTS} routing_replay megatron_bridge",
    # miles_like: data and settings
    "miles_like.device_table": "",
    "miles_like.timing.rates": "miles_like.device_table",
    "miles_like.batch": "routing_replay miles_like.types miles_like.records",
    "miles_like.config.sections.watched": "miles_like.section",
    "miles_like.config.sections": "miles_like.config.sections.watched quant.spec megatron_bridge.config rollout.config"
    " rollout.server_url miles_like.section miles_like.device_table miles_like.variables",
    "miles_like.config": "quant.spec megatron_bridge.config rollout.config rollout.prompts miles_like.limits"
    " miles_like.sandbox miles_like.section miles_like.config.sections",
    "miles_like.config.foreign": "miles_like.limits miles_like.config",
    "miles_like.timing": "quant.spec megatron_bridge.config megatron_bridge.families megatron_bridge.plan"
    " miles_like.config miles_like.device_table miles_like.timing.rates",
    "miles_like.timing.weight_sync": "quant.spec megatron_bridge.config megatron_bridge.families"
    " miles_like.device_table miles_like.timing.rates miles_like.timing",
    "miles_like.timing.published": "quant.spec megatron_bridge.config megatron_bridge.families"
    " miles_like.device_table miles_like.timing.rates miles_like.timing miles_like.timing.weight_sync",
    "miles_like.algorithms.terms": "miles_like.types",
    "miles_like.algorithms.advantages": "miles_like.types miles_like.protocols miles_like.algorithms.terms",
    "miles_like.algorithms.losses": "miles_like.types miles_like.protocols miles_like.algorithms.terms",
    "miles_like.algorithms": f"{CONTRACTS} miles_like.config miles_like.algorithms",
    "miles_like.rewards.maths": f"{CONTRACTS} miles_like.config.sections",
    "miles_like.rewards.judges": f"{CONTRACTS} miles_like.config.sections rollout.server_url",
    "miles_like.rewards": f"{CONTRACTS} miles_like.config.sections miles_like.rewards",
    # miles_like: what a run keeps
    "miles_like.storage": CONTRACTS,
    # rules about a run's metrics: pure, and what they send
    "miles_like.alerts": f"{CONTRACTS} miles_like.config.sections",
    "miles_like.checkpoint": f"{CONTRACTS} routing_replay miles_like.config.sections miles_like.storage",
    "miles_like.report": f"{CONTRACTS} miles_like.config.sections miles_like.storage",
    # whether one model is worse than another on the same problems
    "miles_like.report.paired": f"{CONTRACTS} miles_like.alerts miles_like.config.sections miles_like.report",
    # what each process has recorded, as files for each window of steps
    "miles_like.report.traces": "miles_like.limits miles_like.spans miles_like.config.sections.watched",
    # a process beside a run for each tracker
    # of the alerts the key of a row with which a run went back
    "miles_like.report.trackers": "miles_like.limits miles_like.variables miles_like.config.sections.watched"
    " miles_like.alerts miles_like.report",
    # a run for people: in a browser, and in a terminal
    "miles_like.page": f"{CONTRACTS} miles_like.alerts miles_like.checkpoint miles_like.config.sections"
    " miles_like.report",
    "miles_like.datasets": f"{CONTRACTS} rollout.prompts miles_like.config miles_like.rewards miles_like.storage",
    "miles_like.datasets.sampled": "miles_like.algorithms miles_like.datasets",
    # miles_like: the loop and the processes
    "miles_like.stopping": "miles_like.variables",
    "miles_like.experience": f"{CONTRACTS} rollout.concurrency rollout.seeds rollout.sglang rollout.wire"
    " miles_like.algorithms miles_like.batch",
    "miles_like.loop": f"{CONTRACTS} rollout.concurrency rollout.episodes rollout.prompts rollout.seeds"
    " miles_like.config.sections miles_like.algorithms miles_like.batch miles_like.checkpoint miles_like.experience"
    " miles_like.report miles_like.stopping",
    "miles_like.turns": f"{CONTRACTS} rollout.concurrency rollout.sglang rollout.wire miles_like.loop",
    "miles_like.supervised": f"{CONTRACTS} rollout.prompts miles_like.config.sections miles_like.algorithms"
    " miles_like.batch miles_like.checkpoint miles_like.loop miles_like.report",
    "miles_like.nodes": "miles_like.stopping miles_like.variables",
    "miles_like.cluster.lost": "miles_like.nodes",
    # what a rank tells about itself: memory, profiles
    "miles_like.cluster.observed": "miles_like.limits miles_like.spans miles_like.types",
    "miles_like.cluster": f"{CONTRACTS} quant routing_replay rollout.config rollout.publish rollout.sglang"
    " megatron_bridge.config megatron_bridge.trainer miles_like.batch miles_like.cluster.lost"
    " miles_like.cluster.observed"
    " miles_like.config.sections miles_like.nodes",
    # rollout workers: the driver's side of them, which the loop calls, and their own
    "miles_like.cluster.workers": f"{CONTRACTS} routing_replay rollout.concurrency miles_like.batch"
    " miles_like.checkpoint miles_like.cluster miles_like.loop miles_like.nodes miles_like.report miles_like.storage",
    # rollout servers that fail and are restarted: states, and the watch beside the loop.
    "miles_like.fleet": f"{CONTRACTS} rollout.episodes rollout.wire",
    "miles_like.alignment.layers": "",
    "miles_like.alignment": f"{CONTRACTS} quant routing_replay rollout.episodes rollout.publish rollout.seeds"
    " rollout.sglang rollout.wire megatron_bridge.config miles_like.algorithms.terms miles_like.batch"
    " miles_like.report miles_like.alignment.layers",
    "miles_like.staging": f"{CONTRACTS} quant.hf_config megatron_bridge.convert megatron_bridge.families"
    " megatron_bridge.plan miles_like.cluster miles_like.config miles_like.nodes miles_like.storage",
    # miles_like: the loop in virtual time, without torch
    "miles_like.simulation.clock": "",
    "miles_like.simulation.inputs": "miles_like.section",
    "miles_like.simulation.servers": "miles_like.simulation.clock miles_like.simulation.inputs",
    "miles_like.simulation.loop": "miles_like.simulation.clock miles_like.simulation.inputs"
    " miles_like.simulation.servers",
    "miles_like.simulation": "miles_like.limits miles_like.simulation",
    # miles_like: commands, which alone name both the trainer and the rollout
    "miles_like.check_results": "",
    "miles_like.pipeline": f"{CONTRACTS} quant rollout.prompts megatron_bridge.config megatron_bridge.families"
    " megatron_bridge.plan megatron_bridge.convert miles_like.algorithms miles_like.batch miles_like.check_results"
    " miles_like.checkpoint miles_like.cluster miles_like.config miles_like.nodes miles_like.report miles_like.staging"
    " miles_like.storage miles_like.supervised",
    "miles_like.doctor": "miles_like.check_results miles_like.nodes miles_like.sandbox miles_like.variables",
    # scripts and manifests that start a run; they name no process of it
    # storage: whether a start that is repeated has begun
    "miles_like.launch": "miles_like.config.sections miles_like.stopping miles_like.storage miles_like.variables",
    "miles_like.planning.memory": "quant megatron_bridge.config megatron_bridge.families megatron_bridge.plan"
    " megatron_bridge.convert.directory miles_like.device_table rollout.config",
    "miles_like.planning": "megatron_bridge.config megatron_bridge.families miles_like.cluster miles_like.config"
    " miles_like.planning.memory miles_like.device_table",
    "miles_like.layout_search": "quant.spec megatron_bridge.config megatron_bridge.families megatron_bridge.plan"
    " miles_like.config miles_like.planning miles_like.device_table miles_like.timing.rates miles_like.timing",
    "miles_like.preflight": f"{CONTRACTS} rollout.config rollout.episodes rollout.prompts rollout.tools"
    " miles_like.algorithms"
    " miles_like.check_results miles_like.cluster miles_like.config miles_like.doctor miles_like.nodes"
    " miles_like.pipeline miles_like.planning miles_like.rewards miles_like.staging miles_like.supervised"
    " miles_like.device_table",
    "miles_like.run.setup": f"{CONTRACTS} quant routing_replay rollout megatron_bridge miles_like.algorithms"
    " miles_like.batch miles_like.checkpoint miles_like.cluster miles_like.config miles_like.experience"
    " miles_like.fleet miles_like.nodes miles_like.page miles_like.pipeline miles_like.report miles_like.staging"
    " miles_like.storage miles_like.supervised miles_like.rewards miles_like.turns miles_like.alignment"
    " miles_like.loop miles_like.preflight",
    # what alerts order: a run pauses, ends, or goes back to its best checkpoint
    "miles_like.run.watched": f"{CONTRACTS} miles_like.alerts miles_like.checkpoint miles_like.config.sections"
    " miles_like.loop miles_like.report miles_like.run.setup miles_like.stopping miles_like.storage"
    " miles_like.variables",
    # a run that goes on where it loses ranks or nodes
    "miles_like.run.rebuild": f"{CONTRACTS} rollout.episodes megatron_bridge.config"
    " miles_like.checkpoint miles_like.cluster miles_like.config miles_like.fleet miles_like.report"
    " miles_like.run.setup miles_like.run.watched miles_like.stopping",
    "miles_like.run": f"{CONTRACTS} quant rollout megatron_bridge miles_like.alerts miles_like.algorithms"
    " miles_like.batch miles_like.check_results miles_like.checkpoint miles_like.cluster miles_like.config"
    " miles_like.datasets miles_like.experience miles_like.layout_search miles_like.loop miles_like.pipeline"
    " miles_like.planning miles_like.preflight miles_like.report miles_like.rewards miles_like.run.rebuild"
    " miles_like.run.setup miles_like.run.watched miles_like.simulation miles_like.staging miles_like.stopping"
    " miles_like.storage miles_like.supervised miles_like.device_table miles_like.timing miles_like.turns"
    " miles_like.variables miles_like.alignment",
    # what a run has recorded, read again with the algorithm that trained it
    "miles_like.diagnosis": f"{CONTRACTS} miles_like.config miles_like.report miles_like.run",
    "miles_like.command_errors": "miles_like.stopping",
    # for Python; the commands of the same name call it
    "miles_like.api": f"{CONTRACTS} rollout.server_key rollout.server_url miles_like.alignment"
    " miles_like.command_errors miles_like.config miles_like.pipeline miles_like.planning miles_like.report"
    " miles_like.rewards miles_like.run miles_like.stopping",
    "miles_like.commands": "quant.hf_config megatron_bridge.config megatron_bridge.fake megatron_bridge.plan"
    " rollout.embedded.server rollout.server_key miles_like.api miles_like.command_errors"
    " miles_like.config miles_like.device_table miles_like.doctor miles_like.hf miles_like.launch miles_like.limits"
    " miles_like.page miles_like.pipeline miles_like.preflight miles_like.report miles_like.run miles_like.simulation"
    " miles_like.variables",
    "miles_like.commands.data": "miles_like.command_errors miles_like.commands miles_like.datasets miles_like.run",
    "miles_like.commands.config": "miles_like.command_errors miles_like.commands miles_like.config",
    "miles_like.commands.launch": "miles_like.command_errors miles_like.commands miles_like.config miles_like.launch",
    "miles_like.commands.records": "miles_like.command_errors miles_like.commands miles_like.config"
    " miles_like.diagnosis miles_like.report",
    "miles_like.commands.servers": "miles_like.command_errors miles_like.commands miles_like.fleet",
    "miles_like.cli": "miles_like.command_errors miles_like.commands",
    "miles_like.__main__": "miles_like.cli",
    "scripts": "miles_like.commands miles_like.pipeline",
}
BOTH_SIDES = (
    "miles_like.cluster",
    "miles_like.alignment",
    "miles_like.pipeline",
    "miles_like.planning",
    "miles_like.preflight",
    "miles_like.run",
    "miles_like.staging",
)
LIBRARIES_OF_THE_GROUND = {"torch", "numpy", "pybase64"}
KERNELS = "quant.kernels"  # imports triton too, but only modules that are loaded where a kernel runs
TORCH_FREE = (  # and all that they import
    "megatron_bridge.config",
    "miles_like.config",
    "miles_like.sandbox",
    "miles_like.simulation",
    "quant.hf_config",
    "quant.spec",
    "rollout.config",
    "rollout.prompts.config",
    "rollout.tool_config",
    "rollout.server_url",
)
SEE_THE_WHOLE_CONFIGURATION = (
    "miles_like.config",
    "miles_like.pipeline",
    "miles_like.planning",
    "miles_like.preflight",
    "miles_like.run",
    "miles_like.staging",
    "miles_like.timing.of_run",
    "miles_like.layout_search",
    "miles_like.commands",
)


@functools.cache
def _is_module(package: str, name: str) -> bool:
    base = ROOT / Path(*package.split("."))
    return (base / f"{name}.py").exists() or (base / name / "__init__.py").exists()


@functools.cache
def all_imports(path: Path) -> set[str]:
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names if _is_module(node.module, a.name))}
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name != "__init__.py"
}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Module -> the modules of FILES that it imports."""
    return {m: {name for name in all_imports(path) if name in FILES and name != m} for m, path in FILES.items()}


def folder(module: str) -> str:
    """Row of RULES: the module's folder, or the module where it lies in the root of a package with folders."""
    return module if module in RULES else module.rpartition(".")[0]


def inside(name: str, prefixes: str | tuple[str, ...]) -> bool:
    names = prefixes.split() if isinstance(prefixes, str) else prefixes
    return any(f"{name}.".startswith(f"{p}.") for p in names)


def none_wrong(wrong: list[str]) -> None:
    """Every file that breaks a rule is a line of the message."""
    __tracebackhide__ = True
    assert not wrong, "\n".join(["", *wrong])


def test_a_folder_imports_what_its_rule_allows() -> None:
    none_wrong([f"{module} is in no folder of RULES" for module in FILES if folder(module) not in RULES])
    none_wrong(
        [
            f"{module} imports {target}; RULES[{folder(module)!r}] does not allow it"
            for module, targets in imports().items()
            for target in targets
            if folder(target) != folder(module) and not inside(target, RULES[folder(module)])
        ]
    )


def test_folders_have_no_circle() -> None:
    """CycleError names the circle; so no arrow points up in the order of RULES either."""
    graph: dict[str, set[str]] = {row: set() for row in RULES}
    for module, targets in imports().items():
        graph[folder(module)] |= {folder(t) for t in targets} - {folder(module)}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(RULES)
    order = list(RULES)
    for row, targets in graph.items():
        above = [t for t in targets if order.index(t) > order.index(row)]
        assert not above, f"{row} imports {above}, which stand above it in RULES"


def test_modules_have_no_circle() -> None:
    assert len(list(graphlib.TopologicalSorter(imports()).static_order())) == len(FILES)


def _drawn() -> tuple[dict[str, int], set[str]]:
    """Line of each top folder in the picture of docs/architecture.md, from the top, and those with a star."""
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    head, *lines = [line.split("|") for line in picture.strip().splitlines() if not line.startswith("---")]
    packages, below = [name.strip() for name in head], len(lines)
    found: dict[str, int] = dict.fromkeys(lines.pop()[0].partition(":")[0].split(), below)
    names = [
        (f"{package}.{name}", n)
        for n, row in enumerate(lines)
        for package, cell in zip(packages, row, strict=True)
        for name in cell.split()
    ]
    assert len(names) == len({name.rstrip("*") for name, _ in names}), "a folder is drawn twice"
    found |= {name.rstrip("*"): n for name, n in names}
    return found, {name.rstrip("*") for name, _ in names if name.endswith("*")}


def test_the_picture_has_every_folder_and_no_import_points_up() -> None:
    """A reader takes the picture for the rules: what is on a line imports what is below it."""
    drawn, contracts = _drawn()
    outside = "scripts miles_like.__main__"  # of the picture
    tops = {module: ".".join(module.split(".")[:2]) for module in FILES if not inside(module, outside)}
    tops |= {module: module.split(".")[0] for module in FILES if inside(module, "quant routing_replay")}
    assert set(drawn) == set(tops.values()) and contracts == set(CONTRACTS.split())
    for module, top in tops.items():
        for target in imports()[module]:
            assert tops[target] == top or drawn[tops[target]] > drawn[top], f"{module} imports {target}, drawn above it"


def test_every_rule_is_of_a_folder_and_every_permission_is_used() -> None:
    """A permission that nothing needs would let a later import pass unseen; the contracts are one permission."""
    for row, allowed in RULES.items():
        members = [m for m in FILES if folder(m) == row]
        assert members, f"RULES[{row!r}] is of no module"
        for name in allowed.removeprefix(CONTRACTS).split():
            assert any(inside(t, name) for m in members for t in imports()[m]), f"{row} does not import {name}"


@pytest.mark.parametrize("package", ["rollout", "megatron_bridge"])
def test_lower_packages_import_the_contracts_alone(package: str) -> None:
    for module in FILES:
        if inside(module, package):
            above = [t for t in imports()[module] if inside(t, "miles_like") and not inside(t, CONTRACTS)]
            assert not above, f"{module} imports {above}"


def test_the_wall_between_trainer_and_rollout() -> None:
    """Each side can be replaced without a change to the other."""
    wrong = []
    for module, targets in imports().items():
        imported = [name for name in targets if not name.endswith(".config")]  # sections are data
        sides = {name.split(".")[0] for name in (*imported, module)} & {"rollout", "megatron_bridge"}
        if len(sides) > 1 and not inside(module, BOTH_SIDES):
            wrong.append(f"{module} imports both sides")
    none_wrong(wrong)


def test_folders_stay_small() -> None:
    modules = Counter(path.parent for path in FILES.values())
    none_wrong([f"{path} has {n} modules" for path, n in modules.items() if n > MODULES_IN_A_FOLDER])


@pytest.mark.parametrize("package", PACKAGES)
def test_tests_lie_where_what_they_test_lies(package: str) -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests" / package).rglob("test_*.py")}
    assert not [str(folder) for folder in folders if not (ROOT / folder).is_dir()]
    sources = {path.parent.relative_to(ROOT) for module, path in FILES.items() if inside(module, package)}
    assert {str(folder) for folder in sources - folders} == {f for f in TESTED_ELSEWHERE if inside(f, package)}


def test_the_loop_is_a_page_of_named_objects() -> None:
    """A reader's "go to definition" works at every line of the loop, and another loop is short."""
    text = FILES["miles_like.loop.controller"].read_text()
    assert len(text.splitlines()) < 100
    assert len((ROOT / "docs" / "examples" / "two_passes.py").read_text().splitlines()) < 60
    for module, name in (("controller", "Controller"), ("producer", "Producer"), ("evaluation", "Evaluator")):
        tree = ast.parse(FILES[f"miles_like.loop.{module}"].read_text())
        (found,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
        fields = [n for n in found.body if isinstance(n, ast.AnnAssign)]
        assert fields and not [ast.unparse(f) for f in fields if "Callable" in ast.unparse(f.annotation)], name


def test_no_file_names_a_folder_outside_of_the_repository() -> None:
    outside = "../" + "shared"
    folders = [ROOT / folder for folder in (*PACKAGES, "tests", "docs", "benchmarks", "configs")]
    files = [f for folder in folders for f in folder.rglob("*") if f.suffix in {".py", ".md", ".toml", ".json"}]
    assert not [str(f) for f in [*files, ROOT / "README.md"] if outside in f.read_text()]


def test_the_ground_imports_few_libraries() -> None:
    """quant and routing_replay run inside any process: trainer, server or converter."""
    known = LIBRARIES_OF_THE_GROUND | {"quant", "routing_replay", "__future__"} | set(sys.stdlib_module_names)
    ground = [m for m in FILES if inside(m, "quant routing_replay")]
    foreign = {m: {n.split(".")[0] for n in all_imports(FILES[m])} - known for m in ground}
    none_wrong(
        [
            f"{m} imports {names}"
            for m, names in foreign.items()
            if names - ({"triton"} if inside(m, KERNELS) else set())
        ]
    )


def test_configuration_needs_no_torch() -> None:
    """A cluster's configuration can be checked on a laptop in a moment."""
    reached_from = {m: m for m in FILES if inside(m, TORCH_FREE)}  # module -> one of TORCH_FREE that reaches it
    todo = list(reached_from)
    while todo:
        name = todo.pop()
        for target in imports()[name] - reached_from.keys():
            reached_from[target] = reached_from[name]
            todo.append(target)
    none_wrong(
        [
            f"{module} reaches torch through {name}"
            for name, module in reached_from.items()
            if "torch" in {n.split(".")[0] for n in all_imports(FILES[name])}
        ]
    )


def test_only_commands_see_the_whole_configuration() -> None:
    """A function that takes RunConfig depends on everything; it should take its own section."""
    for module, path in FILES.items():
        names = {n.id for n in nodes_of(path) if isinstance(n, ast.Name)}
        assert "RunConfig" not in names or inside(module, SEE_THE_WHOLE_CONFIGURATION), module


def test_files_and_functions_stay_small() -> None:
    wrong = []
    for module, path in FILES.items():
        if (length := len(path.read_text().splitlines())) > 500:
            wrong.append(f"{module} has {length} lines")
        functions = [n for n in nodes_of(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        lengths = [(n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in functions]
        wrong += [f"{module}.{name} has {lines} lines" for name, lines in lengths if lines > 60]
    none_wrong(wrong)


# server_key: a key reaches a server by its environment alone, for every user can read a command line
READ_THE_ENVIRONMENT = (
    "megatron_bridge.device.device",
    "miles_like.cluster.actors",
    "miles_like.nodes.session",
    "miles_like.variables",
    "quant.kernels.choice",
    "rollout.server_key",
)


def test_house_rules() -> None:
    """Names that say something; environment variables and Ray only where they belong; no broad except."""
    none_wrong([f"{module}: {broken}" for module in FILES for broken in rules_broken_by(module)])


def rules_broken_by(module: str) -> Iterator[str]:
    if {"utils", "util", "common", "helpers", "misc"} & set(module.split(".")):
        yield "a name that says nothing"
    for node in nodes_of(FILES[module]):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            if module not in READ_THE_ENVIRONMENT:
                yield f"reads the environment at {node.lineno}"
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"bare except at {node.lineno}"
    imported = all_imports(FILES[module])
    if "ray" in {n.split(".")[0] for n in imported} and not inside(module, ("miles_like.cluster", "miles_like.nodes")):
        yield "imports ray"
    if module != "megatron_bridge.device.parallel" and any(n.endswith("parallel_state") for n in imported):
        yield "calls parallel_state"
