"""LSTM networks over one sequence: text classification (``rnntc``) and language models (``rnnlm``, ``lstm_ptb``, ``lm``).

``lstm_ptb`` is the large LSTM of Zaremba (2014) for the Penn Treebank, with encoder and decoder tied (Press 2016): what RedSync trains.

``lm`` is the model of the demo: its embedding and softmax layer hold almost all parameters and a step sees few tokens, so that
summing the gradients of data parallelism costs far more than moving activations between the parts of a split softmax layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from soap.zoo.blocks import ChunkedLSTM, Classifier, chunks_of, mean_token_loss
from soap.zoo.recipe import Recipe, tokens


@dataclass(frozen=True)
class RecurrentConfig:
    """Sizes. ``outputs``: classes, or the vocabulary again. ``chunk``: steps per call of an LSTM layer. ``dropout``: see ``ChunkedLSTM``;
    ``tied``: whether embedding and softmax layer have one weight; both of language models."""

    vocabulary: int
    width: int
    layers: int
    steps: int
    chunk: int
    outputs: int
    dropout: float = 0.0
    tied: bool = False


class TextClassifier(Classifier):
    """The last step's output of an LSTM decides the class of the whole text."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.chunk = config.chunk
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.lstm = ChunkedLSTM(config.width, config.width, config.layers)
        self.head = nn.Linear(config.width, config.outputs)

    def logits(self, inputs: Tensor) -> Tensor:
        """Class scores of texts."""
        outputs, _ = self.lstm([self.embedding(chunk) for chunk in chunks_of(inputs, self.chunk)])
        scores: Tensor = self.head(outputs[-1][:, -1])
        return scores


class LanguageModel(nn.Module):
    """Predicts every token of a sequence from those before it; all chunks share embedding, LSTM and softmax weights."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.chunk = config.chunk
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.lstm = ChunkedLSTM(config.width, config.width, config.layers, config.dropout)
        self.head = nn.Linear(config.width, config.outputs)
        if config.tied:
            self.embedding.weight = self.head.weight  # with the initial values of a linear layer

    def forward(self, sequences: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy of the next tokens."""
        outputs, _ = self.lstm([self.embedding(chunk) for chunk in chunks_of(sequences, self.chunk)])
        return mean_token_loss([self.head(chunk) for chunk in outputs], chunks_of(labels, self.chunk))


def _text_inputs(batch: int, config: RecurrentConfig) -> tuple[Tensor, Tensor]:
    """Texts and one class each."""
    return tokens(batch, config.steps, config.vocabulary), torch.randint(config.outputs, (batch,))


def _language_inputs(batch: int, config: RecurrentConfig) -> tuple[Tensor, Tensor]:
    """Sequences and the same sequences one step later."""
    text = tokens(batch, config.steps + 1, config.vocabulary)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _classification(config: RecurrentConfig, batch: int) -> Recipe:
    return Recipe(partial(TextClassifier, config), partial(_text_inputs, config=config), batch)


def _language(config: RecurrentConfig, batch: int) -> Recipe:
    return Recipe(partial(LanguageModel, config), partial(_language_inputs, config=config), batch)


# Movie reviews have two classes; 20,000 words are about the vocabulary of the sentence-polarity data.
_RNNTC = RecurrentConfig(vocabulary=20_000, width=1024, layers=4, steps=40, chunk=8, outputs=2)
_RNNLM = RecurrentConfig(vocabulary=10_000, width=2048, layers=2, steps=40, chunk=8, outputs=10_000)
_PTB = RecurrentConfig(vocabulary=10_000, width=1500, layers=2, steps=35, chunk=35, outputs=10_000, dropout=0.65, tied=True)
_LM = RecurrentConfig(vocabulary=32_000, width=512, layers=2, steps=8, chunk=8, outputs=32_000)

RECIPES = {
    "rnntc": _classification(_RNNTC, 64),
    "rnntc:tiny": _classification(RecurrentConfig(vocabulary=60, width=16, layers=2, steps=7, chunk=3, outputs=2), 8),
    "rnnlm": _language(_RNNLM, 64),
    "rnnlm:tiny": _language(RecurrentConfig(vocabulary=50, width=16, layers=2, steps=6, chunk=3, outputs=50), 8),
    "lstm_ptb": _language(_PTB, 20),
    "lstm_ptb:tiny": _language(RecurrentConfig(vocabulary=40, width=16, layers=2, steps=5, chunk=5, outputs=40, tied=True), 8),
    "lm": _language(_LM, 16),
    "lm:tiny": _language(RecurrentConfig(vocabulary=101, width=16, layers=1, steps=5, chunk=5, outputs=101), 8),
}
