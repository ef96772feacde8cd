"""What a cluster costs: a number per hour, which says nothing about the machine and is no part of its identity."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum, isfinite

from soap.cluster.fields import Fields
from soap.errors import TopologyError

PRICE = "price_per_hour"
CURRENCY = "currency"
LONGEST_CURRENCY = 12


@dataclass(frozen=True, slots=True)
class Price:
    """The price of the whole cluster. ``currency``: its name as reports show it; may be empty."""

    per_hour: float
    currency: str = ""

    def __post_init__(self) -> None:
        if not (isfinite(self.per_hour) and self.per_hour >= 0):
            raise TopologyError(f"price per hour {self.per_hour!r}: expected a finite number of at least 0")


def read_price(fields: Fields) -> Price | None:
    """The price that a cluster's description states, of the whole cluster or of each of its hosts; None if it states none.

    TopologyError if it states both, or a price of some hosts only.
    """
    hosts = [Fields(item, path) for item, path in fields.items("hosts")]
    priced = [host for host in hosts if PRICE in host]
    if PRICE in fields and priced:
        raise TopologyError(f"{priced[0].at(PRICE)}: the whole cluster has a price as well; expected one of the two: remove one")
    if not priced and PRICE not in fields:
        if CURRENCY in fields:
            raise TopologyError(f"{fields.at(CURRENCY)}: a currency without a price; expected {PRICE} of the cluster or of its hosts")
        return None
    unpriced = next((host for host in hosts if PRICE not in host), None)
    if priced and unpriced is not None:
        raise TopologyError(
            f"{unpriced.at(PRICE)}: missing, while other hosts have one; expected a price of every host: write it, if it is 0"
        )
    per_hour = fsum(host.amount(PRICE) * host.whole("count", 1) for host in hosts) if priced else fields.amount(PRICE)
    return Price(per_hour, _currency(fields))


def _currency(fields: Fields) -> str:
    found = fields.text(CURRENCY) if CURRENCY in fields else ""
    if len(found) > LONGEST_CURRENCY or not found.isprintable():
        raise TopologyError(f"{fields.at(CURRENCY)}: {found[:40]!r}; expected at most {LONGEST_CURRENCY} characters, such as EUR")
    return found
