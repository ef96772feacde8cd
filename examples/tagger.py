"""A script for one device, made one for all of them by three lines (docs/howto/runner.md).

    torchrun --nproc-per-node 4 -m examples.tagger
"""

# --8<-- [start:script]
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import soap


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50_000, 64)
        self.tags = nn.Linear(64, 20)

    def forward(self, words: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.tags(self.words(words)), tags)


def main() -> None:
    torch.manual_seed(0)
    words = torch.randint(50_000, (1024,)) ** 2 // 50_000  # some words are more frequent than others
    dataset = TensorDataset(words, words % 20)
    with soap.partitioner():  # 1: tables made in here are cut into one number of partitions
        model = Tagger()
    loader = DataLoader(soap.shard(dataset), batch_size=64)  # 2: each rank reads its own part
    config = soap.RunnerConfig(optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.5))
    with soap.get_runner(model, config=config) as runner:  # 3: instead of loss.backward() and optimizer.step()
        for epoch in range(3):
            for batch in loader:
                loss = runner.run(batch)
            if runner.world.rank == 0:
                print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
        if runner.world.rank == 0 and runner.strategy is not None:
            print({name: sync.word for name, sync in runner.strategy.parameters.items()}, flush=True)


if __name__ == "__main__":
    main()
# --8<-- [end:script]
