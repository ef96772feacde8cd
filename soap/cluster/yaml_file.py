"""``cluster.yaml``: a cluster as people describe it, read into a ``Topology``.

.. code-block:: yaml

    name: two-boxes
    device_types:                # own types; h100, a100-80gb and others are known without (soap/profiles/data/device_types.json)
      small-gpu:
        kind: cuda               # or cpu
        flops: {float32: 9.3 TFLOP/s, bfloat16: 18 TFLOP/s}   # float32 at least; other dtypes, and tf32, fall back to it
        memory_bandwidth: 732 GB/s
        memory: 16 GiB
        kernel_overhead: 5 us
        source: the vendor's data sheet                       # optional
    hosts:
      - name: box                # with a count: box0, box1, …
        count: 2
        devices: {type: small-gpu, count: 4}                  # box0/gpu0 … box1/gpu3; or a list of {name, type}
        cpu_cores: 20
        memory: 256 GiB          # optional: without it nobody checks whether what parameter servers keep fits into the host
        server: false            # optional; true: parameter servers run on such hosts alone, strategies by name compute on the others
        links:
          intra: {bandwidth: 20 GB/s, latency: 5 us, kind: full}   # switch (default), full, ring, pairs, mesh
          host: {bandwidth: 16 GB/s, latency: 2 us}           # optional, full and ring: each device's way to the network card
    network: {bandwidth: 100 Gbit/s, latency: 3 us}           # one card per host into one switch; its devices share the card
    switches: [spine]            # optional, with links: any other network
    links:
      - {from: box0/gpu0, to: spine, bandwidth: 10 GB/s, latency: 1 us}   # both directions, unless duplex: false
      - {from: box1/gpu0, to: spine, bandwidth: 10 GB/s, latency: 1 us}
    price_per_hour: 24.5                                      # optional: of the whole cluster, or under hosts of each host
    currency: EUR                                             # optional

A file may also give a preset a price, and nothing else: ``{preset: h200-8, price_per_hour: 24.5}``. Prices change no prediction.

Bandwidths are per direction. A latency of ``intra`` or ``network`` counts from end to end; that of a listed link, for that link.
``pairs`` is a PCIe tree: two neighbours on a switch of their own, these switches on the host's. ``mesh`` has ``joined: [[0, 1], [0, 3, 2],
…]``: places in the host that are joined, and by how many links of this bandwidth.

``intra``, ``host``, ``network`` and a listed link may name their ``interconnect``: nvlink1 (P100), nvlink2 (V100), nvlink3 (A100), nvlink4
(H100, H200), nvlink5 (B200), xgmi3 (MI300X), pcie or network. The bandwidth is then the data sheet's, of which GPUs reach NCCL's share;
otherwise it is what messages reach.

Without ``nics`` a host's devices share one NIC with the network's figures. With them, each device has one, or a share of one:

.. code-block:: yaml

    hosts:
      - name: dgx
        count: 4
        devices: {type: h100, count: 8}
        cpu_cores: 112
        memory: 2 TB
        links:
          intra: {bandwidth: 450 GB/s, latency: 5 us}
        nics: 8                  # equal ones, which serve equal parts of the devices, in order; or {count, bandwidth, latency}, or a list
    network:
      bandwidth: 400 Gbit/s      # of a NIC that says nothing else
      latency: 2 us
      rails: 8                   # optional: NIC i of every host is joined to switch i. Else one switch joins all NICs
      spine: {bandwidth: 3.2 Tbit/s, latency: 1 us}           # optional: from rail to rail

One by one: ``nics: [{devices: [0, 1], rail: 0, bandwidth: 200 Gbit/s, latency: 2 us}, …]``. ``devices`` are places in the host, from 0.
Without ``rail``, the place in the list counts; bandwidth and latency are the network's if left out. Messages take the fastest way: to
a device on another rail over a neighbour in their own host that is on it, as NCCL does with PXN, or over the spine.

Generated nodes that ``links`` may name: ``HOST/switch`` (where the host has one), ``HOST/nic0``, … (those that serve several devices),
``network``, or ``network/rail0``, … and ``network/spine``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from soap.cluster.build import build_cluster
from soap.cluster.emulated import FAMILY as EMULATED
from soap.cluster.fields import Fields
from soap.cluster.presets import device_types, family, preset
from soap.cluster.price import CURRENCY, PRICE, read_price
from soap.cluster.topology import Topology
from soap.errors import TopologyError
from soap.files import read_text
from soap.yaml_text import parse_yaml

LIMIT_BYTES = 16 * 2**20
PRESET = "preset"


def load_cluster(spec: str | Path) -> Topology:
    """The cluster that a YAML file or a preset name (``local:4``, ``p100-4x4``, …) stands for; TopologyError in one line.

    A name that ends in ``.yaml``, ``.yml`` or ``.json``, contains a folder or is an existing file is read as a file. All other names
    are presets.
    """
    if isinstance(spec, str) and not _is_file_name(spec):
        return _preset(spec)
    text = read_text(spec, what="cluster file", error=TopologyError, limit_bytes=LIMIT_BYTES)
    return parse_cluster(text, Path(spec).name)


def parse_cluster(text: str, where: str = "cluster.yaml") -> Topology:
    """The topology that a YAML text describes. ``where`` begins error messages."""
    try:
        description = parse_yaml(text)
    except ValueError as error:
        raise TopologyError(f"{where}: {error}") from None
    if description is None:
        raise TopologyError(f"{where}: the file is empty; expected a cluster description with name and hosts")
    if isinstance(description, dict) and PRESET in description:
        return _priced_preset(Fields(description, f"{where}: ", (PRESET, PRICE, CURRENCY)))
    return build_cluster(description, device_types(), where)


def _priced_preset(fields: Fields) -> Topology:
    name = fields.text(PRESET)
    if family(name) is not None:
        raise TopologyError(f"{fields.at(PRESET)}: {name!r} is this machine, measured when it is named; expected another preset's name")
    try:
        topology = preset(name)
    except TopologyError as error:
        raise TopologyError(f"{fields.at(PRESET)}: {error}") from None
    return replace(topology, price=read_price(fields))


def _preset(name: str) -> Topology:
    """The preset of this name, even if a folder has the same name."""
    try:
        return preset(name)
    except TopologyError:
        if name and Path(name).is_dir():
            raise TopologyError(f"cluster {name!r} is a folder; expected a cluster.yaml or a preset: name the file in it") from None
        raise


def _is_file_name(spec: str) -> bool:
    if spec.startswith(f"{EMULATED}:"):  # such as emulated clusters, whose rates contain a slash
        return False
    return spec.endswith((".yaml", ".yml", ".json")) or "/" in spec or "\\" in spec or Path(spec).is_file()
