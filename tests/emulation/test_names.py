"""Names lead back to their emulation, fit into Linux's limits, and are never another's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soap.emulation import names
from soap.emulation.hosts import MOST_HOSTS

NUMBERS = st.sampled_from(names.NUMBERS)
HOSTS = st.integers(0, MOST_HOSTS - 1)


@given(NUMBERS, HOSTS)
def test_names_lead_back(number: int, host: int) -> None:
    made = [names.host_name(number, host), names.bridge_name(number), names.group_name(number)]
    assert [names.number_of(name) for name in made] == [number] * 3
    assert all(len(name) <= 15 for name in made[:2])  # IFNAMSIZ, with its end
    addresses = [names.host_address(number, host), names.box_address(number)]
    assert all(address in names.subnet(number) for address in addresses) and addresses[0] != addresses[1]


@given(NUMBERS, NUMBERS)
def test_subnets_do_not_meet(one: int, other: int) -> None:
    assert names.subnet(one).overlaps(names.subnet(other)) == (one == other)
    assert names.subnet(one).subnet_of(names.NETWORKS)


@pytest.mark.parametrize(
    "name", ["eth0", "soap", "soap1", "soap-1-2", "soap1-x", "xsoap1-2", "soap512-1", "soap-emulation-", "soap-emulation-1.lock"]
)
def test_others_names_are_not_ours(name: str) -> None:
    assert names.number_of(name) is None


def test_what_lies_in_a_folder(tmp_path: Path) -> None:
    for name in ("soap1-0", "soap1-br", "soap11-0", "soap-emulation-1", "other"):
        (tmp_path / name).touch()
    assert names.names_in(tmp_path, 1) == ["soap-emulation-1", "soap1-0", "soap1-br"]
    assert names.names_in(tmp_path) == ["soap-emulation-1", "soap1-0", "soap1-br", "soap11-0"]
    assert names.names_in(tmp_path / "missing") == []
