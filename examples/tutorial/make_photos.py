"""Draw made-up holiday photos with captions for the tutorial; 22 % of the captions are wrong.

    python examples/tutorial/make_photos.py holiday [HOW_MANY]

writes `holiday/photos/` and `holiday/photos.csv`. Nobody owns the pictures: they are drawn here and may be used freely.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

PHOTOS, WRONG = 600, 0.22
WIDTH, HEIGHT, HORIZON = 320, 240, 140
PLACES = {
    "beach": ((226, 200, 150), "on the beach"),
    "mountains": ((96, 128, 74), "in front of snowy mountains"),
    "city": ((92, 94, 100), "below the towers of a city"),
    "desert": ((214, 160, 96), "between the dunes of a desert"),
    "lake": ((58, 92, 118), "by a lake in the forest"),
    "snow": ((232, 238, 246), "in a snowy field"),
}
TIMES = {
    "noon": ((70, 140, 220), (190, 220, 245), 1.0, "on a sunny day"),
    "sunset": ((90, 60, 130), (255, 160, 80), 0.75, "at sunset"),
    "night": ((8, 12, 40), (40, 50, 90), 0.35, "at night"),
    "fog": ((170, 176, 182), (206, 210, 214), 0.8, "in thick fog"),
}
COLOURS = {
    "red": (206, 44, 40),
    "yellow": (240, 196, 40),
    "white": (244, 244, 240),
    "blue": (40, 90, 200),
    "green": (50, 150, 80),
}
THINGS = ("tent", "balloon", "car", "cabin", "lighthouse", "umbrella", "boat", "bicycle")
NAMES = {"balloon": "hot-air balloon", "cabin": "wooden cabin", "boat": "sailing boat"}
PHRASES = ("{a} {place} {time}.", "{time}, {a} stands {place}.", "we saw {a} {place} {time}.", "{a} {time}, {place}.")

Colour = tuple[int, int, int]
Canvas = npt.NDArray[np.float32]


def noise(rng: np.random.Generator, height: int, width: int, detail: int = 5, flat: float = 1.0) -> Canvas:
    """Draw smooth noise from 0 to 1, of shape (height, width); `flat` stretches it horizontally."""
    total = np.zeros((height, width), np.float32)
    for octave in range(detail):
        cells = (max(2, int(2**octave * 3)), max(2, int(2**octave * 4 / flat)))
        small = Image.fromarray(rng.random(cells).astype(np.float32))
        total += np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)) / 2**octave
    return (total - total.min()) / (np.ptp(total) or 1.0)


def mix(first: Canvas, second: Colour | Canvas, share: Canvas | float) -> Canvas:
    """Blend two pictures; `share` is that of the second."""
    weight = np.asarray(share)[..., None] if np.ndim(share) else share
    return first * (1 - weight) + np.asarray(second, float) * weight


def scenery(rng: np.random.Generator, place: str, time: str) -> Canvas:
    """Draw sky, background and ground, (height, width, 3) from 0 to 255."""
    top, bottom, light, _ = TIMES[time]
    height = np.linspace(0, 1, HEIGHT)[:, None] * np.ones((1, WIDTH))
    picture = mix(np.full((HEIGHT, WIDTH, 3), top, float), bottom, np.clip(height * HEIGHT / HORIZON, 0, 1))
    clouds = np.clip(noise(rng, HEIGHT, WIDTH, 5, 2.5) * 2.2 - 1.1, 0, 1) * (0.15 if time == "night" else 0.7)
    picture = mix(picture, (255, 250, 245) if time != "sunset" else (255, 190, 150), clouds)
    if time == "night":
        stars = rng.random((HEIGHT, WIDTH)) > 0.998
        picture[stars & (height < 0.5)] = 235
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    if place in ("mountains", "lake", "snow", "desert"):
        for depth in range(3):
            base = HORIZON - (70, 42, 16)[depth] * (1.0 if place == "mountains" else 0.55)
            ridge = base - 46 * (noise(rng, 8, WIDTH, 6 if place != "desert" else 2)[4] - 0.5) * (1.4 - 0.4 * depth)
            inside = rows > ridge
            rock = np.array({"desert": (196, 138, 84), "lake": (40, 74, 50)}.get(place, (112, 112, 124)), float)
            shade = 0.7 + 0.5 * noise(rng, HEIGHT, WIDTH, 6)[..., None]
            colour = np.where((rows < ridge + 22)[..., None] & (place in ("mountains", "snow")), 240.0, rock) * shade
            picture = np.where(inside[..., None], mix(colour * light, picture, 0.55 - 0.22 * depth), picture)
    if place == "city":
        for left in range(0, WIDTH, 18):
            tall, wide = int(rng.integers(30, 105)), int(rng.integers(13, 24))
            tower = np.full((tall, wide, 3), float(rng.integers(60, 150))) * light
            windows = (rng.random((tall, wide)) > (0.55 if time == "night" else 0.8)) & (
                np.indices((tall, wide))[0] % 4 < 2
            )
            tower[windows & (np.indices((tall, wide))[1] % 4 < 2)] = (
                (250, 220, 130) if time == "night" else (180, 205, 225)
            )
            picture[HORIZON - tall : HORIZON, left : left + wide] = tower[:, : WIDTH - left]
    ground = np.full((HEIGHT, WIDTH, 3), PLACES[place][0], float) * (
        0.82 + 0.3 * noise(rng, HEIGHT, WIDTH, 7, 1.5)[..., None]
    )
    ground *= light
    if place in ("beach", "lake"):
        ripples = noise(rng, HEIGHT, WIDTH, 7, 8.0)
        water = mix(np.full((HEIGHT, WIDTH, 3), bottom, float), (20, 70, 110), 0.45) * (0.75 + 0.4 * ripples[..., None])
        shore = HORIZON + (34 if place == "beach" else 60) + 8 * np.sin(columns / 37 + rng.random() * 6)
        ground = np.where((rows < shore)[..., None], water, ground if place == "beach" else ground * 0.4 + 30 * light)
    return np.where((rows >= HORIZON)[..., None], ground, picture)


def draw_thing(rng: np.random.Generator, thing: str, colour: Colour, light: float) -> Image.Image:
    """Draw a thing on a transparent square of 400 x 400."""
    layer = Image.new("RGBA", (400, 400))
    pen = ImageDraw.Draw(layer)

    def tone(base: Colour, share: float = 1.0) -> tuple[int, int, int, int]:
        red, green, blue = (min(255, int(value * share * light)) for value in base)
        return red, green, blue, 255

    main, dark, wood, black = tone(colour), tone(colour, 0.65), tone((120, 80, 50)), tone((30, 30, 34))
    if thing == "tent":
        pen.polygon([(40, 360), (190, 130), (260, 360)], fill=main)
        pen.polygon([(190, 130), (360, 340), (260, 360)], fill=dark)
        pen.polygon([(120, 360), (185, 180), (190, 360)], fill=black)
    elif thing == "balloon":
        pen.ellipse((90, 10, 310, 260), fill=main)
        pen.ellipse((150, 10, 250, 260), fill=dark)
        pen.polygon([(120, 215), (280, 215), (222, 310), (178, 310)], fill=main)
        pen.rectangle((180, 325, 220, 360), fill=wood)
        pen.line([(180, 325), (178, 310)], fill=black, width=3)
        pen.line([(220, 325), (222, 310)], fill=black, width=3)
    elif thing == "car":
        pen.rounded_rectangle((30, 250, 370, 330), 30, fill=main)
        pen.polygon([(95, 255), (140, 185), (260, 185), (310, 255)], fill=dark)
        pen.polygon([(115, 250), (150, 197), (195, 197), (195, 250)], fill=tone((190, 215, 230)))
        pen.polygon([(207, 250), (207, 197), (252, 197), (288, 250)], fill=tone((190, 215, 230)))
        for left in (75, 255):
            pen.ellipse((left, 295, left + 75, 370), fill=black)
            pen.ellipse((left + 22, 317, left + 53, 348), fill=tone((170, 170, 175)))
    elif thing == "cabin":
        pen.rectangle((70, 210, 330, 360), fill=wood)
        for row in range(225, 360, 18):
            pen.line([(70, row), (330, row)], fill=tone((90, 58, 36)), width=3)
        pen.polygon([(40, 215), (200, 90), (360, 215)], fill=main)
        pen.rectangle((170, 270, 225, 360), fill=black)
        pen.rectangle((255, 245, 300, 290), fill=(250, 220, 130, 255))
    elif thing == "lighthouse":
        pen.polygon([(160, 360), (175, 90), (235, 90), (250, 360)], fill=tone((244, 244, 240)))
        for row in range(3):
            top = 120 + row * 90
            pen.polygon(
                [(172 - row * 5, top), (238 + row * 5, top), (241 + row * 5, top + 45), (169 - row * 5, top + 45)],
                fill=main,
            )
        pen.rectangle((178, 50, 232, 90), fill=(255, 240, 170, 255))
        pen.polygon([(165, 50), (205, 15), (245, 50)], fill=dark)
    elif thing == "umbrella":
        pen.line([(200, 90), (225, 365)], fill=wood, width=10)
        pen.pieslice((50, 70, 350, 350), 184, 356, fill=main)
        pen.pieslice((130, 70, 270, 350), 184, 356, fill=tone((250, 250, 245)))
    elif thing == "boat":
        pen.polygon([(190, 40), (190, 285), (60, 285)], fill=main)
        pen.polygon([(205, 70), (205, 285), (315, 285)], fill=tone((245, 245, 240)))
        pen.line([(197, 25), (197, 310)], fill=wood, width=8)
        pen.polygon([(40, 305), (360, 305), (310, 360), (90, 360)], fill=dark)
    else:
        for left in (40, 240):
            pen.ellipse((left, 230, left + 125, 355), outline=black, width=9)
        frame = [(102, 292), (165, 190), (270, 190), (195, 292), (102, 292)]
        pen.line(frame, fill=main, width=14)
        pen.line([(165, 190), (195, 292)], fill=main, width=12)
        pen.line([(302, 292), (262, 160), (300, 150)], fill=main, width=12)
        pen.line([(145, 172), (190, 172)], fill=black, width=14)
    if rng.random() < 0.5 and thing != "cabin":
        layer = layer.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return layer


def photo(rng: np.random.Generator, place: str, time: str, thing: str, colour: str) -> Image.Image:
    """Draw one photo."""
    picture = Image.fromarray(np.clip(scenery(rng, place, time), 0, 255).astype(np.uint8)).convert("RGBA")
    size = int(rng.integers(110, 165))
    light = max(TIMES[time][2], 0.55)
    layer = draw_thing(rng, thing, COLOURS[colour], light).resize((size, size), Image.Resampling.LANCZOS)
    left = int(rng.integers(10, WIDTH - size - 10))
    top = int(rng.integers(5, 30)) if thing == "balloon" else HEIGHT - size + int(rng.integers(-30, 2))
    if thing == "boat" and place in ("beach", "lake"):
        top = HORIZON - size + 30
    shadow = Image.new("RGBA", picture.size)
    if thing != "balloon":
        box = (left + size // 8, top + int(size * 0.86), left + size - size // 10, top + int(size * 0.97))
        ImageDraw.Draw(shadow).ellipse(box, fill=(10, 10, 20, 110))
    picture = Image.alpha_composite(picture, shadow.filter(ImageFilter.GaussianBlur(4)))
    picture.alpha_composite(layer, (left, top))
    pixels = np.asarray(picture.convert("RGB").filter(ImageFilter.GaussianBlur(0.6)), float)
    if time == "fog":
        pixels = mix(pixels, (196, 200, 204), 0.45)
    rows, columns = np.mgrid[-1 : 1 : HEIGHT * 1j, -1 : 1 : WIDTH * 1j]
    pixels *= (1 - 0.25 * (rows**2 + columns**2) / 2)[..., None]
    pixels += rng.normal(0, 5, pixels.shape)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def caption(rng: np.random.Generator, place: str, time: str, thing: str, colour: str) -> str:
    """Describe a photo."""
    a = f"a {colour} {NAMES.get(thing, thing)}"
    text = str(rng.choice(PHRASES)).format(a=a, place=PLACES[place][1], time=TIMES[time][3])
    return text[0].upper() + text[1:]


def wrong_captions(rng: np.random.Generator, photos: int = PHOTOS) -> list[int]:
    """Choose the photos with a wrong caption; some get a file name."""
    return rng.permutation(photos)[: round(photos * WRONG)].tolist()


def main(out: Path, photos: int = PHOTOS) -> None:
    """Write the photos and their captions."""
    rng = np.random.default_rng(0)
    (out / "photos").mkdir(parents=True, exist_ok=True)
    captions: list[str] = []
    for row in range(photos):
        place, time, colour = (str(rng.choice(list(names))) for names in (PLACES, TIMES, COLOURS))
        thing = str(rng.choice(THINGS))
        photo(rng, place, time, thing, colour).save(out / "photos" / f"holiday-{row:03}.jpg", quality=88)
        captions.append(caption(rng, place, time, thing, colour))
    wrong = wrong_captions(np.random.default_rng(1), photos)
    named = len(wrong) // 11
    shown, moved = list(captions), wrong[named:]
    for row, other in zip(moved, np.roll(moved, 1), strict=True):
        shown[row] = captions[other]
    for row in wrong[:named]:
        shown[row] = f"IMG_{2000 + row}.JPG"
    with (out / "photos.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption"])
        writer.writerows([f"holiday-{row:03}.jpg", text] for row, text in enumerate(shown))
    print(f"{out}: {photos} photos; {len(moved)} captions belong to other photos, {named} are file names")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
