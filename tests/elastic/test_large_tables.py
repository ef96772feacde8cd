"""A table of an exported model is mapped: a worker reads nothing of it, and a server its own part alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import soap

pytestmark = pytest.mark.long
ROOT = Path(__file__).parent.parent.parent
ROWS, COLUMNS = 2**21, 32
TABLE_BYTES = 4 * ROWS * COLUMNS
MEASURED = """
import sys
from functools import partial
from pathlib import Path
import torch
from soap.elastic.layout import lay_out
from soap.elastic.store import Keeping
from soap.elastic.worker import InMemory, Source, Worker

def held():
    own = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(own[key].split()[0]) for key in ("RssAnon", "RssFile"))

what, folder = sys.argv[1:]
source = Source(f"{folder}/model.pt2")
graph = source.load(plan_only=True).graph
shapes = {tensor.name: tensor.shape for tensor in graph.parameters}
tables = {name: shape for name, shape in shapes.items() if name in graph.sparse}
layout = lay_out(tables, {name: shape for name, shape in shapes.items() if name not in tables}, 4)
before = held()
if what == "worker":
    kept = Worker(source, InMemory((torch.zeros(4, 3, dtype=torch.int64),)), layout, None, b"")
else:
    kept = Keeping(f"{folder}/kept", partial(torch.optim.SGD, lr=0.1), snapshot_every_pushes=None).store(1, layout, source)
print(held() - before)
"""


class Large(nn.Module):
    """One large table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, COLUMNS, mode="sum")
        self.top = nn.Linear(COLUMNS, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.table(ids)).square().mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("large")
    soap.export(Large(), (torch.zeros(4, 3, dtype=torch.int64),), path=found / "model.pt2", verify=False)
    return found


@pytest.mark.parametrize(("what", "least", "most"), [("worker", 0.0, 0.1), ("server", 0.25, 0.8)])
def test_how_much_of_a_table_a_process_holds(what: str, least: float, most: float, folder: Path) -> None:
    """A server of four: its quarter, and what it read that from, which the kernel may drop."""
    done = subprocess.run([sys.executable, "-c", MEASURED, what, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert least * TABLE_BYTES <= int(done.stdout) <= most * TABLE_BYTES
