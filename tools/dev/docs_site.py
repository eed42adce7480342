"""What MkDocs cannot know of this repository: pages that lie outside of docs/, and links between all of them.

python -m mkdocs build --strict
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
FROM_OUTSIDE = {  # page -> file
    'index.md': 'README.md',
    'contributing.md': 'CONTRIBUTING.md',
    'changelog.md': 'CHANGELOG.md',
    **{
        f'configs/{file.parent.name}.md': f'configs/{file.parent.name}/README.md'
        for file in ROOT.glob('configs/*/*.md')
    },
}
LINK = re.compile(r'\[([^\[\]]*)\]\(([^()\s]+)\)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for page, file in FROM_OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return LINK.sub(lambda link: rewrite(link, page.file.src_uri), markdown)


def rewrite(link: re.Match, page: str) -> str:
    """A link as the site has it; of what is not on the site, only its text.

    Args:
        link: `[text](target)`, the target relative to the file in the repository.
        page: where it stands, as MkDocs names pages.

    Raises:
        ValueError: the repository has no such file.
    """
    text, target = link.groups()
    path, mark, anchor = target.partition('#')
    if '://' in target or not path:
        return link[0]
    source = FROM_OUTSIDE.get(page, f'docs/{page}')
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if not (ROOT / file).exists():
        raise ValueError(f'{source} links to {target}, which is not there')
    pages = {file: page for page, file in FROM_OUTSIDE.items()}
    if file not in pages and not file.startswith('docs/'):
        return text
    there = pages.get(file) or file.removeprefix('docs/')
    return f'[{text}]({posixpath.relpath(there, posixpath.dirname(page) or ".")}{mark}{anchor})'
