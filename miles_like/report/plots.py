"""Colours and resolution of the project's figures: Okabe-Ito, which are distinguishable with any colour vision."""

from __future__ import annotations

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
DPI = 150
INK, FAINT = "#222222", "#767676"
