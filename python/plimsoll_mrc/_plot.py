"""Curves on matplotlib axes. matplotlib is imported only here."""

UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def plot(curve, ax=None, **kwargs):
    """Implements `Curve.plot`."""
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.gca()
    last_bytes = float(curve.sizes[-1]) * curve.page_bytes
    factor, unit = next((row for row in UNITS if last_bytes >= row[0]), (1, "bytes"))
    sizes = curve.sizes * (curve.page_bytes / factor)
    (line,) = ax.step(sizes, curve.ratios, where="post", **kwargs)
    if (curve.lower < curve.upper).any():
        ax.fill_between(sizes, curve.lower, curve.upper, step="post", color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set_xlabel(f"memory size ({unit})")
    ax.set_ylabel("miss ratio")
    ax.set_ylim(0, 1)
    return ax
