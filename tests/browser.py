"""Drives a headless Chromium without a network, by its protocol on two pipes."""

import base64
import io
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

CHROMIUM = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
HEADLESS = (
    '--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking '
    '--disable-component-update --disable-sync --hide-scrollbars '
    '--proxy-server=127.0.0.1:9 --proxy-bypass-list=<-loopback>'  # where nothing answers: no network
).split()


class Browser:
    """One tab that shows a page; `errors` are exceptions that its scripts did not catch."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.errors: list[str] = []
        ours, theirs = os.pipe(), os.pipe()
        command = [CHROMIUM, *HEADLESS, '--remote-debugging-pipe', f'--user-data-dir={folder}', 'about:blank']
        shell = ['bash', '-c', f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}', 'bash', *command]
        silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(shell, pass_fds=(ours[0], theirs[1]), **silent)
        os.close(ours[0])
        os.close(theirs[1])
        self.to, self.came, self.number, self.session = os.fdopen(ours[1], 'wb'), os.fdopen(theirs[0], 'rb'), 0, None
        target = self.send('Target.createTarget', url='about:blank')['targetId']
        self.session = self.send('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'DOM'):  # Network would send each data URL as an event
            self.send(f'{domain}.enable')
        self.send('Page.navigate', url=page.resolve().as_uri())

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and waits for its answer."""
        self.number += 1
        message: dict[str, Any] = dict(id=self.number, method=method, params=parameters)
        if self.session:
            message['sessionId'] = self.session
        self.to.write(json.dumps(message).encode() + b'\0')
        self.to.flush()
        while True:
            found = json.loads(self.read())
            if found.get('method') == 'Runtime.exceptionThrown':
                self.errors.append(json.dumps(found['params']))
            if found.get('id') == self.number:
                assert 'error' not in found, found
                return found['result']

    def read(self) -> bytes:
        message = bytearray()
        while (byte := self.came.read(1)) != b'\0':
            assert byte, 'Chromium has ended'
            message += byte
        return bytes(message)

    def evaluate(self, script: str) -> Any:
        """The value of a script, or of the promise that it gives."""
        found = self.send('Runtime.evaluate', expression=script, awaitPromise=True, returnByValue=True)
        assert 'exceptionDetails' not in found, found
        return found['result'].get('value')

    def wait_for(self, condition: str) -> None:
        look = f'const look = () => {condition} ? done() : setTimeout(look, 50)'
        self.evaluate(f'new Promise(done => {{ {look}; look() }})')

    def choose_files(self, selector: str, files: Sequence[Path]) -> None:
        root = self.send('DOM.getDocument')['root']['nodeId']
        node = self.send('DOM.querySelector', nodeId=root, selector=selector)['nodeId']
        self.send('DOM.setFileInputFiles', nodeId=node, files=[str(file.resolve()) for file in files])

    def bytes_of(self, link: str) -> bytes:
        """What a link of the page saves."""
        script = f"""fetch({link}).then(found => found.blob()).then(blob => new Promise(done => {{
            const reader = new FileReader()
            reader.onload = () => done(reader.result)
            reader.readAsDataURL(blob)
        }}))"""
        return base64.b64decode(self.evaluate(script).split(',')[1])

    def screenshot(self, width: int) -> Image.Image:
        """The whole page in a window of a width."""
        window = dict(width=width, height=800, deviceScaleFactor=1, mobile=width < 800)
        self.send('Emulation.setDeviceMetricsOverride', **window)
        data = self.send('Page.captureScreenshot', captureBeyondViewport=True)['data']
        return Image.open(io.BytesIO(base64.b64decode(data)))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.to.close()
        self.came.close()
