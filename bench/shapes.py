"""Give the leaves of the model whose bytes are measured: what efficiency.py and lockstep.py send on the star.

Rule: shapes alone; nothing is computed with them, so that the cores are left to what is measured.
"""

from __future__ import annotations

__all__ = ["model_shapes"]

BLOCKS = 12


def model_shapes(params: int) -> dict[str, tuple[int, ...]]:
    """Return the leaves of a transformer of about so many values: an embedding and 12 blocks."""
    width = max(8, int((0.92 * params / (12 * BLOCKS)) ** 0.5) // 8 * 8)
    shapes: dict[str, tuple[int, ...]] = {}
    for block in range(BLOCKS):
        for name, (rows, columns) in {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}.items():
            shapes[f"block{block:02}/{name}/kernel"] = (rows * width, columns * width)
            shapes[f"block{block:02}/{name}/bias"] = (columns * width,)
        shapes[f"block{block:02}/norm/scale"] = (width,)
    used = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values())
    shapes["embedding"] = (max(1, (params - used) // width), width)
    return shapes
