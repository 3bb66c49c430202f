"""Paging: the weights of one layer at a time, on a model whose parameters have no memory.

A `Source` puts real weights into a module before it is needed and takes them away afterwards. For a
model that lies in memory already, both do nothing.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ongrid.errors import NonFiniteError, OngridError, StoreError, raise_all
from ongrid.store.shards import ShardFolder, tensor_hash


class AbstractSource(ABC):
    """Where the weights of a model come from."""

    stays: bool
    """Whether finished modules stay in memory, to be used when the walk is over."""

    @abstractmethod
    def digest(self) -> str:
        """A hash of all weights."""

    @abstractmethod
    def page_in(self, path: str) -> None:
        """Gives every parameter below a module its memory and value."""

    @abstractmethod
    def page_out(self, path: str) -> None:
        """Takes the memory of a module's parameters away."""

    @abstractmethod
    def drop(self, path: str) -> None:
        """Forgets a module whose work is done and written."""

    @abstractmethod
    def original(self, name: str, held: Tensor) -> Tensor:
        """A tensor as the source has it, in the source's dtype; `held` is the model's own."""

    @abstractmethod
    def surplus(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the source that the model has no place for; they travel along unchanged."""

    @contextmanager
    def on_demand(self, except_below: str) -> Iterator[None]:
        """Within the context, modules outside a path are paged in when they are first called."""
        yield


class LiveSource(AbstractSource):
    """A model in memory."""

    stays = True

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        hollow = [name for name, p in model.named_parameters() if p.is_meta]
        if hollow:
            raise StoreError(
                f"{len(hollow)} parameters have no memory, {hollow[0]} among them",
                remedy="Load the whole model, or give its folder instead of the model.",
            )

    def digest(self) -> str:
        hashes = {n: tensor_hash(t.detach().cpu()) for n, t in self.model.state_dict().items()}
        return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()

    def page_in(self, path: str) -> None:
        problems: list[OngridError] = []
        for name, parameter in self.model.get_submodule(path).named_parameters(path):
            problems += _not_finite(name, parameter)
        raise_all(problems)

    def page_out(self, path: str) -> None: ...

    def drop(self, path: str) -> None: ...

    def original(self, name: str, held: Tensor) -> Tensor:
        return held

    def surplus(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


class ShardSource(AbstractSource):
    """A model on the meta device, with its weights in a folder.

    `names` maps parameter (and persistent buffer) names of the model to tensor names of the folder.
    Parameters that the model ties stay one object.
    """

    stays = False

    def __init__(self, model: nn.Module, folder: ShardFolder, names: Mapping[str, str]) -> None:
        self.model = model
        self.shards = folder
        self.names = dict(names)
        self._aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(parameter), []).append(name)
        self._tied = {
            name: names for names in self._aliases.values() for name in names if len(names) > 1
        }
        self._check_shapes()

    @property
    def folder(self) -> Path:
        return self.shards.folder

    def _check_shapes(self) -> None:
        problems: list[OngridError] = []
        for name, tensor in self._places().items():
            found = self.shards.infos[self.names[name]].shape
            if found != tuple(tensor.shape):
                problems.append(
                    StoreError(
                        f"the file has shape {list(found)}, the model needs {list(tensor.shape)}",
                        where=f"{self.folder}, {self.names[name]}",
                        remedy="The config and the weights belong to different models.",
                    )
                )
        raise_all(problems)

    def _places(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        named |= dict(self.model.named_buffers())
        return {name: tensor for name, tensor in named.items() if name in self.names}

    def digest(self) -> str:
        return self.shards.digest()

    def page_in(self, path: str) -> None:
        self._page_in(path, recurse=True)

    def _page_in(self, path: str, *, recurse: bool) -> None:
        problems: list[OngridError] = []
        module = self.model.get_submodule(path)
        head = f"{path}." if path else ""
        named = module.named_parameters(recurse=recurse, remove_duplicate=False)
        for name, parameter in list(named):
            # Looked up anew: it may have come with a name that it is tied to.
            if module.get_parameter(name).is_meta:
                problems += self._load(head + name, parameter)
        for name, buffer in list(module.named_buffers(recurse=recurse)):
            if head + name in self.names:
                buffer.copy_(self.shards.read(self.names[head + name]))
        raise_all(problems)

    def _load(self, name: str, hollow: nn.Parameter) -> list[OngridError]:
        stored = self.shards.read(self.names[name])
        problems = _not_finite(f"{self.folder}, {self.names[name]}", stored)
        loaded = nn.Parameter(stored.to(hollow.dtype), requires_grad=False)
        for alias in self._tied.get(name, [name]):
            self._set(alias, loaded)
        return problems

    def page_out(self, path: str) -> None:
        self._page_out(path, recurse=True)

    def _page_out(self, path: str, *, recurse: bool) -> None:
        module = self.model.get_submodule(path)
        head = f"{path}." if path else ""
        moved: dict[int, nn.Parameter] = {}
        named = module.named_parameters(recurse=recurse, remove_duplicate=False)
        for name, parameter in list(named):
            if parameter.is_meta:
                continue
            hollow = moved.setdefault(
                id(parameter), nn.Parameter(parameter.to("meta"), requires_grad=False)
            )
            for alias in self._tied.get(head + name, [head + name]):
                self._set(alias, hollow)

    def drop(self, path: str) -> None:
        parent, _, leaf = path.rpartition(".")
        husk = nn.Module()
        # A parent may read plain facts of its layers, such as the type of their attention.
        facts = self.model.get_submodule(path).__dict__.items()
        husk.__dict__.update({k: v for k, v in facts if isinstance(v, str | int | float)})
        self.model.get_submodule(parent)._modules[leaf] = husk

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        parent, _, leaf = name.rpartition(".")
        self.model.get_submodule(parent)._parameters[leaf] = parameter

    def original(self, name: str, held: Tensor) -> Tensor:
        return self.shards.read(self.names[name]) if name in self.names else held

    def surplus(self) -> Iterator[tuple[str, Tensor]]:
        used = set(self.names.values())
        for name in self.shards.infos:
            if name not in used:
                yield name, self.shards.read(name)

    @contextmanager
    def on_demand(self, except_below: str) -> Iterator[None]:
        handles, paged = [], []

        def page_in(path: str):
            def hook(module: nn.Module, args: object) -> None:
                if path not in paged:
                    paged.append(path)
                    self._page_in(path, recurse=False)

            return hook

        for path, module in self.model.named_modules():
            inside = path == except_below or path.startswith(f"{except_below}.")
            own = (f"{path}.{name}" for name in (*module._parameters, *module._buffers))
            if not inside and any(name.removeprefix(".") in self.names for name in own):
                handles.append(module.register_forward_pre_hook(page_in(path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for path in paged:
                self._page_out(path, recurse=False)


def _not_finite(where: str, tensor: Tensor) -> list[OngridError]:
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):
        return []
    bad = int((~torch.isfinite(tensor.float())).sum())
    if not bad:
        return []
    return [
        NonFiniteError(
            f"{bad} of {tensor.numel()} weights are NaN or infinite",
            where=where,
            remedy="The source is damaged: download it again, or repair these weights.",
        )
    ]
