"""A record of an executed rank is found again by the code that it ran, not by how that is commented."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_bridge.fake.records import Cache, ExecutedRank, sources_hash

CODE = '''"""A module."""

class Router:
    """Chooses."""

    async def choose(self, k: int = 2) -> int:
        """Experts."""
        return k  # of all
'''


def of(root: Path, code: str, name: str = "router.py") -> str:
    (root / "quant").mkdir(parents=True)
    (root / "quant" / name).write_text(code)
    return sources_hash(root)


@pytest.mark.parametrize(
    ("old", "new"), [("A module.", "Modules."), ("Experts.", "The experts."), ("  # of all", ""), ("\n\n", "\n\n\n")]
)
def test_prose_does_not_change_it(tmp_path: Path, old: str, new: str) -> None:
    assert old in CODE and of(tmp_path / "a", CODE) == of(tmp_path / "b", CODE.replace(old, new))


@pytest.mark.parametrize(("old", "new"), [("k: int = 2", "k: int = 4"), ("return k", "return 2 * k")])
def test_code_changes_it(tmp_path: Path, old: str, new: str) -> None:
    assert old in CODE and of(tmp_path / "a", CODE) != of(tmp_path / "b", CODE.replace(old, new))


def test_the_place_of_code_changes_it(tmp_path: Path) -> None:
    assert of(tmp_path / "a", CODE) != of(tmp_path / "b", CODE, "routers.py")


def test_a_record_is_found_by_its_key_alone(tmp_path: Path) -> None:
    cache, record = Cache(tmp_path), ExecutedRank(key="a", rank=3)  # type: ignore[typeddict-item]
    assert cache.get("a") is None
    cache.put(record)
    assert cache.get("a") == record and cache.get("b") is None
