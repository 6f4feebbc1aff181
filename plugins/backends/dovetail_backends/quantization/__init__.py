"""The quantisations that Dovetail brings."""
