"""Paged attention on TPU, with Pallas Mosaic."""

from .decode import decode as decode
from .tiles import tiles as tiles
