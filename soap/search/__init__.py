"""Search for the strategy with the shortest simulated iteration: Metropolis-Hastings over the configurations of all operators."""

from __future__ import annotations

from soap.search.chains import search
from soap.search.metropolis import DEFAULT_BETA, Evaluator
from soap.search.record import MoveCount, SearchResult
from soap.search.starts import Start

__all__ = ["DEFAULT_BETA", "Evaluator", "MoveCount", "SearchResult", "Start", "search"]
