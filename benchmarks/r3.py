"""What rollout routing replay costs: its share of an iteration, its bytes, and its time for one long sample.

1. End to end, capture in the engine, wire, reading, packing, slicing, shipping and replay: iterations of
   configs/tiny.toml with R3 and without any routing, by turns, each on a separate server, the second started without
   --enable-return-routed-experts, so that it keeps no ids (the same measurement as benchmarks/iteration.py). By the
   clock, and of processor time (`r3_cpu_share`). Goal: <= 3 % of an iteration by the clock. Then with answers of 64
   tokens instead of 5: most of the cost is of a sample, whatever its length.
2. Bytes a token as shipped to a trainer rank (ids and seals) in DeepSeek-V3's shape, beside SGLang's int32 of all
   layers. Goal: >= 4 times smaller.
3. Milliseconds of each thing that is done to the routes of one sample of 32,768 tokens in that shape, on one thread:
   read (base64, checks, seals), verify, cut for a rank, ship (pickle and back), receive (found by sample, each row held
   to its token), and replay (58 routers ask).

    python benchmarks/r3.py [--quick]
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from figures import add_write, finish
from iteration import ROOT, run
from rich.console import Console
from rich.table import Table

from miles_like.config.load import load_config
from miles_like.run import assemble
from routing_replay.align import ShardSpec
from routing_replay.rank_routes import cut_routes, fed_routes
from routing_replay.replay import RoutingReplayer
from routing_replay.trace import RoutingTrace

GOALS = {"r3_share_max": 0.03, "int32_bytes_of_shipped_min": 4.0}
TOKENS, LAYERS, DENSE, TOP_K, EXPERTS = 32768, 61, 3, 8, 256  # DeepSeek-V3
LONGER = 64  # tokens of an answer
PARTS = {  # of the routes that one rank is sent
    "": ShardSpec(layers=tuple(range(DENSE, LAYERS))),
    "_cp2_pp4": ShardSpec(layers=tuple(range(DENSE, DENSE + 15)), cp=2, cp_rank=1),
}


def long_sample() -> tuple[torch.Tensor, str]:
    """Its tokens [S], and its routes as a server sends them."""
    g = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.rand(LAYERS - DENSE, EXPERTS, generator=g).topk(TOP_K).indices for _ in range(256)])
    ids = ids.repeat(TOKENS // 256, 1, 1)[: TOKENS - 1].to(torch.uint8)
    trace = RoutingTrace(experts=ids, layers=tuple(range(DENSE, LAYERS)), num_experts=EXPERTS)
    return torch.randint(0, 1000, (TOKENS,), generator=g), trace.to_wire(num_layers=LAYERS)


def _shipped(cut: object) -> object:
    """`cut` as a rank gets it from another process."""
    return pickle.loads(pickle.dumps(cut, protocol=5))


def of_one_sample(turns: int) -> dict[str, float]:
    tokens, wire = long_sample()
    ends = torch.tensor([0, TOKENS - 1], dtype=torch.int32)
    layers = tuple(range(DENSE, LAYERS))
    figures: dict[str, float] = {"int32_bytes_a_token": LAYERS * TOP_K * 4.0}

    def read() -> RoutingTrace:
        return RoutingTrace.from_wire(
            wire, tokens=tokens, num_layers=LAYERS, layers=layers, top_k=TOP_K, num_experts=EXPERTS
        )

    def replay() -> None:
        tape = RoutingReplayer()
        tape.load(0, fed)
        for layer in fed.layers:
            tape.topk(0, layer, rows=len(fed))

    trace = read()
    figures["read_ms"] = median_ms(read, turns)
    figures["verify_ms"] = median_ms(lambda: trace.check_tokens(tokens, sample="a/0"), turns)
    for name, part in PARTS.items():
        cut = cut_routes(trace, ["a/0"], ends, part)
        fed = fed_routes(cut, ["a/0"], tokens[:-1], ends, part)
        figures[f"shipped_bytes_a_token{name}"] = cut.nbytes / (TOKENS - 1)
        figures[f"cut_ms{name}"] = median_ms(partial(cut_routes, trace, ["a/0"], ends, part), turns)
        figures[f"ship_ms{name}"] = median_ms(partial(_shipped, cut), turns)
        figures[f"receive_ms{name}"] = median_ms(partial(fed_routes, cut, ["a/0"], tokens[:-1], ends, part), turns)
        figures[f"replay_ms{name}"] = median_ms(replay, turns)
    figures["sample_ms"] = sum(figures[f"{what}_ms"] for what in ("read", "verify", "cut", "ship", "receive", "replay"))
    figures["int32_bytes_of_shipped"] = figures["int32_bytes_a_token"] / figures["shipped_bytes_a_token"]
    return figures


def median_ms(work: Callable[[], object], turns: int) -> float:
    took = []
    for _ in range(turns + 1):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took[1:])


def iterations(settings: list[str], turns: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as home:
        try:
            return run(load_config(ROOT / "configs" / "tiny.toml", settings), Path(home), iterations=turns)
        finally:
            assemble.shut_down()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    figures = of_one_sample(turns=3 if quick else 9)
    for of, answer, turns in (("", 5, 12 if quick else 60), (f"_of_{LONGER}", LONGER, 4 if quick else 12)):
        settings = ["model.make.max_steps=0", f"rollout.max_new_tokens={answer}"]
        whole = iterations(settings, turns)
        figures |= {name + of: whole[name] for name in whole if name == "iteration_s" or name.startswith("r3_")}
    table = Table("figure", "value", title="routing replay")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)
    holds = (
        figures["r3_share"] <= GOALS["r3_share_max"]
        and figures["int32_bytes_of_shipped"] >= GOALS["int32_bytes_of_shipped_min"]
    )
    finish("r3", figures, GOALS, holds)


if __name__ == "__main__":
    main()
