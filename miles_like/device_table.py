"""Accelerators and the nodes that hold them: figures of their makers, each with its source.

FLOP/s are dense (a maker's figure "with sparsity" is halved), links are one direction (a maker's total of both is
halved), and memory is what the driver reports, which is less than the marketed size. A figure that no maker gives, such
as the host memory of a node of other vendors, is an assumption and says so. How much of a peak is reached is not here:
calibration.py has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20
GB, TB = 1e9, 1e12
TFLOP = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, and its share of a node. Bytes, bytes/s and FLOP/s."""

    name: str
    memory: int
    """Bytes that a process can use, as the driver reports them."""
    bf16: float
    """Dense FLOP/s of BF16 products with FP32 sums."""
    fp8: float | None
    """Dense FLOP/s of FP8 products with FP32 sums; None: the device has none."""
    hbm: float
    """Bytes/s of the device's memory."""
    intra: float
    """Bytes/s, each direction, of a GPU to the others of its NVLink domain."""
    inter: float
    """Bytes/s, each direction, of a GPU's share of the network between domains."""
    host: float
    """Bytes/s, each direction, between a GPU and the memory of its host."""
    domain: int
    """GPUs of one NVLink domain."""
    node_gpus: int
    node_memory: int
    """Bytes of a node's host memory."""
    node_disk: int
    """Bytes of a node's local NVMe."""
    disk: float
    """Bytes/s at which a node writes its local NVMe; reading is faster."""


# PCI Express gives 64 GB/s each direction at Gen5 x16 and 32 at Gen4 x16 (PCI-SIG, base specifications 5.0 and 4.0:
# 32 and 16 GT/s a lane).
_PCIE5 = 64 * GB
_PCIE4 = 32 * GB
# A data drive of 3.84 TB writes 4 GB/s in sequence (Samsung, "PM9A3 NVMe PCIe SSD", U.2: 4,000 MB/s). DGX systems
# stripe theirs (RAID 0); NVIDIA gives no rate of the array.
_DRIVE = 4 * GB

_A100 = Device(
    name="A100",
    memory=81_920 * MIB,  # NVIDIA A100-SXM4-80GB in nvidia-smi
    bf16=312 * TFLOP,  # "NVIDIA A100 Tensor Core GPU" datasheet, June 2021, A100 80GB SXM: 312 | 624 with sparsity
    fp8=None,  # the same: no FP8 row
    hbm=2.039 * TB,  # the same: GPU memory bandwidth 2,039 GB/s
    intra=300 * GB,  # the same: NVLink 600 GB/s, of both directions
    inter=25 * GB,  # "DGX A100 User Guide": 8 ConnectX-6 or -7 of 200 Gb/s for 8 GPUs
    host=_PCIE4,  # the datasheet: PCIe Gen4 64 GB/s, of both directions
    domain=8,  # "DGX A100 User Guide": 8 GPUs on 6 NVSwitches
    node_gpus=8,
    node_memory=2048 * GIB,  # "DGX A100 User Guide", DGX A100 640GB: 2 TB
    node_disk=int(8 * 3.84 * TB),  # the same: 8 drives of 3.84 TB, RAID 0
    disk=8 * _DRIVE,
)
_H100 = Device(
    name="H100",
    memory=81_559 * MIB,  # NVIDIA H100 80GB HBM3 in nvidia-smi
    bf16=989.4 * TFLOP,  # "NVIDIA H100 Tensor Core GPU Architecture" white paper, table 2, H100 SXM5
    fp8=1978.9 * TFLOP,  # the same
    hbm=3.35 * TB,  # "NVIDIA H100 Tensor Core GPU" datasheet, H100 SXM
    intra=450 * GB,  # the same: NVLink 900 GB/s, of both directions
    inter=50 * GB,  # "DGX H100 datasheet": 8 single-port ConnectX-7 of 400 Gb/s for compute
    host=_PCIE5,  # "NVIDIA H100 Tensor Core GPU" datasheet: PCIe Gen5 128 GB/s, of both directions
    domain=8,  # "DGX H100 datasheet": 8 GPUs, 4 NVSwitches
    node_gpus=8,
    node_memory=2048 * GIB,  # the same: 2 TB
    node_disk=int(8 * 3.84 * TB),  # the same: 8 drives of 3.84 TB, NVMe U.2
    disk=8 * _DRIVE,
)
_H200 = Device(
    name="H200",
    memory=143_771 * MIB,  # NVIDIA H200 in nvidia-smi
    bf16=_H100.bf16,  # "NVIDIA H200 Tensor Core GPU" datasheet, H200 SXM: 1,979 with sparsity
    fp8=_H100.fp8,  # the same: 3,958 with sparsity
    hbm=4.8 * TB,  # the same
    intra=450 * GB,  # the same: NVLink 900 GB/s, of both directions
    inter=50 * GB,  # "DGX H200 datasheet": 8 single-port ConnectX-7 of 400 Gb/s for compute
    host=_PCIE5,  # "NVIDIA H200 Tensor Core GPU" datasheet: PCIe Gen5 128 GB/s, of both directions
    domain=8,  # "DGX H200 datasheet": 8 GPUs, 4 NVSwitches
    node_gpus=8,
    node_memory=2048 * GIB,  # the same: 2 TB
    node_disk=int(8 * 3.84 * TB),  # the same: 8 drives of 3.84 TB, NVMe U.2
    disk=8 * _DRIVE,
)
_B200 = Device(
    name="B200",
    memory=183_359 * MIB,  # NVIDIA B200 in nvidia-smi
    bf16=2250 * TFLOP,  # "NVIDIA Blackwell Architecture Technical Brief", HGX B200, one GPU: 4.5 PFLOPS with sparsity
    fp8=4500 * TFLOP,  # the same: 9 PFLOPS with sparsity
    hbm=8 * TB,  # "DGX B200 datasheet": 64 TB/s of 8 GPUs
    intra=900 * GB,  # the same: 14.4 TB/s of 8 GPUs, of both directions
    inter=50 * GB,  # "DGX B200 User Guide": 8 single-port ConnectX-7 of 400 Gb/s for 8 GPUs
    host=_PCIE5,  # "NVIDIA Blackwell Architecture Technical Brief", HGX B200: PCIe Gen5 x16 to an x86 host
    domain=8,  # "DGX B200 User Guide": 8 GPUs, 2 NVSwitches
    node_gpus=8,
    node_memory=2048 * GIB,  # the same: 2 TB, upgradable to 4
    node_disk=int(8 * 3.84 * TB),  # the same: 8 drives of 3.84 TB, RAID 0
    disk=8 * _DRIVE,
)
_GB200 = Device(
    name="GB200",
    memory=189_471 * MIB,  # NVIDIA GB200 in nvidia-smi
    bf16=2500 * TFLOP,  # "NVIDIA GB200 NVL72" datasheet: 360 PFLOPS of 72 GPUs with sparsity
    fp8=5000 * TFLOP,  # the same: 720 PFLOPS of 72 GPUs with sparsity
    hbm=8 * TB,  # the same: 576 TB/s of 72 GPUs
    intra=900 * GB,  # the same: NVLink 130 TB/s of 72 GPUs, of both directions
    inter=50 * GB,  # "DGX GB200 User Guide": 4 ConnectX-7 of 400 Gb/s for the 4 GPUs of a compute tray
    host=225 * GB,  # "NVIDIA Grace Blackwell": NVLink-C2C 900 GB/s of both directions, of one Grace to its two GPUs
    domain=72,  # "NVIDIA GB200 NVL72" datasheet
    node_gpus=4,  # a compute tray is one operating system: 2 Grace, 4 GPUs ("DGX GB200 User Guide")
    node_memory=960 * GIB,  # "NVIDIA GB200 NVL72" datasheet: 17 TB LPDDR5X of 36 Grace, 480 GB each
    node_disk=int(4 * 3.84 * TB),  # "DGX GB200 User Guide": 4 drives of 3.84 TB, E1.S
    disk=4 * _DRIVE,
)
_MI300X = Device(
    name="MI300X",
    memory=196_592 * MIB,  # AMD Instinct MI300X in amd-smi
    bf16=1307.4 * TFLOP,  # "AMD Instinct MI300X Accelerator" data sheet: peak bfloat16
    fp8=2614.9 * TFLOP,  # the same: peak FP8 (E4M3, E5M2)
    hbm=5.3 * TB,  # the same: peak theoretical memory bandwidth
    intra=448 * GB,  # the same: 7 Infinity Fabric links of 128 GB/s, of both directions, one to each other GPU
    inter=50 * GB,  # assumption: one 400 Gb/s NIC a GPU, as in "AMD Instinct MI300X cluster reference architecture"
    host=_PCIE5,  # the data sheet: PCIe Gen5 x16
    domain=8,  # "AMD Instinct MI300X Platform" data sheet: 8 OAMs, fully connected
    node_gpus=8,
    node_memory=2048 * GIB,  # assumption: as a DGX H100; AMD sells no nodes
    node_disk=int(8 * 3.84 * TB),  # assumption: as a DGX H100
    disk=8 * _DRIVE,
)
_RTX4090 = Device(
    name="RTX4090",
    memory=24_564 * MIB,  # NVIDIA GeForce RTX 4090 in nvidia-smi
    bf16=165.2 * TFLOP,  # "NVIDIA Ada GPU Architecture" white paper, table 2, BF16 with FP32 accumulate
    fp8=330.3 * TFLOP,  # the same: FP8 with FP32 accumulate
    hbm=1.008 * TB,  # the same: memory bandwidth 1,008 GB/s
    intra=_PCIE4,  # no NVLink: PCIe Gen4 x16
    inter=1.25 * GB,  # assumption: 10 Gb/s Ethernet
    host=_PCIE4,  # the white paper: PCIe Gen4 x16
    domain=1,
    node_gpus=1,  # assumption: a desktop of one
    node_memory=128 * GIB,  # assumption
    node_disk=int(2 * TB),  # assumption: one NVMe drive
    disk=_DRIVE,
)

DEVICES: Mapping[str, Device] = {d.name: d for d in (_A100, _H100, _H200, _B200, _GB200, _MI300X, _RTX4090)}


def device(name: str) -> Device:
    """The device of this name. Raises ValueError, with the known ones, for another."""
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}: choose one of {', '.join(DEVICES)}")
    return DEVICES[name]
