"""Ten kinds of objects for the demo images, each given by formulas for outline, relief and colours.

An object is painted on coordinates u (right) and v (down), which reach a little beyond -1 and 1. A painter returns
(inside, normal, color): `inside` (H, W) is about the distance to the outline, positive inside it; `normal` (3, H, W)
points right, down and towards the viewer; `color` (H, W, 3) is 0 to 1. Random numbers vary shape, colours and pattern.
"""

import colorsys
from collections.abc import Callable

import numpy as np

Surface = tuple[np.ndarray, np.ndarray, np.ndarray]
Painter = Callable[[np.ndarray, np.ndarray, np.random.Generator], Surface]


def fractal_noise(height: int, width: int, slope: float, rng: np.random.Generator) -> np.ndarray:
    """Noise with amplitude 1 / frequency**slope, mean 0 and deviation 1; a slope of 1 to 1.5 looks natural."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    white = rng.standard_normal((height, width // 2 + 1, 2)).astype(np.float32)
    noise = np.fft.irfft2((white[..., 0] + 1j * white[..., 1]) / frequency**slope, (height, width))
    noise -= noise.mean()
    return (noise / (noise.std() + 1e-9)).astype(np.float32)


def hsv(hue: float, saturation: float, value: float) -> np.ndarray:
    return np.array(colorsys.hsv_to_rgb(hue % 1, saturation, value), np.float32)


def mix(weight: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Blends two colours by a weight (H, W), 0 to 1: (H, W, 3)."""
    weight = np.clip(weight, 0, 1)[..., None]
    return low + weight * (high - low)


def relief(height: np.ndarray, strength: float) -> np.ndarray:
    """Normals (3, H, W) of a height field."""
    down, right = np.gradient(height)
    normal = np.stack([-strength * right, -strength * down, np.ones_like(height)])
    return normal / np.linalg.norm(normal, axis=0)


def ball(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> Surface:
    """Panels of two colours that meet at a pole in a random direction."""
    radius = np.hypot(u, v)
    normal = np.stack([u, v, np.sqrt(np.clip(1 - radius**2, 0, 1))])
    axes, _ = np.linalg.qr(rng.standard_normal((3, 3)))
    x, y, z = np.tensordot(axes, normal, 1)
    panels = np.sin(rng.integers(2, 5) * np.arctan2(x, z)) * 8
    hue = rng.random()
    color = mix(panels + 0.5, hsv(hue, 0.85, 0.85), hsv(hue + rng.uniform(0.3, 0.7), 0.3, 0.95))
    return 1 - radius, normal, mix((np.abs(y) - 0.92) * 30, color, hsv(hue, 0.2, 0.9))


def box(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> Surface:
    """A wooden crate seen from above a corner: three faces with planks."""
    turn, lift = rng.uniform(0.3, 1.2), rng.uniform(0.25, 0.45)
    right = np.array([np.cos(turn), -lift * np.sin(turn)]) * 0.8
    left = np.array([-np.sin(turn), -lift * np.cos(turn)]) * 0.8
    up = np.array([0, -rng.uniform(0.7, 1.0)])
    corner = np.array([0.1 * (np.sin(turn) - np.cos(turn)), 0.85])
    inside = np.full_like(u, -1)
    normal = np.zeros((3, *u.shape), np.float32)
    shade = np.zeros_like(u)
    faces = [(corner, right, up, (0.6, 0.1, 0.8)), (corner, left, up, (-0.6, 0.1, 0.8))]
    for origin, side, height, direction in [*faces, (corner + up, right, left, (0, -0.9, 0.4))]:
        a, b = np.tensordot(np.linalg.inv(np.stack([side, height], 1)), np.stack([u - origin[0], v - origin[1]]), 1)
        face = np.minimum(np.minimum(a, 1 - a), np.minimum(b, 1 - b)) * 0.7
        here = face > inside
        inside = np.where(here, face, inside)
        normal[:, here] = np.array(direction, np.float32)[:, None]
        planks = np.abs(np.sin(np.pi * 4 * b)) < 0.2
        shade[here] = (0.75 + 0.25 * (face > 0.07) - 0.4 * planks * (face > 0.07))[here]
    grain = 0.12 * fractal_noise(*u.shape, 1, rng)
    color = (shade + grain)[..., None] * hsv(rng.uniform(0.05, 0.12), 0.55, 0.8)
    return inside + 0.03, normal, color  # 0.03 closes the gaps between faces


def can(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> Surface:
    """A metal can with a printed label and a bright lid."""
    width, bulge = rng.uniform(0.45, 0.65), rng.uniform(0.1, 0.2)
    arc = np.sqrt(np.clip(1 - (u / width) ** 2, 0, 1))
    lid = width * (1 - np.hypot(u / width, (v + 0.8) / bulge)) * 0.5
    body = np.minimum(width - np.abs(u), np.minimum(v + 0.8, 0.8 + bulge * arc - v))
    normal = np.stack([u / width, np.zeros_like(u), arc])
    normal[:, lid > 0] = np.array([[0], [-0.8], [0.6]])
    around, up = np.arcsin(np.clip(u / width, -1, 1)), v - bulge * arc
    hue, metal = rng.random(), hsv(0.6, 0.05, 0.75)
    waves = np.sin(rng.uniform(3, 7) * around + rng.uniform(0, 6)) * 0.15
    label = mix((up - waves) * 20, hsv(hue, 0.9, 0.8), hsv(hue + 0.15, 0.5, 0.95))
    label = mix((np.abs(up - waves) - 0.05) * -40, label, np.float32(0.95))
    color = np.where((np.abs(up) < 0.6)[..., None], label, metal)
    return np.maximum(body, lid), normal, np.where((lid > 0)[..., None], metal * 1.15, color)


def cone(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> Surface:
    """A traffic cone with bright bands on a square foot."""
    half = np.clip(0.08 + rng.uniform(0.2, 0.28) * (v + 1), 0.02, None)
    foot = np.minimum(0.75 - np.abs(u), 0.12 - np.abs(v - 0.85))
    arc = np.sqrt(np.clip(1 - (u / half) ** 2, 0, 1))
    body = np.minimum(half - np.abs(u), np.minimum(v + 0.95, 0.85 - v))
    normal = np.stack([u / half, np.full_like(u, -0.25), arc])
    normal[:, foot > body] = np.array([[0.0], [-0.4], [0.9]])
    bands = np.sin((v - 0.12 * arc) * rng.uniform(6, 9) + rng.uniform(0, 6)) * 10
    hue = rng.choice([0.03, 0.05, 0.13, 0.62])
    color = mix(bands, hsv(hue, 0.9, 0.9), np.full(3, 0.92, np.float32))
    color[foot > body] = hsv(hue, 0.8, 0.5)
    return np.maximum(body, foot), normal, color


def ring(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> Surface:
    """A glazed doughnut with sprinkles, tilted."""
    v = v / rng.uniform(0.6, 1)
    radius, thick = np.hypot(u, v) + 1e-6, rng.uniform(0.26, 0.36)
    across = (radius - 0.64) / thick
    normal = np.stack([u / radius * across, v / radius * across, np.sqrt(np.clip(1 - across**2, 0, 1))])
    edge = 0.6 + 0.12 * np.sin(rng.integers(5, 9) * np.arctan2(v, u))
    glaze = hsv(*rng.choice([(0.07, 0.7, 0.35), (0.93, 0.45, 0.95), (0.12, 0.15, 0.95)]))
    color = mix((edge - np.abs(across)) * 12, hsv(0.09, 0.55, 0.75), glaze)
    sprinkles = (fractal_noise(*u.shape, 0.3, rng) > 1.9) & (np.abs(across) < 0.5)
    color[sprinkles] = hsv(rng.random(), 0.7, 0.95)
    return (1 - np.abs(across)) * thick, normal, color


def starfish(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> Surface:
    """Five rounded arms with rough, dotted skin."""
    angle = np.arctan2(v, u)
    outline = 0.62 + 0.34 * np.cos(5 * angle + 0.25 * np.sin(angle))
    inside = (outline - np.hypot(u, v)) * 0.6
    bumps = fractal_noise(*u.shape, 0.6, rng)
    normal = relief(np.sqrt(np.clip(inside, 0, 1)) + 0.02 * bumps, 0.45 * len(u) / 2)
    hue = rng.choice([0.03, 0.07, 0.85, 0.6])
    return inside, normal, mix(0.5 + 0.3 * bumps, hsv(hue, 0.85, 0.6), hsv(hue + 0.04, 0.6, 0.95))


def tree(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> Surface:
    """A crown of leaf clusters on a barked trunk."""
    leaves = fractal_noise(*u.shape, 0.9, rng)
    crown = np.full_like(u, -1)
    for _ in range(7):
        x, y = rng.uniform(-0.45, 0.45), rng.uniform(-0.6, 0.0)
        crown = np.maximum(crown, rng.uniform(0.32, 0.45) - np.hypot(u - x, v - y))
    crown = crown + 0.05 * leaves
    trunk = np.minimum(0.1 + 0.04 * v - np.abs(u + 0.03 * np.sin(4 * v)), np.minimum(v + 0.2, 1 - v))
    hue = rng.choice([0.28, 0.33, 0.25, 0.1, 0.05])
    green = mix(0.45 + 0.35 * leaves, hsv(hue, 0.8, 0.2), hsv(hue - 0.05, 0.75, 0.75))
    bark = mix(0.5 + 0.4 * np.sin(60 * u + 2 * leaves), hsv(0.07, 0.6, 0.2), hsv(0.08, 0.4, 0.5))
    normal = relief(np.clip(crown, 0, 1) + 0.04 * leaves, len(u) / 3)
    return np.maximum(crown, trunk), normal, np.where((crown > 0)[..., None], green, bark)


def house(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> Surface:
    """Brick or plaster walls, a tiled gable roof, windows and a door."""
    eaves, slope = rng.uniform(-0.3, 0.0), rng.uniform(0.7, 1.1)
    wall = np.minimum(0.8 - np.abs(u), np.minimum(v - eaves, 0.95 - v))
    roof = np.minimum(eaves + 0.05 - v, (v - eaves + slope * 0.85) / slope - np.abs(u) + 0.1) * 0.7
    course = np.floor(v * 14)
    joints = (np.abs(v * 14 - course - 0.5) > 0.4) | (np.abs((u * 7 + course / 2) % 1 - 0.5) > 0.45)
    paint = hsv(*rng.choice([(0.03, 0.6, 0.6), (0.12, 0.25, 0.9), (0.58, 0.2, 0.8), (0.0, 0, 0.9)]))
    color = paint * (1 - 0.25 * joints[..., None])
    columns = rng.integers(2, 4)
    across, down = (u + 0.8) / 1.6 * columns % 1 - 0.5, (v - eaves) / 0.5 % 1 - 0.5
    window = np.maximum(np.abs(across) * 1.6, np.abs(down) * 1.3)
    color = mix((0.5 - window) * 40, color, np.full(3, 0.92, np.float32))
    glass = mix(0.5 + across + down, hsv(0.58, 0.6, 0.15), hsv(0.55, 0.3, 0.7))
    panes = (window < 0.4) & (np.abs(across) > 0.03)
    color = np.where(panes[..., None], glass, color)
    door = (np.abs(u - rng.uniform(-0.4, 0.4)) < 0.12) & (v > 0.45)
    color[door] = hsv(rng.random(), 0.6, 0.4)
    tiles = 0.75 + 0.25 * np.sin(45 * v) * np.sin(30 * u)
    color = np.where((roof > 0)[..., None], tiles[..., None] * hsv(rng.choice([0.02, 0.6, 0.08]), 0.55, 0.55), color)
    normal = np.zeros((3, *u.shape), np.float32)
    normal[2], normal[1] = 0.9, np.where(roof > 0, -0.5, 0.0)
    return np.maximum(wall, roof), normal, color


def flower(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> Surface:
    """Veined petals around a grainy disc."""
    petals = rng.integers(5, 10)
    radius, angle = np.hypot(u, v), np.arctan2(v, u)
    wave = np.abs(np.cos(petals * angle / 2))
    inside = (0.42 + 0.55 * wave**0.7 - radius) * 0.6
    hue = rng.choice([0.95, 0.0, 0.14, 0.75, 0.6])
    veins = 0.12 * np.sin(petals * 9 * angle)
    color = mix(radius + veins, hsv(hue, 0.9, 0.7), hsv(hue + 0.05, rng.uniform(0.1, 0.6), 1.0))
    grain = fractal_noise(*u.shape, 0.5, rng)
    disc = 0.3 - radius
    color = np.where((disc > 0)[..., None], mix(0.5 + 0.4 * grain, hsv(0.09, 0.9, 0.3), hsv(0.14, 0.9, 0.9)), color)
    height = 0.25 * wave + 0.4 * np.sqrt(np.clip(disc, 0, 1)) + 0.01 * grain * (disc > 0)
    return inside, relief(height, len(u) / 3), color


def fish(u: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> Surface:
    """A striped, scaled body with tail and eye."""
    body = 0.36 * (1 - np.hypot((u + 0.15) / 0.75, v / rng.uniform(0.36, 0.48)))
    tail = np.minimum((u - 0.35) * 0.9 - np.abs(v), 0.95 - u - 0.2 * np.cos(3 * v))
    fin = np.minimum(0.55 + 0.5 * u - np.abs(v + 0.1), 0.25 - np.abs(u - 0.02)) * (v < 0)
    inside = np.maximum(np.maximum(body, tail), np.where(v < 0, fin, -1))
    hue = rng.random()
    stripes = np.sin(u * rng.uniform(8, 16) + 2 * v**2 + rng.uniform(0, 6)) * 4
    color = mix(stripes + 0.5, hsv(hue, 0.8, 0.8), hsv(hue + rng.uniform(0.1, 0.5), 0.5, 0.95))
    scales = np.sin(26 * u + 20 * v) * np.sin(26 * u - 20 * v)
    color = color * (0.85 + 0.15 * scales * (body > 0.02))[..., None]
    eye = np.hypot(u + 0.65, v + 0.08)
    color = mix((0.09 - eye) * 40, color, np.full(3, 0.95, np.float32))
    color = mix((0.05 - eye) * 60, color, np.full(3, 0.03, np.float32))
    return inside, relief(np.sqrt(np.clip(body, 0, 1)), len(u) / 3), color


UPRIGHT: dict[str, Painter] = dict(box=box, can=can, cone=cone, house=house, tree=tree)
TURNED: dict[str, Painter] = dict(ball=ball, fish=fish, flower=flower, ring=ring, starfish=starfish)
PAINTERS: dict[str, Painter] = dict(sorted((UPRIGHT | TURNED).items()))
