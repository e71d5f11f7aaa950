"""Checks of versions: equal on all nodes, and compatible by their own metadata and by the table of this module."""

from __future__ import annotations

from collections.abc import Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from miles_like.check_results import Outcome
from miles_like.doctor.examiner import NodeReport
from miles_like.doctor.findings import Finding, Needs, by_value, listed, one_row
from miles_like.doctor.software import Software

# CUDA of torch -> the oldest Linux driver that runs it, with minor-version compatibility (CUDA Toolkit release notes,
# table "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version Compatibility")
OLDEST_DRIVER = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}


def check_software(reports: Mapping[str, NodeReport], needs: Needs) -> list[Finding]:
    """reports: by the node's name."""
    own = {node: r["software"] for node, r in reports.items()}
    out = _equal("trainer", own, needs.packages)
    engines = {node: e for node, r in reports.items() if not isinstance(e := r["engine"], str)}
    if needs.engine_packages:
        for node, r in reports.items():
            if isinstance(why := r["engine"], str):
                text = (
                    f"{node}: the engine's interpreter {needs.engine} reports no versions ({why}): install the "
                    "engine's environment at that path there"
                )
                out.append(_wrong("engine", (node,), "", text))
        out += _equal("engine", engines, needs.engine_packages)
    for side, environments in (("trainer", own), *((("engine", engines),) if needs.engine_packages else ())):
        out += _together([(node, fault) for node, one in environments.items() for fault in misfits(side, one)])
    out += _together([(node, f) for node, r in reports.items() for f in driver_misfits(r)])
    return out + _sandbox(reports, needs)


def _sandbox(reports: Mapping[str, NodeReport], needs: Needs) -> list[Finding]:
    faults = {node: fault for node, r in reports.items() if (fault := r["sandbox"]) is not None}
    kind = str(needs.sandbox.kind)
    return one_row(
        "sandbox", dict.fromkeys(faults, kind), {node: f"{node}: {fault}" for node, fault in faults.items() if fault}
    )


def _equal(side: str, environments: Mapping[str, Software], needed: tuple[str, ...]) -> list[Finding]:
    """Rows of each package; of the trainer's environment python and glibc too."""
    out = []
    names = dict.fromkeys([*needed, *(name for one in environments.values() for name in one["packages"])])
    for name in names:
        versions = {node: one["packages"].get(name, "none") for node, one in environments.items()}
        out += _one_version(f"{side}: {name}", versions, needed=name in needed)
    glibc = {node: one["glibc"] for node, one in environments.items()}
    return out + by_value(f"{side}: glibc", glibc)


def _one_version(check: str, versions: Mapping[str, str], *, needed: bool) -> list[Finding]:
    rows = by_value(check, versions)
    if len(rows) > 1:
        most = max(rows, key=lambda row: len(row.where))
        return [
            row
            if row is most
            else _wrong(
                check,
                row.where,
                row.found,
                f"{check} is {row.found} on {listed(row.where)}, but {most.found} on {listed(most.where)}: "
                "install the same version on all nodes",
            )
            for row in rows
        ]
    missing = needed and rows and rows[0].found == "none"
    text = f"{check} is not installed on {listed(rows[0].where)}: install it there" if missing else ""
    return [_wrong(check, rows[0].where, "none", text)] if missing else rows


def misfits(side: str, one: Software) -> list[str]:
    """Faults of one environment: packages that do not fit each other or the system."""
    out, packages = [], one["packages"]
    names = {canonicalize_name(d): name for name, d in one["distributions"].items()}
    for name, requirements in one["requires"].items():
        for text in requirements:
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            other = names.get(canonicalize_name(wanted.name))
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if other is not None and applies and not wanted.specifier.contains(packages[other], prereleases=True):
                out.append(
                    f"{name} {packages[name]} of the {side} requires {wanted.name}{wanted.specifier}, but "
                    f"{packages[other]} is installed: install compatible versions, or use a separate environment "
                    "for the engine"
                )
    for name, needed in one["glibc_needed"].items():
        if one["glibc"] and Version(one["glibc"]) < Version(needed):
            out.append(
                f"{name} {packages[name]} of the {side} is built for glibc {needed}, but the system has "
                f"{one['glibc']}: use a newer system, or a container with a newer glibc"
            )
    cuda, part = packages.get("cuda"), one["distributions"].get("transformer-engine-cuda", "")
    if cuda is not None and part and not part.endswith(f"cu{cuda.partition('.')[0]}"):
        out.append(
            f"{part} of the {side} is built for a different CUDA version from torch "
            f"{packages.get('torch')}, which is built for CUDA {cuda}: install "
            f"transformer-engine-cu{cuda.partition('.')[0]}"
        )
    return out


def driver_misfits(report: NodeReport) -> list[str]:
    """Faults of the CUDA driver: too old for torch of one of the sides."""
    gpus, engine = report["gpus"], report["engine"]
    if isinstance(gpus, str) or not gpus:
        return []
    out = []
    for side, one in (("trainer", report["software"]), *((("engine", engine),) if not isinstance(engine, str) else ())):
        cuda = one["packages"].get("cuda", "")
        oldest = OLDEST_DRIVER.get(cuda.partition(".")[0])
        if oldest is not None and Version(gpus[0]["driver"]) < Version(oldest):
            out.append(
                f"the CUDA driver {gpus[0]['driver']} is older than {oldest}, which CUDA {cuda} of the {side}'s torch "
                "needs: update the driver, or install a torch for an older CUDA"
            )
    return list(dict.fromkeys(out))


def _together(faults: list[tuple[str, str]]) -> list[Finding]:
    """One row for each fault, with all nodes that have it."""
    by_fault: dict[str, list[str]] = {}
    for node, fault in faults:
        by_fault.setdefault(fault, []).append(node)
    return [_wrong("versions that fit", tuple(nodes), "", f"{listed(nodes)}: {f}") for f, nodes in by_fault.items()]


def _wrong(check: str, where: tuple[str, ...], found: str, text: str) -> Finding:
    return Finding(check=check, where=where, found=found, outcome=Outcome.WRONG, text=text)
