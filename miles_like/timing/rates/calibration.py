"""The share of a peak that is reached: one calibrated constant per device type (REACHED), and constants of kernels,
links and software, each with the measurement that it is from. None is fitted to a run that docs/plan.md compares
with."""

from __future__ import annotations

from collections.abc import Mapping

# The calibration constant of a device type: the share of the predicted speed at which whole programs sample and
# train. Rollout, log-prob passes and training take their predicted seconds divided by it; copies over links and disks
# do not. H100 and GB200: the median over the dense models of NeMo-RL v0.5 (docs/about/performance-summary.md of that
# tag: Llama 3.1 8B and Qwen3-32B, on-policy and 1-off, on each device type; `published.calibration` computes it).
# H200 is the chip of H100, B200 that of GB200. No such runs are published for the others: the mean of the two.
REACHED: Mapping[str, float] = {
    "A100": 0.75,
    "H100": 0.81,
    "H200": 0.81,
    "B200": 0.69,
    "GB200": 0.69,
    "MI300X": 0.75,
    "RTX4090": 0.75,
}

# Share of the peak FLOP/s of large matrix products. Measured by Azure with random operands at 16,384^3
# ("Azure/AI-benchmarking-guide", Azure_Results, FP8; A100: FP16; MI300X: 8,192^3, its best): A100 256.5 of 312, H100
# 1,377.3 of 1,978.9, H200 1,366.3, GB200 2,906.9 of 5,000, MI300X 1,159.2 of 2,614.9 TFLOP/s. B200: as GB200, whose
# chip it is; RTX 4090: assumed like A100.
PRODUCTS: Mapping[str, float] = {
    "A100": 0.82,
    "H100": 0.70,
    "H200": 0.69,
    "B200": 0.58,
    "GB200": 0.58,
    "MI300X": 0.44,
    "RTX4090": 0.82,
}

# Attention kernels relative to products: FlashAttention-3 (arXiv:2407.08608, figures 5 and 6) reaches about 600
# TFLOP/s forward and 500 backward on H100 for causal attention of long samples with 128 channels a head: 0.55 of the
# peak.
ATTENTION = 0.8
# FlashAttention-2's rate relative to that: 35 % of H100's peak (the same paper's abstract) against 55 %.
FLASH_2 = 0.35 / 0.55

# Share of the datasheet's bytes/s. Memory: Azure's STREAM triad, 2.97 of 3.35 TB/s on H100, 4.15 of 4.8 on H200, 1.70
# of 2.04 on A100. NVLink: its NCCL all-reduce, 231 of 300 GB/s on A100, 680 of 900 on GB200. Network: DeepEP's normal
# kernels ("DeepEP", docs/legacy.md: 43 to 47 of 50 GB/s over ConnectX-7). Host: Azure's copies, 51 of 64 GB/s on H100
# and H200, 26 of 32 on A100.
MEMORY = 0.85
NVLINK = 0.8
NETWORK = 0.9
HOST = 0.8

# Seconds of a collective of few bytes: Azure's all-reduce of 0.5 MiB takes 18 us on GB200, 31 on H200, 43 on H100, 48
# on A100. An engine's one-shot all-reduce within an NVLink domain skips the ring. Each doubling of the number of
# domains adds two hops of the network in a tree, and the proxy threads that serve them (assumption).
LATENCY = 35e-6
ONE_SHOT = 12e-6
LATENCY_OF_DOMAINS = 30e-6

# Rows of a grouped product's tile: a rank's experts get whole tiles, half a tile more than their tokens on average.
TILE = 128

# Host seconds of one pass (a forward, a recomputation or a backward) of a layer's Python and kernel launches, for
# which the device waits where its own work is shorter. With experts: Megatron-Bridge 25.11's Qwen3-30B-A3B on B200
# takes 9.2 ms a layer for two passes over 4,096 tokens (9,299 tokens/s/GPU), whose kernels take a quarter of that
# ("Megatron-Bridge", docs/performance-summary-archive.md). Without experts (assumption): a quarter, by the number of
# modules.
HOST_DENSE_LAYER = 1.2e-3
HOST_MOE_LAYER = 4.6e-3
# Where a layer's operations are separate kernels under FSDP2 with checkpoints: 9.0 ms for the three passes of a dense
# layer over 1,024 tokens, whose kernels take 1.4 ms. With four adapters beside each of the seven matrices, whose token
# counts the host reads: 24.0 ms, 2.6 of them kernels. Measured on an H100 with torch 2.11 (docs/plan.md, "Separate
# kernels").
HOST_SEPARATE_LAYER = 3.0e-3
HOST_ADAPTERS = 5.0e-3

# Host seconds to compare one element of a tensor on the device and read the answer: 18.2 to 18.4 us, measured likewise.
READ_BACK = 18.3e-6

# Host seconds of an engine's step, and more for each running request: scheduling, sampling, log-probs (assumption, as
# seen in engines' logs).
ENGINE_STEP = 3e-3
ENGINE_REQUEST = 25e-6

# Host seconds to gather, name, convert and load one tensor of a checkpoint: verl's synchronisation from Megatron
# ranks takes 4.4 s for Qwen3-30B-A3B and 23.7 s for Qwen3-235B-A22B, from FSDP ranks 7 s for the former
# (docs/advance/ fully_async.md, verl/checkpoint_engine/README.md): 0.24, 0.65 and 0.37 ms.
TENSOR = 0.42e-3

# Of these seconds, those of the trainer's side and those of a server's, each (assumption: halves), where the two sides
# work on different tensors at once; and a server's seconds for a tensor of which it keeps nothing (assumption).
TENSOR_SIDE = TENSOR / 2
TENSOR_PASSED = 20e-6

# Seconds of a publication that do not depend on its size: requests to all ranks, and waiting for the last of them. What
# remains of NeMo-RL's refit of Qwen3-4B (0.21 to 0.34 s on H100, docs/design-docs/nccl-reshard-refit.md) beyond its
# simulated transfer (`published.weight_sync`).
CONTROL = 0.13

# Bytes/s of BF16 at which one device encodes, by format: measured on an H200 with one expert of DeepSeek-V3
# (docs/gpu.md).
ENCODER: Mapping[str, float] = {
    "fp8": 135e9,
    "fp8-ue8m0": 135e9,
    "int4": 78e9,
    "mxfp8": 70e9,
    "mxfp4": 45e9,
    "nvfp4": 33e9,
}

# Compressed bytes of a difference over the bytes that have changed: 5.9 GB for 3 % of 247 GB in NeMo-RL
# (tools/refit_bandwidth_calculator.py). Bytes/s of places and values that one rank's host compresses or expands
# (assumption: zstd at a fast level).
DELTA_WIRE = 0.8
COMPRESSOR = 1e9

# Bytes/s of a node's host memory that the optimizers on it share (2 sockets of 8 channels of DDR5-4800 are 614 GB/s;
# the two Grace of a GB200 tray measure 763 in Azure's CPU STREAM).
HOST_MEMORY = 400e9

# Bytes/s of copies between a device and pageable host memory that is allocated for them, by one thread that fills
# fresh pages (assumption).
PAGEABLE = 4e9

# Bytes/s of the file system that trainer and servers share (assumption; each read of a publication counts).
SHARED_DISK = 10e9

# Bytes/s at which one thread quantizes and writes a file through the page cache, or copies from a device into fresh
# pages (1.3 to 1.5 GB/s measured with a virtual machine's pages), and at which it encodes base64 in
# JSON (assumptions: a write is a copy into fresh pages, an encoding two passes over memory).
ONE_WRITER = 2e9
ONE_ENCODER = 1e9

# Load of the busiest expert-parallel rank over the mean. Trained routers are balanced over a corpus, not over the
# tokens of one domain in a micro-batch (assumption).
IMBALANCE = 1.25
