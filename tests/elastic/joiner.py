"""Joins a Ray cluster and says how that went: ``python -m tests.elastic.joiner ADDRESS``."""

from __future__ import annotations

import sys

from soap.elastic.faults import ElasticError
from soap.elastic.session import join


def main() -> None:
    try:
        join(sys.argv[1])
    except ElasticError as error:
        print(error)
    else:
        print("let in")


if __name__ == "__main__":
    main()
