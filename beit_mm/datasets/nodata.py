"""Finds the pixels of images and label maps that hold no data."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

NODATA_TAG = 42113  # of TIFF, GDAL_NODATA: the value that means no data, as text
# How far a value lies below or above all others of its band, in multiples of their range from percentile 1 to 99
FAR, APART = 3, 0.25


def tag_value(tag: object) -> list[float]:
    """The number in a GDAL_NODATA tag, in a list; an empty list without one."""
    with suppress(ValueError):
        return [float(str(tag).strip(' \0'))]
    return []


def is_missing(values: np.ndarray, nodata: Sequence[float] = ()) -> np.ndarray:
    """Where an array holds no data, bool: masked, NaN, infinity, or one of the values in `nodata`."""
    stored = np.ma.getdata(values)
    missing: np.ndarray = np.ma.getmaskarray(values) | ~np.isfinite(stored)
    tolerance = 2e-6 if stored.dtype.kind == 'f' else 0  # a tag may have six digits: -3.40282e+38
    with np.errstate(over='ignore'):
        for value in nodata:
            missing |= np.isclose(stored, value, rtol=tolerance, atol=0)
    return missing


def find_nodata(pixels: np.ndarray, dtype: np.dtype) -> tuple[list[float], list[str]]:
    """Finds the values that no tag marks but that are the lowest or highest on more than 1 % of a band's pixels.

    A value that is FAR from the others means no data. One that is only APART is named in a note if it is 0 or a limit
    of its type: it may have been measured, as 0 in a shadow, and leaves most of the scale to the others.

    Args:
        pixels: bands (N, C) of some pixels, NaN where no data is known.
        dtype: type of the numbers in the files.

    Returns:
        Values that mean no data, and a note about each of both kinds.
    """
    limits = [0, np.iinfo(dtype).min, np.iinfo(dtype).max] if dtype.kind in 'ui' else [0]
    notes: dict[float, str] = {}
    nodata = []
    for band in pixels.T:
        ends = [end for end in (np.nanmin(band), np.nanmax(band)) if (band == end).mean() > 0.01]
        others = band[np.isfinite(band) & ~np.isin(band, ends)]
        spread = np.subtract(*np.percentile(others, (99, 1))) if others.size else 0
        for end in map(float, ends if spread else ()):
            gap = max(others.min() - end, end - others.max()) / spread
            note = f'{end:g}, on {100 * (pixels == end).any(axis=1).mean():.0f} % of the pixels, lies far from the rest'
            if gap > FAR:
                nodata.append(end)
                notes[end] = f'{note} and counts as no data'
            elif gap > APART and end in limits:
                notes.setdefault(end, f'{note}; if it means no data, say so: rio edit-info --nodata {end:g} FILE')
    return sorted({*nodata}), [*notes.values()]
