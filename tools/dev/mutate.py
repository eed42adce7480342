"""Changes files of the package in one place at a time, and names the changes that no test notices.

    python tools/dev/mutate.py beit_mm/files.py beit_mm/models/vit.py --tests tests/models tests/parity --count 20

Works in a copy of the current folder. A first run with coverage, kept beside --out, finds which tests execute which
line in pytest's own process. For a change these run, the quickest first, in a fork of a process that has imported the
large libraries. What stands in --out, as lines of JSON, is not tried again.

No library replaces it: mutmut (3.8) runs only the first test of a file for what a fixture of that file calls, changes
no decorated function, and its wrappers break torch.compile; cosmic-ray (8.7) starts Python for every change, which
takes five times as long.
"""

import argparse
import ast
import copy
import importlib
import json
import os
import random
import re
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LARGE = 'torch torchvision mmengine.runner mmcv mmpretrain.apis mmseg.apis timm transformers.models.beit.modeling_beit'
PAIRS = 'Lt GtE, Gt LtE, Eq NotEq, Is IsNot, In NotIn, Add Sub, Mult Div, And Or'  # codespell:ignore notin
FLIPS = {getattr(ast, a): getattr(ast, b) for pair in PAIRS.split(', ') for a, b in (pair.split(), pair.split()[::-1])}
NOT_COPIED = ('*.copy', '.git', '.venv*', '__pycache__', '.*_cache', 'work_dirs', 'data', 'build', 'dist')
FAILED = re.compile(r'^(?:FAILED|ERROR) (.+?)(?: - .*)?$', re.M)  # as pytest's summary has them
TIMES = re.compile(r'^([\d.]+)s (?:setup|call|teardown) +(.+)$', re.M)  # the longest first


def changes(node: ast.AST, body: int = 0) -> Iterator[tuple[ast.AST, ast.AST, int]]:
    """Nodes at and below one, what may take their place, and where the body of their function begins (0: in none)."""
    if ast.unparse(node).startswith(('raise ', 'print_log(', 'if TYPE_CHECKING', "f'", 'f"')):
        return
    match node:
        case ast.Expr(ast.Call()) | ast.Assign([ast.Attribute()]) | ast.AugAssign(ast.Attribute()):
            yield node, ast.Pass(), body
        case ast.Return(value) if value and not isinstance(value, ast.Constant):
            yield node, ast.Return(ast.Constant(None)), body
        case ast.Constant(int(value) | float(value)):
            other = [not value] if isinstance(value, bool) else {value + 1, -value} - {value}
            yield from ((node, ast.Constant(new), body) for new in other)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, operand, body
        case ast.If() | ast.IfExp() | ast.While() if not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
            yield node.test, ast.UnaryOp(ast.Not(), node.test), body
    *others, operator = getattr(node, 'ops', [getattr(node, 'op', None)])
    if type(operator) in FLIPS and not others:
        new, operator = copy.copy(node), FLIPS[type(operator)]()
        new.op, new.ops = operator, [operator]
        yield node, new, body
    for name, value in ast.iter_fields(node):
        start = node.body[0].lineno if isinstance(node, ast.FunctionDef) and name == 'body' else body
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ('annotation', 'returns'):
                yield from changes(child, start)


def replaced(source: bytes, old: ast.AST, new: ast.AST) -> bytes:
    lines = source.splitlines(keepends=True)
    before, after = lines[old.lineno - 1][: old.col_offset], lines[old.end_lineno - 1][old.end_col_offset :]
    text = (ast.unparse(new) if isinstance(new, ast.stmt) else f'({ast.unparse(new)})').encode()
    return b''.join([*lines[: old.lineno - 1], before, text, after, *lines[old.end_lineno :]])


def tests_of(contexts: dict[int, list[str]], line: int, body: int, seconds: dict[str, float]) -> list[str]:
    """Tests that execute a line, the quickest first: of what a fixture does all of its file, of an import all."""
    found = contexts.get(max((number for number in contexts if body <= number <= line), default=0), [])
    found = set().union(*contexts.values()) if not body or '' in found else found
    names = {name.split('::')[0] if name.endswith('|setup') else name.split('|')[0] for name in found}
    return sorted((test for test in seconds if {test, test.split('::')[0]} & names), key=seconds.__getitem__)


def run_tests(folder: Path, log: Path, arguments: list[str], limit: int = 36_000) -> tuple[int, str]:
    """Runs pytest in a fork, with so many seconds of CPU time: its exit code, or minus a signal; what it printed."""
    import pytest

    if (process := os.fork()) == 0:
        code = 1
        try:
            os.chdir(folder)
            os.environ.update(PYTHONPATH=str(folder), PYTHONDONTWRITEBYTECODE='1')
            os.environ['COVERAGE_FILE'] = str(log.with_suffix('.coverage'))
            sys.stdout = sys.stderr = log.open('w', buffering=1)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            common = f'-p no:cacheprovider --basetemp={folder}.tmp -rfE --durations=0 --durations-min=0'
            code = pytest.main([*common.split(), *arguments])
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), log.read_text(errors='replace')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('files', nargs='+', type=Path, help='to be changed, relative to the current folder')
    parser.add_argument('--tests', nargs='+', required=True, help='files or folders of tests')
    parser.add_argument('--count', type=int, default=20, help='of changes, as many of each file')
    parser.add_argument('--seed', type=int, default=0, help='of their choice')
    parser.add_argument('--minutes', type=float, default=600, help='begin no test of a change later')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/mutants.jsonl'), help='one for each set of --tests')
    parser.add_argument('--preload', nargs='*', default=LARGE.split(), help='modules that are imported once')
    args = parser.parse_args()
    from coverage import CoverageData

    end, out, folder = time.monotonic() + 60 * args.minutes, args.out.resolve(), args.out.resolve().with_suffix('.copy')
    out.parent.mkdir(parents=True, exist_ok=True)
    results = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for module in args.preload:
        importlib.import_module(module)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree('.', folder, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))

    cover, log = out.with_suffix('.coverage'), out.with_suffix('.log')
    if not cover.exists() or cover.stat().st_mtime < max(path.stat().st_mtime for path in folder.rglob('*.py')):
        sources = {f'--cov={file.parent}' for file in args.files}
        run_tests(folder, log, [*args.tests, *sources, '--cov-context=test', '--cov-report='])
    failed = FAILED.findall(log.read_text())
    seconds = {test: float(time) for time, test in TIMES.findall(log.read_text())[::-1] if test not in failed}
    data = CoverageData(str(cover))
    data.read()

    for file in args.files:
        source, contexts = file.read_bytes(), data.contexts_by_lineno(str(folder / file))
        found = list(changes(ast.parse(source)))
        random.Random(f'{args.seed} {file}').shuffle(found)
        for old, new, body in found[: args.count // len(args.files)]:
            change, killer = f'{file}:{old.lineno}:{old.col_offset} {ast.unparse(old)} -> {ast.unparse(new)}', None
            if change in [result['change'] for result in results] or time.monotonic() > end:
                continue
            if tests := tests_of(contexts, old.lineno, body, seconds):
                (folder / file).write_bytes(replaced(source, old, new))
                limit = 60 + int(5 * sum(seconds[test] for test in tests))
                code, text = run_tests(folder, out.with_suffix('.last.log'), ['-x', *tests], limit)
                killer = (FAILED.findall(text) or [f'exit code {code}'])[0] if code else None
                shutil.copy2(file, folder / file)
            results.append(dict(change=change, killed_by=killer, tests=len(tests)))
            out.write_text(''.join(json.dumps(result) + '\n' for result in results))
            print(f'{killer or "SURVIVED"}: {change}', flush=True)
    shutil.rmtree(folder)
    print(f'{sum(result["killed_by"] is not None for result in results)} of {len(results)} changes were noticed')


if __name__ == '__main__':
    main()
