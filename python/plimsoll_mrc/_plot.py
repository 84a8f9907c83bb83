"""Curves on matplotlib axes. matplotlib is imported only here."""

import numpy as np

# The same for every curve, so that several share axes.
UNIT_BYTES = 1 << 20

# The last ratio of a curve holds for all larger sizes. All curves on the axes are drawn up to the same size, a bit beyond
# the last point of any, so that this is seen.
BEYOND = 1.05


def plot(curve, ax=None, **kwargs):
    """Implements `Curve.plot`."""
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.gca()
    kwargs.setdefault("where", "post")
    # That size, and the lines and bands that end there.
    before, artists = getattr(ax, "_plimsoll_mrc", (0, []))
    artists = [artist for artist in artists if artist.axes is ax]
    sizes = curve.sizes * (curve.page_bytes / UNIT_BYTES)
    end = max(before if artists else 0, sizes[-1] * BEYOND) or 1
    for artist in artists:
        _extend(artist, before, end)
    sizes = np.append(sizes, end)
    ratios, lower, upper = (np.append(values, values[-1]) for values in (curve.ratios, curve.lower, curve.upper))
    (line,) = ax.step(sizes, ratios, **kwargs)
    line.sticky_edges.x.append(end)
    artists.append(line)
    if (lower < upper).any():
        fill = {"color": line.get_color(), "alpha": 0.2, "linewidth": 0}
        artists.append(ax.fill_between(sizes, lower, upper, step=kwargs["where"], **fill))
    ax._plimsoll_mrc = end, artists
    ax.set_xlabel("memory size (MiB)")
    ax.set_ylabel("miss ratio")
    # So that the frame does not hide a line at 1.
    ax.set_ylim(0, 1.02)
    return ax


def _extend(artist, before, end):
    """Moves the end of a line or a band."""
    if hasattr(artist, "set_xdata"):
        sizes = artist.get_xdata()
        artist.set_xdata(np.where(sizes == before, end, sizes))
    else:
        sizes = artist.get_paths()[0].vertices[:, 0]
        sizes[sizes == before] = end
        artist.stale = True
