"""Law: a trainer that slept is, bit for bit, the trainer that never slept; and while it sleeps no byte of parameters,
gradients or optimizer state is on its device.

Why it must hold: the engine takes the memory meanwhile; a byte that stays is missing to it, a bit that changes is
another run. The bytes are counted by the trainer, by a walk over every object that it refers to, and of a model of more
than 64 MB by the operating system. Not covered: GPUs, where the host memory is pinned and the caching allocator gives
memory back.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import toy
from tests.support.chosen import later
from tests.support.layouts import EXPERTS, ROUTED
from tests.support.qat_cases import FORMATS
from tests.support.refusals import check_refusal
from tests.support.spawn import run_ranks
from tests.support.tiny_models import tiny_dense

HERE = "tests/laws/test_sleep.py"
Found = dict[str, Any]
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # ranks, settings
    "fp32": (1, {}),
    "bf16, EP2": (2, {"dp": 2, "ep": 2, "dtype": "bfloat16"}),
    "bf16, without distributed optimizer": (1, {"dtype": "bfloat16", "distributed_optimizer": False}),
    "QAT, TP2, overlap": (2, {"tp": 2, "dtype": "bfloat16", "precision": {"qat": True, **FORMATS["fp8"]}}),
    "tied": (1, {"tied": True}),
    "PP2, recomputed, R2": (2, {"pp": 2, "first_stage_layers": 2, "recompute": "full", "mode": "r2"}),
}


def _config(where: Path, settings: dict[str, Any]) -> Any:
    model = "tied" if settings.get("tied") else "moe"
    given = {k: v for k, v in settings.items() if k != "tied"}
    return toy.config(str(where / model), **{"mode": "off", **given})


def _row(t: Any, seed: int) -> tuple[Any, int]:
    dp = t.config.parallel.dp
    rows, tokens = toy.grid(
        toy.samples(4, seed=seed, layers=t.family.moe_layers(t.hf), experts=EXPERTS), dp=dp, micros=2 // dp
    )
    return rows[t.dp_rank], tokens


def reachable(t: Any) -> tuple[int, int]:
    """(bytes, number of tensors) of all storages that can be reached from the trainer: host copies of weights and the
    bytes that `sleep` keeps there are left out, and so are modules, functions' globals and process groups."""
    skipped = {id(t.copies), id(t._sleep._freed), id(t._sleep._host), id(t.family), id(t.hf)}
    todo, seen, sizes = [t], set[int](), dict[int, int]()
    while todo:
        thing = todo.pop()
        if id(thing) in seen or id(thing) in skipped or isinstance(thing, type(gc)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
            todo += vars(thing).values()
            if thing.is_leaf and thing.grad is not None:
                todo.append(thing.grad)
        elif isinstance(thing, dict):
            if "__builtins__" not in thing:
                todo += [*thing.keys(), *thing.values()]
        elif isinstance(thing, list | tuple | set | frozenset):
            todo += thing
        elif hasattr(thing, "__dict__") and not isinstance(thing, type):
            todo.append(vars(thing))
    return sum(sizes.values()), len(sizes)


def _never(rank: int, world: int, port: int, where: str, settings: dict[str, Any]) -> Found:
    return _run(Path(where), rank, world, port, settings, lambda t: {})


def _slept(rank: int, world: int, port: int, where: str, settings: dict[str, Any]) -> Found:
    return _run(Path(where), rank, world, port, settings, _nap)


def _nap(t: Any) -> Found:
    """Sleeps twice over, publishes asleep, and wakes."""
    published = {name: x.clone() for name, x in t.export()}
    t._step.replay.reset(), t._sleep._last_pass.drop()  # what a step leaves is dropped without being counted
    total, tensors = reachable(t)
    freed = t.sleep()
    left, _ = reachable(t)
    again = t.sleep()
    with t.parameters():
        asleep = {name: x.clone() for name, x in t.export()}
        lent, _ = reachable(t)
    after, _ = reachable(t)
    refused = {}
    for what, call in _refused(t).items():
        try:
            call()
        except RuntimeError as e:
            refused[what] = str(e)
    t.wake()
    t.wake()
    awake, _ = reachable(t)
    return {
        "freed": freed,
        "again": again,
        "same": all(x.equal(asleep[n]) for n, x in published.items()) and len(asleep) == len(published),
        "bytes": {"before": total, "asleep": left, "lent": lent, "after": after, "awake": awake},
        "tensors": tensors,
        "refused": refused,
    }


def _refused(t: Any) -> dict[str, Callable[[], Any]]:
    row, tokens = _row(t, 0)
    return {
        "train": lambda: t.step(row, tokens, 9),
        "evaluate": lambda: t.evaluate(row, tokens),
        "logprobs": lambda: t.logprobs(row),
        "score": lambda: t.score(row),
        "save": lambda: t.save(Path("nowhere")),
        "load": lambda: t.load(Path("nowhere")),
        "load_copy": lambda: t.load_copy("x", Path("nowhere")),
        "load_weights": lambda: t.load_weights(Path("nowhere")),
        "export": lambda: next(t.export()),
    }


def _run(where: Path, rank: int, world: int, port: int, settings: dict[str, Any], nap: Callable[[Any], Found]) -> Found:
    out: Found = {"metrics": [], "naps": []}
    with toy.trainer(_config(where, settings), rank, world, port) as t:
        out["naps"].append(nap(t))
        for step in range(2):
            out["metrics"].append(dict(t.step(*_row(t, step), step + 1).metrics))
            out["naps"].append(nap(t))
        out["logprobs"] = [x.clone() for x in t.logprobs(_row(t, 7)[0])]
        out["weights"] = {name: x.clone() for name, x in t.export()}
        out["state"] = [x.clone() for x in _state(t)]
    return out


def _state(t: Any) -> list[torch.Tensor]:
    """Masters and moments, in the order of the optimizer."""
    found = []
    for part in t.optimizer.chained_optimizers:
        inner = part.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                found += [p.detach(), *(v for v in inner.state[p].values() if isinstance(v, torch.Tensor))]
    return found


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sleep")
    toy.hf_dir(home / "moe", toy.hf_config() | ROUTED)
    toy.hf_dir(home / "tied", tiny_dense(tie_word_embeddings=True))
    return home


@pytest.mark.parametrize("name", later(CASES, ("QAT, TP2, overlap", "tied"), beside=HERE))
def test_a_trainer_that_slept_is_the_one_that_never_did(where: Path, name: str) -> None:
    world, settings = CASES[name]
    never = run_ranks(_never, world, str(where), settings, keep=True)
    slept = run_ranks(_slept, world, str(where), settings, keep=True)
    for a, b in zip(never, slept, strict=True):
        assert a["metrics"] == b["metrics"]
        for key in ("logprobs", "state"):
            assert len(a[key]) == len(b[key]) > 0
            assert all(x.equal(y) for x, y in zip(a[key], b[key], strict=True)), key
        assert a["weights"].keys() == b["weights"].keys()
        assert all(x.equal(b["weights"][n]) for n, x in a["weights"].items())
        for number, nap in enumerate(b["naps"]):
            _check(nap, name, trained=number > 0)


def _check(nap: Found, name: str, *, trained: bool) -> None:
    freed, at = nap["freed"], nap["bytes"]
    assert nap["same"] and not any(nap["again"].values())
    small = 4096  # per tensor that the walk finds beside: statistics, tables of a pass
    assert at["before"] - at["asleep"] == sum(freed.values())
    assert at["asleep"] < small * 8, at
    assert at["lent"] - at["asleep"] == freed["parameters"] and at["after"] == at["asleep"]
    assert at["awake"] == at["before"]
    assert freed["parameters"] > 0 and freed["gradients"] > 0
    assert (freed["rounded"] > 0) == name.startswith("QAT")
    assert not trained or freed["optimizer"] > freed["parameters"]
    assert set(nap["refused"]) == {
        *("train", "evaluate", "logprobs", "score", "save", "load", "load_copy", "load_weights", "export")
    }


def test_the_sentence_of_a_trainer_that_sleeps(where: Path) -> None:
    (found,) = run_ranks(_slept, 1, str(where), {}, keep=True)
    check_refusal(found["naps"][0]["refused"]["logprobs"], "logprobs", "wake")


# ---- a model of more than 64 MB, by the operating system's count


def _anonymous() -> int:
    """Resident bytes of this process that are no file's, host copies among them. A rank on CPU has glibc keep up to
    1 GiB of freed memory (megatron_bridge/device/device.py) until it is asked for it, as here."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10


def _host_bytes(t: Any) -> int:
    return sum(x.nbytes for x in t._sleep._host.values())


def _large(rank: int, world: int, port: int, hf: str) -> Found:
    """Two naps after a step. The first makes the host's copies, which the second finds resident."""
    out: Found = {"fell": [], "rose": [], "made": [], "freed": [], "counted": [], "left": []}
    with toy.trainer(toy.config(hf, mode="off", dtype="bfloat16"), rank, world, port) as t:
        rows, tokens = toy.grid(toy.samples(2, layers=()), dp=1, micros=1)
        t.step(rows[0], tokens, 1)
        held = [*t.models[0].parameters(), *_state(t)]
        before = [x.clone() for x in held]
        out["elements"] = sum(p.numel() for p in t.models[0].parameters())
        for _ in range(2):
            total, copies, resident = reachable(t)[0], _host_bytes(t), _anonymous()
            out["freed"].append(dict(t.sleep()))
            asleep = _anonymous()
            out["fell"].append(resident - asleep)
            out["made"].append(_host_bytes(t) - copies)
            out["counted"].append(total - reachable(t)[0])
            out["left"].append(sum(x.untyped_storage().nbytes() for x in held))
            t.wake()
            out["rose"].append(_anonymous() - asleep)
        out["same"] = len(before) if all(x.equal(y) for x, y in zip(held, before, strict=True)) else 0
    return out


@pytest.mark.long(beside="tests/laws/test_sleep.py")
def test_a_large_rank_gives_its_memory_back_to_the_system(tmp_path: Path) -> None:
    """On CPU the device's memory is the process's, in which the host's copies lie too: what the process loses is what
    was freed, less the copies that were made for it."""
    hf = tiny_dense(hidden_size=512, intermediate_size=2048, num_hidden_layers=7, vocab_size=10240)
    (found,) = run_ranks(_large, 1, toy.hf_dir(tmp_path / "hf", hf), keep=True)
    freed, elements = found["freed"][0], found["elements"]
    assert 2 * elements >= 64 << 20 and found["freed"][1] == freed
    # BF16 weights, FP32 gradients, FP32 masters and two moments; tables of angles and numbers of steps beside
    want = {"parameters": 2 * elements, "gradients": 4 * elements, "optimizer": 12 * elements, "rounded": 0}
    assert all(0 <= freed[part] - size < 4096 for part, size in want.items()), (freed, want)
    whole = sum(freed.values())
    assert found["counted"] == [whole] * 2 and found["left"] == [0] * 2
    assert found["made"][1] == 0 < found["made"][0]
    for nap in range(2):
        assert abs(found["fell"][nap] + found["made"][nap] - whole) < 0.03 * whole, found
        assert found["rose"][nap] > 0.6 * whole, found  # gradients are zeros, whose pages come when they are written
    assert found["same"] > 100
