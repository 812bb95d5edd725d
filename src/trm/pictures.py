"""Answers as pictures: the last one as PNG, and how it formed as GIF."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from macbook_optimization.durable_files import replace_file
from macbook_optimization.errors import DataError
from trm.tasks.base import Picture, Tile

_LONGEST_SIDE = 640  # pixels, about
_LINE = (200, 200, 200)
_HEAVY = (60, 60, 60)
_WRONG = (220, 30, 30)
_FRAME_MILLISECONDS, _LAST_MILLISECONDS = 400, 3000


def write_png(file: Path, picture: Picture) -> None:
    content = BytesIO()
    draw(picture).save(content, "PNG", optimize=True)
    _write(file, content.getvalue())


def write_gif(file: Path, pictures: list[Picture]) -> None:
    """One frame a step; the last one stays. Grids of different sizes share a canvas."""
    frames = [draw(picture) for picture in pictures]
    width, height = (max(frame.size[side] for frame in frames) for side in (0, 1))
    padded = [Image.new("RGB", (width, height), "white") for _ in frames]
    for canvas, frame in zip(padded, frames, strict=True):
        canvas.paste(frame, (0, 0))
    durations = [_FRAME_MILLISECONDS] * (len(frames) - 1) + [_LAST_MILLISECONDS]
    content = BytesIO()
    padded[0].save(content, "GIF", save_all=True, append_images=padded[1:], duration=durations, loop=0)
    _write(file, content.getvalue())


def draw(picture: Picture) -> Image.Image:
    rows = picture.tiles
    side = max(8, _LONGEST_SIDE // max(len(rows), len(rows[0])))
    image = Image.new("RGB", (side * len(rows[0]) + 1, side * len(rows) + 1), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=max(8, int(side * 0.6)))
    for r, row in enumerate(rows):
        for c, tile in enumerate(row):
            _draw_tile(pen, tile, c * side, r * side, side, font)
    box_rows, box_columns = picture.box
    for r in range(0, len(rows) + 1, box_rows) if box_rows else ():
        pen.line((0, r * side, image.width, r * side), fill=_HEAVY, width=max(2, side // 20))
    for c in range(0, len(rows[0]) + 1, box_columns) if box_columns else ():
        pen.line((c * side, 0, c * side, image.height), fill=_HEAVY, width=max(2, side // 20))
    return image


def _draw_tile(
    pen: ImageDraw.ImageDraw,
    tile: Tile,
    x: int,
    y: int,
    side: int,
    font: ImageFont.ImageFont | ImageFont.FreeTypeFont,
) -> None:
    pen.rectangle((x, y, x + side, y + side), fill=tile.fill, outline=_LINE)
    if tile.text:
        pen.text((x + side / 2, y + side / 2), tile.text, fill=tile.ink, font=font, anchor="mm")
    if tile.wrong:  # in white, too: cells may be red
        width = max(2, side // 10)
        pen.rectangle((x + 1, y + 1, x + side - 1, y + side - 1), outline="white", width=width + 2)
        pen.rectangle((x + 1, y + 1, x + side - 1, y + side - 1), outline=_WRONG, width=width)


def _write(file: Path, content: bytes) -> None:
    try:
        replace_file(file, content)
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror or error}") from error
