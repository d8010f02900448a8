"""Accelerators by name, as their data sheets have them; each figure with its public source.

FLOP/s are dense bfloat16 products with no sparsity (float16 on a T4, which has no bfloat16); bytes
are decimal unless a source says GiB. A host link is one direction of the PCI Express slot that the
data sheet names: 16 lanes carry 16, 32 or 64 GB/s each way in generations 3, 4 and 5 (PCI-SIG; data
sheets give the sum of both ways).

NVIDIA, "... Tensor Core GPU" data sheets (SXM where there are several forms):
  A100 80GB: 312 TFLOPS, 2,039 GB/s, 80 GB, PCIe Gen4 64 GB/s.
  H100 SXM:  1,979 TFLOPS with sparsity, so 989; 3.35 TB/s, 80 GB, PCIe Gen5 128 GB/s.
  H200 SXM:  as H100, 4.8 TB/s, 141 GB.
  B200:      DGX B200 data sheet: 8 GPUs with 1,440 GB and 64 TB/s in all, 72 PFLOPS FP8 with
             sparsity, so 2.25 PFLOPS each in dense bfloat16. Its hosts (Xeon 8570) have PCIe 5.0.
  L4:        242 TFLOPS with sparsity, so 121; 300 GB/s, 24 GB, PCIe Gen4 x16 64 GB/s.
  T4:        65 TFLOPS mixed precision, 320 GB/s, 16 GB, PCIe Gen3 x16 32 GB/s.
Google Cloud, "TPU v4", "TPU v5e", "TPU v6e", "TPU7x (Ironwood)" (which has v5p too), per chip:
  v4 275 TFLOPS, 1,200 GB/s, 32 GiB; v5e 197, 819 GB/s, 16 GB; v5p 459, 2,765 GB/s, 95 GiB;
  v6e 918, 1,640 GB/s, 32 GiB; 7x 2,307, 7,380 GB/s, 192 GiB.
  Host links are not in these pages. "How to Scale Your Model" (jax-ml.github.io/scaling-book, part
  2) has 1.6e10 bytes/s per TPU, 3.2e10 for v6e; of 7x nothing is published.
Disk: no accelerator's data sheet has one. Samsung's PM9A3 (U.2, PCIe 4.0) stands in: 6.5 GB/s
  sequential reads and 3.5 GB/s writes, as announced in 2020 (computerbase.de, heise.de/-4720224).
Remote: 100 Gb/s Ethernet (IEEE 802.3) stands in.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .hardware import Hardware

_GIB = 1 << 30
_DISK = "disk: one PCIe 4.0 NVMe drive (6.5 GB/s reads, 3.5 GB/s writes)"
_NO_LINK = "link: as of TPU v6e, none is published"
_REMOTE = "remote: 100 Gb/s Ethernet"


def _sheet(
    name: str,
    tflops: float,
    memory_gb: float,
    memory_gb_per_second: float,
    link_gb_per_second: float,
    *assumptions: str,
) -> Hardware:
    return Hardware(
        name=name,
        peak_flops=tflops * 1e12,
        peak_memory_bytes=memory_gb_per_second * 1e9,
        memory_bytes=memory_gb * 1e9,
        peak_link_bytes=link_gb_per_second * 1e9,
        peak_disk_read_bytes=6.5e9,
        peak_disk_write_bytes=3.5e9,
        peak_remote_bytes=12.5e9,
        assumptions=(*assumptions, _DISK, _REMOTE),
    )


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        sheet.name: sheet
        for sheet in (
            _sheet("a100", 312, 80, 2039, 32),
            _sheet("h100", 989, 80, 3350, 64),
            _sheet("h200", 989, 141, 4800, 64),
            _sheet("b200", 2250, 180, 8000, 64),
            _sheet("l4", 121, 24, 300, 32),
            _sheet("t4", 65, 16, 320, 16),
            _sheet("tpu-v4", 275, 32 * _GIB / 1e9, 1200, 16),
            _sheet("tpu-v5e", 197, 16, 819, 16),
            _sheet("tpu-v5p", 459, 95 * _GIB / 1e9, 2765, 16),
            _sheet("tpu-v6e", 918, 32 * _GIB / 1e9, 1640, 32),
            _sheet("tpu-7x", 2307, 192 * _GIB / 1e9, 7380, 32, _NO_LINK),
        )
    }
)
