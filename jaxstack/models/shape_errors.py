"""Explains errors about shapes that JAX raises while it traces a model: the code, the layer, and the logical axes.

The explanation is read from the traceback: its frames contain the arrays, the parameters and the context. So a model's
code has nothing to do for it, and a step that runs costs nothing.
"""

import ast
import linecache
import math
import re
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax

from jaxstack.common.counts import plural
from jaxstack.common.errors import ConfigError
from jaxstack.common.files import short_path
from jaxstack.config import Config, ModelConfig
from jaxstack.models.blocks import Stack
from jaxstack.models.context import Context
from jaxstack.models.family import FAMILIES, Family
from jaxstack.models.params import Param, flat_spec
from jaxstack.sharding.rules import MeshAxes, names_of

VARIABLE = "JAX_TRACEBACK_FILTERING"
"""JAX's environment variable that decides what a traceback shows. Where it is set, commands show the traceback."""

MOST_OPERANDS = 2
"""Maximum number of operands that are described."""

_PACKAGE = str(Path(__file__).parents[1])
_HELPERS = tuple(f"{_PACKAGE}/{room}/" for room in ("common", "debug", "kernels", "pipeline", "sharding"))
_JAX = str(Path(jax.__file__).parent)
_LIBRARIES = (_JAX, "<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_FILTERED = "JAX has removed its internal frames"
_SHAPES = re.compile(r"shape|dimension|dims|ax[ei]s|rank|broadcast|contract|concat|size|traced|dtype|indices", re.I)
_PYTHON = re.compile(r"\(\) (takes|missing|got)|object (is not|has no|does not)|unsupported operand")
_LEVELS = 8
"""Levels of a tree of parameters or modules that are searched."""


class Step(NamedTuple):
    """A frame of a traceback.

    Attributes:
      frame: the frame, with its variables.
      line: number of the line that failed.
      instruction: index of the instruction that failed, in bytes.
    """

    frame: FrameType
    line: int
    instruction: int

    @property
    def file(self) -> str:
        """Path of its file."""
        return self.frame.f_code.co_filename

    @property
    def is_own(self) -> bool:
        """Whether it is neither of a library nor of Python."""
        return self.file.startswith(_PACKAGE) or not self.file.startswith(_LIBRARIES)

    @property
    def is_model(self) -> bool:
        """Whether it can be the model's code, and not code that every model calls."""
        return self.is_own and not self.file.startswith(_HELPERS) and self.file != __file__

    @property
    def raises(self) -> bool:
        """Whether the line that failed is a `raise` statement."""
        return linecache.getline(self.file, self.line).lstrip().startswith("raise")

    def text(self) -> str:
        """Returns place and function."""
        return f"{short_path(self.file)}:{self.line} in {self.frame.f_code.co_name}"


def explain(error: BaseException) -> list[str]:
    """Returns what went wrong, where, in which layer, with which operands, and what to do, in three to six lines.

    The list is empty for errors of other kinds. It explains errors that JAX raises while it traces: wrong shapes, wrong
    dtypes, and values that do not exist yet.
    """
    steps = [*_steps(error)]
    try:
        return _lines(error, steps) if _is_about_shapes(error, steps) else []
    except Exception:  # whatever is found in the variables of frames, JAX's own error must not be lost
        return []


def _lines(error: BaseException, steps: list[Step]) -> list[str]:
    places = [i for i, step in enumerate(steps) if step.is_model]
    if not places:
        return []
    last = places[-1]
    code = [steps[i] for i in places[-2:] if steps[i].file == steps[last].file or i == last]
    found = _Found(steps)
    lines = [_what(error), f"code     {', '.join(step.text() for step in code)}"]
    if inner := [step for step in steps[last + 1 :] if step.is_own and step.file != __file__]:
        lines[-1] += f", which calls {inner[-1].text()}"
    if layer := found.layer(steps[last]):
        lines.append(f"layer    {layer}")
    operands = _operands(steps[last])
    lines += [found.describe(name, value) for name, value in [*operands.items()][:MOST_OPERANDS]]
    if (more := len(operands) - MOST_OPERANDS) > 0:
        lines[-1] += f"; and {more} more"
    return [*lines, f"fix      {_advice(error, found.ctx)} {VARIABLE}=off shows all frames."]


@contextmanager
def explained() -> Iterator[None]:
    """Adds the lines of `explain` to errors about shapes as a note, for programs that call a model themselves.

    The error is raised as it is. Use it around a step: `with explained(): state = train_step(state, batch)`.
    """
    try:
        yield
    except (TypeError, ValueError, IndexError) as error:
        noted = any(note.startswith("code ") for note in getattr(error, "__notes__", ()))
        if not noted and (lines := explain(error)):
            error.add_note("\n".join(lines[1:]))
        raise


def _steps(error: BaseException) -> Iterator[Step]:
    """Yields the frames of a traceback, outermost first."""
    place = error.__traceback__
    while place is not None:
        yield Step(place.tb_frame, place.tb_lineno, place.tb_lasti)
        place = place.tb_next


def _is_about_shapes(error: BaseException, steps: list[Step]) -> bool:
    if not steps or isinstance(error, ConfigError) or not isinstance(error, TypeError | ValueError | IndexError):
        return False
    if not _SHAPES.search(str(error)) or _PYTHON.search(str(error)):
        return False
    last = steps[-1]
    if last.file.startswith((_JAX, *_HELPERS)):
        return True
    if last.is_own and last.raises:  # the code's own error, which says what it is about
        return False
    return any(_FILTERED in note for note in getattr(error, "__notes__", ()))


def _what(error: BaseException) -> str:
    """Returns the first line of JAX's message, and what it announces."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def _advice(error: BaseException, ctx: Context) -> str:
    if isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError):
        return "A value is not there while the step is compiled; use jnp.where or jax.lax.cond."
    if "carry" in str(error):
        return "A layer must return the residual stream with the shape and dtype that it reads."
    of = "the whole mesh" if ctx.layout.partitioner == "auto" else "one device"
    return f"Make sizes equal where arrays are contracted, added or joined; those above are of {of}."


def _expression(step: Step) -> ast.AST | None:
    """Returns the part of a line that failed."""
    positions = [*step.frame.f_code.co_positions()]
    line, end, first, past = positions[step.instruction // 2]
    if line is None or end is None or first is None or past is None:
        return None
    rows = [linecache.getline(step.file, number).encode() for number in range(line, end + 1)]
    rows[-1] = rows[-1][:past]
    rows[0] = rows[0][first:]
    try:
        return ast.parse(b"(" + b"".join(rows) + b")", mode="eval").body
    except SyntaxError:  # a part that is not an expression of its own
        return None


def _operands(step: Step) -> dict[str, Any]:
    """Returns the arrays that the part of a line that failed reads, by the text that names them.

    The arguments of calls within it come last, and before them the arrays of modules, the largest first.
    """
    found: list[tuple[float, str, Any]] = []
    variables = {**step.frame.f_globals, **step.frame.f_locals}
    expression = _expression(step)

    def visit(node: ast.AST, calls: int) -> None:
        value, text = _value(node, variables), ast.unparse(node)
        if _is_array(value):
            found.append((calls, text, value))
        elif isinstance(value, tuple | list) and value and all(map(_is_array, value)):
            found.extend((calls, f"{text}[{i}]", one) for i, one in enumerate(value))
        elif _is_module(value) and (inner := [(name, v) for name, v in _children(value) if _is_array(v)]):
            inner.sort(key=lambda one: -math.prod(one[1].shape))
            found.extend((calls + 0.5, f"{text}.{name}", one) for name, one in inner)
        else:
            for child in ast.iter_child_nodes(node):
                visit(child, calls + (isinstance(node, ast.Call) and node is not expression))

    if expression is not None:
        visit(expression, 0)
    return {text: value for _, text, value in sorted(found, key=lambda one: one[0])}


def _value(node: ast.AST, variables: Mapping[str, Any]) -> Any:
    """Returns the value of a name, an attribute or an item, or None; nothing is computed."""
    try:
        if isinstance(node, ast.Name):
            return variables.get(node.id)
        if isinstance(node, ast.Attribute):
            base = _value(node.value, variables)
            return None if _is_array(base) and not hasattr(base, "get_metadata") else vars(base).get(node.attr)
        if isinstance(node, ast.Subscript):
            base, key = _value(node.value, variables), node.slice
            item: Any = key.value if isinstance(key, ast.Constant) else _value(key, variables)
            if hasattr(base, "get_metadata"):  # a variable of nnx, which `[...]` reads
                return base
            if isinstance(base, dict | list | tuple):
                return base[item]
    except (TypeError, KeyError, IndexError):
        pass
    return None


def _is_array(value: Any) -> bool:
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def _is_module(value: Any) -> bool:
    """Returns whether a value is a module of nnx."""
    return any(kind.__module__.startswith("flax.nnx") for kind in type(value).__mro__) and not _is_array(value)


def _children(node: Any) -> list[tuple[str, Any]]:
    """Returns what a dict, a list or a module of nnx contains, with its names."""
    if isinstance(node, dict):
        return [(name, value) for name, value in node.items() if isinstance(name, str)]
    if isinstance(node, list | tuple):
        return [(str(i), value) for i, value in enumerate(node)]
    return [(name, value) for name, value in vars(node).items() if name[0] != "_"] if _is_module(node) else []


def _raw(value: Any) -> Any:
    """Returns the array of a variable of nnx; anything else as it is."""
    return value.get_raw_value() if hasattr(value, "get_raw_value") else value


def _path_in(tree: Any, wanted: Any, levels: int = _LEVELS) -> str | None:
    """Returns the path of an object in a tree, or None."""
    for name, child in _children(tree):
        if _raw(child) is _raw(wanted):
            return name
        if levels and (inner := _path_in(child, wanted, levels - 1)) is not None:
            return f"{name}/{inner}"
    return None


def _row_lengths(variables: list[Any], name: str) -> tuple[int, ...]:
    """Returns the length of a batch's rows; `name` is an array [B, S] that every batch has.

    The outermost batch, which is the last one, has whole rows, also where each device has a part of them.
    """
    shapes = [v[name].shape for v in variables if isinstance(v, dict) and hasattr(v.get(name), "shape")]
    return shapes[-1][1:2] if shapes else ()


class _Found:
    """What the variables of a traceback's frames say about a model, its context and its parameters."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = [step for step in steps if step.is_own]
        self._frames = steps
        every = [value for step in reversed(self._steps) for value in step.frame.f_locals.values()]
        configs = (v.model if isinstance(v, Config) else v for v in every if isinstance(v, Config | ModelConfig))
        self.cfg: ModelConfig | None = next(configs, None)
        self.ctx = next((v for v in every if isinstance(v, Context)), Context())
        self.stack = next((v for v in every if isinstance(v, Stack)), None)
        self.lengths: tuple[int, ...] = ()
        self.declared: dict[str, Param] = {}
        self.name = "" if self.stack is None else self.stack.name
        family = next((v for v in every if isinstance(v, Family)), None)
        if family is None and self.cfg is not None:
            family = FAMILIES.get(self.cfg.family)
        if self.cfg is not None and family is not None:
            self.declared = flat_spec(family.spec(self.cfg))
            self.lengths = _row_lengths(every, self.cfg.objective.terms[0].weights)

    def path(self, wanted: Any) -> str:
        """Returns the path of an array, a group or a module in the outermost tree that has it, or ""."""
        for step in self._steps:
            for name, variable in step.frame.f_locals.items():
                tree = variable.shown if isinstance(variable, Context) else variable
                if (path := _path_in(tree, wanted)) is None:
                    continue
                if self.declared:  # lists of blocks are within the steps of a loop
                    path = "/".join(part for part in path.split("/") if not part.isdigit())
                if name in ("batch", "micro"):
                    return f"batch/{path}"
                return self._declared_path(path)
        return ""

    def _declared_path(self, path: str) -> str:
        """Returns the path in the model of a path that may begin within a stack, or within a group of a layer."""
        if not self.name or any(f"{one}/".startswith(f"{path}/") for one in self.declared):
            return path
        ends = [one for one in self.declared if one.startswith(f"{self.name}/") and one.endswith(f"/{path}")]
        return ends[0] if len(ends) == 1 else f"{self.name}/{path}"

    def _group(self, tree: dict[str, Any]) -> str:
        """Returns the path of a group of parameters, or "" for another dict."""
        leaf = next((value for value in tree.values() if _is_array(value)), None)
        return self.path(tree) or ("" if leaf is None else self.path(leaf).rpartition("/")[0])

    def layer(self, step: Step) -> str:
        """Returns in words the layer in which a frame is."""
        owners = (s.frame.f_locals.get("self") for s in reversed(self._frames) if not s.file.startswith(_JAX))
        for owner in owners:
            if isinstance(path := getattr(owner, "path", None), tuple):  # a module of linen
                return f"{'/'.join(map(str, path))}, {type(owner).__name__}"
            if _is_module(owner):
                return f"{self.path(owner) or 'the model'}, {type(owner).__name__}"
        groups = (value for value in step.frame.f_locals.values() if isinstance(value, dict))
        path = next((path for group in groups if (path := self._group(group))), "")
        if self.stack is None or not self.name:
            return path
        kind = f"in each of {plural(self.stack.depth, 'layer')} of the {self.cfg.family if self.cfg else ''}"
        if self.ctx.layout.pipeline is not None:
            kind += f", on {plural(self.ctx.layout.pipeline.schedule.stages, 'stage')}"
        return f"{path or self.name}, {kind}"

    def describe(self, name: str, value: Any) -> str:
        """Returns one line about an operand: dtype, shape, path, logical axes and how the mesh splits them."""
        path, shape = self.path(value), tuple(value.shape)
        kind = f"{name:<8} {value.dtype}[{','.join(map(str, shape))}]"
        named = value.get_metadata().get("out_sharding") if hasattr(value, "get_metadata") else None
        if param := self.declared.get(path):
            stacked = param.stacked and len(shape) != len(param.shape)
            axes = self._of_parameter(param.axes[stacked:], param.shape[stacked:], shape)
        elif named:
            axes = ", ".join(f"{axis} {size}" for axis, size in zip(named, shape, strict=False))
        else:
            axes = self._of_activation(shape)
        return f"{kind}  {path}: {axes}" if path and axes else f"{kind}  {path or axes}".rstrip()

    def _of_parameter(self, axes: tuple[str, ...], declared: tuple[int, ...], shape: tuple[int, ...]) -> str:
        if len(shape) != len(declared):
            return "declared " + ", ".join(f"{axis} {size}" for axis, size in zip(axes, declared, strict=True))
        texts = []
        for axis, whole, size in zip(axes, declared, shape, strict=True):
            split, count = self._split(self.ctx.layout.rules.parameters.get(axis))
            if size == whole:
                texts.append(f"{axis} {size}")
            elif size * count == whole:
                texts.append(f"{axis} {size} ({whole} over {split})")
            else:
                texts.append(f"{axis} {size}, declared {whole}{f' over {split}' * (count > 1)}")
        return ", ".join(texts)

    def _of_activation(self, shape: tuple[int, ...]) -> str:
        """Returns the axes of an array that is not declared, found by their sizes."""
        cfg = self.cfg
        if cfg is None or len(shape) < 2:
            return ""
        known = {"embed": cfg.d_model, "mlp": cfg.ff_width, "heads": cfg.num_heads, "kv_heads": cfg.kv_heads}
        known |= {"head_dim": cfg.head_width, "vocab": cfg.vocab}
        texts = []
        for i, size in enumerate(shape):
            names = ["batch"] if i == 0 and len(shape) > 2 else ["sequence"] if i == 1 and len(shape) > 2 else [*known]
            for axis in names:
                split, count = self._split(self.ctx.layout.rules.activations.get(axis))
                if axis == "sequence" and size not in self.lengths:  # the residual stream may be split further
                    split, count = self._split(self.ctx.layout.rules.activations.get("residual"))
                    count = count if size * count in self.lengths else 1
                if axis not in known:
                    texts.append(f"{axis} {size}" + f" (over {split})" * (count > 1))
                elif size == known[axis]:
                    texts.append(f"{axis} {size}")
                elif count > 1 and size * count == known[axis]:
                    texts.append(f"{axis} {size} ({known[axis]} over {split})")
                else:
                    continue
                break
            else:
                texts.append(f"? {size}")
        return ", ".join(texts)

    def _split(self, entry: MeshAxes) -> tuple[str, int]:
        """Returns the mesh axes that split a logical axis, with their sizes, and the number of parts."""
        if self.ctx.layout.mesh is None:
            return "", 1
        sizes = {
            name: self.ctx.layout.mesh.shape[name] for name in names_of(entry) if self.ctx.layout.mesh.shape[name] > 1
        }
        return ", ".join(f"{name}={size}" for name, size in sizes.items()), math.prod(sizes.values())
