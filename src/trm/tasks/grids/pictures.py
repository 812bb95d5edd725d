"""Answers as image files: the last one as PNG, and how it forms as GIF."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from macbook_optimization.output_files import OutputFile
from trm.tasks.base import Picture, Tile

_LONGEST_SIDE_PIXELS = 640  # approximately: tiles have whole pixels
_MIN_TILE_PIXELS = 8
_LINE = (200, 200, 200)
_HEAVY_LINE = (60, 60, 60)
_WRONG = (220, 30, 30)
_FRAME_MILLISECONDS = 400
_LAST_FRAME_MILLISECONDS = 3000


def write_png(file: OutputFile, picture: Picture) -> None:
    content = BytesIO()
    draw(picture).save(content, "PNG", optimize=True)
    file.write(content.getvalue())


def write_gif(file: OutputFile, pictures: Sequence[Picture]) -> None:
    """Write one frame per step and show the last one longer. Grids of different sizes share a canvas."""
    images = [draw(picture) for picture in pictures]
    size = (max(image.width for image in images), max(image.height for image in images))
    frames = [Image.new("RGB", size, "white") for _ in images]
    for frame, image in zip(frames, images, strict=True):
        frame.paste(image, (0, 0))
    durations = [_FRAME_MILLISECONDS] * (len(frames) - 1) + [_LAST_FRAME_MILLISECONDS]
    content = BytesIO()
    frames[0].save(content, "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0)
    file.write(content.getvalue())


def draw(picture: Picture) -> Image.Image:
    num_rows = len(picture.tiles)
    num_columns = len(picture.tiles[0])
    side = max(_MIN_TILE_PIXELS, _LONGEST_SIDE_PIXELS // max(num_rows, num_columns))
    image = Image.new("RGB", (side * num_columns + 1, side * num_rows + 1), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=max(8, int(side * 0.6)))
    for r, row in enumerate(picture.tiles):
        for c, tile in enumerate(row):
            _draw_tile(pen, tile, c * side, r * side, side, font)
    box_rows, box_columns = picture.box
    width = max(2, side // 20)
    for r in range(0, num_rows + 1, box_rows) if box_rows else ():
        pen.line((0, r * side, image.width, r * side), fill=_HEAVY_LINE, width=width)
    for c in range(0, num_columns + 1, box_columns) if box_columns else ():
        pen.line((c * side, 0, c * side, image.height), fill=_HEAVY_LINE, width=width)
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
    if tile.wrong:  # a white frame around the red one, because tiles may be red
        width = max(2, side // 10)
        frame = (x + 1, y + 1, x + side - 1, y + side - 1)
        pen.rectangle(frame, outline="white", width=width + 2)
        pen.rectangle(frame, outline=_WRONG, width=width)
