"""The models compute what their names say: oracles for the parts that are written by hand here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from soap import zoo
from soap.zoo.blocks import chunks_of, mean_token_loss
from soap.zoo.dlrm import CRITEO_KAGGLE_ROWS, DLRM, DLRMConfig, _interactions
from soap.zoo.gpt import CausalAttention, GPTConfig
from soap.zoo.nmt import Translator, TranslatorConfig
from soap.zoo.recurrent import LanguageModel, RecurrentConfig

# Exporting an LSTM swaps the list of weights that it keeps beside its parameters, and puts it back; torch warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")

LANGUAGE = RecurrentConfig(vocabulary=20, width=4, layers=2, steps=7, chunk=7, outputs=20)


@settings(max_examples=30, deadline=None)
@given(steps=st.integers(1, 12), chunk=st.integers(1, 12))
def test_chunks_put_together_are_the_sequence(steps: int, chunk: int) -> None:
    sequence = torch.arange(2 * steps).reshape(2, steps)
    chunks = chunks_of(sequence, chunk)
    assert torch.equal(torch.cat(chunks, dim=1), sequence)
    assert {part.shape[1] for part in chunks[:-1]} <= {chunk}


@settings(max_examples=30, deadline=None)
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
