"""The pages of docs/ fit the code and each other."""

import json
import re
from pathlib import Path

import pytest
from helpers import run_tool
from mkdocs.commands import build
from mkdocs.config import load_config

ROOT = Path(__file__).resolve().parents[1]


def test_messages_of_the_troubleshooting_page_are_printed_by_the_code():
    quoted = re.findall(r'^\| `([^`]+)` \|', (ROOT / 'docs/troubleshooting.md').read_text(), flags=re.M)
    sources = [*(ROOT / 'beit_mm').rglob('*.py'), *(ROOT / 'tools').rglob('*.py'), *(ROOT / 'tools').glob('*.sh')]
    text = ' '.join(file.read_text() for file in sources if '.mim' not in file.parts)
    joined = re.sub(r"['\"]\s+f?['\"]", '', text)  # literals that go on in the next line
    joined = re.sub(r'\$?\{[^{}]*\}|\$\w+', '', joined)  # what is put into them
    own = [message for message in quoted if not message.startswith('torch.')]
    assert len(own) > 10
    squeezed = ' '.join(joined.split())
    assert not [message for message in own if message not in squeezed]


def test_the_site_builds_and_all_its_links_lead_somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    build.build(load_config(str(ROOT / 'mkdocs.yml'), site_dir=str(tmp_path / 'site'), strict=True))
    start = (tmp_path / 'site/index.html').read_text()
    assert 'href="reliability/"' in start and 'href="docs/' not in start


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_tool('demo/draw_images.py', 'images', '--num-train', '300', '--num-val', '60', '--size', '64')
    monkeypatch.setenv('IMAGES', 'images')
    monkeypatch.setenv('MINUTES', '1')
    cells = json.loads((ROOT / 'docs/tutorial.ipynb').read_text())['cells']
    names: dict = {}
    for cell in cells:
        if cell['cell_type'] == 'code':
            exec(''.join(cell['source']), names)
    assert names['features'].shape[0] == 60 and len(names['nearest']) == 5
    for file in ('run/report.md', 'run/reconstruction.png', 'attention.png', 'run_ft/finetuned.pth'):
        assert Path(file).stat().st_size > 500
