# ruff: noqa
"""Tiles and warps of the codecs' kernels on one device."""

import torch, sys, time

sys.path.insert(0, ".")
from quant.kernels import launch
from quant.kernels.traffic import traffics
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec

N = 16
ws = [torch.randn(7168, 2048, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(N)]


def rate(f, nbytes):
    f()
    torch.cuda.synchronize()
    took = []
    for _ in range(7):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2000000)
        a.record()
        f()
        b.record()
        took.append((a, b))
    torch.cuda.synchronize()
    return nbytes / sorted(x.elapsed_time(y) for x, y in took)[3] / 1e6


c = torch.empty(2, N * 7168, 2048, device="cuda", dtype=torch.bfloat16)
print(torch.cuda.get_device_name(), "copy", rate(lambda: c[1].copy_(c[0]), c.nbytes))
out = torch.empty(N, 7168, 2048, device="cuda", dtype=torch.bfloat16).unbind()
began = time.time()
for tile, warps in (
    (4096, 4),
    (2048, 4),
    (1024, 4),
    (4096, 8),
    (2048, 8),
    (8192, 8),
    (1024, 2),
    (2048, 2),
    (8192, 4),
    (16384, 8),
    (8192, 2),
):
    if time.time() - began > 150:
        break
    launch._TILE, launch._WARPS, launch._BLOCK_WARPS = tile, warps, {2: 16, 4: 8, 8: 4}[warps]
    line = []
    for fmt in ("fp8", "fp8-ue8m0", "int4", "mxfp8", "mxfp4", "nvfp4"):
        if fmt.startswith("fp8") and (tile, warps) not in ((4096, 4), (4096, 8), (1024, 2)):
            continue
        codec = make_codec(QuantSpec(format=QuantFormat(fmt)))
        found = codec.encode({f"model.layers.3.mlp.experts.{i}.down_proj.weight": w for i, w in enumerate(ws)})
        k = launch.Kernels(fmt, codec.block, codec.divides)
        leaves = list(codec.stored)
        stored = [(q.stored[leaves[0]], q.stored[leaves[1]]) for q in found.values()]
        top = (
            None if not codec.of_weight else torch.stack([q.stored[codec.of_weight] for q in found.values()]).flatten()
        )
        tops = None if top is None else top.cpu()
        n = sum(w.numel() for w in ws)
        t = {x.work: x.needed for x in traffics() if x.format == fmt}
        line.append(
            f"{fmt} {rate(lambda: k.encode(ws, stored, tops), n * t['encode']):.0f} {rate(lambda: k.fake(ws, out, tops), n * t['fake']):.0f} {rate(lambda: k.decode([a for a, _ in stored], [b for _, b in stored], out, top, rounded=True), n * t['decode']):.0f}"
        )
    line.append(f"amax {rate(lambda: launch.amax(ws), 2 * n):.0f}")
    print(tile, warps, " | ".join(line), flush=True)
