"""The rules of the house, as checks of source text; test_house.py applies them.

A check is a function from (path inside src/ongrid, source) to findings, each naming file and line.
It reads text and never imports the package, so a broken file cannot hide.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

# docs/architecture.md, section 3. Imports go down only.
LAYERS = {
    "errors": 1, "_config": 1, "_version": 1,
    "grid": 2, "kernels": 2,
    "nn": 3, "store": 3,
    "recipe": 4,
    "calibrate": 5, "tune": 5, "export": 5,
    "hf": 6,
    "quantize": 7, "finetune": 7, "adopt": 7, "qat": 7, "cli": 7, "axolotl": 7, "report": 7,
    "__init__": 8, "__main__": 8,
}  # fmt: skip
STRANGERS = {3, 5}  # layers in which nobody imports a neighbour
EDGE, DOORS = 6, 7
LIBRARIES = {  # the lowest layer that may import them
    "transformers": EDGE, "datasets": EDGE, "accelerate": EDGE, "tokenizers": EDGE,
    "huggingface_hub": EDGE, "typer": DOORS, "rich": DOORS, "pydantic": DOORS,
}  # fmt: skip

FILE_LINES, FUNCTION_LINES, PARAMETERS = 500, 80, 8
NAMES_THAT_SAY_NOTHING = {"util", "utils", "helper", "helpers", "common", "base", "manager", "misc"}

# The two registrations that importing may do, and where. Whoever adds a third argues for it here.
OPS, METHOD = "an op of torch.library", "a quantization method of transformers"
REGISTRATIONS = {OPS: "grid/", METHOD: "hf/quantizer.py"}

Check = Callable[[str, str], list[str]]
CHECKS: dict[str, Check] = {}


def rule(name: str) -> Callable[[Check], Check]:
    """Enters a check under the sentence it enforces."""

    def enter(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return enter


# Reading source


@functools.cache
def parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])  # reported once, by its own check


def findings(path: str, lines: Iterable[tuple[int, str]]) -> list[str]:
    return [f"src/ongrid/{path}:{line}: {what}" for line, what in sorted(lines)]


class Import(NamedTuple):
    line: int
    target: str  # dotted, absolute, with the imported name: "ongrid.grid.levels.Int"
    local: str  # the name that it binds here; "" if none
    binds: str  # what that name stands for
    in_function: bool
    for_types: bool  # under `if TYPE_CHECKING:`


@functools.cache
def imports(path: str, source: str) -> tuple[Import, ...]:
    """Every import of a file, wherever it stands."""
    found: list[Import] = []

    def visit(node: ast.AST, in_function: bool, for_types: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                local, binds = (alias.asname, alias.name) if alias.asname else (root, root)
                found.append(Import(node.lineno, alias.name, local, binds, in_function, for_types))
        elif isinstance(node, ast.ImportFrom):
            package = from_where(path, node)
            for alias in node.names:
                target = f"{package}.{alias.name}"
                local = alias.asname or alias.name
                found.append(Import(node.lineno, target, local, target, in_function, for_types))
        elif isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__")):
            for word in node.args[:1]:
                if isinstance(word, ast.Constant) and isinstance(word.value, str):
                    found.append(Import(node.lineno, word.value, "", "", in_function, for_types))
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        types = for_types or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        for child in ast.iter_child_nodes(node):
            visit(child, inside, types)

    visit(parsed(source), False, False)
    return tuple(found)


def from_where(path: str, node: ast.ImportFrom) -> str:
    """The absolute package of a `from ... import`, relative or not."""
    if not node.level:
        return node.module or ""
    here = ["ongrid", *PurePosixPath(path).parent.parts]
    package = here[: len(here) - (node.level - 1)]
    return ".".join([*package, node.module] if node.module else package)


def called(node: ast.Call) -> str:
    """The last name of what is called: `b` of `a.b(...)`."""
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def names(path: str, source: str) -> dict[str, str]:
    """What the imported names of a file stand for: {"nn": "torch.nn"}."""
    return {i.local: i.binds for i in imports(path, source) if i.local}


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """`nn.Linear` as "torch.nn.Linear"; "" where the chain does not start at an imported name."""
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value, known)
        return owner and f"{owner}.{node.attr}"
    return ""


def scoped(
    node: ast.AST, bound: frozenset[str] = frozenset()
) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """Every node, with the names that its enclosing functions bind: they hide imported ones."""
    for child in ast.iter_child_nodes(node):
        inner = bound
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = bound | {a.arg for a in parameters(child.args)} | {
                n.id
                for n in ast.walk(child)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }  # fmt: skip
        yield child, inner
        yield from scoped(child, inner)


def parameters(arguments: ast.arguments) -> list[ast.arg]:
    a = arguments
    extra = [star for star in (a.vararg, a.kwarg) if star is not None]
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *extra]


def unit(path: str) -> str:
    """What stands in the table of layers: a folder or a module at the top of the package."""
    return PurePosixPath(path).parts[0].removesuffix(".py")


def layer(path: str) -> int:
    return LAYERS.get(unit(path), 0)


# Who may import whom


@rule("every file parses")
def syntax(path: str, source: str) -> list[str]:
    try:
        ast.parse(source)
    except SyntaxError as error:
        return findings(path, [(error.lineno or 1, error.msg)])
    return []


@rule("imports go down, and strangers stay strangers")
def layers(path: str, source: str) -> list[str]:
    me, mine = unit(path), layer(path)
    if not mine:
        return findings(path, [(1, f"{me} stands in no layer; give it one in LAYERS")])
    found = []
    for item in imports(path, source):
        root, _, rest = item.target.partition(".")
        lowest = LIBRARIES.get(root, 0)
        if mine < lowest:
            found.append((item.line, f"{me} (layer {mine}) imports {root}: layer {lowest} and up"))
        if root == "ongrid" and (why := _why_not(me, rest.split(".")[0], item)):
            found.append((item.line, why))
    return findings(path, found)


def _why_not(me: str, other: str, item: Import) -> str | None:
    if other == me:
        return None
    mine, theirs = LAYERS[me], LAYERS.get(other, 8)
    if theirs == 8:
        return f"{me} imports {item.target} from the surface; import it from where it is defined"
    if theirs > mine:
        return f"{me} (layer {mine}) imports {other} (layer {theirs}): imports go down only"
    if theirs == mine and mine in STRANGERS:
        return f"{me} imports its neighbour {other}: those of layer {mine} are strangers"
    if other == "hf" and not (item.in_function or item.for_types):
        return f"{me} imports hf at the top: doors do so inside functions, to keep imports light"
    return None


def cycles(sources: dict[str, str]) -> list[str]:
    """Import cycles between modules; lazy and type-checking-only imports count."""
    modules = {module_name(path): path for path in sources}
    edges: dict[str, dict[str, int]] = {module: {} for module in modules}
    for module, path in modules.items():
        for item in imports(path, sources[path]):
            target = item.target
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != module:
                edges[module].setdefault(target, item.line)

    @functools.cache
    def reach(start: str) -> frozenset[str]:
        seen, todo = set(), [start]
        while todo:
            new = set(edges[todo.pop()]) - seen
            seen |= new
            todo += new
        return frozenset(seen)

    found = []
    for module, targets in edges.items():
        lines = [
            (line, f"imports {target}, which imports {module} in turn")
            for target, line in targets.items()
            if module in reach(target)
        ]
        found += findings(modules[module], lines)
    return found


def module_name(path: str) -> str:
    parts = ["ongrid", *PurePosixPath(path).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@rule("no star import")
def stars(path: str, source: str) -> list[str]:
    return findings(
        path,
        [
            (i.line, f"imports everything from {i.target.removesuffix('.*')}")
            for i in imports(path, source)
            if i.target.endswith(".*")
        ],
    )


# How large things may be


@rule("no file above 500 lines")
def file_length(path: str, source: str) -> list[str]:
    count = len(source.splitlines())
    return findings(
        path, [(count, f"{count} lines, at most {FILE_LINES}")] if count > FILE_LINES else []
    )


@rule("no function above 80 lines")
def function_length(path: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES:
                found.append(
                    (node.lineno, f"{node.name} has {count} lines, at most {FUNCTION_LINES}")
                )
    return findings(path, found)


@rule("at most 8 parameters")
def parameter_count(path: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(ast.unparse(d).startswith("app.command") for d in node.decorator_list):
                continue  # a command's parameters are options, given by name on the command line
            taken = [a.arg for a in parameters(node.args)]
            count = len(taken) - (taken[:1] in (["self"], ["cls"]))
            if count > PARAMETERS:
                found.append(
                    (node.lineno, f"{node.name} takes {count} parameters, at most {PARAMETERS}")
                )
    return findings(path, found)


@rule("names of files say something")
def file_names(path: str, source: str) -> list[str]:
    words = [part.removesuffix(".py").strip("_") for part in PurePosixPath(path).parts]
    return findings(path, [(1, f"called {w!r}") for w in words if w in NAMES_THAT_SAY_NOTHING])


# What code may not do


@rule("no hasattr below hf")
def hasattrs(path: str, source: str) -> list[str]:
    if layer(path) >= EDGE:
        return []
    return findings(
        path,
        [
            (node.lineno, "asks an object what it is (hasattr); let its type say so")
            for node in ast.walk(parsed(source))
            if isinstance(node, ast.Name) and node.id == "hasattr"
        ],
    )


@rule("no handler swallows every exception")
def handlers(path: str, source: str) -> list[str]:
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _re_raises(node):
            caught = ast.unparse(node.type) if node.type else "everything"
            found.append((node.lineno, f"catches {caught} and does not always raise it again"))
        if isinstance(node, ast.Call) and called(node) == "suppress":
            found += [
                (node.lineno, f"suppresses {ast.unparse(a)}") for a in node.args if _is_broad(a)
            ]
    return findings(path, found)


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(_is_broad(each) for each in caught.elts)
    return caught is None or ast.unparse(caught).split(".")[-1] in ("Exception", "BaseException")


def _re_raises(handler: ast.ExceptHandler) -> bool:
    leaves = ast.Return | ast.Break | ast.Continue
    return _ends_in_raise(handler.body) and not any(
        isinstance(node, leaves) for node in ast.walk(handler)
    )


def _ends_in_raise(body: list[ast.stmt]) -> bool:
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return _ends_in_raise(last.body) and _ends_in_raise(last.orelse)
    return isinstance(last, ast.Raise)


@rule("no global statement")
def globals_(path: str, source: str) -> list[str]:
    return findings(
        path,
        [
            (node.lineno, f"global {', '.join(node.names)}")
            for node in ast.walk(parsed(source))
            if isinstance(node, ast.Global)
        ],
    )


@rule("nothing writes to the environment")
def environment(path: str, source: str) -> list[str]:
    known = names(path, source)
    writers = {"putenv", "unsetenv"}
    methods = {"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"}
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call):
            owner, _, name = dotted(node.func, known).rpartition(".")
            if (owner == "os" and name in writers) or (
                owner in ("os.environ", "os.environb") and name in methods
            ):
                found.append((node.lineno, f"calls {owner}.{name}"))
        for target in _written(node):
            while isinstance(target, ast.Subscript):
                target = target.value
            if dotted(target, known) in ("os.environ", "os.environb"):
                found.append((target.lineno, "writes to os.environ"))
    return findings(path, found)


def _written(node: ast.AST) -> list[ast.expr]:
    """The places that an assignment or a deletion writes to."""
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars:
        targets = [node.optional_vars]
    else:
        return []
    flat: list[ast.expr] = []
    for target in targets:
        flat += target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    return flat


@rule("nothing patches what it imported")
def patches(path: str, source: str) -> list[str]:
    """Assignments, setattr and delattr that reach into an imported name, also by subscript."""
    every = names(path, source)
    found = []
    for node, bound in scoped(parsed(source)):
        known = {name: binds for name, binds in every.items() if name not in bound}
        for target in _written(node):
            inner = target
            while isinstance(inner, ast.Subscript):
                inner = inner.value
            inside = inner is not target or isinstance(inner, ast.Attribute)
            what = dotted(inner, known)
            if inside and what and not what.startswith("os.environ"):
                found.append((target.lineno, f"writes into {what}"))
        if isinstance(node, ast.Call) and called(node) in ("setattr", "delattr"):
            what = dotted(node.args[0], known) if node.args else ""
            if what:
                found.append((node.lineno, f"{called(node)} on {what}"))
    return findings(path, found)


@rule("nothing reads or writes pickles")
def pickles(path: str, source: str) -> list[str]:
    modules = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    found = [
        (i.line, f"imports {i.target}")
        for i in imports(path, source)
        if i.target.split(".")[0] in modules or i.target in ("torch.load", "torch.save")
    ]
    known = names(path, source)
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Attribute) and dotted(node, known) in ("torch.load", "torch.save"):
            found.append((node.lineno, f"uses {dotted(node, known)}; tensors live in safetensors"))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append((node.value.lineno, "passes allow_pickle"))
    return findings(path, found)


def registrations(path: str, source: str) -> list[tuple[int, str]]:
    """Calls that enter something in a table of torch, of transformers or of anyone else."""
    known = names(path, source)
    op_methods = {
        "custom_op", "triton_op", "register_fake", "register_autograd", "register_kernel",
        "register_vmap", "register_autocast", "register_torch_dispatch",
    }  # fmt: skip
    makers = {"torch.library.Library", "torch.library.define", "torch.library.impl"}
    found = []
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.Call):
            continue
        what, name = dotted(node.func, known), called(node)
        if what in makers or name in op_methods:
            found.append((node.lineno, OPS))
        elif name in ("register_quantizer", "register_quantization_config"):
            found.append((node.lineno, METHOD))
        elif name.startswith("register") and what and not what.startswith("ongrid."):
            found.append((node.lineno, f"{what}(...)"))
    return found


@rule("registrations stand where the list says")
def registrations_elsewhere(path: str, source: str) -> list[str]:
    return findings(
        path,
        [
            (line, f"registers {kind}, which belongs {REGISTRATIONS.get(kind, 'nowhere')}")
            for line, kind in registrations(path, source)
            if not path.startswith(REGISTRATIONS.get(kind, "nowhere"))
        ],
    )
