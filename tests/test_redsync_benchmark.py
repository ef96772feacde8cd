"""RedSync's page: what is simulated for it, what it says, and the equations in closed form."""

from __future__ import annotations

import pytest

from benchmarks import redsync, redsync_page
from benchmarks.redsync import SAMPLES, cell, gradients_of, graph_of
from benchmarks.redsync_cells import METHODS, Cell
from benchmarks.redsync_equations import Gradient, dense_ns, sparse_ns, wire, worthwhile
from soap.strategy.compression import Rgc, RgcAsq
from tests.simulator.test_redsync_equations import WIDE, equations_ns, network

TIMES = {"dense": 40_000_000, "RGC": 20_000_000, "ASQ": 25_000_000, "naive": 80_000_000, "naive, whole GPU": 32_000_000}
OWN = Cell("lstm_ptb", "piz-daint", 4, TIMES, (0.25, 0.01, 0.03, 0.06))


@pytest.mark.long
def test_the_lstm_is_the_papers_and_its_output_layer_is_not_quantized() -> None:
    assert sum(tensor.bytes for tensor in graph_of("lstm_ptb", 2).parameters) // 10**6 == 204  # its Table 1
    assert SAMPLES.keys() == redsync_page.PAPER.keys() and set(redsync.CLIPPED) < SAMPLES.keys()
    by_method = {name: gradients_of("lstm_ptb", method) for name, method in METHODS.items()}
    assert [type(own.how) for own in by_method["ASQ"]] == [Rgc, *[RgcAsq] * 4]
    assert [own.how.selection for own in by_method["RGC"]] == ["sampled"] * 5  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_lstm_gains_its_selection_takes_time_and_a_naive_one_takes_more() -> None:
    found = cell("lstm_ptb", "piz-daint", 4)
    assert found.gain("RGC") > found.gain("ASQ") > 1 > found.gain("naive")
    assert found.gain("naive") < found.gain("naive, whole GPU")
    assert 0.1 < found.shares[0] < 0.5


@pytest.mark.parametrize("density", [2**-9, 2**-5])
def test_the_closed_forms_are_those_that_simulated_tasks_are_held_to(density: float) -> None:
    gradients = [Gradient((WIDE, WIDE), 4, Rgc(density, "exact"))]
    for peers in (2, 8, 64):
        topology = network(peers)
        assert (sparse_ns(gradients, topology, peers), dense_ns(gradients, topology, peers)) == pytest.approx(
            equations_ns(topology, density), rel=1e-9
        )


@pytest.mark.parametrize("density", [2**-9, 2**-7, 2**-5, 0.5])
def test_where_equations_meet_is_found(density: float) -> None:
    gradients, topology = [Gradient((WIDE, WIDE), 4, Rgc(density, "exact"))], network(2)
    better = [own for own in range(2, 400) if sparse_ns(gradients, topology, own) < dense_ns(gradients, topology, own)]
    found = worthwhile(gradients, topology)
    if density == 0.5:
        assert found is None and not better
    else:
        assert found is not None and (found[0], min(found[1], 399)) == (better[0], better[-1])
        assert wire(topology)[1] == 1.25e9
