"""Figures that need no display. matplotlib is the extra `plot`, imported when a figure is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agmm import _installation
from agmm.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, GREY = "#000000", "#767676"
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
"""The palette of Okabe and Ito, told apart by colour-blind eyes too."""

PAGE_WIDTH = 7.6
"""The width of a picture in inches: on a page of 690 pixels, text of 9 points is 11 pixels high."""
_DPI = 150
"""The resolution of a picture, which is twice that of such a page for dense screens."""


class PlotUnavailable(RuntimeError):
    """matplotlib is not installed."""


def need_matplotlib() -> None:
    """Raises PlotUnavailable, which names the extra, where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotUnavailable(_installation.lacks("matplotlib")) from error


def check_writable(path: Path, option: str) -> None:
    """Makes the folder of a file that is to be written, and tries to write the file, before a long
    run.

    Raises:
        InvalidArgument: it cannot be written.
    """
    try:
        is_new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidArgument(
            f"{option}: found {path}, wanted a file that can be written ({reason})"
        ) from None


def check_path(path: Path, option: str) -> None:
    """Makes the folder of a picture that is to be written.

    Raises:
        InvalidArgument: it cannot be made or written to, or no picture has this suffix.
    """
    check_writable(path, option)
    try:
        need_matplotlib()
    except PlotUnavailable:
        return  # then there will be none
    from matplotlib.backend_bases import FigureCanvasBase

    suffixes = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in suffixes:
        raise InvalidArgument(
            f"{option}: found the suffix {path.suffix!r}, wanted one of {', '.join(suffixes)}"
        )


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of the given size in inches. Raises PlotUnavailable."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def strip(axes: Axes, *, grid: str) -> None:
    """Takes the frame's upper and right side away and draws a faint grid behind the data."""
    axes.grid(axis=grid, alpha=0.25)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Writes the figure to `path` (PNG, or what the suffix says) and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
