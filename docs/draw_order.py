"""Draws docs/order.svg: the forward of one step, horizontally and vertically. Run it from the repository root."""

from __future__ import annotations

from pathlib import Path

from greedysnake.schedule import snake

BLOCKS = ["embedding", "layer 1", "layer 2", "layer 3"]
NUM_MICRO_BATCHES = 3
CELL, GAP, LEFT, TOP, PANEL = 74, 22, 118, 92, 540
FILLS = ["#dbeafe", "#dcfce7", "#fef3c7", "#fce7f3"]
INK, PATH, FETCH = "#1f2937", "#6b7280", "#dc2626"

Cell = tuple[int, int]


def horizontal_order() -> list[Cell]:
    """(block, micro-batch) in the order of computing: each micro-batch goes through all blocks."""
    return [(block, index) for index in range(NUM_MICRO_BATCHES) for block in range(len(BLOCKS))]


def vertical_order() -> list[Cell]:
    """All micro-batches go through a block before the next one, in snake order."""
    return [(block, index) for block in range(len(BLOCKS)) for index in snake(block, NUM_MICRO_BATCHES)]


def text(x: float, y: float, words: str, size: int = 14, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{INK}" {extra}>{words}</text>'


def panel(left: int, title: str, order: list[Cell]) -> list[str]:
    """One grid: blocks from left to right, micro-batches from top to bottom, and the path through it."""

    def corner(cell: Cell) -> tuple[int, int]:
        return left + LEFT + cell[0] * (CELL + GAP), TOP + cell[1] * (CELL + GAP)

    fetches = [cell for before, cell in zip([None, *order], order, strict=False) if not before or before[0] != cell[0]]
    parts = [text(left + 16, 36, title, 18, 'font-weight="bold"')]
    for block, name in enumerate(BLOCKS):
        x, _ = corner((block, 0))
        parts.append(text(x + CELL / 2, TOP - 14, name, 14, 'text-anchor="middle"'))
    for index in range(NUM_MICRO_BATCHES):
        _, y = corner((0, index))
        parts.append(text(left + LEFT - 12, y + CELL / 2 + 5, f"micro-batch {index}", 14, 'text-anchor="end"'))
    for x, y, fill in [(*corner(cell), FILLS[cell[0]]) for cell in order]:
        parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="8" fill="{fill}"/>')
    points = [(x + CELL * 0.5, y + CELL * 0.6) for x, y in map(corner, order)]
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    parts.append(
        f'<polyline points="{path}" fill="none" stroke="{PATH}" stroke-width="2.5" stroke-linejoin="round" '
        'marker-end="url(#arrow)"/>'
    )
    parts += [f'<circle cx="{x:g}" cy="{y:g}" r="3.5" fill="{PATH}"/>' for x, y in points[:-1]]
    for number, cell in enumerate(order):
        x, y = corner(cell)
        halo = f'font-weight="bold" stroke="{FILLS[cell[0]]}" stroke-width="5" paint-order="stroke"'
        parts.append(text(x + 8, y + 21, str(number + 1), 16, halo))
        if cell in fetches:
            parts.append(f'<circle cx="{x + CELL - 13}" cy="{y + 14}" r="6" fill="{FETCH}"/>')
    bottom = TOP + NUM_MICRO_BATCHES * (CELL + GAP) + 12
    parts.append(f'<circle cx="{left + LEFT + 6}" cy="{bottom - 5}" r="6" fill="{FETCH}"/>')
    parts.append(text(left + LEFT + 20, bottom, f"a block's weights are fetched: {len(fetches)} times"))
    return parts


def main() -> None:
    width, height = 2 * PANEL, TOP + NUM_MICRO_BATCHES * (CELL + GAP) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        "<title>The forward of one step: horizontal and vertical order</title>",
        '<defs><marker id="arrow" viewBox="0 0 10 10" refX="6" refY="5" markerWidth="6" markerHeight="6" '
        f'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="{PATH}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="12" fill="#ffffff"/>',
        *panel(0, "Horizontal: plain gradient accumulation", horizontal_order()),
        *panel(PANEL, "Vertical: GreedySnake", vertical_order()),
        "</svg>",
    ]
    Path(__file__).with_name("order.svg").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
