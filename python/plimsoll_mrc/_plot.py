"""Curves on matplotlib axes. matplotlib is imported only here."""

# The same for every curve, so that several share axes.
UNIT_BYTES = 1 << 20


def plot(curve, ax=None, **kwargs):
    """Implements `Curve.plot`."""
    if ax is None:
        from matplotlib import pyplot

        ax = pyplot.gca()
    sizes = curve.sizes * (curve.page_bytes / UNIT_BYTES)
    (line,) = ax.step(sizes, curve.ratios, where="post", **kwargs)
    if (curve.lower < curve.upper).any():
        ax.fill_between(sizes, curve.lower, curve.upper, step="post", color=line.get_color(), alpha=0.2, linewidth=0)
    ax.set_xlabel("memory size (MiB)")
    ax.set_ylabel("miss ratio")
    ax.set_ylim(0, 1)
    return ax
