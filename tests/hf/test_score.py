"""Scores against the formula, written as loops over positions and vocabulary in Python floats."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ongrid.errors import CalibrationError, NonFiniteError, StructureError
from ongrid.hf.score import Score, score, score_all

VOCAB = 31


def model(seed: int, *, vocab: int = VOCAB, **settings) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=vocab, attention_dropout=0.3, initializer_range=0.3,
        **settings,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).train()


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.randint(VOCAB, (5, 9), generator=torch.Generator().manual_seed(0))


class Calls(torch.nn.Module):
    """Counts the forwards of a model and notes how it was called."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, []

    def forward(self, **inputs):
        self.calls.append((inputs["input_ids"].shape[0], inputs["use_cache"], self.training))
        return self.inner(**inputs)


def log_probs(logits: list[float]) -> list[float]:
    top = max(logits)
    total = math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - top - total for x in logits]


def naive(of: LlamaForCausalLM, windows: torch.Tensor, against: LlamaForCausalLM) -> Score:
    nll = kl = same = n = 0
    for window in windows:
        with torch.no_grad():
            p_all, r_all = (m.eval()(window[None]).logits[0].tolist() for m in (of, against))
        of.train()
        against.train()
        for t in range(len(window) - 1):
            p, r = log_probs(p_all[t]), log_probs(r_all[t])
            nll -= p[window[t + 1]]
            kl += math.fsum(math.exp(b) * (b - a) for a, b in zip(p, r, strict=True))
            same += p.index(max(p)) == r.index(max(r))
            n += 1
    return Score(math.exp(nll / n), kl / n, same / n, n)


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 4 * VOCAB, 1 << 20])
@pytest.mark.parametrize("rows_per_forward", [1, 2, 5, 9])
def test_scores_are_the_formula(windows, rows_per_forward, chunk_bytes, monkeypatch):
    # The package exports a function of the module's name, which hides the module.
    monkeypatch.setattr(sys.modules["ongrid.hf.score"], "_CHUNK_BYTES", chunk_bytes)
    one, reference = model(1), model(2)
    expected = naive(one, windows, reference)
    found = score(one, windows, against=reference, rows_per_forward=rows_per_forward)
    assert found.tokens == expected.tokens == 40
    assert found.top1 == expected.top1
    # fp32 log-softmax: a few 1e-7 of log-probabilities up to 20, averaged
    assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-5)
    assert found.kl == pytest.approx(expected.kl, rel=1e-5)
    alone = score(one, windows, rows_per_forward=rows_per_forward)
    assert alone == Score(found.perplexity, None, None, 40)


def test_several_models_share_the_forward_of_the_reference(windows):
    reference, one = Calls(model(2)), Calls(model(1))
    progress = []
    found = score_all(
        {"bf16": reference, "int4": one},
        windows,
        against=reference,
        rows_per_forward=2,
        progress=lambda done, rows: progress.append((done, rows)),
    )
    assert progress == [(2, 5), (4, 5), (5, 5)]
    assert reference.calls == one.calls == [(2, False, False), (2, False, False), (1, False, False)]
    assert list(found) == ["bf16", "int4"]
    assert (found["bf16"].kl, found["bf16"].top1) == (0.0, 1.0)
    assert found["int4"] == score(one, windows, against=reference, rows_per_forward=2)
    assert found["int4"].kl and found["int4"].kl > 0.1
    assert found["bf16"].perplexity == score(reference, windows, rows_per_forward=2).perplexity


def test_a_copy_of_the_reference_is_at_distance_zero(windows):
    found = score(model(2).bfloat16(), windows, against=model(2).bfloat16())
    assert (found.kl, found.top1) == (0.0, 1.0)


def test_modes_and_gradients_are_left_alone(windows):
    one, reference = model(1), model(2).eval()
    one.get_submodule("model.layers.0").eval()
    modes = {name: part.training for name, part in one.named_modules()}
    first = score(one, windows, against=reference)
    assert {name: part.training for name, part in one.named_modules()} == modes
    assert not any(part.training for part in reference.modules())
    assert first == score(one, windows, against=reference)  # no dropout
    one(windows, labels=windows).loss.backward()  # and still trains
    gradient = one.get_parameter("model.layers.1.mlp.up_proj.weight").grad
    assert gradient is not None and gradient.abs().max() > 0


def test_training_goes_on_after_a_score_that_rewrites_rotary_tables():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    one = model(1, max_position_embeddings=8, rope_parameters=rope)
    long = torch.arange(20)[None]
    score(one, long)
    one(long, labels=long).loss.backward()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_names_model_and_window(windows, value):
    class Broken(torch.nn.Module):
        """Breaks one logit of the token 7."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, **inputs):
            out = self.inner(input_ids=input_ids, **inputs)
            out.logits[..., 3] = torch.where(input_ids == 7, value, out.logits[..., 3])
            return out

    clean = windows.clone()
    clean[clean == 7] = 8
    clean[3, 4] = 7
    good, broken = model(1), Broken(model(2))
    with pytest.raises(NonFiniteError, match="int4, window 3: its logits are not finite"):
        score_all({"bf16": good, "int4": broken}, clean, against=good, rows_per_forward=2)
    with pytest.raises(NonFiniteError, match="model, window 3: the logits of the reference"):
        score(good, clean, against=broken)
    assert good.training and broken.inner.training
    clean[3, 4], clean[2, -1] = 8, 7  # the last logits predict nothing
    score(broken, clean)


def test_a_hopeless_model_has_infinite_perplexity(windows):
    one = model(1)
    with torch.no_grad():
        one.lm_head.weight.mul_(1e5)
    assert score(one, windows).perplexity == math.inf


def test_vocabularies_must_agree_and_windows_must_predict(windows):
    with pytest.raises(StructureError, match="40 logits per token, 31 of the reference"):
        score(model(1, vocab=40), windows, against=model(2))
    for bad in (windows[:, :1], windows[:0]):
        with pytest.raises(CalibrationError, match="nothing to predict"):
            score(model(1), bad)
    assert score_all({}, windows) == {}
