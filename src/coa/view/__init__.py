"""Pages: what a run holds, as one HTML file that a browser opens without a server or a network."""

from __future__ import annotations
