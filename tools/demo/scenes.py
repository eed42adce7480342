"""Paints a scene like a natural image: background, shaded objects with shadows, and the effects of a camera."""

import numpy as np
from objects import PAINTERS, UPRIGHT, fractal_noise, hsv, mix
from scipy.ndimage import gaussian_filter, map_coordinates

OBJECTS = tuple(PAINTERS)
STUFF = ('sky', 'ground', 'wall')
GROUNDS = [(0.27, 0.6, 0.5), (0.1, 0.4, 0.75), (0.6, 0.05, 0.4)]  # outdoors: hue, saturation, value
GROUNDS += [(0.22, 0.45, 0.55), (0.55, 0.06, 0.9), (0.07, 0.5, 0.45)]
UNLABELLED = 0  # pixels on outlines, which are part object, part background


def paint_scene(kind: int, size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Paints a main object of `kind` and up to three smaller objects; `size` is the short side in pixels.

    Returns the image, uint8 (H, W, 3), RGB, and labels, uint8 (H, W): 0 is unlabelled, 1 the first of OBJECTS + STUFF.
    """
    long = round(size * rng.uniform(1, 1.5))
    height, width = (size, long) if rng.random() < 0.75 else (long, size)
    image, labels, horizon = paint_background(height, width, rng)
    elevation, azimuth = rng.uniform(0.3, 1.2), rng.uniform(-np.pi, np.pi)
    right, near = np.cos(elevation) * np.sin(azimuth), abs(np.cos(elevation) * np.cos(azimuth)) + 0.2
    light = np.array([right, -np.sin(elevation), near])
    light /= np.linalg.norm(light)
    extras = sorted(rng.uniform(0.07, 0.17, rng.integers(0, 4)))  # far, small objects are painted first
    for radius, which in [(r, rng.integers(len(OBJECTS))) for r in extras] + [(rng.uniform(0.24, 0.42), kind)]:
        radius *= size
        nearness = radius / (0.42 * size)
        bottom = horizon + (height - horizon) * (0.15 + 0.8 * nearness) + rng.normal(0, 0.03) * size
        center = bottom - radius, width * rng.uniform(0.18, 0.82)
        add_object(image, labels, int(which), center, radius, light, rng)
    return camera(image, rng), labels


def paint_background(height: int, width: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, float]:
    """Paints sky or wall above a horizon and ground below; returns pixels, labels and the row of the horizon."""
    horizon = height * rng.uniform(0.3, 0.65)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    outdoors = rng.random() < 0.65
    noise = fractal_noise(height, width, rng.uniform(1.3, 1.7), rng)
    if outdoors:
        hue = rng.choice([0.58, 0.6, 0.07, 0.62])
        zenith = hsv(hue, rng.uniform(0.3, 0.7), rng.uniform(0.55, 0.9))
        far = mix(y / horizon, zenith, hsv(hue + rng.normal(0, 0.05), 0.15, 0.95))
        far = mix((noise - rng.uniform(-0.5, 1.5)) * 0.8, far, np.full(3, 0.93, np.float32))
        ridge = horizon - height * 0.06 * (1 + fractal_noise(1, width, 1.2, rng))
        hills = hsv(rng.uniform(0.2, 0.6), 0.3, rng.uniform(0.3, 0.55))
        far = mix((y - ridge) * 0.7, far, hills * (1 + 0.12 * noise[..., None]))
    else:
        paint = hsv(rng.random(), rng.uniform(0.05, 0.5), rng.uniform(0.5, 0.9))
        pitch = width / rng.integers(5, 18)
        pattern = rng.choice([0.0, 0.1, 0.2]) * np.sign(np.sin(2 * np.pi * x / pitch))
        if rng.random() < 0.4:
            course = np.floor(y / pitch * 2)
            pattern = -0.25 * ((y / pitch * 2 % 1 < 0.12) | ((x / pitch + course / 2) % 1 < 0.07))
        far = paint * (1 + pattern + 0.06 * noise)[..., None]
        far = far * (1.1 - 0.4 * np.hypot(x / width - rng.random(), y / height))[..., None]
    near = ground(x, y, horizon, outdoors, rng)
    below = y > horizon
    image = np.where(below[..., None], near, far).astype(np.float32)
    first = len(OBJECTS) + 1
    labels = np.where(below, first + 1, first if outdoors else first + 2).astype(np.uint8)
    return image, labels, horizon


def ground(x: np.ndarray, y: np.ndarray, horizon: float, outdoors: bool, rng: np.random.Generator) -> np.ndarray:
    """Paints a textured plane that extends to the horizon."""
    height, width = x.shape
    depth = height / (np.maximum(y - horizon, 0) + 0.06 * height)  # from 1 at the camera to 17 at the horizon
    across, along = (x / width - 0.5) * depth, depth + rng.random()
    texture = fractal_noise(128, 128, rng.uniform(0.6, 1.1), rng)
    grain = map_coordinates(texture, [along * 60 % 128, across * 60 % 128], order=1, mode='wrap')
    grain = grain * np.clip(2.5 / depth, 0, 1)
    if outdoors:
        color = hsv(*rng.choice(GROUNDS))
        return mix(0.5 + 0.25 * grain, color * 0.6, np.minimum(color * 1.3, 1))
    color = hsv(rng.uniform(0.03, 0.13), rng.uniform(0.2, 0.6), rng.uniform(0.35, 0.8))
    pitch = rng.uniform(3, 7)
    board = np.floor(across * pitch)
    seams = (across * pitch - board < 0.05) | (rng.random() < 0.5) * (along * pitch % 1 < 0.06)
    shade = 1 + 0.12 * np.sin(board * 12.9) + 0.1 * grain - 0.4 * seams * np.clip(4 / depth, 0, 1)
    return color * shade[..., None]


def add_object(image, labels, kind: int, center: tuple[float, float], radius: float, light, rng) -> None:
    """Paints an object and its shadow into image and labels."""
    top, left = (max(0, int(c - 1.3 * radius)) for c in center)
    bottom, right = (min(side, int(c + 1.3 * radius)) for c, side in zip(center, labels.shape, strict=True))
    y, x = np.mgrid[top:bottom, left:right].astype(np.float32)
    if min(x.shape) < 4:  # nearly all of it is outside the image
        return
    u, v = (x - center[1]) / radius, (y - center[0]) / radius
    name = OBJECTS[kind]
    angle = rng.normal(0, 0.06) if name in UPRIGHT else rng.uniform(-np.pi, np.pi)
    cos, sin = np.cos(angle), np.sin(angle)
    stretch = rng.uniform(0.85, 1.15)
    local = (cos * u + sin * v) * stretch, (cos * v - sin * u) / stretch
    inside, normal, color = PAINTERS[name](*local, rng)
    normal = np.stack([cos * normal[0] - sin * normal[1], sin * normal[0] + cos * normal[1], normal[2]])

    here = np.s_[top : top + len(x), left : left + x.shape[1]]
    spread = np.hypot((u + 0.6 * light[0]) / 1.1, (v - 0.92) / 0.22)
    image[here] *= (1 - 0.6 * np.clip(1.6 - 1.4 * spread, 0, 1))[..., None]

    diffuse = np.clip(np.tensordot(light, normal, 1), 0, None)
    ambient = rng.uniform(0.3, 0.5)
    shine = rng.choice([0, 0.15, 0.5]) * diffuse**20
    shaded = color * (ambient + (1.15 - ambient) * diffuse)[..., None] + shine[..., None]
    shaded *= (1 + 0.05 * fractal_noise(*x.shape, 0.8, rng))[..., None]
    alpha = np.clip(inside * radius + 0.5, 0, 1)
    image[here] += alpha[..., None] * (shaded - image[here])
    labels[here] = np.where(alpha > 0.9, kind + 1, np.where(alpha > 0.1, UNLABELLED, labels[here]))


def camera(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Applies focus, colour temperature, exposure, vignette and sensor noise; float (H, W, 3) to uint8."""
    height, width, _ = image.shape
    image = gaussian_filter(np.clip(image, 0, 1), (*[rng.choice([0.3, 0.5, 0.8])] * 2, 0))
    warmth = rng.normal(0, 0.06)
    gain = rng.lognormal(0, 0.2) * np.array([1 + warmth, 1, 1 - warmth])
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    image = image * gain * (1 - rng.uniform(0, 0.35) * (x**2 + y**2) / 2)[..., None]
    image = np.clip(image, 0, 1) ** rng.uniform(0.8, 1.25)
    noise = rng.standard_normal(image.shape, np.float32) * rng.uniform(0.003, 0.03)
    return np.rint(np.clip(image + noise * np.sqrt(image + 0.1), 0, 1) * 255).astype(np.uint8)
