"""The models compute what their names say: oracles for the parts that are written by hand here."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import prod

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import soap
from soap import zoo
from soap.plan.compression.policy import layer_of
from soap.zoo.blocks import chunks_of, mean_token_loss
from soap.zoo.dlrm import CRITEO_KAGGLE_ROWS, DLRM, DLRMConfig, _interactions
from soap.zoo.gnmt import GNMT, GNMTConfig
from soap.zoo.gpt import CausalAttention, GPTConfig
from soap.zoo.lm1b import SampledConfig, SampledLanguageModel
from soap.zoo.nmt import Translator, TranslatorConfig
from soap.zoo.recurrent import LanguageModel, RecurrentConfig
from tests.extent import FEW, often

# Exporting an LSTM swaps the list of weights that it keeps beside its parameters, and puts it back; torch warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")

LANGUAGE = RecurrentConfig(vocabulary=20, width=4, layers=2, steps=7, chunk=7, outputs=20)


@FEW
@given(steps=st.integers(1, 12), chunk=st.integers(1, 12))
def test_chunks_put_together_are_the_sequence(steps: int, chunk: int) -> None:
    sequence = torch.arange(2 * steps).reshape(2, steps)
    chunks = chunks_of(sequence, chunk)
    assert torch.equal(torch.cat(chunks, dim=1), sequence)
    assert {part.shape[1] for part in chunks[:-1]} <= {chunk}


@FEW
@given(steps=st.integers(1, 9), chunk=st.integers(1, 9), seed=st.integers(0, 99))
def test_loss_by_chunks_is_the_mean_over_all_tokens(steps: int, chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, steps, 5, dtype=torch.float64, generator=generator)
    labels = torch.randint(5, (3, steps), generator=generator)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(mean_token_loss(chunks_of(logits, chunk), chunks_of(labels, chunk)), expected)


@pytest.mark.parametrize("chunk", [1, 3, 6])
def test_language_model_does_not_depend_on_the_chunks(chunk: int) -> None:
    whole, chunked = (LanguageModel(replace(LANGUAGE, chunk=size)).double() for size in (LANGUAGE.steps, chunk))
    chunked.load_state_dict(whole.state_dict())
    sequences, labels = torch.randint(20, (3, 7)), torch.randint(20, (3, 7))
    torch.testing.assert_close(chunked(sequences, labels), whole(sequences, labels))


def test_a_tied_language_model_by_hand() -> None:
    """Dropout of what both layers read, and of what the last one gives; one weight for encoder and decoder."""
    model = LanguageModel(replace(LANGUAGE, width=6, dropout=0.5, tied=True)).double()
    assert [name for name, _ in model.named_parameters() if "weight" in name and "lstm" not in name] == ["embedding.weight"]
    sequences, labels = torch.randint(20, (3, 7)), torch.randint(20, (3, 7))
    torch.manual_seed(5)
    loss = model(sequences, labels)
    torch.manual_seed(5)
    found = F.embedding(sequences, model.head.weight)
    for layer in model.lstm.layers:
        found = layer(F.dropout(found, 0.5))[0]
    scores = F.linear(F.dropout(found, 0.5), model.head.weight, model.head.bias)
    torch.testing.assert_close(loss, F.cross_entropy(scores.flatten(0, 1), labels.flatten()))


@pytest.mark.slow
def test_lstm_ptb_is_an_output_layer_and_two_hidden_ones() -> None:
    """For the policy of compression: the tied encoder counts as the output layer."""
    graph = soap.load("zoo:lstm_ptb", plan_only=True).graph
    kinds = {tensor.name: layer_of(graph, tensor.name).kind for tensor in graph.parameters if len(tensor.shape) > 1}
    assert kinds.pop("embedding.weight") == "output"
    assert set(kinds.values()) == {"hidden"} and len(kinds) == 4
    assert not graph.sparse


@pytest.mark.parametrize(("name", "convolutions"), [("vgg16", 13), ("vgg19", 16)])
def test_vgg_has_its_convolutions_in_five_stages(name: str, convolutions: int) -> None:
    layers = zoo.build(name, fake=True).module.features
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in layers) == convolutions
    assert sum(isinstance(layer, torch.nn.MaxPool2d) for layer in layers) == 5
    assert layers(torch.zeros(1, 3, 224, 224, device="meta")).shape == (1, 512, 7, 7)


def test_translator_does_not_depend_on_the_chunks() -> None:
    config = TranslatorConfig(vocabulary=20, width=4, layers=2, source_steps=5, target_steps=7, chunk=7)
    whole, chunked = (Translator(replace(config, chunk=size)).double() for size in (7, 2))
    chunked.load_state_dict(whole.state_dict())
    source, target, labels = torch.randint(20, (3, 5)), torch.randint(20, (3, 7)), torch.randint(20, (3, 7))
    torch.testing.assert_close(chunked(source, target, labels), whole(source, target, labels))


def test_attention_looks_at_itself_and_before() -> None:
    attention = CausalAttention(GPTConfig(width=8, heads=2)).double()
    inputs = torch.randn(2, 5, 8, dtype=torch.float64)
    changed = inputs.clone()
    changed[:, 3:] += 1
    before, after = attention(inputs), attention(changed)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert not torch.isclose(before[:, 3:], after[:, 3:]).all()


def test_interactions_are_the_lower_triangle_of_all_dot_products() -> None:
    vectors = [torch.randn(3, 4, dtype=torch.float64) for _ in range(5)]
    stacked = torch.stack(vectors, dim=1)
    rows, columns = torch.tril_indices(5, 5, offset=-1)
    expected = torch.einsum("bif,bjf->bij", stacked, stacked)[:, rows, columns]
    torch.testing.assert_close(_interactions(vectors), expected)


def test_dlrm_tables_have_the_shape_of_the_criteo_data() -> None:
    assert len(CRITEO_KAGGLE_ROWS) == 26
    assert sum(CRITEO_KAGGLE_ROWS) == 33_762_577
    with torch.device("meta"):
        unlimited = DLRM(DLRMConfig(rows=CRITEO_KAGGLE_ROWS))
    assert sum(p.numel() for p in unlimited.embeddings.parameters()) == 540_201_232


@pytest.mark.slow
def test_recurrent_benchmarks_are_unrolled_in_five_chunks_that_share_weights() -> None:
    calls = {}
    for name in ("rnntc", "rnnlm", "nmt"):
        model = zoo.build(name, fake=True)
        program = torch.export.export(model.module, model.args, strict=False)
        calls[name] = sum(str(node.target) == "aten.lstm.input" for node in program.graph.nodes)
    assert calls == {"rnntc": 4 * 5, "rnnlm": 2 * 5, "nmt": 4 * 5}


def test_demo_model_is_dominated_by_embedding_and_softmax() -> None:
    model = zoo.build("lm", fake=True)
    sizes = {name: p.numel() for name, p in model.module.named_parameters()}
    assert (sizes["embedding.weight"] + sizes["head.weight"]) / sum(sizes.values()) > 0.85
    assert model.args[0].numel() == 128


def test_sampled_softmax_by_hand() -> None:
    """Against the loss written down token by token: cross-entropy over the label and the candidates that are other words."""
    config = SampledConfig(vocabulary=30, width=4, cell=6, steps=3, candidates=12, dropout=0.0, batch=5)
    model = SampledLanguageModel(config).double()
    torch.nn.init.normal_(model.bias.weight)
    sequences, labels = torch.randint(30, (5, 3)), torch.randint(30, (5, 3))
    candidates = torch.randperm(30)[:12]
    assert set(candidates.tolist()) & set(labels.flatten().tolist())  # there are accidental hits
    outputs = model.lstm(model.embedding(sequences))[0]
    probability = config.sampler.probability(torch.arange(30, dtype=torch.float64))
    expected = 1 - (1 - probability) ** model.tries  # how often among the candidates, by rank

    def score(output: torch.Tensor, word: int) -> torch.Tensor:
        rank = int(config.sampler.ranks(torch.tensor(word)))
        return output @ model.softmax.weight[word] + model.bias.weight[word, 0] - expected[rank].log()

    losses = []
    for output, label in zip(outputs.flatten(0, 1), labels.flatten().tolist(), strict=True):
        words = [label, *(word for word in candidates.tolist() if word != label)]
        losses.append(F.cross_entropy(torch.stack([score(output, word) for word in words]), torch.tensor(0)))
    torch.testing.assert_close(model(sequences, labels, candidates), torch.stack(losses).mean())


def test_parameters_of_parallax_models_are_those_of_its_table() -> None:
    """Millions of dense and sparse parameters; torch's LSTM has 8192 biases more in the first."""
    graph = soap.load("zoo:lm1b", plan_only=True).graph
    sizes = {tensor.name: prod(tensor.shape) for tensor in graph.parameters}
    assert sum(sizes[name] for name in graph.sparse) / 1e6 == pytest.approx(813.307, abs=1e-3)
    assert (sum(size for name, size in sizes.items() if name not in graph.sparse) - 8192) / 1e6 == pytest.approx(9.445, abs=1e-3)
    with torch.device("meta"):
        model = GNMT(GNMTConfig())
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    tables = sizes["source_embedding.weight"] + sizes["target_embedding.weight"]
    assert round(tables / 1e6, 1) == 74.9
    assert round((sum(sizes.values()) - tables) / 1e6, 1) == 94.1


SPARSE = {
    "lm1b": {"embedding.weight": 4 * 8, "softmax.weight": 4 * 8 + 10, "bias.weight": 4 * 8 + 10},
    "nmt_gnmt": {"source_embedding.weight": 4 * 8, "target_embedding.weight": 3 * 8},
    "dlrm": {f"embeddings.{i}.weight": 8 for i in range(5)},
    "full_sparse": {f"layers.{i}.weight": 3 * 8 for i in range(2)},
}
"""Sparse parameters of tiny models, and how many rows a batch looks up."""


@pytest.mark.parametrize("name", SPARSE)
def test_tables_are_found_to_be_sparse_and_every_call_has_a_rule(name: str) -> None:
    graph = soap.load(f"zoo:{name}:tiny", plan_only=True).graph
    assert {parameter: access.indices for parameter, access in graph.sparse.items()} == SPARSE[name]
    assert all(access.measured for access in graph.sparse.values())
    assert all(op.partitionable for op in graph.operators)


@pytest.mark.parametrize("name", often(list(SPARSE), ["lm1b"], pytest.mark.slow))
def test_data_touches_the_share_of_rows_that_is_asked_for(name: str) -> None:
    spec = f"zoo:{name}:emulation"
    model = soap.load(spec, plan_only=True)
    found = soap.measure_rows(model, islice(zoo.batches(spec), 5)).sparse
    expected = {
        "lm1b": {"embedding.weight": 0.03},
        "nmt_gnmt": {"source_embedding.weight": 0.05, "target_embedding.weight": 0.05},
        "dlrm": {"embeddings.2.weight": 0.4 * 2048 / 50_657},
        "full_sparse": {f"layers.{i}.weight": 0.05 for i in range(3)},
    }[name]
    for parameter, alpha in expected.items():
        assert found[parameter].alpha == pytest.approx(alpha, rel=0.1)


@pytest.mark.parametrize(("name", "rate"), [("lm1b", 2.0), ("nmt_gnmt", 1.0), ("dlrm", 0.5), ("full_sparse", 0.5)])
def test_models_with_sparse_parameters_learn(name: str, rate: float) -> None:
    model = zoo.build(f"{name}:tiny")
    optimizer = torch.optim.SGD(model.module.parameters(), lr=rate)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model.module(*model.args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
