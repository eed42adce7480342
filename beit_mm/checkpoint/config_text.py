"""Reads the config that mmengine writes into checkpoints, without running it.

It is Python text, which mmengine's own Config would execute.
"""
import ast
from typing import Any

from beit_mm.checkpoint.errors import CheckpointError


def read_config_text(text: str) -> dict[str, Any]:
    """Values of a config that consists of assignments of plain values and `dict(...)`.

    Args:
        text: `Config.pretty_text`, `meta['cfg']` of a checkpoint.

    Raises:
        CheckpointError: it holds anything else; says what and in which line.
    """
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f'The config in the checkpoint is no Python text ({error}).') from None
    values = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = _value(value)
            case _:
                raise _refusal(statement)
    return values


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand) if isinstance(number := _value(operand), (int, float)):
            return -number
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Set(elts=[_, *_] as items) if all(isinstance(item, ast.Constant) for item in items):
            return {item.value for item in items}
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {key.value: _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Call(func=ast.Name(id='dict'), args=[], keywords=keywords) if all(k.arg for k in keywords):
            return {keyword.arg: _value(keyword.value) for keyword in keywords}
        case ast.Call(func=ast.Name(id='dict'), args=[ast.Dict() as inner], keywords=[]):  # keys that are no names
            return _value(inner)
    raise _refusal(node)


def _refusal(node: ast.AST) -> CheckpointError:
    return CheckpointError(f'The config in the checkpoint is refused, nothing in it was run: line {node.lineno} is '
                           f'more than a plain value ({ast.unparse(node):.60}).')
