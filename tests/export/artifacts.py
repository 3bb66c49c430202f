"""A small artifact with matrices of many makes, written without a model."""

from pathlib import Path

import torch

from ongrid.grid import Grid, QTensor
from ongrid.store.artifact import REST, Artifact, Manifest, layer_segment
from ongrid.store.shards import tensor_hash

# By the name of the linear in each of two layers: four grids of different make, one with an order.
LINEARS = {
    "up": ("int4.32.code.fp16", (48, 64), torch.bfloat16),
    "gate": ("uint3.16.shift.bf16", (48, 64), torch.float16),
    "down": ("e2m1.16.sym.[e4m3.tensor.sym.fp32]", (64, 48), torch.bfloat16),
    "ordered": ("int4.32.sym.fp16", (8, 64), torch.float32),
}
UP, GATE = "layers.0.up", "layers.0.gate"
FIRST = f"model-{layer_segment(0)}.safetensors"


def a_matrix(path: str) -> tuple[QTensor, torch.dtype]:
    text, shape, dtype = LINEARS[path.rpartition(".")[2]]
    generator = torch.Generator().manual_seed(sum(path.encode()))
    q = QTensor.rounded(Grid.parse(text), torch.randn(shape, generator=generator).to(dtype))
    if path.endswith("ordered"):
        groups = torch.arange(shape[1]) // 32
        order = groups[torch.randperm(shape[1], generator=generator)]
        q = QTensor(q.grid, q.parts, order.to(torch.int32))
    return q, dtype


def write_artifact(folder: Path) -> Artifact:
    """Two layers and the rest, as the walk writes them."""
    paths = [f"layers.{i}.{name}" for i in (0, 1) for name in LINEARS]
    matrices = {path: a_matrix(path) for path in paths}
    manifest = Manifest(
        fingerprint={},
        recipe={},
        algorithm={},
        segments=[layer_segment(0), layer_segment(1), REST],
        matrices={
            path: {
                "grid": str(q.grid),
                "shape": list(q.shape),
                "dtype": str(dtype).removeprefix("torch."),
                "transposed": False,
            }
            for path, (q, dtype) in matrices.items()
        },
        activations={f"{UP}.input_quantizer": {"grid": "int8.tensor.sym.fp32", "dynamic": False}},
        kept={},
    )
    artifact = Artifact.begin(folder, manifest)
    for i in (0, 1):
        here = {path: m for path, m in matrices.items() if path.startswith(f"layers.{i}.")}
        tensors = {
            f"{path}.weight_quantizer.{name}": tensor
            for path, (q, _) in here.items()
            for name, tensor in q.tensors().items()
        }
        tensors[f"layers.{i}.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
        if i == 0:
            tensors[f"{UP}.input_quantizer.scale"] = torch.ones((1, 1))
        used = {path: tensor_hash(q.dequantize(dtype)) for path, (q, dtype) in here.items()}
        artifact.write(layer_segment(i), tensors, {"notes": {}, "used": used})
    artifact.write(REST, {"embed.weight": torch.ones(4, 64)}, {"notes": {}, "used": {}})
    artifact.finish({}, [])
    return artifact
