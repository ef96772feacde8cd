"""The figures of the known devices: what the sheets say, that they are of one kind, and which GPU is which."""

from __future__ import annotations

import pytest

from soap.cluster.kinds import known_gpu
from soap.cluster.memory_budget import left_by_process
from soap.cluster.presets import device_types
from soap.cluster.yaml_file import parse_cluster
from soap.errors import TopologyError
from tests.cluster_text import dump_cluster


def test_devices_of_one_chip_have_its_rates():
    types = device_types()
    for names in (("a100-40gb", "a100-80gb", "a100-pcie-40gb", "a100-pcie-80gb"), ("h100", "h200"), ("v100-16gb", "v100-32gb")):
        assert all(types[name].flops_per_second == types[names[0]].flops_per_second for name in names)


NARROWER = ("float64", "float32", "tf32", "bfloat16", "float8_e4m3fn")


@pytest.mark.parametrize("name", sorted(device_types()))
def test_narrower_arithmetic_is_no_slower(name):
    """A figure with sparsity beside a dense one, or one of two GPUs beside one of a single GPU, would break the order or the ratios."""
    rates = device_types()[name].flops_per_second
    known = [rates[dtype] for dtype in NARROWER if dtype in rates]
    assert known == sorted(known)
    assert rates.get("bfloat16", 0.0) in (0.0, rates.get("float16", 0.0))
    if "tf32" in rates:
        assert rates["bfloat16"] / rates["tf32"] == pytest.approx(2, rel=0.03)
    for narrow in ("float8_e4m3fn", "float8_e4m3fnuz"):
        assert narrow not in rates or rates[narrow] / rates["bfloat16"] == pytest.approx(2, rel=0.03)
    assert rates.get("float16", rates["float32"]) / rates["float32"] < 32


def test_arithmetic_without_a_figure_falls_back_to_float32():
    types = device_types()
    assert types["v100-32gb"].flops("tf32") == types["v100-32gb"].flops("bfloat16") == 15.7e12
    assert types["a100-80gb"].flops("float8_e4m3fn") == 19.5e12
    assert types["mi300x"].flops("float8_e4m3fn") == 163.4e12
    assert types["h200"].flops("tf32") == 494.5e12


def test_a_file_may_give_rates_of_tf32_and_float8():
    text = """
name: mine
device_types:
  own:
    kind: cuda
    flops: {float32: 10 TFLOP/s, tf32: 80 TFLOP/s, float8_e4m3fnuz: 300 TFLOP/s}
    memory_bandwidth: 1 TB/s
    memory: 16 GB
    kernel_overhead: 5 us
hosts: [{devices: {type: own}, cpu_cores: 8, memory: 64 GB}]
"""
    made = parse_cluster(text)
    assert [made.devices[0].type.flops(dtype) for dtype in ("tf32", "float8_e4m3fnuz", "bfloat16")] == [80e12, 300e12, 10e12]
    assert parse_cluster(dump_cluster(made)).hash == made.hash
    assert parse_cluster(text.replace("tf32: 80", "tf32: 90")).hash != made.hash


def test_a_file_may_say_what_the_driver_reports():
    text = """
name: mine
device_types:
  own: {kind: cuda, flops: {float32: 10 TFLOP/s}, memory_bandwidth: 1 TB/s, total_memory: 24 GiB, kernel_overhead: 5 us}
hosts: [{devices: {type: own}, cpu_cores: 8, memory: 64 GB}]
"""
    assert parse_cluster(text).devices[0].type.memory_bytes == left_by_process(24 * 2**30)
    with pytest.raises(TopologyError, match=r"own.total_memory: there is also memory; expected what plans may use, or"):
        parse_cluster(text.replace("total_memory", "memory: 20 GiB, total_memory"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("NVIDIA GB200", "gb200"),
        ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"), ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 2060", "rtx2060"), ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"), ("Tesla P100-SXM2-16GB", "p100"), ("Tesla P100-PCIE-16GB", "p100-pcie"),
        ("Tesla K80", "k80"), ("NVIDIA TITAN V", "titanv"), ("NVIDIA TITAN Xp", "titanxp"), ("TITAN RTX", "titanrtx"),
        ("Quadro P4000", "p4000"), ("AMD Instinct MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_its_drivers_name(name, kind):
    assert known_gpu(name, device_types()) == kind


@pytest.mark.parametrize(
    "name",
    [
        "", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA H800", "NVIDIA L40", "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 2060 SUPER", "Tesla V100-PCIE-16GB", "NVIDIA A100-SXM4-64GB", "NVIDIA TITAN X",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100X", "Intel(R) Xeon(R)",
    ],
)  # fmt: skip
def test_other_gpus_are_not_taken_for_a_known_one(name):
    assert known_gpu(name, device_types()) is None
