"""From a model's folder to the proof, through the door that users take."""

from pathlib import Path

import pytest
import torch

from ongrid import quantize
from ongrid.export import verify


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model") / "tiny"
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("recipe", "algorithm"),
    [("int4_g64", "gptq"), ("int4_g64", "gptq:act_order=true"), ("nvfp4_weight", "rtn")],
)
def test_what_quantize_writes_is_proved(
    model_folder: Path, tmp_path: Path, recipe: str, algorithm: str
) -> None:
    rows = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    quantize(model_folder, recipe, [rows], algorithm=algorithm, out=tmp_path / "q")
    found = verify(tmp_path / "q")
    assert found.ok, "\n".join(found.lines())
    assert found.matrices == found.fresh_equals_file == 14
