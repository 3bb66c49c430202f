"""Finds the decoder layers of a model by its structure, not by its class name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ongrid.errors import StructureError


@dataclass(frozen=True)
class Stack:
    """The list of decoder layers: its path in the model, and the path of every layer."""

    path: str
    size: int

    @property
    def paths(self) -> list[str]:
        return [f"{self.path}.{i}" if self.path else str(i) for i in range(self.size)]

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(path) for path in self.paths]

    def holds(self, path: str) -> bool:
        """Whether a module or parameter path lies inside a decoder layer."""
        return path.startswith(f"{self.path}.") if self.path else True


def find_stack(model: nn.Module, path: str | None = None) -> Stack:
    """The decoder layers of a model: the outermost `ModuleList` that holds most of its parameters.

    A list inside another list's entry (experts, branches) never counts. `path` overrides the
    search. Raises `StructureError` where no list qualifies, or where two hold a similar share, as
    in an encoder-decoder model: then the answer is not structural, and the caller has to say it.
    """
    lists = {p: m for p, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if path is not None:
        chosen = lists.get(path)
        if chosen is None or len(chosen) == 0:
            raise StructureError(
                f"no list of layers at {path!r}",
                remedy=f"Lists in this model: {', '.join(lists) or 'none'}.",
            )
        return Stack(path, len(chosen))
    outermost = {
        p: m
        for p, m in lists.items()
        if len(m) > 0
        and not any(p != other and p.startswith(f"{other}." if other else "") for other in lists)
        and all(any(True for _ in entry.parameters()) for entry in m)
    }
    if not outermost:
        raise StructureError(
            f"{type(model).__name__} has no list of decoder layers",
            remedy="Name it with `layers=`, a path to a ModuleList.",
        )
    sizes = {p: sum(w.numel() for w in m.parameters()) for p, m in outermost.items()}
    ranked = sorted(sizes, key=lambda p: (-sizes[p], p))
    if len(ranked) > 1 and 2 * sizes[ranked[1]] > sizes[ranked[0]]:
        raise StructureError(
            f"{type(model).__name__} has several lists of layers of similar size: "
            + ", ".join(f"{p} ({len(outermost[p])} entries)" for p in ranked[:3]),
            remedy="Name the decoder's with `layers=`.",
        )
    return Stack(ranked[0], len(outermost[ranked[0]]))
