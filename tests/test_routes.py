"""Routes against an oracle that looks at every simple path."""

from __future__ import annotations

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from soap.cluster.routes import PICOSECONDS, REFERENCE_MESSAGE_BYTES, Router
from soap.cluster.topology import Link
from tests.extent import MANY

NODES = [f"n{i}" for i in range(7)]


@st.composite
def networks(draw: st.DrawFn) -> list[Link]:
    pairs = st.tuples(st.sampled_from(NODES), st.sampled_from(NODES)).filter(lambda pair: pair[0] != pair[1])
    ends = draw(st.lists(pairs, unique=True, max_size=18))
    figures = st.tuples(st.sampled_from([1e9, 2e9, 3.3e9]), st.sampled_from([0.0, 1e-6, 1e-4, 5e-4]))
    return [Link(i, f"{a}->{b}", a, b, *draw(figures)) for i, (a, b) in enumerate(ends)]


def fastest(links: list[Link], source: str, target: str) -> tuple[int, ...] | None:
    graph = nx.DiGraph()
    graph.add_nodes_from(NODES)
    graph.add_edges_from((link.source, link.target, {"link": link}) for link in links)
    keys = []
    for edges in nx.all_simple_edge_paths(graph, source, target):
        path = [graph.edges[edge]["link"] for edge in edges]
        seconds_ps = sum(round(link.latency_seconds * PICOSECONDS) for link in path)
        seconds_ps += round(REFERENCE_MESSAGE_BYTES / min(link.bandwidth_bytes_per_second for link in path) * PICOSECONDS)
        keys.append((seconds_ps, len(path), tuple(link.index for link in path)))
    return min(keys)[2] if keys else None


@MANY
@given(networks())
def test_routes_are_the_fastest_of_all_simple_paths(links):
    router = Router(links)
    for source in NODES:
        assert router.path(source, source) == ()
        for target in NODES:
            if target != source:
                assert router.path(source, target) == fastest(links, source, target)


@given(st.lists(st.integers(0, 5), min_size=6, max_size=6), st.integers(0, 2**12 - 1))
def test_a_tree_has_one_path(parents, missing):
    """Each node hangs on an earlier one, by a cable of which a direction may be missing."""
    pairs = [(NODES[i + 1], NODES[min(parent, i)]) for i, parent in enumerate(parents)]
    ends = [end for a, b in pairs for end in ((a, b), (b, a))]
    links = [Link(i, f"{a}->{b}", a, b, 1e9, 1e-6) for i, (a, b) in enumerate(e for k, e in enumerate(ends) if not missing >> k & 1)]
    router = Router(links)
    assert router.is_tree
    for source in NODES:
        for target in NODES:
            assert router.path(source, target) == (() if source == target else fastest(links, source, target))
    pairs = [(source, target) for source in NODES for target in NODES if router.path(source, target) is not None]
    found = router.paths([source for source, _ in pairs], [target for _, target in pairs])
    assert [tuple(row[row >= 0].tolist()) for row in found] == [router.path(source, target) for source, target in pairs]
