"""Images of scenes, drawn with Pillow: clean flat shapes with some nuisance."""

from __future__ import annotations

import colorsys

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from mispair.pairs.shapes.scene import IMAGE_SIZE, Item, Scene, pick

_PX = 2  # canvas pixels a pixel of the image: drawn larger and reduced, it has smooth edges
_CANVAS = IMAGE_SIZE * _PX

Colour = tuple[int, int, int]
Points = npt.NDArray[np.float64]  # (n, 2), x and y with y downwards
Pixels = npt.NDArray[np.uint8]

_COLOURS: dict[str, Colour] = {
    "red": (222, 56, 62),
    "orange": (244, 134, 44),
    "yellow": (248, 206, 60),
    "green": (46, 148, 82),
    "teal": (38, 172, 172),
    "blue": (48, 102, 214),
    "purple": (132, 76, 190),
    "pink": (244, 134, 182),
    "brown": (132, 84, 52),
    "white": (250, 248, 242),
}
_GROUND_COLOURS: dict[str, tuple[Colour, Colour]] = {  # at the top, at the bottom
    "grass": ((178, 216, 138), (146, 196, 112)),
    "sky": ((150, 204, 244), (206, 232, 250)),
    "night": ((28, 34, 74), (58, 62, 112)),
    "sand": ((246, 228, 186), (232, 206, 152)),
    "sea": ((98, 178, 206), (58, 134, 180)),
    "snow": ((236, 240, 248), (212, 222, 238)),
}
# Fewest and most places of clutter.
_SPOTS = {"grass": (8, 16), "sky": (2, 5), "night": (14, 28), "sand": (12, 24), "sea": (7, 13), "snow": (10, 20)}


def draw_scene(scene: Scene, rng: np.random.Generator) -> Pixels:
    """Draw a scene: pixels (IMAGE_SIZE, IMAGE_SIZE, 3).

    The generator chooses details that captions never mention: light, tilt, exact hues, patterns and small things on the
    ground.
    """
    canvas = _ground(scene.background, rng)
    pen = ImageDraw.Draw(canvas)
    _draw_clutter(pen, scene.background, rng)
    for item in scene.items:
        _draw_item(canvas, item, rng)
    in_this_light = np.minimum(np.rint(np.arange(256) * rng.uniform(0.93, 1.03)), 255).astype(np.uint8)
    return np.take(in_this_light, np.asarray(canvas.reduce(_PX)))


def _mix(colour: Colour, other: Colour, part: float) -> Colour:
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(colour, other, strict=True))
    return red, green, blue


def _jitter(colour: Colour, rng: np.random.Generator, hue: float, light: float) -> Colour:
    h, lightness, s = colorsys.rgb_to_hls(*(channel / 255 for channel in colour))
    h += rng.uniform(-hue, hue)
    lightness = min(max(lightness * (1 + rng.uniform(-light, light)), 0.0), 1.0)
    red, green, blue = (round(255 * channel) for channel in colorsys.hls_to_rgb(h % 1, lightness, s))
    return red, green, blue


def _turn(angle: float) -> npt.NDArray[np.float64]:
    """Turns rows of points clockwise as people see them."""
    return np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])


def _polar(angles: npt.NDArray[np.float64], radii: npt.NDArray[np.float64] | float) -> Points:
    return np.stack([radii * np.sin(angles), -radii * np.cos(angles)], axis=1)  # angle 0 points up


def _regular(corners: int, first: float = 0.0) -> Points:
    return _polar(first + 2 * np.pi * np.arange(corners) / corners, 1.0)


def _heart() -> Points:
    t = np.linspace(0, 2 * np.pi, 60, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return np.stack([x, y - 2.5], axis=1) / 17


def _cross() -> Points:
    arm, end = 0.32, 0.94
    corner = np.array([(-arm, -end), (arm, -end), (arm, -arm)])
    return np.concatenate([corner @ _turn(turn * np.pi / 2) for turn in range(4)])


def _moon() -> Points:
    rise, radius = 0.5, 0.72  # of the circle that is bitten out of the unit circle's upper part
    tip_height = (1 + rise**2 - radius**2) / (2 * rise)
    tip, inner_tip = np.arccos(tip_height), np.arccos((tip_height - rise) / radius)
    outer = _polar(np.linspace(tip, 2 * np.pi - tip, 48), 1.0)
    inner = _polar(np.linspace(2 * np.pi - inner_tip, inner_tip, 36), radius) - np.array([0.0, rise])
    return np.concatenate([outer, inner]) @ _turn(np.pi / 3)


_PETALS = 2 * np.pi * np.arange(80) / 80
# Outline of each shape in the unit circle, then of its hole.
_OUTLINES: dict[str, list[Points]] = {
    "circle": [_regular(64)],
    "square": [_regular(4, first=np.pi / 4)],
    "triangle": [_regular(3) + np.array([0.0, 0.12])],
    "star": [_polar(np.pi * np.arange(10) / 5, np.where(np.arange(10) % 2, 0.45, 1.0))],
    "heart": [_heart()],
    "diamond": [_regular(4) * np.array([0.62, 1.0])],
    "cross": [_cross()],
    "ring": [_regular(64), 0.5 * _regular(48)],
    "moon": [_moon()],
    "flower": [_polar(_PETALS, 0.6 + 0.4 * np.abs(np.cos(2.5 * _PETALS)))],  # five round petals with sharp valleys
}


def _draw_item(canvas: Image.Image, item: Item, rng: np.random.Generator) -> None:
    fill = _jitter(_COLOURS[item.colour], rng, hue=0.012, light=0.07)
    radius = item.radius * _CANVAS
    half = int(radius) + 2 * _PX
    left, top = round(item.x * _CANVAS) - half, round(item.y * _CANVAS) - half
    tilt = _turn(rng.uniform(-0.35, 0.35))
    polygons = [[(x, y) for x, y in (points @ tilt * radius + half).tolist()] for points in _OUTLINES[item.shape]]

    shadow = _stencil(polygons, half, opacity=56)
    canvas.paste((20, 24, 48), (left + _PX, top + 2 * _PX), shadow)
    surface = _surface(item.texture, fill, half, radius, rng)
    edge = ImageDraw.Draw(surface)
    for polygon in polygons:  # half of the line's width is cut off by the stencil
        edge.line([*polygon, *polygon[:2]], fill=_mix(fill, (24, 20, 44), 0.38), width=2 * _PX + 1)
    canvas.paste(surface, (left, top), _stencil(polygons, half, opacity=255))


def _stencil(polygons: list[list[tuple[float, float]]], half: int, opacity: int) -> Image.Image:
    """A square mask of the outline without its hole."""
    mask = Image.new("L", (2 * half, 2 * half))
    pen = ImageDraw.Draw(mask)
    outline, *holes = polygons
    pen.polygon(outline, fill=opacity)
    for hole in holes:
        pen.polygon(hole, fill=0)
    return mask


def _surface(texture: str, fill: Colour, half: int, radius: float, rng: np.random.Generator) -> Image.Image:
    """A square patch of the item's material, to be cut out by its outline."""
    if texture == "plain":
        return Image.new("RGB", (2 * half, 2 * half), fill)

    def fraction(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return values - np.floor(values)  # much faster than values % 1

    period = 0.3 * radius + 3.5 * _PX
    angle = rng.uniform(0, np.pi)
    steps = (np.arange(-half, half) / period).astype(np.float32)
    across = fraction(np.add.outer(np.sin(angle) * steps, np.cos(angle) * steps))
    if texture == "striped":
        marked = across < 0.45
    else:
        along = fraction(np.add.outer(np.cos(angle) * steps, -np.sin(angle) * steps))
        marked = (across - 0.5) ** 2 + (along - 0.5) ** 2 < 0.3**2
    pattern = _mix(fill, (255, 255, 255), 0.72) if sum(fill) < 600 else _mix(fill, (70, 74, 110), 0.5)
    surface = Image.new("RGB", marked.shape, fill)
    surface.paste(pattern, mask=Image.fromarray(marked.astype(np.uint8) * 255))
    return surface


def _ground(background: str, rng: np.random.Generator) -> Image.Image:
    top, bottom = (_jitter(colour, rng, hue=0.015, light=0.03) for colour in _GROUND_COLOURS[background])
    column = np.linspace(top, bottom, _CANVAS).astype(np.uint8)
    return Image.fromarray(column[:, None]).resize((_CANVAS, _CANVAS), Image.Resampling.NEAREST)


def _draw_clutter(pen: ImageDraw.ImageDraw, background: str, rng: np.random.Generator) -> None:
    """Draw what belongs to the ground, and specks in the items' colours, too small to be worth a word."""

    def spots(fewest: int, most: int) -> Points:
        return rng.uniform(0, _CANVAS, size=(int(rng.integers(fewest, most + 1)), 2))

    def dot(x: float, y: float, radius: float, fill: Colour) -> None:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)

    for x, y in spots(*_SPOTS[background]):
        if background == "grass":
            for lean in (-1.7 * _PX, 0, 1.7 * _PX):
                pen.line((x, y, x + lean, y - 4 * _PX + abs(lean)), fill=(112, 166, 84), width=_PX)
        elif background == "sky":
            for dx, radius in ((-5.0 * _PX, 3.0 * _PX), (-1.0 * _PX, 5.0 * _PX), (4.0 * _PX, 3.7 * _PX)):
                dot(x + dx, y - radius / 2, radius, (240, 247, 253))
        elif background == "night":
            dot(x, y, rng.uniform(0.3, 0.9) * _PX, (226, 226, 200))
        elif background == "sand":
            dot(x, y, rng.uniform(0.5, 1.3) * _PX, (206, 178, 124))
        elif background == "sea":
            half, depth = 2.3 * _PX, 1.7 * _PX
            for middle in (x - 2 * half, x, x + 2 * half):
                pen.arc((middle - half, y - depth, middle + half, y + depth), 0, 180, fill=(150, 206, 226), width=_PX)
        else:
            for dx, dy in ((2.3 * _PX, 0.0), (1.2 * _PX, 2.0 * _PX), (-1.2 * _PX, 2.0 * _PX)):
                pen.line((x - dx, y - dy, x + dx, y + dy), fill=(186, 204, 230), width=1)
    for x, y in spots(0, 5):
        dot(x, y, 1.6 * _PX, _COLOURS[pick(rng, tuple(_COLOURS))])
