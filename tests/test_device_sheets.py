"""The figures of the known devices: what the sheets say, that they are of one kind, and which GPU is which."""

from __future__ import annotations

import pytest

from soap.cluster.gpu_names import known_gpu
from soap.cluster.presets import device_types
from soap.cluster.yaml_file import parse_cluster
from tests.cluster_text import dump_cluster

TFLOPS = {
    "p100-pcie": {"float64": 4.7, "float32": 9.3, "float16": 18.7},
    "v100-16gb": {"float64": 7.8, "float32": 15.7, "float16": 125},
    "v100-32gb": {"float64": 7.8, "float32": 15.7, "float16": 125},
    "t4": {"float64": 0.254, "float32": 8.1, "float16": 65},
    "a100-40gb": {"float64": 9.7, "float32": 19.5, "tf32": 156, "bfloat16": 312, "float16": 312},
    "h100": {"float64": 34, "float32": 67, "tf32": 494.5, "bfloat16": 989.5, "float16": 989.5, "float8_e4m3fn": 1979},
    "h100-pcie": {"float64": 26, "float32": 51, "tf32": 378, "bfloat16": 756.5, "float16": 756.5, "float8_e4m3fn": 1513},
    "b200": {"float64": 40, "float32": 80, "tf32": 1100, "bfloat16": 2250, "float16": 2250, "float8_e4m3fn": 4500},
    "l4": {"float64": 0.473, "float32": 30.3, "tf32": 60, "bfloat16": 121, "float16": 121, "float8_e4m3fn": 242.5},
    "l40s": {"float64": 1.43, "float32": 91.6, "tf32": 183, "bfloat16": 362, "float16": 362, "float8_e4m3fn": 733},
    "rtx4090": {"float64": 1.29, "float32": 82.6, "tf32": 82.6, "bfloat16": 165.2, "float16": 165.2, "float8_e4m3fn": 330.3},
    "titanv": {"float64": 6.9, "float32": 13.8, "float16": 110},
    "titanrtx": {"float64": 0.51, "float32": 16.3, "float16": 130.5},
    "rtx2060": {"float64": 0.202, "float32": 6.45, "float16": 25.8},
    "p4000": {"float64": 0.166, "float32": 5.3},
    "mi300x": {"float64": 81.7, "float32": 163.4, "tf32": 653.7, "bfloat16": 1307.4, "float16": 1307.4, "float8_e4m3fnuz": 2614.9},
}


@pytest.mark.parametrize("name", TFLOPS)
def test_rates(name):
    assert dict(device_types()[name].flops_per_second) == pytest.approx({dtype: 1e12 * rate for dtype, rate in TFLOPS[name].items()})


@pytest.mark.parametrize(
    ("name", "gigabytes", "gigabytes_per_second"),
    [
        ("p100-pcie", 16, 732), ("v100-16gb", 16, 900), ("v100-32gb", 32, 900), ("t4", 16, 320), ("a100-40gb", 40, 1555),
        ("a100-80gb", 80, 2039), ("a100-pcie-40gb", 40, 1555), ("a100-pcie-80gb", 80, 1935), ("h100", 80, 3350), ("h100-pcie", 80, 2000),
        ("h200", 141, 4800), ("b200", 180, 8000), ("l4", 24, 300), ("l40s", 48, 864), ("rtx4090", 24, 1008), ("titanv", 12, 652.8),
        ("titanrtx", 24, 672), ("rtx2060", 6, 336), ("p4000", 8, 243), ("mi300x", 192, 5300),
    ],
)  # fmt: skip
def test_memory(name, gigabytes, gigabytes_per_second):
    kind = device_types()[name]
    assert kind.memory_bytes == gigabytes * 10**9
    assert kind.memory_bandwidth_bytes_per_second == pytest.approx(gigabytes_per_second * 1e9)


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
    assert rates.get("float16", rates["float32"]) / rates["float32"] < 30


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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"), ("Tesla T4", "t4"),
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
